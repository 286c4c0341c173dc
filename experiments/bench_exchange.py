"""Peak memory and time of exporting and importing safetensors: `python -m experiments.bench_exchange` (Linux).

Each command runs in a process of its own, on a checkpoint of params as a training run saves it; peaks are resident
memory over what the interpreter took after its imports.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jzero.checkpoint import Entry, Manifest, Rules, export_safetensors, import_params, malloc
from jzero.checkpoint.chunks import LARGEST, grid, halved
from jzero.checkpoint.names import folders
from jzero.checkpoint.store import Piece
from jzero.checkpoint.write import write

MAP = '[leaves]\n"w{n}" = { tensor = "w{n}", transpose = true }\n'

COMMANDS = ("export", "export, transposed, bf16", "import", "import, transposed")


def make(folder: Path, nbytes: int, leaves: int) -> None:
    """Writes a checkpoint of float32 params, a chunk at a time."""
    columns = 4096 if nbytes // leaves > 2**20 else 16
    shape = (max(1, nbytes // leaves // 4 // columns), columns)
    paths = [("params", f"w{number}") for number in range(leaves)]
    chunk = halved(shape, 4, LARGEST)
    names = zip(paths, folders(paths), strict=True)
    entries = [Entry(path, ".".join(name), shape, "float32", "float32", shape, chunk) for path, name in names]
    random = np.random.default_rng(0)

    def pieces() -> Iterator[Piece]:
        for entry in entries:
            for number, region in grid(shape, chunk):
                size = [end - begin for begin, end in region]
                yield Piece(entry, number, region, random.random(size, np.float32))

    write(folder, Manifest(tuple(entries)), pieces())


def measure(command: str, folder: Path, memory: int) -> dict[str, float]:
    """Runs one command in this process; returns `peak` bytes over those before, and `seconds`."""
    malloc.reuse()  # as the command line does
    (folder / "map.toml").write_text(MAP)
    rules = Rules.read(folder / "map.toml") if "transposed" in command else None
    dtype = "bfloat16" if "bf16" in command else None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began = _status("VmRSS"), time.perf_counter()
    if command.startswith("export"):
        export_safetensors(folder / "0", folder / command, map=rules, dtype=dtype, memory=memory)
    else:
        import_params(folder / "export", folder / command, map=rules, memory=memory)
    return {"peak": _status("VmHWM") - before, "seconds": time.perf_counter() - began}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; this benchmark needs Linux.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_exchange", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, metavar="X", help="size of the params (default: 4)")
    parser.add_argument("--leaves", type=int, nargs="+", default=[4, 3000], metavar="N", help="(default: 4 and 3000)")
    parser.add_argument("--max-memory", type=int, default=300, metavar="MB", help="what is allowed (default: 300)")
    parser.add_argument("--folder", metavar="DIR", help="on which disk (default: that of temporary files)")
    parser.add_argument("--only", choices=COMMANDS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.only:
        print(json.dumps(measure(options.only, Path(options.folder), options.max_memory * 10**6)))
        return 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("leaves", "", "peak MB", "s", "MB/s"):
        table.add_column(name, justify="right")
    nbytes = round(options.gigabytes * 1e9)
    for leaves in options.leaves:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            make(Path(folder, "0"), nbytes, leaves)
            for command in COMMANDS:
                arguments = ["--folder", folder, "--only", command, f"--max-memory={options.max_memory}"]
                line = [sys.executable, "-m", "experiments.bench_exchange", *arguments]
                found = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, env=os.environ).stdout)
                speed = f"{nbytes / 1e6 / found['seconds']:,.0f}"
                table.add_row(str(leaves), command, f"{found['peak'] / 1e6:,.0f}", f"{found['seconds']:.1f}", speed)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
