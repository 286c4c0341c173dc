"""What the commands about checkpoints share: exit codes, sizes, a mesh with its stage, progress, text."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jzero.checkpoint import malloc
from jzero.checkpoint.blocks import MEMORY
from jzero.checkpoint.errors import CorruptCheckpoint, LimitExceeded, SaveFailed
from jzero.checkpoint.origin import Origin
from jzero.cli.help import Help
from jzero.cli.options import mesh_axes, nbytes, parsed
from jzero.wording import size

CODES = """\
exit codes: 0 done; 1 damaged or different; 2 a wrong command line, no checkpoint there, one that does not fit, or a
folder that cannot be read or written; 3 memory or disk are too small, told before anything is written unless others
fill the disk meanwhile."""


def command(subparsers: Any, name: str, text: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Adds a subcommand with examples, and `--json`."""
    parser = subparsers.add_parser(
        name,
        help=text,
        description=description,
        epilog=f"{examples}\n\n{CODES}",
        formatter_class=Help,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text; sizes in bytes, null for NaN")
    return parser


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Adds `--max-memory`."""
    text = f"memory to take over that of the interpreter (default: {MEMORY // 10**6}MB)"
    parser.add_argument("--max-memory", type=parsed(nbytes), default=MEMORY, metavar="SIZE", help=text)


def exits(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The same command, with messages and exit codes for what can go wrong with checkpoints, and little memory."""

    def checked(options: argparse.Namespace) -> int:
        malloc.reuse()
        try:
            return run(options)
        except LimitExceeded as error:
            return _failed(error, 3)
        except SaveFailed as error:
            return _failed(error, 3 if error.full else 2)
        except CorruptCheckpoint as error:
            return _failed(error, 1)
        except BrokenPipeError:
            raise
        except (ValueError, TypeError, OSError) as error:
            return _failed(error, 2)

    return checked


def _failed(error: Exception, code: int) -> int:
    lines = str(error).splitlines()  # a message may have names of a checkpoint that comes from anywhere
    print("\n".join(safe(line) for line in ("jzero: error: " + lines[0], *lines[1:])), file=sys.stderr)
    return code


def mesh_and_stage(text: str) -> tuple[dict[str, int], int | None]:
    """Reads "data=4,model=2,stage=3"; without a stage that is None.

    Raises:
        ValueError: Another form.

    Example:
        >>> mesh_and_stage("data=4,model=2,stage=3"), mesh_and_stage("data=8")
        (({'data': 4, 'model': 2}, 3), ({'data': 8}, None))
    """
    parts = [part.strip() for part in text.split(",")]
    stages = [part for part in parts if re.fullmatch(r"stage\s*=.*", part)]
    axes = [part for part in parts if part not in stages]
    if len(stages) > 1 or not axes or (stages and not re.fullmatch(r"stage\s*=\s*[0-3]", stages[0])):
        raise ValueError(f"{text!r}; wanted axes and perhaps a stage of 0 to 3, such as data=4,model=2,stage=3")
    mesh = mesh_axes(",".join(axes))
    if -1 in mesh.values():
        raise ValueError(f"{text!r}; wanted the size of each axis, for there are no devices to count")
    return mesh, int(stages[0][-1]) if stages else None


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on stderr, one for each task, if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def progress(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done)

        yield progress


def pace(nbytes: int, seconds: float) -> str:
    """How much was done, how long it took, and how fast that is.

    Example:
        >>> pace(3_000_000_000, 12.0)
        '3.00 GB in 12.0 s, 250 MB/s'
    """
    return f"{size(nbytes)} in {seconds:.1f} s, {size(nbytes / seconds)}/s"


def safe(text: str) -> str:
    """A name as a terminal may have it: what does not print is escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def title(origin: Origin) -> str:
    """One line about a checkpoint."""
    manifest = origin.manifest
    who = "jzero" if origin.has_checksums else "orbax (no checksums of its own)"
    step = "" if manifest.step is None else f", step {manifest.step}"
    total = sum(leaf.nbytes for leaf in manifest.leaves)
    return f"{safe(str(origin.folder))}: written by {who}{step}, {len(manifest.leaves)} leaves, {size(total)}"


def aligned(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines of columns; those of `right` are aligned on the right. A table of rich takes seconds for 3000 of them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
