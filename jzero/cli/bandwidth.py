"""`jzero bandwidth`: how fast a mesh axis carries each collective."""

import argparse
import contextlib
import math
import sys

import jax
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from jzero import bandwidth
from jzero.bandwidth import DTYPES, KINDS, sizes_between
from jzero.cli.as_json import print_json
from jzero.cli.help import Help
from jzero.cli.options import mesh_axes, nbytes, parsed, plot_file, speed
from jzero.mesh import check_names, make_mesh, platform_of
from jzero.sweep import Sweep
from jzero.wording import exact_size

SIMULATED = 8
"""How many CPU devices are simulated where there is no accelerator."""

SIZES, CPU_SIZES = "1KiB..1GiB", "1KiB..4MiB"

DESCRIPTION = """\
Times all-reduce, reduce-scatter, all-gather, all-to-all and permute over one axis of a mesh, after nccl-tests.

A size is the bytes of the whole array, as nccl-tests counts it. algbw is size over time; busbw is what each device
sends over time, to be compared with the speed of its link in one direction; the plateau is the median busbw of the
three largest sizes. Times are medians, of a call of a jitted function; +- is the quartiles' distance to either side.
Where there is no accelerator, CPU devices are simulated: then this measures memory, not links."""

EXAMPLES = """\
examples:
  jzero bandwidth --link 450GB/s                          all devices; an H200's NVLink carries 450 GB/s each way
  jzero bandwidth --mesh replica=2,data=4 --axis replica  one axis of two; its four groups run at once
  jzero bandwidth --collective all-reduce all-gather --dtype bfloat16 --sizes 1MiB..256MiB
  jzero bandwidth --plot bandwidth.pdf --json > bandwidth.json"""


def add(subparsers: argparse._SubParsersAction) -> None:
    """Adds the command to `jzero`'s."""
    parser = subparsers.add_parser(
        "bandwidth",
        help="how fast a mesh axis carries each collective",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    text = "axes and sizes, -1 for the devices that are left (default: data=-1, all devices)"
    parser.add_argument("--mesh", type=parsed(mesh_axes), default={"data": -1}, metavar="NAME=N,...", help=text)
    parser.add_argument("--axis", default="data", help="the axis to measure (default: data)")
    parser.add_argument("--collective", nargs="+", choices=KINDS, default=KINDS, metavar="NAME", help=", ".join(KINDS))
    text = f"doubling sizes, or single ones (default: {SIZES}; on CPU {CPU_SIZES})"
    parser.add_argument("--sizes", nargs="+", type=parsed(_sizes), metavar="FROM..TO", help=text)
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["float32"], metavar="NAME", help=", ".join(DTYPES)
    )
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="how often each is timed (default: 20)")
    text = "the speed of a device's link in one direction, as 450GB/s or 400Gb/s (bits), to judge by"
    parser.add_argument("--link", type=parsed(speed), metavar="SPEED", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds and bytes per second")
    text = "draw busbw over size into FILE (png, pdf, svg)"
    parser.add_argument("--plot", type=parsed(plot_file), metavar="FILE", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns an exit code: 2 for options that cannot be, 1 where measuring failed, else 0."""
    try:
        mesh = _mesh(args.mesh)
        todo = [
            (kind, dtype, _sizes_for(args.sizes, mesh, args.axis, args.dtype))
            for kind in dict.fromkeys(args.collective)
            for dtype in dict.fromkeys(args.dtype)
        ]
        for kind, dtype, sizes in todo:  # all of them before the first takes its minute
            bandwidth.check(mesh, args.axis, kind, sizes, dtype)
        if args.repeats < 1:
            raise ValueError(f"--repeats {args.repeats}; wanted 1 or more.")
    except (ValueError, OSError) as error:
        return _failed(error, 2)
    sweeps = []
    with Console(stderr=True).status("") as status:
        for kind, dtype, sizes in todo:
            status.update(f"{kind} {dtype}")
            try:
                sweeps.append(bandwidth.measure(mesh, args.axis, kind, sizes, dtype, args.repeats))
            except jax.errors.JaxRuntimeError as error:
                return _failed(f"{kind} {dtype}: {error}\nIf memory ran out, end --sizes at a smaller one.", 1)
    if args.json:
        print_json(_report(mesh, sweeps, args.link))
    else:
        _show(Console(), mesh, sweeps, args.link)
    if args.plot is not None:
        from jzero.bandwidth_plot import plot  # matplotlib takes half a second, of those who draw alone

        plot(sweeps, args.link).savefig(args.plot, dpi=200)
    return 0


def _failed(why: object, code: int) -> int:
    print(f"jzero bandwidth: error: {why}", file=sys.stderr)
    return code


def _mesh(axes: dict[str, int]) -> Mesh:
    """The accelerators of this machine in a mesh, or simulated CPU devices where there are none."""
    check_names("--mesh", axes)
    product = math.prod(axes.values())
    with contextlib.suppress(RuntimeError):  # once JAX has started the number is fixed
        jax.config.update("jax_num_cpu_devices", product if product > 0 else SIMULATED)
    devices = jax.devices()
    if product > len(devices):
        raise ValueError(f"--mesh asks for {product} devices; there are {len(devices)} ({devices[0].device_kind}).")
    return make_mesh(devices=devices[:product] if product > 0 else devices, **axes)


def _sizes_for(asked: list[tuple[int, ...]] | None, mesh: Mesh, axis: str, dtypes: list[str]) -> list[int]:
    """Sizes in bytes. Those of a range are rounded up to what the axis divides; those that are named stay."""
    asked = asked or [_sizes(CPU_SIZES if platform_of(mesh) == "cpu" else SIZES)]
    multiple = mesh.shape.get(axis, 1) * max(jax.numpy.dtype(dtype).itemsize for dtype in dtypes)
    return [size for some in asked for size in (some if len(some) == 1 else sizes_between(some[0], some[1], multiple))]


def _report(mesh: Mesh, sweeps: list[Sweep], link: float | None) -> dict:
    """All of it for JSON, in bytes, seconds and bytes per second."""
    return {
        "jax": jax.__version__,
        "device": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "axis": sweeps[0].axis,
        "measures": sweeps[0].measures,
        "link": link,
        "sweeps": [
            {
                "collective": sweep.kind,
                "dtype": sweep.dtype,
                "plateau": sweep.plateau,
                "of_link": sweep.plateau / link if link else None,
                "rising": sweep.rising,
                "latency": sweep.latency,
                "verdict": sweep.verdict(link),
                "sizes": [
                    {
                        "bytes": timing.collective.bytes,
                        "wire_bytes": timing.collective.wire_bytes,
                        "seconds": timing.seconds,
                        "quartiles": timing.quartiles,
                        "algbw": timing.algbw,
                        "busbw": timing.busbw,
                        "ring_seconds": timing.ring_seconds(link) if link else None,
                        "tree_seconds": timing.tree_seconds(link) if link else None,
                    }
                    for timing in sweep.timings
                ],
            }
            for sweep in sweeps
        ],
    }


def _show(console: Console, mesh: Mesh, sweeps: list[Sweep], link: float | None) -> None:
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    console.print(f"{mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {shape}, over {sweeps[0].axis}.")
    if sweeps[0].measures == "memory":
        console.print("[yellow]No accelerator: these devices are simulated. This measures memory, not links.[/]")
    for sweep in sweeps:
        console.print(_table(sweep, link))
    for sweep in sweeps:
        console.print(sweep.verdict(link), highlight=False, soft_wrap=True)


def _table(sweep: Sweep, link: float | None) -> Table:
    title = f"{sweep.kind}, {sweep.dtype} (us, GB/s)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    columns = ["size", "time", "+-", "algbw", "busbw"]
    if link:
        columns += ["ring bound", "tree bound", "of link"] if sweep.kind == "all-reduce" else ["bound", "of link"]
    for name in columns:
        table.add_column(name, justify="right")
    for timing in sweep.timings:
        times = [timing.seconds, (timing.quartiles[1] - timing.quartiles[0]) / 2]
        bounds = [timing.ring_seconds(link), timing.tree_seconds(link)] if link else []
        table.add_row(
            exact_size(timing.collective.bytes),
            *(f"{1e6 * x:,.1f}" for x in times),
            *(f"{x / 1e9:.3f}" for x in (timing.algbw, timing.busbw)),
            *(f"{1e6 * x:,.1f}" for x in bounds if x is not None),
            *([f"{timing.busbw / link:.1%}"] if link else []),
        )
    return table


def _sizes(text: str) -> tuple[int, ...]:
    """One size, or the ends of a range: "64KiB" or "1KiB..1GiB"."""
    ends = tuple(map(nbytes, text.split("..")))
    if len(ends) > 2 or list(ends) != sorted(ends):
        raise ValueError(f"{text!r}; wanted one size, or a range from a smaller to a larger: 1KiB..1GiB")
    return ends
