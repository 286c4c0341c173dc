"""Whether something may be written at a place, and whether there is room for it; asked before anything is written."""

import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from jzero.checkpoint import place
from jzero.checkpoint.entry import ARRAYS
from jzero.checkpoint.errors import LimitExceeded
from jzero.checkpoint.manifest import FILE
from jzero.checkpoint.orbax_format import CHECKPOINT
from jzero.wording import few, size

SLACK = 2**20
"""Bytes that names, headers and descriptions take, about, and as many again for each 256 files."""


def target(folder: str | PathLike[str]) -> Path:
    """Where something is to be written, after what a write that was stopped has left there is gone.

    Raises:
        BeingWritten: Another process is writing there.
        ValueError: Its name is one that things have only until they are whole.
    """
    found = Path(folder).resolve()  # "." has no name; and what a link leads to is replaced, not the link
    if not found.name or found.name.endswith((place.TMP, place.OLD, place.LOCK)):
        raise ValueError(f"{folder} cannot be the name of something that is whole. Choose another place.")
    place.recover(found)
    return found


def check_apart(source: Path, folder: Path) -> None:
    """Raises if what is read and what is to be written lie in each other.

    Raises:
        ValueError: They do.
    """
    source, where = source.resolve(), folder.resolve()
    if where == source or where in source.parents or source in where.parents:
        raise ValueError(f"{folder} is what is read, or inside of it, or holds it. Choose another place.")


def check_free(folder: Path, overwrite: bool, ours: Callable[[Path], bool], what: str) -> None:
    """Raises if a folder may not be made here.

    Args:
        folder: Where it will be.
        overwrite: Whether one that is there may be replaced.
        ours: Whether something in it is what would be written here, and so may go.
        what: What that is, for messages.

    Raises:
        FileExistsError: Something is there, and may not be replaced.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file. Choose another place.")
    place.check_new(folder, overwrite)
    others = sorted(path.name for path in folder.iterdir() if not ours(path))
    if others:
        raise FileExistsError(
            f"{folder} holds {few(others)}, which is not of {what}, and would be lost. Choose another place."
        )


def is_of_checkpoint(path: Path) -> bool:
    """Whether something is a part of a checkpoint of jzero."""
    return (path.parent / FILE).is_file() and path.name in (FILE, ARRAYS, CHECKPOINT)


def on_disk(nbytes: int, files: int) -> int:
    """Bytes of the disk that so many in so many files take, at most."""
    return nbytes + SLACK * (1 + files // 256)


def check_disk(folder: Path, needed: int, more: str = "") -> None:
    """Raises unless there is room where a folder will be.

    Args:
        folder: Where it will be.
        needed: Bytes of the disk that it takes.
        more: What else can be done about it, for the message.

    Raises:
        LimitExceeded: There is not.
    """
    there = next(above for above in folder.absolute().parents if above.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise LimitExceeded(
            f"{folder}: takes {size(needed)}; {size(free)} are free there. Free some space, or choose "
            f"another disk{more}.",
            needed,
            free,
        )
