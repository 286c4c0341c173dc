"""A folder that is there as a whole or not at all, and that one process writes at a time.

What is written has another name until it is whole, and what it replaces has another one until it is replaced. Three
names beside that of a folder say so, wherever a process was stopped:

| name | what it is |
|---|---|
| `NAME.jzero-tmp` | half of something: it is being written or removed, or that was stopped |
| `NAME.jzero-old` | what was to be replaced: whole, if nothing has the name itself; it gets it back then |
| `NAME.jzero-lock` | held by the process that writes, and free as soon as that has ended, whatever its end |
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jzero.checkpoint.errors import BeingWritten, InTheWay, SaveFailed, disk_full

TMP = ".jzero-tmp"
"""Ends the name of what is being written or removed."""

OLD = ".jzero-old"
"""Ends the name of what is being replaced."""

LOCK = ".jzero-lock"
"""Ends the name of the file that the process that writes holds."""

SYNCS = 32
"""How many files are forced to the disk at once."""


TRIES = 1000
"""How often a lock is taken again that others have just removed."""


def tmp(folder: Path) -> Path:
    """Where a folder is until it is whole."""
    return folder.with_name(folder.name + TMP)


def old(folder: Path) -> Path:
    """Where what a folder replaces is until it is replaced."""
    return folder.with_name(folder.name + OLD)


def standing(folder: Path) -> Path:
    """Where a folder is: under its name; or, where its replacement was stopped between two names, beside it."""
    return folder if folder.exists() or not old(folder).exists() else old(folder)


def stale(directory: Path) -> list[Path]:
    """What writes and removals that go on, or were stopped, have in a directory."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name.endswith((TMP, OLD, LOCK)))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """This process alone writes a folder, with its temporary names. The folder above it is made if need be.

    Raises:
        BeingWritten: Another one does.

    Warns:
        UserWarning: The file system has no locks.
    """
    lock = folder.with_name(folder.name + LOCK)
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = _hold(lock, folder)
    try:
        with contextlib.suppress(OSError):  # on a full disk: it is for messages only
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # children of this process may have the file open as well
        os.close(handle)


def _hold(lock: Path, folder: Path) -> int:
    for _ in range(TRIES):
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        except BlockingIOError:
            who = os.read(handle, 300).decode(errors="replace")
            os.close(handle)
            raise BeingWritten(folder, who) from None
        except FileNotFoundError:
            pass  # the one that held it has just removed it
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
                os.close(handle)
                raise
            warnings.warn(
                f"{folder.parent} is on a file system without locks ({error}): see to it yourself that one job at a "
                f"time writes there.",
                stacklevel=4,
            )
            return handle
        os.close(handle)
    raise BeingWritten(folder, "")


def recover(folder: Path) -> None:
    """Ends what was stopped: what was to be replaced gets its name back, other remains go.

    Raises:
        BeingWritten: It was not stopped; another process is at it.
    """
    if tmp(folder).exists() or old(folder).exists():
        with locked(folder):
            tidy(folder)


def tidy(folder: Path) -> None:
    """`recover` by the process that has the lock."""
    if standing(folder) == old(folder):
        old(folder).rename(folder)
    _discard(tmp(folder))
    if old(folder).exists():
        old(folder).rename(tmp(folder))  # from here on it is half of something
        _discard(tmp(folder))


def check_new(folder: Path, overwrite: bool) -> None:
    """Raises if something is there, and may not be replaced.

    Raises:
        InTheWay: It is.
    """
    if folder.exists() and not overwrite:
        raise InTheWay(folder)


def begin(folder: Path, overwrite: bool) -> None:
    """An empty folder to write into, by the process that has the lock; what was stopped there is ended before.

    Raises:
        InTheWay: Something is there, perhaps only since this process has looked before, and may not be replaced.
    """
    tidy(folder)
    check_new(folder, overwrite)
    tmp(folder).mkdir()


def clean(directory: Path) -> None:
    """Recovers all that was stopped in a directory. What other processes are at is left."""
    names = {path.name.removesuffix(end) for path in stale(directory) for end in (TMP, OLD, LOCK)}
    for name in sorted(name for name in names if name and not name.endswith((TMP, OLD, LOCK))):
        with contextlib.suppress(BeingWritten), locked(directory / name):
            tidy(directory / name)


def remove(folder: Path) -> None:
    """Removes a folder, under another name, so that none is ever half gone.

    Raises:
        BeingWritten: Another process is at it.
    """
    with locked(folder):
        tidy(folder)
        if folder.exists():
            folder.rename(tmp(folder))
            _discard(tmp(folder))


@contextmanager
def whole(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which takes its place when all is written, and goes if not.

    Args:
        folder: Its place.
        overwrite: Whether one that is there is replaced.

    Raises:
        BeingWritten: Another process is at it.
        InTheWay: Something is there, and may not be replaced.
        SaveFailed: The system refused something.
    """
    try:
        with locked(folder):
            begin(folder, overwrite)
            try:
                yield tmp(folder)
                put(folder)
            except BaseException:
                shutil.rmtree(tmp(folder), ignore_errors=True)
                raise
    except InTheWay:
        raise
    except OSError as error:
        raise SaveFailed(unwritten(folder, f": {error}", error)) from error


def unwritten(folder: Path, why: str, error: BaseException | None) -> str:
    """Says that a folder was not written."""
    way_out = " Free some space." if disk_full(error) else ""
    return f"{folder} was not written{why}.{way_out} What was there before is as it was, and nothing of this is left."


def put(folder: Path) -> None:
    """What was written gets its name; what has that name goes. Of what was written all files are on the disk."""
    sync_all(Path(one) for one, _, _ in os.walk(tmp(folder)))
    if folder.exists():
        folder.rename(old(folder))
        try:
            tmp(folder).rename(folder)
        except BaseException:
            old(folder).rename(folder)
            raise
    else:
        tmp(folder).rename(folder)
    sync(folder.parent)
    with contextlib.suppress(OSError):  # it is there; what is left of the old one goes with the next write
        tidy(folder)


def _discard(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def write_text(path: Path, text: str) -> None:
    """A file onto the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_all(paths: Iterable[Path]) -> None:
    """Files, or the names in folders, onto the disk; many at a time, for each waits for the disk."""
    with ThreadPoolExecutor(SYNCS) as pool:
        for _ in pool.map(sync, paths):
            pass


def sync(path: Path) -> None:
    """A file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
