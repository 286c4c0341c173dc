"""A picture of how fast an axis is: bus bandwidth over size."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from jzero.sweep import Sweep
from jzero.wording import exact_size

_STYLES = ("-", ":", "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (1, 4)))  # dashes are the link's
_MARKERS = "osD^v"


def plot(sweeps: Sequence[Sweep], link: float | None = None) -> Figure:
    """Draws busbw over size on logarithmic axes: a line for each collective, and the link's speed as a dashed one.

    A collective has one colour and marker, a dtype one style of line, so that it reads in print.

    Args:
        sweeps: What `jzero.bandwidth.measure` returned.
        link: The stated speed of the link in bytes per second, in one direction; no line if None.

    Returns:
        A figure of its own, apart from pyplot; `figure.savefig(path)` writes it.

    Raises:
        ValueError: No sweeps.

    Example:
        >>> from jzero.bandwidth import measure
        >>> mesh = jzero.make_mesh(data=-1)
        >>> figure = plot([measure(mesh, "data", "permute", [1024, 2048], repeats=1)], link=450e9)
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['permute float32', 'link: 450 GB/s']
    """
    if not sweeps:
        raise ValueError("plot: no sweeps; wanted one or more of what jzero.bandwidth.measure returns.")
    kinds = list(dict.fromkeys(sweep.kind for sweep in sweeps))
    dtypes = list(dict.fromkeys(sweep.dtype for sweep in sweeps))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for sweep in sweeps:
        kind, dtype = kinds.index(sweep.kind), dtypes.index(sweep.dtype)
        axes.plot(
            [timing.collective.bytes for timing in sweep.timings],
            [timing.busbw / 1e9 for timing in sweep.timings],
            color=f"C{kind}",
            marker=_MARKERS[kind % len(_MARKERS)],
            markersize=4,
            linestyle=_STYLES[dtype % len(_STYLES)],
            label=f"{sweep.kind} {sweep.dtype}",
        )
    if link is not None:
        axes.axhline(link / 1e9, color="black", linestyle="--", linewidth=1, label=f"link: {link / 1e9:.3g} GB/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: exact_size(round(size)))
    axes.set_xlabel("size of the whole array")
    axes.set_ylabel("bus bandwidth (GB/s)")
    first = sweeps[0]
    what = "memory, not links: CPU devices" if first.measures == "memory" else f"{first.platform} links"
    axes.set_title(f"Collectives over {first.axis}={first.devices} ({what})")
    axes.grid(which="major", alpha=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return figure
