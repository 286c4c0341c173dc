"""`jzero preflight`: what a training step will do on GPUs that are not there."""

import argparse
import re
from typing import Any

import jax
from rich.console import Console

from jzero.cli.as_json import print_json
from jzero.cli.help import Help
from jzero.cli.options import called, mesh_axes, parsed, plot_file, raised, speed
from jzero.mesh import check_names
from jzero.plain import WIDTH
from jzero.preflight import preflight
from jzero.step import TrainStep
from jzero.targets import GPUS, target_mesh

DESCRIPTION = """\
Compiles a training step for GPUs that need not be there, and says what it will do on them: whether it fits and what
takes the memory, whether its state is donated, every collective with what runs beside it, the bytes that it sends
against theory, and a bound on its time. Nothing is run, and no array is made."""

EXAMPLES = """\
examples:
  jzero preflight experiments.gpt:train_config --target h200x8
  jzero preflight experiments.llama:train_8b --target h200x2x8 --mesh replica=2,data=8 --plot block.pdf
  jzero preflight mymodel:config --target a100x2x8 --mesh data=16 --link data=90GB/s --json

The function is called with a jax.sharding.Mesh of the target's GPUs, and returns (step, state, batch): the step from
jzero.train_step, and the shapes of its state and of its global batch. Shapes of a state come from
jax.eval_shape(functools.partial(jzero.init, init_params, tx, layout), key). The current folder is importable.

exit codes: 0 it fits, and no promise is broken; 1 it does not, or one is; 2 nothing could be said, and why."""


def add(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "preflight",
        help="compile a step for GPUs that are not there, and see what it will do",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="takes a mesh, returns (step, state, batch)")
    text = f"{', '.join(GPUS)}; x8 is one host of 8, x2x8 two hosts of 8 (default: h200x8)"
    parser.add_argument("--target", default="h200x8", metavar="GPU", help=text)
    text = "size of each mesh axis, -1 for what is left (default: data=-1)"
    parser.add_argument("--mesh", type=parsed(mesh_axes), default={"data": -1}, metavar="AXES", help=text)
    text = (
        "what a device sends per second over each axis, or over those that are named, as `jzero bandwidth` measures: "
        "300GB/s, or replica=40GB/s,data=300GB/s (default: the links of the GPU, and its makers' networks)"
    )
    parser.add_argument("--link", type=parsed(_links), default={}, metavar="SPEED", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    text = "draw the schedule of a block with its collectives into this file (.pdf, .png, .svg)"
    parser.add_argument("--plot", type=parsed(plot_file), metavar="FILE", help=text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    if jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")  # programs are compiled for GPUs; jax must not look for real ones
    check_names("--mesh", options.mesh)
    mesh = target_mesh(options.target, **options.mesh)
    found = called(options.function, "MODULE:FUNCTION", mesh, takes="of one argument, the mesh")
    if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[0], TrainStep):
        names = ", ".join(type(one).__name__ for one in found) if isinstance(found, tuple) else type(found).__name__
        raise ValueError(
            f"{options.function} returned ({names}); wanted (step, state, batch): a step from jzero.train_step, and "
            f"the shapes of its state and of its global batch."
        )
    links: Any = options.link if isinstance(options.link, dict) else dict.fromkeys(mesh.axis_names, options.link)
    try:
        report = preflight(*found, target=options.target, mesh=options.mesh, links=links)
    except (ValueError, TypeError, RuntimeError):
        raise
    except Exception as error:
        raise RuntimeError(f"{raised(error)}, while the step of {options.function} was traced and compiled.") from error
    if options.plot is not None:
        from jzero.schedule_plot import block_schedule  # matplotlib takes half a second, of those who draw alone

        block_schedule(report).savefig(options.plot)
    if options.json:
        print_json(report.as_dict())
    else:
        console = Console()
        (console if console.is_terminal else Console(width=WIDTH)).print(report)
    return 1 if report.broken else 0


def _links(text: str) -> float | dict[str, float]:
    """Reads "300GB/s" or "replica=40GB/s,data=300GB/s"."""
    if "=" not in text:
        return speed(text)
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(\S+)\s*", part) for part in text.split(",")]
    found = {pair[1]: speed(pair[2]) for pair in pairs if pair}
    if len(found) < len(pairs):
        raise ValueError(f"{text!r}; wanted a speed, or axes and speeds: replica=40GB/s,data=300GB/s")
    return found
