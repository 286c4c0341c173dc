"""Tables of what was found."""

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.bench_step.compare import JZERO, PROGRAMS, Compiled, Result, Timed


def show(console: Console, result: Result, clock: str) -> None:
    """All that was found at one stage."""
    for found in result.timed:
        console.print(_timed(result.stage, found, clock))
    if result.compiled:
        console.print(_compiled(result.stage, result.compiled))
    console.print(_targets(result))


def _timed(stage: int, found: Timed, clock: str) -> Table:
    title = f"Stage {stage}, {PROGRAMS[found.program]}: median {clock} of {found.pairs} rounds, with each way in each"
    table = _table(title, "", "seconds", "jzero / it [95%]", "temp bytes", "ratio", "error")
    temp = found.temp_bytes
    for way, seconds in found.seconds.items():
        cells = [f"{seconds:.4f}", "", f"{temp[way]:,}", "", ""]
        if way != JZERO:
            cells[1], cells[4] = f"{found.ratios[way]}", f"{found.errors[way]:.0e}"
            cells[3] = f"{temp[JZERO] / temp[way]:.3f}" if temp[way] else "-"
        table.add_row(way, *cells)
    return table


def _compiled(stage: int, compiled: tuple[Compiled, ...]) -> Table:
    title = f"Stage {stage}, {PROGRAMS['gradient']}: seconds to trace and lower, and to compile"
    table = _table(
        title, "", *(f"{found.layers} layers: {what}" for found in compiled for what in ("trace", "compile"))
    )
    for way in compiled[0].trace:
        table.add_row(way, *(f"{x:.3f} s" for found in compiled for x in (found.trace[way], found.compile[way])))
    return table


def _targets(result: Result) -> Table:
    table = _table(f"Stage {result.stage}: targets", "target", "wanted", "found", "", left=4)
    for target in result.targets:
        verdict = "[green]met[/]" if target.met else "[red]not met[/]"
        table.add_row(target.what, target.wanted, target.found, verdict)
    return table


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right")
    return table
