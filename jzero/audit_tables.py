"""How an `Audit` prints: what moves, what is held, what is broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jzero.plain import add_row, table
from jzero.wording import dtypes, few, size

if TYPE_CHECKING:
    from jzero.audit import Audit
    from jzero.promise import Moved
    from jzero.tally import Collective

BESIDE = ("partitioner", "unnamed")
UNNAMED = "what XLA has joined under no name"
_ADDED = "added by the partitioner"


def tables(report: Audit) -> RenderableType:
    """The tables for a rich console."""
    mesh = " x ".join(f"{name} {size}" for name, size in report.axes)
    stage = "a stage of its own" if report.number is None else f"stage {report.number}"
    plural = "es" if report.microbatches > 1 else ""
    parts: list[RenderableType] = [
        Text(f"A step at {stage} on {mesh}, {report.microbatches} microbatch{plural}, on each device"),
        Text(),
        _moved(report),
        *_reasons(report),
        _axes(report),
    ]
    if any(origin.purpose in BESIDE for origin, _ in report.compiled):
        parts += [Text(), *_partitioner(report)]
    parts += [Text(), *_held(report)]
    if report.memory is not None:
        parts.append(_memory(report))
    parts.append(Text())
    if not report.broken:
        parts.append(Text("Every promise is kept."))
    for one in report.broken:
        parts.append(Text(f"BROKEN, {one.subject}: {one.message}", style="red"))
    return Group(*parts)


def _moved(report: Audit) -> Table:
    right = ("runs", "promised", "program")
    made = table("moved for", "collective", "over", "dtype", *right, right=right, folds=["moved for"])
    groups: dict[tuple[str, str, tuple[str, ...]], list] = {}
    for one in report.moved:
        name = f"the loss itself: {one.leaf}" if one.what == "loss" else one.what
        groups.setdefault((name, one.kind, one.axes), []).append(one)
    for (what, kind, axes), some in groups.items():
        running = [one for one in some if one.count] or some
        names = dtypes(dtype for one in running for dtype in one.dtypes)
        sizes = [sum(one.promised for one in some), sum(one.bytes for one in some)]
        add_row(made, what, kind, ", ".join(axes) or "?", names, _runs(some), *map(size, sizes))
    return made


def _note(text: str) -> RenderableType:
    """What is said below a table, apart from it on every line."""
    return Padding(Text(text), (0, 0, 0, 2))


def _runs(some: Sequence[Moved | Collective]) -> str:
    return f"{sum(one.count for one in some)}{'' if all(one.exact for one in some) else ' or more'}"


def _reasons(report: Audit) -> Iterable[RenderableType]:
    groups: dict[tuple[str, str], list] = {}
    for one in report.moved:
        if one.reason:
            groups.setdefault((one.what, one.reason), []).append(one)
    for (what, reason), some in groups.items():
        apart = sum(one.bytes - one.promised for one in some)
        names = [one.leaf for one in some if one.leaf]
        shown = f" ({few(names)})" if names else ""
        change = f"{size(abs(apart))} {'more' if apart > 0 else 'less'}, " if apart else ""
        yield _note(f"{what}: {change}{reason}{shown}")


def _axes(report: Audit) -> RenderableType:
    sent = [
        f"{axis} {size(report.sent(axis))} of {size(report.sent(axis, promised=True))} promised"
        for axis, n in report.axes
        if n > 1
    ]
    return _note(f"sent by each device, by axis: {'; '.join(sent) or 'nothing, there is one device'}")


def _partitioner(report: Audit) -> Iterable[RenderableType]:
    right = ("runs", "bytes", "on the wire")
    by = "by the partitioner or unnamed" if any(o.purpose == "unnamed" for o, _ in report.compiled) else _ADDED
    made = table(f"{by}, compiled", "over", "dtype", *right, right=right, folds=[f"{by}, compiled"])
    groups: dict[tuple[str, tuple[str, ...], str], list] = {}
    for origin, row in report.compiled:
        if origin.purpose in BESIDE:
            name = origin.name if origin.purpose == "partitioner" else UNNAMED
            groups.setdefault((row.kind, row.axes, row.dtype), []).append((name, row))
    lines = []
    for (kind, axes, dtype), found in groups.items():
        rows, names = [row for _, row in found], dict.fromkeys(name for name, _ in found)
        over, short = ", ".join(axes) or "?", dtypes([dtype])
        sizes = size(sum(row.bytes for row in rows)), size(sum(row.wire_bytes for row in rows))
        add_row(made, kind, over, short, _runs(rows), *sizes)
        lines.append(_note(f"{kind} over {over} in {short}: {few(names)}"))
    return made, *lines


def _held(report: Audit) -> Iterable[RenderableType]:
    right = ("formula", "promised", "program", "live")
    made = table("held", *right, right=right, folds=["held"])
    for one in report.held:
        live = "-" if one.live is None else f"{one.live:,}"
        add_row(made, one.what, f"{one.formula:,.0f}", f"{one.promised:,}", f"{one.compiled:,}", live)
    return made, *(_note(f"{one.what}, {one.reason}") for one in report.held if one.reason)


def _memory(report: Audit) -> RenderableType:
    memory = report.memory
    assert memory is not None
    return _note(
        f"compiled program: arguments {size(memory.arguments)}, donated {size(memory.donated)}, temp "
        f"{size(memory.temp)} (reduced gradients are {size(memory.gradients)}; the rest is activations, gathered "
        f"params, unreduced gradients and copies)"
    )
