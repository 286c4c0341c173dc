"""Figures of what the rest of the library computes. They are returned, and nothing is shown or written."""

from collections.abc import Sequence

from matplotlib.figure import Figure

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
    names = ["own stage" if one.number is None else f"stage {one.number}" for one in estimates]
    axes.set_xticks(range(len(rows)), names)
    axes.set_ylim(0, 1.12 * max(*bottom, limit))
    axes.set_ylabel("GB on each device")
    first = estimates[0]
    mesh = " x ".join(f"{name} {size}" for name, size in first.axes)
    axes.set_title(f"{first.params:,} params on {mesh}", fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    return figure


def _bytes(one: Estimate) -> dict[str, int]:
    kinds = {entry.kind: entry.bytes for entry in one.ledger}
    return kinds | {kind: getattr(one.inside, kind) for kind in ("gradients", "local", "gathered")}
