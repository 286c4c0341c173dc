"""Options in, exit code out."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console

from experiments.bench_step import report
from experiments.bench_step.compare import Disagreement, compare, compare_cpu_time
from experiments.bench_step.model import Size
from experiments.gpt import devices
from experiments.gpt.config import Config
from jzero.cli.help import Help

COMPARISON = Size(layers=4, width=256, heads=4, vocabulary=256, context=128, batch_size=8)
MATMULS = Size(layers=2, width=512, heads=8, vocabulary=256, context=128, batch_size=16)
ROUNDS, CPU_ROUNDS = 100, 12

DESCRIPTION = """\
How much time, memory and compilation jzero costs beside what one writes without it.

The same scanned, rematerialised GPT with the same loss is differentiated in three ways: by jzero; with collectives
written into it by hand, inside of jax.shard_map; and by plain jax.jit, which is only told where arrays live. That they
agree is checked first. Then each runs once a round, in another order each round; times are medians, and their ratio
comes with a bootstrap interval. With --cpu-time, jzero on all devices is compared with plain JAX on one device that
does the same work, by the CPU time of the whole process.

Nothing else should run on this machine."""

EXAMPLES = """\
examples:
  python -m experiments.bench_step                        stage 3; three to five minutes on two cores
  python -m experiments.bench_step --stages 0 1 2 3       every stage
  python -m experiments.bench_step --cpu-time             CPU time of four devices against one, at every stage
  python -m experiments.bench_step --json result.json     what is printed, as JSON too; --json alone prints JSON only
  JAX_PLATFORMS=cpu python -m experiments.bench_step      simulated devices, even where there are accelerators"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_step",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    text = "ZeRO stages to measure (default: 3; all with --cpu-time)"
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), metavar="0..3", help=text)
    text = "compare the CPU time of all devices with that of one, instead of the three ways"
    parser.add_argument("--cpu-time", action="store_true", help=text)
    text = "how many devices, simulated where there is no accelerator (default: 4)"
    parser.add_argument("--devices", type=int, default=4, metavar="N", help=text)
    text = f"how often each program is timed (default: {ROUNDS}; {CPU_ROUNDS} with --cpu-time)"
    parser.add_argument("--rounds", type=int, metavar="N", help=text)
    text = "write the results to PATH as well, or to the standard output instead of tables"
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help=text)
    group = parser.add_argument_group("model")
    for name, text in (
        ("layers", "transformer blocks"),
        ("width", "width of the residual stream"),
        ("heads", "attention heads"),
        ("vocabulary", "rows of the embedding"),
        ("context", "tokens of an example"),
        ("batch_size", "examples over all devices"),
    ):
        usual, other = getattr(COMPARISON, name), getattr(MATMULS, name)
        text += f" (default: {usual}" + (f"; {other} with --cpu-time)" if other != usual else ")")
        group.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns an exit code: 1 where programs disagree, else 0, targets met or not."""
    command = parser()
    options = command.parse_args(argv)
    try:
        size, rounds, out = _checked(options)
        mesh = devices.make_mesh(Config(devices=options.devices))
        if options.cpu_time and mesh.devices.flat[0].platform != "cpu":
            raise ValueError("--cpu-time: these devices are no CPUs. Set JAX_PLATFORMS=cpu for simulated ones.")
    except (ValueError, OSError) as error:
        command.exit(2, f"{command.prog}: error: {error}\n")
    console = Console(quiet=options.json == "-")
    run, clock = (compare_cpu_time, "CPU time") if options.cpu_time else (compare, "time")
    settings = {"cpu_time": options.cpu_time, "devices": options.devices, "rounds": rounds, "jax": jax.__version__}
    console.print(f"{devices.describe(mesh)} {', '.join(f'{x} {name}' for name, x in vars(size).items())}.")
    results = []
    with Console(stderr=True).status("") as status:
        for stage in options.stages or ([0, 1, 2, 3] if options.cpu_time else [3]):
            try:
                result = run(size, mesh, stage, rounds, lambda text, s=stage: status.update(f"Stage {s}, {text}"))
            except Disagreement as error:
                command.exit(1, f"{command.prog}: error: stage {stage}, {error}\n")
            report.show(console, result, clock)
            results.append(dataclasses.asdict(result))
    out(json.dumps(settings | {"size": vars(size), "results": results}, indent=2) + "\n")
    return 0


def _checked(options: argparse.Namespace) -> tuple[Size, int, Callable[[str], object]]:
    """The size, the rounds, and where JSON goes.

    Raises:
        ValueError: An option that cannot be.
        OSError: A file that cannot be written.
    """
    usual = vars(MATMULS if options.cpu_time else COMPARISON)
    size = Size(**{name: x if (x := getattr(options, name)) is not None else y for name, y in usual.items()})
    rounds = (CPU_ROUNDS if options.cpu_time else ROUNDS) if options.rounds is None else options.rounds
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: wanted 1 or more.")
    if options.devices < 2:
        raise ValueError(f"--devices {options.devices}: wanted 2 or more; there is nothing to shard on fewer.")
    if size.batch_size % options.devices:
        raise ValueError(
            f"--batch-size {size.batch_size} does not divide over --devices {options.devices}. Use a multiple of "
            f"{options.devices}."
        )
    if options.json is None:
        return size, rounds, lambda text: None
    if options.json == "-":
        return size, rounds, sys.stdout.write
    path = Path(options.json)
    path.touch()  # better now than after minutes
    return size, rounds, path.write_text
