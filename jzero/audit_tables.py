"""How an `Audit` prints: what moves, what is held, what is broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jzero.plain import add_row
from jzero.wording import few, size

if TYPE_CHECKING:
    from jzero.audit import Audit

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
        _moved(report),
        *_reasons(report),
        _axes(report),
    ]
    if any(origin.purpose in BESIDE for origin, _ in report.compiled):
        parts += [Text(), _partitioner(report)]
    parts += [Text(), _held(report)]
    if report.memory is not None:
        parts.append(_memory(report))
    parts.append(Text())
    if not report.broken:
        parts.append(Text("Every promise is kept."))
    for one in report.broken:
        parts.append(Text(f"BROKEN, {one.subject}: {one.message}", style="red"))
    return Group(*parts)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _moved(report: Audit) -> Table:
    right = ("collectives", "promised", "program", "on the wire")
    table = _table("moved for", "collective", "over", "dtype", *right, right=right)
    groups: dict[tuple[str, str, tuple[str, ...]], list] = {}
    for one in report.moved:
        name = f"the loss itself: {one.leaf}" if one.what == "loss" else one.what
        groups.setdefault((name, one.kind, one.axes), []).append(one)
    for (what, kind, axes), some in groups.items():
        running = [one for one in some if one.count] or some
        dtypes = ", ".join(dict.fromkeys(dtype for one in running for dtype in one.dtypes))
        count = f"{sum(one.count for one in some)}{'' if all(one.exact for one in some) else ' or more'}"
        sizes = [sum(one.promised for one in some), sum(one.bytes for one in some)]
        wire = sum(one.wire_bytes for one in some)
        add_row(table, what, kind, ", ".join(axes) or "?", dtypes, count, *map(size, sizes), size(wire))
    return table


def _reasons(report: Audit) -> Iterable[Text]:
    groups: dict[tuple[str, str], list] = {}
    for one in report.moved:
        if one.reason:
            groups.setdefault((one.what, one.reason), []).append(one)
    for (what, reason), some in groups.items():
        apart = sum(one.bytes - one.promised for one in some)
        names = [one.leaf for one in some if one.leaf]
        shown = f" ({few(names)})" if names else ""
        change = f"{size(abs(apart))} {'more' if apart > 0 else 'less'}, " if apart else ""
        yield Text(f"  {what}: {change}{reason}{shown}")


def _axes(report: Audit) -> Text:
    sent = [
        f"{axis} {size(report.sent(axis))} of {size(report.sent(axis, promised=True))} promised"
        for axis, n in report.axes
        if n > 1
    ]
    return Text(f"  sent by each device, by axis: {'; '.join(sent) or 'nothing, there is one device'}")


def _partitioner(report: Audit) -> Table:
    right = ("collectives", "bytes", "on the wire")
    by = "by the partitioner or unnamed" if any(o.purpose == "unnamed" for o, _ in report.compiled) else _ADDED
    table = _table(f"{by}, compiled", "over", "dtype", *right, "for", right=right)
    groups: dict[tuple[str, tuple[str, ...], str], list] = {}
    for origin, row in report.compiled:
        if origin.purpose in BESIDE:
            name = origin.name if origin.purpose == "partitioner" else UNNAMED
            groups.setdefault((row.kind, row.axes, row.dtype), []).append((name, row))
    for (kind, axes, dtype), found in groups.items():
        rows, names = [row for _, row in found], list(dict.fromkeys(name for name, _ in found))
        count = f"{sum(row.count for row in rows)}{'' if all(row.exact for row in rows) else ' or more'}"
        sizes = size(sum(row.bytes for row in rows)), size(sum(row.wire_bytes for row in rows))
        add_row(table, kind, ", ".join(axes) or "?", dtype, count, *sizes, few(names))
    return table


def _held(report: Audit) -> Table:
    right = ("formula", "promised", "program", "live")
    table = _table("held", *right, "why they differ", right=right)
    for one in report.held:
        live = "-" if one.live is None else f"{one.live:,}"
        add_row(table, one.what, f"{one.formula:,.0f}", f"{one.promised:,}", f"{one.compiled:,}", live, one.reason)
    return table


def _memory(report: Audit) -> Text:
    memory = report.memory
    assert memory is not None
    return Text(
        f"  compiled program: arguments {size(memory.arguments)}, donated {size(memory.donated)}, temp "
        f"{size(memory.temp)} (reduced gradients are {size(memory.gradients)}; the rest is activations, gathered "
        f"params, unreduced gradients and copies)"
    )
