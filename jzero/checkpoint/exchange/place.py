"""A folder that is there as a whole or not at all."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jzero.checkpoint import write
from jzero.checkpoint.errors import LimitExceeded, SaveFailed, disk_full

SLACK = 2**20
"""Bytes that names, headers and descriptions take, about, and as many again for each 256 files."""


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
    if not overwrite:
        raise FileExistsError(f"{folder} is there already. Choose another place, or pass overwrite=True (--overwrite).")
    others = sorted(path.name for path in folder.iterdir() if not ours(path))
    if others:
        raise FileExistsError(
            f"{folder} holds {', '.join(others[:5])}{' and more' if len(others) > 5 else ''}, which is not of {what}, "
            f"and would be lost. Choose another place."
        )


def check_disk(folder: Path, nbytes: int, files: int) -> None:
    """Raises unless there is room for so many bytes in so many files where a folder will be.

    Raises:
        LimitExceeded: There is not.
    """
    needed = nbytes + SLACK * (1 + files // 256)
    there = next(place for place in folder.absolute().parents if place.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise LimitExceeded(
            f"{folder}: takes {needed / 1e6:,.0f} MB; {free / 1e6:,.0f} MB are free there. Free some space, or choose "
            f"another disk.",
            needed,
            free,
        )


def recover(folder: Path) -> None:
    """Removes what a run that was killed has left beside a folder; what it was about to replace gets its name back."""
    tmp, old = _beside(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    for path in (tmp, old):
        if path.exists():
            shutil.rmtree(path)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes its place when all is written, and goes if not.

    Raises:
        SaveFailed: The system refused something.
    """
    tmp, old = _beside(folder)
    tmp.mkdir(parents=True)
    try:
        yield tmp
        write.sync(tmp)
        if folder.exists():
            folder.rename(old)
        tmp.rename(folder)
        write.sync(folder.parent)
    except BaseException as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(error, OSError):
            way_out = " Free some space." if disk_full(error) else ""
            raise SaveFailed(
                f"{folder} was not written: {error}.{way_out} What was there before is as it was, and nothing of this "
                f"is left."
            ) from error
        raise
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(folder.name + write.TMP), folder.with_name(folder.name + write.OLD)
