"""How a `Preflight` prints: memory, buffers, collectives, wire bytes, the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jzero.buffers import tidy
from jzero.plain import add_row, table
from jzero.wording import dtypes, few, size, time

if TYPE_CHECKING:
    from jzero.buffers import Buffer
    from jzero.events import Window
    from jzero.preflight_report import Line, Preflight, Sent

UNNAMED = "without a name"
LARGEST = 8
"""Buffers of each kind that are listed."""


def tables(report: Preflight) -> RenderableType:
    """The tables for a rich console."""
    mesh = " x ".join(f"{name} {size}" for name, size in report.axes)
    stage = "A stage of its own" if report.number is None else f"Stage {report.number}"
    plural = "es" if report.microbatches > 1 else ""
    title = (
        f"{stage} on {report.target} ({report.device.name}, {mesh}), {report.microbatches} microbatch{plural}; "
        f"compiled ahead of time by jax {report.jax}, not run. Figures are of one device and one step."
    )
    parts: list[RenderableType] = [
        Text(title),
        Text(),
        _memory(report),
        Text(),
        _buffers(report),
        Text(),
        _donation(report),
    ]
    for loop in dict.fromkeys(sorted(one.window.loop for one in report.sent)):
        parts += [Text(), _collectives([one for one in report.sent if one.window.loop == loop])]
    parts += [Text(), _wire(report), *_reasons(report), Text(), *_bound(report)]
    parts += [Text(f"Note: {note}") for note in report.notes]
    if report.broken:
        parts += [Text(), *(Text(f"{one.subject}: {one.message}", style="bold red") for one in report.broken)]
    else:
        parts += [Text("It fits, and no promise is broken.", style="bold")]
    return Group(*parts)


def leaves(window: Window, count: int = 2) -> str:
    """Which leaves a collective is for, the first few; of what is no leaf's, where it stands in the program."""
    if not window.purpose and not any(piece.leaf for piece in window.pieces):
        return tidy(window.where) or UNNAMED
    found = [piece.leaf or "x".join(map(str, piece.shape)) or "scalar" for piece in window.pieces]
    named = list(dict.fromkeys(path for paths in found for path in paths.split(" + ")))
    return few(named, count)


def _memory(report: Preflight) -> Table:
    found = report.memory
    made = table("", "size", "what", right=["size"], title="Memory")
    add_row(made, "arguments", size(found.arguments), "state and batch")
    add_row(made, "temporaries", size(found.temporaries), "activations, gradients, gathered params, at their largest")
    add_row(made, "results", size(found.outputs - found.aliased), "metrics, and what is not written over the state")
    verdict = "fits" if found.fits else "DOES NOT FIT"
    share = f"{found.peak / found.limit:.0%} of {size(found.limit)}: {verdict}"
    add_row(made, "peak", size(found.peak), share, style="bold")
    return made


def _buffers(report: Preflight) -> Table:
    made = table("name", "kind", "dtype", "shape", "size", right=["size"], folds=["name"], title="Largest buffers")

    def rows(found: Sequence[Buffer]) -> None:
        for one in found[:LARGEST]:
            name = one.name + (f" in {one.where}" if one.where else "")
            shape = "x".join(map(str, one.shape))
            add_row(made, name, one.kind, dtypes([one.dtype]), shape, size(one.bytes))
        if rest := found[LARGEST:]:
            add_row(
                made,
                f"{len(rest)} more",
                rest[0].kind if len({x.kind for x in rest}) == 1 else "",
                "",
                "",
                size(sum(x.bytes for x in rest)),
            )

    rows(report.held)
    made.add_section()
    rows(report.temporaries or ())
    return made


def _donation(report: Preflight) -> Text:
    if not report.not_donated:
        return Text("Donation: the new state is written over the old one, every leaf of it.")
    names = few(report.not_donated, 6)
    return Text(f"Donation: {len(report.not_donated)} leaves of the state are not written over: {names}", style="red")


def _collectives(rows: Sequence[Sent]) -> Table:
    loop, runs = rows[0].window.loop, rows[0].window.passes
    where = "outside of loops" if not loop else f"in loop {'.'.join(map(str, loop))}, {runs} times"
    numbers = ("size", "beside", "time", "waits")
    names = ("collective", "over", "for", "leaves", "dtype", *numbers)
    made = table(*names, right=numbers, folds=["leaves"], title=f"Collectives {where}")
    for one in rows:
        window = one.window
        beside = f"{window.matmuls} matmul{'s' * (window.matmuls != 1)}" if window.asynchronous else "sync"
        add_row(
            made,
            window.kind,
            ", ".join(window.axes) or "?",
            window.purpose or "other",
            leaves(window),
            dtypes(piece.dtype for piece in window.pieces),
            size(window.bytes),
            beside,
            time(one.seconds),
            time(one.waits),
        )
    return made


def _wire(report: Preflight) -> Table:
    numbers = ("theory", "written", "compiled")
    made = table("what", "collective", "over", *numbers, right=numbers, folds=["what"], title="Sent by each device")
    for one in report.lines:
        sizes = [size(x) if x else "-" for x in (one.theory, one.program, one.compiled)]
        add_row(made, one.what, one.kind, ", ".join(one.axes) or "?", *sizes)
    made.add_section()
    sums = [sum(getattr(one, name) for one in report.lines) for name in ("theory", "program", "compiled")]
    add_row(made, "all", "", "", *map(size, sums), style="bold")
    return made


def _reasons(report: Preflight) -> list[Text]:
    """Why the columns differ."""
    found: dict[str, list[str]] = {}
    for one in report.moved:
        if one.reason and one.promised != one.bytes:
            found.setdefault(f"{one.what}: {one.reason}", []).append(one.leaf)
    reasons = []
    for reason, paths in found.items():
        named = [path for path in paths if path]
        reasons.append(reason + (f" ({few(named)})" if named else ""))
    reasons += [why for group in groups(report.lines) if (why := of_xla(report, group))]
    return [Text("Why they differ:"), *(Text(f"- {reason}") for reason in reasons)] if reasons else []


def groups(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines by kind of collective and axes, which XLA joins with one another."""
    keys = dict.fromkeys((one.kind, one.axes) for one in lines)
    return [[one for one in lines if (one.kind, one.axes) == key] for key in keys]


def of_xla(report: Preflight, group: Sequence[Line]) -> str:
    """Why what XLA compiled is not what was written down; empty where it is."""
    if all(one.compiled == one.program for one in group):
        return ""
    kind, axes = group[0].kind, group[0].axes
    more = sum(one.compiled for one in group) - sum(one.program for one in group)
    which = f"{kind} over {', '.join(axes) or '?'}, compiled"
    unnamed = {
        leaves(one.window)
        for one in report.sent
        if (one.window.kind, one.window.axes) == (kind, axes) and any(not piece.purpose for piece in one.window.pieces)
    } - {UNNAMED}
    of = f": {few(sorted(unnamed))}" if unnamed else ""
    if more > 0.5:
        return f"{which}: {size(more)} more than written, by the partitioner (norms, whole leaves, model shards){of}"
    if more < -0.5:
        return f"{which}: {size(-more)} less than written: XLA has removed what it need not run, or narrowed it"
    return f"{which}: as much as written, but XLA has joined several under one name, or lost their names{of}"


def _bound(report: Preflight) -> list[Text]:
    bound = report.bound
    links = "; ".join(
        f"{', '.join(axes) or '?'} {name} at {speed / 1e9:.3g} GB/s{' as stated' if stated else ''}"
        for axes, name, speed, stated in dict.fromkeys(
            (one.window.axes, one.link.name, one.link.bandwidth, one.link.stated) for one in report.sent
        )
    )
    busy = ", ".join(f"{name} {time(seconds)}" for name, seconds in bound.links)
    return [
        Text("A bound, by a model and not a measurement: no kernel is faster than the data sheet, no link than stated"),
        Text(f"- a step takes at least {time(bound.seconds)}, so MFU is at most {bound.mfu:.1%}"),
        Text(
            f"- matmuls {time(bound.compute)}: {bound.flops / 1e12:,.4g} TFLOP, without what is recomputed "
            f"{bound.model_flops / 1e12:,.4g}, at {bound.peak / 1e12:,.4g} TFLOP/s"
        ),
        Text(f"- links are busy for {busy or 'no time'}; matmuls wait for {time(bound.waiting)}"),
        Text(f"- links: {links or 'none used'}"),
    ]
