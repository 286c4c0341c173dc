"""Figures of what the rest of the library computes. They are returned, and nothing is shown or written."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch

from jzero.devices import Device
from jzero.estimate import Estimate
from jzero.events import Window
from jzero.preflight import Preflight
from jzero.preflight_tables import leaves, size
from jzero.timeline import Span

_KINDS = (
    ("params", "params", "#1b4f72", ""),
    ("master", "master weights", "#2e86c1", ""),
    ("moments", "moments", "#aed6f1", ""),
    ("gradients", "gradients, reduced", "#d35400", "//"),
    ("local", "gradients, not yet reduced", "#f0b27a", "//"),
    ("gathered", "gathered params", "#f7dc6f", "//"),
)
_PURPOSES = (
    ("gather, forward", "params, forward", "#1b4f72", ""),
    ("gather, backward", "params, backward", "#2e86c1", ""),
    ("gather, update", "params, updated", "#aed6f1", ""),
    ("reduce", "gradients", "#d35400", "//"),
)


def memory_bars(estimates: Sequence[Estimate], device: Device | None = None, reserve: float = 0.0) -> Figure:
    """Bytes on each device by stage, stacked by kind; hatched is what lives inside of a step only.

    Args:
        estimates: One bar each.
        device: Draws its memory as a line.
        reserve: Share of that memory which is kept for activations; drawn as a second line.

    Example:
        >>> from jzero.devices import DEVICES
        >>> from jzero.estimate import estimate
        >>> plans = [estimate(7.5e9, axes={"data": 64}, stage=stage) for stage in range(4)]
        >>> figure = memory_bars(plans, DEVICES["h200"])
        >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
        ['stage 0', 'stage 1', 'stage 2', 'stage 3']
    """
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    _draw_memory(figure, estimates, device, reserve)
    return figure


def traffic_bars(estimates: Sequence[Estimate]) -> Figure:
    """Bytes that each device sends in a step, by stage and by the axes that they go over, stacked by what for.

    An all-reduce counts as the ring algorithm sends it, twice. Replica axes are drawn beside the data axes: a bar each.

    Args:
        estimates: One stage each.

    Example:
        >>> from jzero.estimate import estimate
        >>> plans = [estimate(7.5e9, axes={"replica": 4, "data": 8}, stage=stage) for stage in range(4)]
        >>> figure = traffic_bars(plans)
        >>> [text.get_text() for text in figure.axes[0].get_xticklabels(minor=True)]
        ['all axes', 'data', 'replica', 'data', 'replica', 'data', 'replica']
    """
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    _draw_traffic(figure, estimates)
    return figure


def plan_bars(estimates: Sequence[Estimate], device: Device | None = None, reserve: float = 0.0) -> Figure:
    """`memory_bars` above `traffic_bars`, on one page.

    Args:
        estimates: As for both.
        device: As for `memory_bars`.
        reserve: As for `memory_bars`.

    Example:
        >>> from jzero.estimate import estimate
        >>> figure = plan_bars([estimate(7.5e9, axes={"data": 64}, stage=stage) for stage in range(4)])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['GB on each device', 'GB sent by each device in a step']
    """
    figure = Figure(figsize=(7.5, 8), layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False).flat
    _draw_memory(upper, estimates, device, reserve)
    _draw_traffic(lower, estimates)
    return figure


def _draw_memory(figure: FigureBase, estimates: Sequence[Estimate], device: Device | None, reserve: float) -> None:
    axes = figure.subplots()
    rows = [_bytes(one) for one in estimates]
    bottom = [0.0] * len(rows)
    for kind, label, color, hatch in _KINDS:
        heights = [row[kind] / 1e9 for row in rows]
        if any(heights):
            axes.bar(
                range(len(rows)), heights, 0.62, bottom=bottom, label=label, color=color, hatch=hatch, edgecolor="white"
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for at, total in enumerate(bottom):
        axes.annotate(f"{total:.3g}", (at, total), xytext=(0, 3), textcoords="offset points", ha="center")
    limit = device.memory / 1e9 if device else 0.0
    if device is not None:
        axes.axhline(limit, color="black", linewidth=1.2, label=f"{device.name}: {limit:.0f} GB")
        if reserve:
            kept = f"without {reserve:.0%} for activations: {limit * (1 - reserve):.0f} GB"
            axes.axhline(limit * (1 - reserve), color="black", linewidth=1.2, linestyle="--", label=kept)
    axes.set_xticks(range(len(rows)), [_name(one) for one in estimates])
    axes.set_ylim(0, 1.12 * max(*bottom, limit))
    axes.set_ylabel("GB on each device")
    axes.set_title(f"Memory: {_title(estimates[0])}", fontsize="medium")
    _finish(figure, axes)


def _draw_traffic(figure: FigureBase, estimates: Sequence[Estimate]) -> None:
    axes = figure.subplots()
    bars = [(one, over) for one in estimates for over in dict.fromkeys(row.axes for row in one.traffic)]
    # The bars of a stage stand together, with a gap to the next.
    places = [at + 0.6 * estimates.index(one) for at, (one, _) in enumerate(bars)]
    bottom = [0.0] * len(bars)
    for what, label, color, hatch in _PURPOSES:
        heights = [
            sum(row.wire_bytes for row in one.traffic if row.what == what and row.axes == over) / 1e9
            for one, over in bars
        ]
        if any(heights):
            axes.bar(places, heights, 0.8, bottom=bottom, label=label, color=color, hatch=hatch, edgecolor="white")
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for at, total in zip(places, bottom, strict=True):
        axes.annotate(f"{total:.3g}", (at, total), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(places, [_over(one, over) for one, over in bars], minor=True)
    groups = [(one, [at for at, (other, _) in zip(places, bars, strict=True) if other is one]) for one in estimates]
    groups = [(one, some) for one, some in groups if some]
    axes.set_xticks([sum(some) / len(some) for _, some in groups], [_name(one) for one, _ in groups])
    axes.tick_params(axis="x", which="minor", labelsize="small")
    axes.tick_params(axis="x", which="major", pad=16, length=0)
    axes.xaxis.remove_overlapping_locs = False  # a stage with one bar has both names in one place
    axes.set_ylim(0, 1.12 * max(bottom, default=0) or 1)
    axes.set_ylabel("GB sent by each device in a step")
    first = estimates[0]
    plural = "es" if first.microbatches > 1 else ""
    axes.set_title(f"Traffic: {_title(first)}, {first.microbatches} microbatch{plural}", fontsize="medium")
    _finish(figure, axes)


def _over(one: Estimate, axes: tuple[str, ...]) -> str:
    batch = [name for name, size in one.axes if size > 1 and name in ("data", "replica")]
    return "all axes" if len(axes) > 1 and len(axes) == len(batch) else " x ".join(axes)


def _name(one: Estimate) -> str:
    return "own stage" if one.number is None else f"stage {one.number}"


def _title(one: Estimate) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in one.axes)
    return f"{one.params:,} params on {mesh}"


def _finish(figure: FigureBase, axes) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:  # there are none where one device sends nothing
        figure.legend(loc="outside right center", fontsize="small", frameon=False)


def _bytes(one: Estimate) -> dict[str, int]:
    kinds = {entry.kind: entry.bytes for entry in one.ledger}
    return kinds | {kind: getattr(one.inside, kind) for kind in ("gradients", "local", "gathered")}


_LANES = ("matmuls", "within hosts", "between hosts")
_PURPOSE_COLORS = {
    "forward": ("gather, forward", "#2e86c1", ""),
    "backward": ("gather, backward", "#1b4f72", "\\\\"),
    "update": ("gather, updated params", "#aed6f1", ""),
    "scatter": ("reduce gradients", "#d35400", "//"),
    "reduce": ("reduce gradients, whole", "#f0b27a", ""),
    "": ("other", "#7f8c8d", "xx"),
}


def block_schedule(report: Preflight) -> Figure:
    """The schedule of the blocks with their collectives: what is multiplied, what is on which link, and what waits.

    One panel for each of up to three loops that communicate most, showing its middle pass, or for the whole program
    where no loop communicates. Times are those of `jzero.timeline`: a model, and no measurement.

    Args:
        report: From `jzero.preflight`.

    Example:
        >>> block_schedule(report).savefig("block.pdf")  # doctest: +SKIP
    """
    sent: dict[tuple[int, ...], float] = {}
    for one in report.sent:
        if one.window.loop in report.timeline.spans:
            sent[one.window.loop] = sent.get(one.window.loop, 0.0) + one.wire_bytes * one.window.passes
    loops = sorted(sorted((loop for loop in sent if loop), key=lambda loop: -sent[loop])[:3]) or [()]
    figure = Figure(figsize=(9, 1.1 + 2.4 * len(loops)), layout="constrained")
    passes = {one.window.loop: one.window.passes for one in report.sent}
    for axes, loop in zip(figure.subplots(len(loops), squeeze=False)[:, 0], loops, strict=True):
        _schedule(axes, report.timeline.spans[loop])
        found = {one.window.purpose for one in report.sent if one.window.loop == loop}
        name = (
            "backward pass" if {"backward", "scatter"} & found else "forward pass" if "forward" in found else "a loop"
        )
        where = f"loop {'.'.join(map(str, loop))}, one of {passes[loop]} passes"
        axes.set_title(f"{name}: {where}" if loop else "the whole step, loops as one", fontsize="medium", loc="left")
    used = {one.window.purpose for one in report.sent if one.window.loop in loops}
    bars = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=label)
        for purpose, (label, color, hatch) in _PURPOSE_COLORS.items()
        if purpose in used
    ]
    bars += [Patch(facecolor="#444444", edgecolor="white", label="matmuls")]
    bars += [Patch(facecolor="white", edgecolor="#c0392b", hatch="....", label="waiting for a collective")]
    figure.legend(handles=bars, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    mesh = " x ".join(f"{name} {size}" for name, size in report.axes)
    figure.suptitle(
        f"A block on {report.target}, {mesh}: a model of the schedule, not a measurement", fontsize="medium"
    )
    return figure


def _schedule(axes: Axes, spans: list[Span]) -> None:
    """Draws one lane for matmuls and one for each link that is used."""
    lanes = [lane for lane in _LANES if lane == "matmuls" or any(span.lane == lane for span in spans)]
    begin = min((span.begin for span in spans), default=0.0)
    scale = 1e6 if max((span.end for span in spans), default=0.0) - begin < 1e-3 else 1e3
    for span in spans:
        at, length = scale * (span.begin - begin), scale * (span.end - span.begin)
        y = -lanes.index(span.lane)
        if not isinstance(span.what, Window):
            axes.barh(y, length, 0.6, at, color="#444444", edgecolor="white", linewidth=0.5)
            continue
        _, color, hatch = _PURPOSE_COLORS.get(span.what.purpose, _PURPOSE_COLORS[""])
        axes.barh(y, length, 0.6, at, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
        if span.wait:
            wait = scale * span.wait
            axes.barh(0, wait, 0.6, at + length - wait, color="white", edgecolor="#c0392b", hatch="....", linewidth=0.8)
    for span in spans:
        if isinstance(span.what, Window):
            name = f"{leaves(span.what, 1)}, {size(span.what.bytes)}"
            at = scale * (span.begin - begin), -lanes.index(span.lane) - 0.34
            axes.annotate(name, at, rotation=-20, ha="left", va="top", fontsize=6, rotation_mode="anchor")
    axes.set_yticks([-n for n in range(len(lanes))], lanes)
    axes.set_ylim(-len(lanes) + 0.1, 0.5)
    axes.set_xlabel("microseconds" if scale == 1e6 else "milliseconds")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
