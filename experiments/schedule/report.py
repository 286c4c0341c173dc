"""A program's collectives as a table, and as JSON."""

import dataclasses
from collections.abc import Iterable

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.schedule.config import Config
from experiments.schedule.program import Program
from jzero.schedule import Share, Window, shares

MIB = 2**20
PURPOSES = {
    ("all-gather", "forward"): "gathered, forward",
    ("all-gather", "backward"): "gathered, backward",
    ("all-gather", "update"): "gathered after the update",
    ("reduce-scatter", "scatter"): "scattered",
    ("all-reduce", "scatter"): "scattered, over the replicas",
    ("all-reduce", "reduce"): "reduced",
    ("all-reduce", "sum"): "summed, of the loss",
}


def show(console: Console, config: Config, program: Program) -> None:
    """Prints the collectives of each loop body and of the rest, and the share of bytes under a matmul."""
    for loop in dict.fromkeys(sorted(window.loop for window in program.windows)):
        rows = [window for window in program.windows if window.loop == loop]
        console.print(_table(_title(loop, rows[0].passes), rows))
    table = Table(box=box.SIMPLE_HEAD, title="Bytes with a matmul between start and done", title_justify="left")
    for name in ("", "where", "MiB", "under a matmul"):
        table.add_column(name, justify="right" if name in ("MiB", "under a matmul") else "left")
    for share in shares(program.windows):
        where = "loop bodies" if share.in_loops else "whole program"
        table.add_row(_purpose(share), where, f"{share.bytes / MIB:,.1f}", f"{share.share:.0%}")
    console.print(table)
    axes = " x ".join(f"{name} {size}" for name, size in program.mesh.shape.items())
    console.print(
        f"Stage {config.stage} of {config.model}, {config.what}, on {config.target} ({axes}), jax {jax.__version__}: "
        f"temp {program.temp_bytes / MIB:,.0f} MiB per device. A schedule, not a time."
    )


def as_json(config: Config, program: Program) -> dict:
    """The same as JSON can hold it."""
    return {
        "jax": jax.__version__,
        "config": dataclasses.asdict(config) | {"options": dict(config.options)},
        "mesh": dict(program.mesh.shape),
        "temp_bytes": program.temp_bytes,
        "shares": [dataclasses.asdict(share) | {"share": share.share} for share in shares(program.windows)],
        "windows": [_plain(window) for window in program.windows],
    }


def _table(title: str, rows: Iterable[Window]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in ("collective", "over", "for", "matmuls", "leaf", "dtype", "MiB"):
        justify = "right" if name in ("MiB", "matmuls") else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in ("over", "leaf"))
    for window in rows:
        matmuls = str(window.matmuls) if window.asynchronous else "sync"
        cells = [window.kind, ", ".join(window.axes) or "?", window.purpose or "other", matmuls]
        for piece in window.pieces:
            leaf = piece.leaf or str(piece.shape)
            table.add_row(*cells, leaf, piece.dtype, f"{piece.bytes / MIB:,.2f}")
            cells = [""] * len(cells)
    return table


def _title(loop: tuple[int, ...], passes: int) -> str:
    if not loop:
        return "Outside of loops"
    return f"Body of loop {'.'.join(map(str, loop))}, {passes} times"


def _purpose(share: Share) -> str:
    return PURPOSES.get((share.kind, share.purpose), f"{share.kind}, other")


def _plain(window: Window) -> dict:
    pieces = [dataclasses.asdict(piece) | {"bytes": piece.bytes} for piece in window.pieces]
    return dataclasses.asdict(window) | {"purpose": window.purpose, "bytes": window.bytes, "pieces": pieces}
