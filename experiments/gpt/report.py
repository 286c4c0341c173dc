"""Tables and the progress bar."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jzero
from experiments.gpt.config import Config
from experiments.gpt.data import Text
from experiments.gpt.job import Job
from experiments.gpt.rules import RULES
from jzero.cli.estimate import show
from jzero.plain import add_row, table

FORMULAS = {
    "fp32": ("12P", "4P + 8P/N", "4P + 8P/N", "12P/N"),
    "bf16": ("14P", "2P + 12P/N", "2P + 12P/N", "12P/N"),
    "fp16": ("14P", "2P + 12P/N", "2P + 12P/N", "12P/N"),
    "bf16-pure": ("6P", "2P + 4P/N", "2P + 4P/N", "6P/N"),
}
"""Bytes that Adam stores, by precision and stage."""


def show_text(console: Console, text: Text, yardstick: float) -> None:
    """What is trained on and held out, and the yardstick."""
    held_out = f"{len(text.held_out_files)} files" if text.held_out_files else "the tail of the file"
    console.print(f"Text: {text.source}", markup=False)
    console.print(f"  training {len(text.train):,} bytes in {len(text.train_files)} files")
    console.print(f"  held out {len(text.held_out):,} bytes, {held_out}")
    console.print(
        f"Yardstick: an order-2 byte model of the same training text needs [bold]{yardstick:.3f}[/] bits per byte on "
        f"the held-out text."
    )


def show_placements(console: Console, job: Job) -> None:
    """Where each leaf lives: `jzero.explain`, put so that it fits a terminal."""
    layout = job.layout
    cut = (
        "1:data: dim 1 cut over data" if layout.model_axes else f"dim: cut along it over {' x '.join(layout.data_axes)}"
    )
    title, places = f"Placements at stage {stage_number(layout)} ({job.n_params:,} params)", ("params", "grads", "opt")
    made = table("leaf", "shape", *places, "bytes", right=["bytes"], folds=places, title=title)
    whole: dict[str, list[str]] = {}
    for row in jzero.explain(layout):
        name = row.path
        if row.reason:
            whole.setdefault(row.reason, []).append(name)
        cuts = [_place(spec, bool(layout.model_axes)) for spec in (row.params, row.grads, row.opt_state)]
        add_row(made, name, str(row.shape), *cuts, f"{row.bytes_per_device:,}")
    console.print(made)
    console.print(f"  {cut}; whole: on every device; bytes: of the params, on each device")
    for reason, names in whole.items():
        console.print(f"  {', '.join(names)}: {reason}", markup=False, highlight=False)


def show_plan(console: Console, config: Config, job: Job) -> int:
    """What this run would take at each stage; at its own, where each leaf lives and is gathered. Returns 0."""
    layout = job.layout
    params = layout.treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtypes.given) for leaf in layout.leaves])
    plans = [
        jzero.estimate(
            params,
            axes=dict(layout.mesh.shape),
            stage=stage,
            precision=config.precision,
            optimizer=job.tx,
            microbatches=config.microbatches,
            layers=config.layers,
            rules=RULES if layout.model_axes else (),
            min_shard_size=config.min_shard_size,
        )
        for stage in range(len(jzero.STAGES))
    ]
    show(console, plans, optimizer=config.optimizer, precision=config.precision)
    show_placements(console, job)
    windows = jax.ShapeDtypeStruct((config.batch_size, config.context + 1), jnp.int32)
    rows = [row for row in jzero.explain(layout, job.loss_fn, windows) if row.gathers]
    if rows:
        console.print("Gathered in each microbatch:")
    for row in rows:
        for gathering in row.gathers or ():
            console.print(f"  {row.path}: {gathering}", markup=False, highlight=False)
    return 0


def _place(spec: PartitionSpec | None, tensor_parallel: bool) -> str:
    if spec is None:
        return "-"
    cut = [(dim, axes if isinstance(axes, str) else "+".join(axes)) for dim, axes in enumerate(spec) if axes]
    return ", ".join(f"{dim}:{axes}" if tensor_parallel else f"dim {dim}" for dim, axes in cut) or "whole"


def stage_number(layout: jzero.Layout) -> int:
    """The number of the layout's stage."""
    return jzero.STAGES.index(layout.stage)


def show_bytes(console: Console, config: Config, job: Job, state: jzero.TrainState) -> None:
    """Bytes per device: counted on live arrays, by the layout leaf by leaf, and by the formula where Adam has one."""
    layout = job.layout
    planned = jzero.memory.stored_bytes(layout, job.tx)
    table = Table(box=box.SIMPLE_HEAD, title="Stored bytes per device", title_justify="left")
    table.add_column("")
    table.add_column("live arrays", justify="right")
    table.add_column("by the layout", justify="right")
    for name, tree, layout_bytes in (
        ("params", state.params, planned.params),
        *([("master weights", state.master, planned.master)] if planned.master else []),
        ("optimizer state", state.opt_state, planned.opt_state),
        ("all", (state.params, state.master, state.opt_state), planned.total),
    ):
        table.add_row(name, f"{most_bytes(tree):,}", f"{layout_bytes:,}")
    console.print(table)
    if config.optimizer == "adamw":
        formula = FORMULAS[config.precision][config.stage]
        ideal = formula_bytes(job)
        console.print(
            f"ZeRO's formula for Adam in {config.precision}: {formula} = {ideal:,.0f} with P = {model_shard(job):,} "
            f"{'(one model shard) ' if layout.model_axes else ''}and N = {layout.shards}; the layout is "
            f"{planned.total - ideal:,.0f} bytes off: scalars"
            + (", and leaves kept whole (see reason above)." if layout.stage.opt_state == "sharded" else ".")
        )


def most_bytes(tree) -> int:
    """Bytes that a tree's live arrays take on the device that holds most of them."""
    return max(jzero.memory.live_bytes(tree).values(), default=0)


def formula_bytes(job: Job) -> float:
    """Bytes per device that ZeRO promises for Adam to store."""
    layout = job.layout
    sizes = {"params": model_shard(job), "shards": layout.shards}
    return jzero.memory.formula(layout.stage, precision=layout.precision, **sizes).stored


def model_shard(job: Job) -> int:
    """P: the params of one model shard; all of them without a model axis."""
    leaves = job.layout.leaves
    return sum(jzero.memory.leaf_bytes(job.layout, leaf, "replicated") // leaf.dtype.itemsize for leaf in leaves)


def scale_and_skips(state: jzero.TrainState) -> str:
    """The loss scale of the next step, and how many steps were skipped until now."""
    return f"scale {float(state.loss_scale.scale):g}, {int(state.skipped.total)} skipped"


def progress_bar(console: Console) -> Progress:
    """The bar of a training run; each update gives it loss, bits, speed and norm."""
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("[bold]{task.fields[bits]:.3f}[/] bits/byte"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TextColumn("norm {task.fields[norm]:.2f}"),
        TextColumn("{task.fields[scale]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        expand=True,
        console=console,
    )
