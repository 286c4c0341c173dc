"""Options in, exit code out."""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from experiments.gpt.config import parse_mesh
from experiments.schedule import report
from experiments.schedule.config import Config, parse_option
from experiments.schedule.models import MODELS
from experiments.schedule.program import compile_program
from jzero.cli.help import Help
from jzero.cli.options import parsed
from jzero.targets import GPUS

DESCRIPTION = """\
Compile a model at a ZeRO stage for GPUs that need not be there, and read from XLA's schedule when it communicates.

Prints every collective with what it is for and how many matmuls run between its start and its done, and the share of
bytes that have one. Nothing is run: this is a schedule, not a time."""

EXAMPLES = """\
examples:
  python -m experiments.schedule --stage 1 --unrolled --what step
  python -m experiments.schedule --target h200x2x8 --mesh replica=2,data=8
  python -m experiments.schedule --no-ahead --xla-defaults --options xla_gpu_enable_pipelined_all_gather=true --json"""


def parser() -> argparse.ArgumentParser:
    """The command line. Its defaults are those of `Config`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.schedule",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )

    def option(name, text, kind: Callable[[str], Any] = int, **more: Any):
        default = getattr(Config, name)
        more = {"metavar": "N", "help": f"{text} (default: {default})"} | more
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, **more)

    option("stage", "ZeRO stage", choices=range(4), metavar="0..3")
    option("target", f"{', '.join(GPUS)}; x8 is one host of 8, x2x8 two hosts of 8", str, metavar="GPU")
    text = "size of each mesh axis: data, perhaps replica and model; -1 takes what is left (default: data=-1)"
    option("mesh", text, parsed(parse_mesh), metavar="AXES", help=text)
    text = "memory of each GPU, of which XLA's scheduler uses what is spare (default: the GPU's own)"
    option("device_memory", text, float, metavar="GIB", help=text)
    text = "gather leaves again in the backward pass, or keep them (default: again)"
    parser.add_argument("--regather", action=argparse.BooleanOptionalAction, default=Config.regather, help=text)
    text = "gather blocks one ahead and reduce them one behind (default: as jzero.zero sees fit)"
    parser.add_argument("--ahead", action=argparse.BooleanOptionalAction, default=Config.ahead, help=text)
    option("bucket_bytes", "bytes of gradients that are reduced together at most", int, metavar="N")
    text = "leave out the compiler options that jzero.compiler_options gives"
    parser.add_argument("--xla-defaults", action="store_true", help=text)
    text = "more compiler options of XLA"
    parser.add_argument(
        "--options",
        type=parsed(parse_option),
        nargs="+",
        action="extend",
        default=[],
        help=text,
        metavar="NAME=VALUE",
    )
    option(
        "what", "the gradient alone, or the step with AdamW", str, choices=("value_and_grad", "step"), metavar="WHAT"
    )
    option("model", "what is compiled", str, choices=tuple(MODELS), metavar="MODEL")
    option("layers", "blocks")
    option("width", "width of the residual stream")
    option("heads", "attention heads")
    option("context", "bytes per sequence")
    option("batch", "sequences per data shard")
    text = "recompute each block in the backward pass (default: recompute)"
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=Config.remat, help=text)
    parser.add_argument("--unrolled", action="store_true", help="write the blocks out, instead of a scan over them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns an exit code."""
    command = parser()
    given = vars(command.parse_args(argv))
    logging.getLogger("jax_plugins").setLevel(logging.ERROR)  # they say that there is no CUDA, which is no news
    as_json, options = given.pop("json"), given.pop("options")
    try:
        config = Config(**given, options=tuple(options))
        program = compile_program(config)
    except (ValueError, RuntimeError) as error:
        command.exit(2, f"{command.prog}: error: {error}\n")
    if as_json:
        print(json.dumps(report.as_json(config, program), indent=1))
    else:
        report.show(Console(), config, program)
    return 0
