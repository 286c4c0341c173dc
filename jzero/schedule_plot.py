"""A picture of a schedule: what is multiplied, what is on which link, and what waits."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jzero.events import Window
from jzero.preflight_report import Preflight
from jzero.preflight_tables import leaves
from jzero.timeline import Span
from jzero.wording import size

_LANES = ("matmuls", "within hosts", "between hosts")
_PURPOSE_COLORS = {
    "forward": ("gather, forward", "#2e86c1", ""),
    "backward": ("gather, backward", "#1b4f72", "\\\\"),
    "update": ("gather, updated params", "#aed6f1", ""),
    "scatter": ("reduce gradients", "#d35400", "//"),
    "reduce": ("reduce gradients, whole", "#f0b27a", ""),
    "sum": ("sum of the loss", "#9b59b6", ""),
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
    figure = Figure(figsize=(10, 1.1 + 2.4 * len(loops)), layout="constrained")
    passes = {one.window.loop: one.window.passes for one in report.sent}
    for axes, loop in zip(figure.subplots(len(loops), squeeze=False)[:, 0], loops, strict=True):
        _schedule(axes, report.timeline.spans[loop])
        found = {one.window.purpose for one in report.sent if one.window.loop == loop}
        passes_of = ["forward"] * ("forward" in found) + ["backward"] * bool({"backward", "scatter"} & found)
        name = f"{' and '.join(passes_of)} pass" if passes_of else "a loop"
        where = f"loop {'.'.join(map(str, loop))}, one of {passes[loop]} passes"
        axes.set_title(f"{name}: {where}" if loop else "the whole step, loops as one", fontsize="medium", loc="left")
    purposes = {one.window.purpose for one in report.sent if one.window.loop in loops}
    used = {purpose if purpose in _PURPOSE_COLORS else "" for purpose in purposes}
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
    sent = sorted((span for span in spans if isinstance(span.what, Window)), key=lambda span: span.begin)
    lines = []
    for number, span in enumerate(sent, 1):
        assert isinstance(span.what, Window)
        at = scale * ((span.begin + span.end) / 2 - begin), -lanes.index(span.lane) - 0.42 - 0.12 * (number % 2)
        axes.annotate(str(number), at, ha="center", va="center", fontsize=6)
        lines.append(f"{number}  {leaves(span.what, 1)}, {size(span.what.bytes)}")
    axes.text(1.01, 1.0, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=6)
    axes.set_yticks([-n for n in range(len(lanes))], lanes)
    axes.set_ylim(-len(lanes) + 0.35, 0.5)
    axes.set_xlabel("microseconds" if scale == 1e6 else "milliseconds")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
