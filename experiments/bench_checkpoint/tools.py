"""What `jzero inspect`, `verify` and `reshard` take: `python -m experiments.bench_checkpoint.tools --help`.

Each runs in a process of its own, which says how much resident memory it had at its peak over what it had after its
imports, and how long it took.
"""

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jzero.checkpoint import chunks
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.store import Piece
from jzero.checkpoint.write import write
from jzero.cli import main as jzero

WIDTH = 8192
"""Length of the last dim of large leaves."""


def make(folder: Path, nbytes: int, leaves: int, largest: int = chunks.LARGEST) -> None:
    """Writes a checkpoint of float32 leaves of equal size, in chunks of at most `largest` bytes."""
    rng = np.random.default_rng(0)
    size = nbytes // 4 // leaves
    shape = (size // WIDTH, WIDTH) if size > WIDTH else (size,)
    entries = [
        Entry(path, ".".join(path), shape, "float32", "float32", shape, chunks.halved(shape, 4, largest))
        for path in (("params", f"layer{i:05}") for i in range(leaves))
    ]
    some = rng.standard_normal(max(math.prod(entry.chunk) for entry in entries), np.float32)
    pieces = (
        Piece(entry, number, region, some[: math.prod(b - a for a, b in region)].reshape([b - a for a, b in region]))
        for entry in entries
        for number, region in chunks.grid(shape, entry.chunk)
    )
    write(folder, Manifest(tuple(entries)), pieces, overwrite=True)


def watched(work: Callable[[], object]) -> dict[str, float]:
    """Seconds that something takes, and bytes of its peak of resident memory over those before (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began = _status("VmRSS"), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "peak": _status("VmHWM") - before}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; this benchmark needs Linux.")


def _quiet(command: Sequence[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = jzero(command)
    if code:
        raise SystemExit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_checkpoint.tools", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, metavar="X", help="of the checkpoint (default: 1)")
    parser.add_argument("--leaves", type=int, default=3000, metavar="N", help="cut so, beside one (default: 3000)")
    parser.add_argument("--folder", metavar="DIR", help="on which disk (default: that of temporary files)")
    parser.add_argument("--only", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.only:
        print(json.dumps(watched(lambda: _quiet(options.only))))
        return 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("", "MB", "peak MB", "s", "MB/s"):
        table.add_column(name, justify="left" if not name else "right")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        nbytes = round(options.gigabytes * 1e9)
        for title, count in (("1 leaf", 1), (f"{options.leaves} leaves", options.leaves)):
            source, target = str(folder / "source"), str(folder / "target")
            make(Path(source), nbytes, count)
            for what, flush in (("cp", lambda: None), ("cp and sync", os.sync)):
                os.sync()
                began = time.perf_counter()
                shutil.copytree(source, target)
                flush()
                _row(table, f"{what}, {title}", nbytes, {"seconds": time.perf_counter() - began})
                shutil.rmtree(target)
            for command in (
                ["inspect", source],
                ["verify", source],
                ["reshard", source, target, "--mesh", "data=8"],
                ["verify", source, "--against", target],
                ["reshard", source, target, "--overwrite", "--cast", "params=bfloat16"],
            ):
                run = [sys.executable, "-m", "experiments.bench_checkpoint.tools", "--only", *command]
                found = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
                what = " ".join(part for part in command if part not in (source, target, "--overwrite"))
                _row(table, f"{what}, {title}", nbytes, found)
            shutil.rmtree(target)
    Console().print(table)
    return 0


def _row(table: Table, what: str, nbytes: int, found: dict[str, float]) -> None:
    peak = f"{found['peak'] / 1e6:,.0f}" if "peak" in found else ""
    speed = f"{nbytes / 1e6 / found['seconds']:,.0f}"
    table.add_row(what, f"{nbytes / 1e6:,.0f}", peak, f"{found['seconds']:.1f}", speed)


if __name__ == "__main__":
    sys.exit(main())
