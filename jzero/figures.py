"""Figures of what the rest of the library computes. They are returned, and nothing is shown or written."""

from collections.abc import Sequence

from matplotlib.figure import Figure, FigureBase

from jzero.devices import Device
from jzero.estimate import Estimate

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
