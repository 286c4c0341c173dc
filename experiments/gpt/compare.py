"""The same few steps at stages 0 to 3, side by side."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable

from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

import jzero
from experiments.gpt import report
from experiments.gpt.config import Config
from experiments.gpt.data import Text
from experiments.gpt.job import Job, build
from experiments.gpt.record import Record
from experiments.gpt.train import batch_of
from jzero.wording import size

DIGITS = {"fp32": 6, "bf16": 3, "fp16": 3, "bf16-pure": 3}
"""To how many digits losses have to agree, by precision."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a few steps at one stage were.

    Attributes:
        job: What was run.
        losses: Loss of each step.
        params_bytes: Bytes per device of the params, on live arrays after the last step.
        master_bytes: The same of the master weights; 0 if there are none.
        opt_bytes: The same of the optimizer state.
        temp_bytes: Bytes per device that the compiled step needs beside its arguments and results; None where the
            backend does not say.
        lowered: The collectives that jzero writes, per step.
        compiled: All collectives of the compiled program, as XLA left them, per step.
        seconds: Mean time of a step after the first.
    """

    job: Job
    losses: tuple[float, ...]
    params_bytes: int
    master_bytes: int
    opt_bytes: int
    temp_bytes: int | None
    lowered: tuple[jzero.program.Collective, ...]
    compiled: tuple[jzero.program.Collective, ...]
    seconds: float


def trial(config: Config, mesh: Mesh, text: Text) -> Trial:
    """Trains `config.steps` steps at `config.stage`, and looks at the program that does."""
    job = build(config, mesh)
    state = job.init(config.seed)
    lowered = job.step.lower(state, job.layout.put_batch(batch_of(config, text, 0)))
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    losses, times = [], []
    for step in range(config.steps):
        start = time.perf_counter()
        state, metrics = job.step(state, job.layout.put_batch(batch_of(config, text, step)))
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    later = times[1:] or times
    return Trial(
        job,
        tuple(losses),
        report.most_bytes(state.params),
        report.most_bytes(state.master),
        report.most_bytes(state.opt_state),
        memory.temp_size_in_bytes if memory else None,
        jzero.program.collectives(lowered, mesh),
        jzero.program.compiled_collectives(compiled, mesh),
        sum(later) / len(later),
    )


def compare(config: Config, mesh: Mesh, text: Text, record: Record, console: Console) -> int:
    """Runs a trial at each stage and prints them side by side.

    Returns:
        An exit code: 0 if the losses agree to as many digits as the precision has, else 1.
    """
    trials = []
    for stage in range(len(jzero.STAGES)):
        with console.status(f"Stage {stage}: {config.steps} steps"):
            trials.append(trial(dataclasses.replace(config, stage=stage), mesh, text))
        record.add("stage", stage=stage, **_plain(trials[-1]))
    console.print(_table(config, trials))
    console.print(
        "Bytes are those of one device: stored between steps, on live arrays; temp, what a step needs besides."
    )
    console.print(
        f"Collectives of one step: bytes of the whole arrays that are gathered, scattered or reduced, in how many "
        f"collectives, over which mesh axes, and the elements in models' worth, an all-reduce counted once (M is "
        f"{trials[0].job.n_params:,}). 'Written by jzero' reads the program as it is lowered; 'as "
        f"compiled' what XLA makes of it, with what the norm and the optimizer add."
    )
    apart = max(_apart(trials[0].losses, other.losses) for other in trials[1:])
    digits = DIGITS[config.precision]
    if apart <= 10.0**-digits:
        console.print(f"Losses agree to {digits} digits at all stages (largest relative difference {apart:.1e}).")
        return 0
    console.print(f"[red]Losses differ between stages[/] by {apart:.1e} (relative); wanted at most 1e-{digits}.")
    return 1


def _apart(some: Iterable[float], others: Iterable[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(some, others, strict=True))


def _table(config: Config, trials: list[Trial]) -> Table:
    model = trials[0].job.n_params
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title=f"{config.steps} steps at stages 0 to 3", title_justify="left"
    )
    table.add_column("", no_wrap=True, min_width=len("  reduce-scatter"))
    for stage in range(len(trials)):
        table.add_column(f"stage {stage}", justify="right")

    def row(name, cells, **options):
        table.add_row(name, *cells, **options)

    def heading(name):
        table.add_section()
        row(name, [""] * len(trials), style="bold")

    for step in range(config.steps):
        row(f"loss, step {step + 1}", [f"{t.losses[step]:.6g}" for t in trials])
    heading("stored bytes")
    row(" params", [f"{t.params_bytes:,}" for t in trials])
    row(" optimizer", [f"{t.opt_bytes:,}" for t in trials])
    if any(t.master_bytes for t in trials):
        row(" master", [f"{t.master_bytes:,}" for t in trials])
    row(" all", [f"{t.params_bytes + t.master_bytes + t.opt_bytes:,}" for t in trials])
    if config.optimizer == "adamw":
        row(" formula", [f"{report.formula_bytes(t.job):,.0f}" for t in trials])
        row("", report.FORMULAS[config.precision])
    heading("a step")
    row(" temp bytes", ["?" if t.temp_bytes is None else f"{t.temp_bytes:,}" for t in trials])
    row(" seconds", [f"{t.seconds:.2f}" for t in trials])
    for title, views in (
        ("written by jzero", [t.lowered for t in trials]),
        ("as compiled", [t.compiled for t in trials]),
    ):
        heading(title)
        totals = [by_kind(view) for view in views]
        for kind, axes in sorted(set().union(*totals)):
            found = [total.get((kind, axes), (0, 0, 0)) for total in totals]
            row(f" {kind}", [f"{size(nbytes)} in {count}" if count else "-" for count, nbytes, _ in found])
            row(f"  {', '.join(axes) or '?'}", [f"{n / model:.2f}M" if n else "" for _, _, n in found])
    return table


def by_kind(rows: Iterable[jzero.program.Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int, int]]:
    """Count, bytes and elements per step of each kind of collective over the same axes."""
    counts, sizes, elements = Counter(), Counter(), Counter()
    for row in rows:
        counts[row.kind, row.axes] += row.count
        sizes[row.kind, row.axes] += row.bytes
        elements[row.kind, row.axes] += math.prod(row.shape) * row.count
    return {key: (counts[key], sizes[key], elements[key]) for key in counts}


def _plain(found: Trial) -> dict:
    """The trial as JSON can hold it."""
    keys = ("losses", "params_bytes", "master_bytes", "opt_bytes", "temp_bytes", "seconds")
    return {key: getattr(found, key) for key in keys} | {
        name: [dataclasses.asdict(row) | {"bytes": row.bytes} for row in rows]
        for name, rows in (("lowered", found.lowered), ("compiled", found.compiled))
    }
