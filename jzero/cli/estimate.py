"""`jzero estimate`: what a training run will take, from a parameter count or a model's abstract params."""

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich import box
from rich.console import Console
from rich.table import Table

from jzero.advice import RESERVE, Advice, advise, gb
from jzero.cli.as_json import print_json
from jzero.cli.help import Help
from jzero.cli.options import called, filled, mesh_axes, named, parsed, plot_file
from jzero.devices import DEVICES
from jzero.estimate import BY_COUNT, LAYERS, OPTIMIZERS, Entry, Estimate, estimate
from jzero.precision import PRECISIONS
from jzero.wording import dtypes

DESCRIPTION = """\
What a training run will take on each device, before there is one: memory by ZeRO stage and kind, communication per
step, and what to choose on a given device. Nothing is run, and no accelerator is needed.

What is stored is exact where --model gives the shapes. What lives inside of a step only is an approximation: with what
is stored it was 4% too small to 11% too large, against XLA's peak for ten steps of a GPT on H200s. Activations come on
top."""

EXAMPLES = """\
examples:
  jzero estimate --params 7.5e9 --devices 64                       the ZeRO paper's example
  jzero estimate --params 70e9 --mesh replica=4,data=8 --device h100 --microbatches 8
  jzero estimate --params 70e9 --devices 64 --mesh data=-1,model=8 --stage 1
  jzero estimate --model mymodel:abstract_params --devices 8 --optimizer mymodel:optimizer --plot memory.pdf
  jzero estimate --params 1e12 --devices 1024 --json

--model names a function without arguments that returns the params, as arrays or jax.ShapeDtypeStructs; it is traced,
and no array is made. The current folder is importable."""


def add(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "estimate",
        help="memory and communication by stage, before there are machines",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", type=parsed(_count), metavar="N", help="how many params, such as 7.5e9")
    what.add_argument("--model", metavar="MODULE:FUNCTION", help="a function that returns the params")
    parser.add_argument("--devices", type=int, metavar="N", help="how many devices (default: what --mesh says)")
    text = "size of each axis: data, perhaps replica and model axes; -1 takes what is left (default: data)"
    parser.add_argument("--mesh", type=parsed(mesh_axes), metavar="AXES", help=text)
    parser.add_argument("--stage", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="(default: all)")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16", help="(default: bf16)")
    shaped = ", ".join(name for name in OPTIMIZERS if name not in BY_COUNT)
    text = f"{', '.join(BY_COUNT)}; with --model also {shaped}, or a MODULE:NAME of an optax optimizer (default: adam)"
    parser.add_argument("--optimizer", default="adam", metavar="NAME", help=text)
    text = "a MODULE:NAME of the rules for model axes, as for jzero.zero; a count is cut everywhere"
    parser.add_argument("--rules", metavar="MODULE:NAME", help=text)
    parser.add_argument("--microbatches", type=int, default=1, metavar="N", help="per step (default: 1)")
    text = f"blocks of the model: how large what is gathered at once is (default: {LAYERS})"
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help=text)
    text = f"advise for this one: {', '.join(DEVICES)} (default: h200)"
    parser.add_argument("--device", default="h200", metavar="NAME", help=text)
    text = f"share of its memory to keep for activations (default: {RESERVE})"
    parser.add_argument("--reserve", type=float, default=RESERVE, metavar="X", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    text = "draw memory and traffic into this file (.pdf, .png, .svg)"
    parser.add_argument("--plot", type=parsed(plot_file), metavar="FILE", help=text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    params = options.params if options.model is None else _abstract(options.model)
    axes = filled(options.mesh, options.devices)

    @functools.cache
    def cached(stage, axes):
        return estimate(params, axes=dict(axes), stage=stage, **settings)

    def plan(stage: int, axes: Mapping[str, int]) -> Estimate:
        return cached(stage, tuple(axes.items()))

    settings: dict[str, Any] = {
        "precision": options.precision,
        "optimizer": _optimizer(options.optimizer),
        "microbatches": options.microbatches,
        "layers": options.layers,
        "rules": named(options.rules, "--rules") if options.rules else (),
    }
    plans = [plan(stage, axes) for stage in dict.fromkeys(options.stage)]
    advice = advise(plan, axes, device=options.device, reserve=options.reserve)
    if options.plot:
        from jzero.figures import plan_bars  # matplotlib takes half a second, of those who draw alone

        plan_bars(plans, advice.device, options.reserve).savefig(options.plot)
    if options.json:
        print_json(_plain(plans, advice, options))
    else:
        show(Console(), plans, advice, optimizer=options.optimizer, precision=options.precision)
    return 0


def show(
    console: Console, plans: list[Estimate], advice: Advice | None = None, *, optimizer: str, precision: str
) -> None:
    """Prints memory, communication and, if there is any, advice."""
    first = plans[0]
    mesh = " x ".join(f"{name} {size}" for name, size in first.axes)
    console.print(
        f"{first.params:,} params, {optimizer}, {precision}, {mesh} = {first.devices} devices, "
        f"{first.microbatches} microbatch{'es' if first.microbatches > 1 else ''} per step",
        highlight=False,
    )
    console.print()
    unit = MB if max(one.total for one in plans) < 1e8 else GB
    console.print(_memory(plans, advice, unit))
    console.print()
    if any(one.traffic for one in plans):
        text = "Sent by each device in a step; an all-reduce counts twice; wire: (n-1)/n of GB"
        console.print(text, highlight=False)
        console.print(_traffic(plans, unit))
        console.print()
    if advice is None:
        return
    kept = f"{gb(advice.device.memory - advice.budget)} of {gb(advice.device.memory)}"
    text = f"On {advice.device.name}, with {kept} kept for activations; what moves is that on the wire:"
    console.print(text, markup=False, highlight=False)
    counts = [f"{number or 'none'} at stage {stage}" for stage, number in enumerate(advice.smallest)]
    for reason in (*advice.reasons, f"Smallest number of devices that fits: {', '.join(counts)}."):
        console.print(f"- {reason}", markup=False, highlight=False)


@dataclasses.dataclass(frozen=True)
class Unit:
    """In what sizes are printed: 10 to the power of `digits` bytes, or elements."""

    name: str
    digits: int

    def __call__(self, size: float) -> str:
        """As in "1.23"."""
        return gb(size * 10 ** (9 - self.digits)).removesuffix(" GB")


GB, MB = Unit("GB", 9), Unit("MB", 6)


def _memory(plans: list[Estimate], advice: Advice | None, unit: Unit) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(f"{unit.name} on each device", no_wrap=True)
    table.add_column("B/param", justify="right")
    for one in plans:
        table.add_column(f"stage {one.number}", justify="right")

    def row(name, values, per_param="", **style):
        table.add_row(name, per_param, *("-" if value is None else unit(value) for value in values), **style)

    def either(values):
        return " or ".join(dict.fromkeys(values))

    for at, kind in enumerate(("params", "master weights", "moments", "gradients")):
        if at == 3:
            row("stored between steps", [one.stored.total for one in plans], style="bold")
        entries = [one.ledger[at] for one in plans]
        there = [entry for entry in entries if entry.bytes]
        if there:
            sizes = either(f"{entry.per_param:.4g}" for entry in there)
            names = either(dtypes([each]) for entry in there for each in entry.dtypes)
            row(f"{kind}, {names}", _bytes(entries), sizes)
    row("gathered, unreduced: about", [one.inside.total - one.ledger[3].bytes for one in plans])
    row("in a step, activations apart", [one.total for one in plans], style="bold")
    row("as the ZeRO paper counts", [one.papers for one in plans])
    if any(one.megatron for one in plans):
        row("as Megatron-LM counts", [one.megatron for one in plans])
    if advice is not None:
        fits = ["yes" if one.total <= advice.budget else "no" for one in plans]
        table.add_row(f"fits in {gb(advice.budget)}", "", *fits)
    return table


def _bytes(entries: list[Entry]) -> list[int | None]:
    return [entry.bytes or None for entry in entries]


def _traffic(plans: list[Estimate], unit: Unit) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("stage")
    for name in ("collective", "for", "over", "dtype"):
        table.add_column(name)
    for name in ("elements", unit.name, "wire"):
        table.add_column(name, justify="right")
    for one in plans:
        for at, row in enumerate(one.traffic):
            purpose = "gradients" if row.what == "reduce" else row.what.removeprefix("gather, ")
            sizes = [f"{row.volume / 10**unit.digits:.4g}e{unit.digits}", unit(row.bytes), unit(row.wire_bytes)]
            dtype, stage = dtypes([row.dtype]), str(one.number) if at == 0 else ""
            table.add_row(stage, row.kind, purpose, ", ".join(row.axes), dtype, *sizes)
    return table


def _plain(plans: list[Estimate], advice: Advice, options: argparse.Namespace) -> dict[str, Any]:
    """All of it as JSON can hold it; sizes in bytes."""
    stages = [
        {
            "stage": one.number,
            "ledger": [dataclasses.asdict(entry) for entry in one.ledger],
            "stored": dataclasses.asdict(one.stored) | {"total": one.stored.total},
            "inside": dataclasses.asdict(one.inside) | {"total": one.inside.total},
            "total": one.total,
            "fits": one.total <= advice.budget,
            "zero_paper": one.papers,
            "megatron": one.megatron,
            "traffic": [
                dataclasses.asdict(row) | {"volume": row.volume, "bytes": row.bytes, "wire_bytes": row.wire_bytes}
                for row in one.traffic
            ],
        }
        for one in plans
    ]
    return {
        "params": plans[0].params,
        "axes": dict(plans[0].axes),
        "precision": options.precision,
        "optimizer": options.optimizer,
        "microbatches": options.microbatches,
        "layers": options.layers,
        "stages": stages,
        "advice": dataclasses.asdict(advice),
    }


def _count(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number; wanted a count such as 7.5e9") from None


def _abstract(text: str) -> Any:
    """The params that a function returns, as shapes: it is traced."""

    def traced():
        leaves = (called(text, "--model"),)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, leaves)

    return jax.eval_shape(traced)[0]


def _optimizer(text: str) -> str | optax.GradientTransformation:
    if ":" not in text:
        return text
    found = named(text, "--optimizer")
    return found if isinstance(found, optax.GradientTransformation) else called(text, "--optimizer")
