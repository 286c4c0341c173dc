"""Options in, a table out."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.bench_checkpoint.measure import KINDS, measure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns an exit code."""
    command = argparse.ArgumentParser(
        prog="python -m experiments.bench_checkpoint",
        description="Peak memory and time of saving and restoring a state of Adam on 8 simulated devices, each in a "
        "process of its own (Linux).",
    )
    command.add_argument("--gigabytes", type=float, default=1.0, metavar="X", help="size of the state (default: 1)")
    command.add_argument("--leaves", type=int, default=16, metavar="N", help="number of params (default: 16)")
    command.add_argument("--stage", type=int, default=3, choices=range(4), metavar="0..3", help="(default: 3)")
    command.add_argument("--folder", metavar="DIR", help="on which disk (default: that of temporary files)")
    command.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    options = command.parse_args(argv)
    if options.only:
        nbytes = round(options.gigabytes * 1e9)
        print(json.dumps(measure(options.only, Path(options.folder), nbytes, options.leaves, options.stage)))
        return 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("", "state MB", "saved MB", "peak MB", "peak / state", "s", "s blocked", "MB/s"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind in KINDS:
            found = _apart(kind, folder, options)
            mega = [found[name] / 1e6 for name in ("state", "saved", "peak")]
            table.add_row(
                kind,
                *(f"{value:,.0f}" for value in mega),
                f"{mega[2] / mega[0]:.2f}",
                f"{found['seconds']:.1f}",
                f"{found['blocked']:.1f}" if "blocked" in found else "",
                f"{mega[1] / found['seconds']:,.0f}",
            )
    Console().print(table)
    return 0


def _apart(kind: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    numbers = [f"--{name}={getattr(options, name)}" for name in ("gigabytes", "leaves", "stage")]
    command = [sys.executable, "-m", "experiments.bench_checkpoint", "--folder", folder, "--only", kind, *numbers]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
