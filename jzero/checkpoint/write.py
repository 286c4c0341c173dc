"""A checkpoint onto the disk: beside its place until it is whole, then there at once."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jzero.checkpoint import orbax_format, store
from jzero.checkpoint.errors import SaveFailed, disk_full
from jzero.checkpoint.manifest import ARRAYS, FILE, Manifest, Sum
from jzero.checkpoint.processes import Processes
from jzero.checkpoint.store import Piece

TMP = ".jzero-tmp"
"""Ends the name of a checkpoint that is being written."""

OLD = ".jzero-old"
"""Ends the name of one that is being removed or replaced."""

SYNCS = 32
"""How many files are forced to the disk at once."""

_writes = itertools.count()  # names barriers; all processes write in the same order


def write(
    folder: Path,
    manifest: Manifest,
    pieces: Iterable[Piece],
    *,
    processes: Processes | None = None,
    overwrite: bool = False,
    check: Callable[[Path, Manifest], None] | None = None,
) -> None:
    """Writes a checkpoint. Until all of it is on the disk it has another name, so that none is ever half there.

    In a run of several processes all call this, with the same manifest and each with the chunks that it writes; the
    folder must be one that all see.

    Args:
        folder: Where it will be.
        manifest: What it holds, without `files`.
        pieces: Each chunk of each leaf; of several processes, this one's. Chunks of one leaf follow each other.
        processes: This process among all; None: it is the only one.
        overwrite: Whether a checkpoint that is there is replaced, in the end.
        check: Looks at all of it before it gets its name, in the folder where it is until then; what it raises undoes
            the write. The first process calls it.

    Raises:
        FileExistsError: One is there.
        SaveFailed: It could not be written, by this process or another; what was written is removed.
    """
    processes = processes or Processes()
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} is there already. Choose another place, or pass overwrite=True.")
    tmp, number = folder.with_name(folder.name + TMP), next(_writes)
    first = processes.index == 0

    def begin():
        if first:
            remove(tmp)
            tmp.mkdir(parents=True)
            (tmp / ARRAYS).mkdir()
            store.create(tmp, manifest.leaves)

    def fill():
        files = store.write(tmp, pieces)
        _sync_all(tmp / name for name in files)
        part = {name: [sum.size, sum.check] for name, sum in files.items()}
        _write_text(tmp / f"part-{processes.index}", json.dumps(part))

    def commit():
        if first:
            _commit(tmp, folder, manifest, processes.count, check)

    failure: Exception | None = None
    notes: list[str] = []
    for name, work in (("begin", begin), ("fill", fill), ("commit", commit)):
        failure = _attempt(work, tmp / f"failed-{name}-{processes.index}")
        _meet(processes, f"{number}/{name}/{folder}", folder)
        # Another process may have gone on and failed at the next part already; all must see the same here.
        notes = [note.name.rpartition("-")[2] for note in tmp.glob(f"failed-{name}-*")]
        if failure or notes:
            break
    else:
        return
    _meet(processes, f"{number}/failed/{folder}", folder)
    if first:
        shutil.rmtree(tmp, ignore_errors=True)
    who = f" by process {', '.join(sorted(notes))}" if failure is None else f": {failure}"
    way_out = " Free some space." if disk_full(failure) else ""
    raise SaveFailed(
        f"{folder} was not written{who}.{way_out} What was there before is as it was, and nothing of this is left."
    ) from failure


def _meet(processes: Processes, name: str, folder: Path) -> None:
    try:
        processes.barrier(name)
    except Exception as error:
        raise SaveFailed(f"{folder} was not written: the other processes did not come ({error}).") from error


def _attempt(work: Callable[[], None], note: Path) -> Exception | None:
    """Runs a part of the work; what goes wrong is returned, and noted where the other processes see it."""
    try:
        work()
    except Exception as error:
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
        except OSError:
            pass  # the others find no part of this process, and then wait for it until their time is over
        return error
    return None


def _commit(tmp: Path, folder: Path, manifest: Manifest, count: int, check) -> None:
    files: dict[str, Sum] = {}
    for index in range(count):
        part = tmp / f"part-{index}"
        files |= {name: Sum(*sum) for name, sum in json.loads(part.read_text()).items()}
        part.unlink()
    for name, text in orbax_format.files(manifest).items():
        _write_text(tmp / name, text)
        files[name] = Sum.of(tmp / name)
    for leaf in manifest.leaves:
        if leaf.stored is not None:
            files[leaf.file()] = Sum.of(tmp / leaf.file())
    manifest = manifest.with_files(files)
    _write_text(tmp / FILE, manifest.to_json())
    if check is not None:
        check(tmp, manifest)
    _sync_all(tmp / leaf.file() for leaf in manifest.leaves if leaf.stored is not None)
    _sync_all(Path(folder) for folder, _, _ in os.walk(tmp))
    if folder.exists():
        old = folder.with_name(folder.name + OLD)
        remove(old)
        folder.rename(old)
        try:
            tmp.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        sync(folder.parent)
        remove(old)
    else:
        tmp.rename(folder)
        sync(folder.parent)


def stale(directory: Path) -> list[Path]:
    """What saves and removals that did not come to an end have left in a directory."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name.endswith((TMP, OLD)))


def standing(folder: Path) -> Path:
    """Where a checkpoint is: under its name; or, where its replacement was stopped between two names, beside it."""
    if folder.exists():
        return folder
    old = folder.with_name(folder.name + OLD)
    return old if (old / FILE).is_file() else folder


def clean(directory: Path) -> None:
    """Removes what `stale` finds. One that was to be replaced, and whose successor is not there, gets its name back."""
    for path in stale(directory):
        if path.name.endswith(OLD):
            take_back(path.with_name(path.name.removesuffix(OLD)))
        else:
            remove(path)


def take_back(folder: Path) -> None:
    """Ends a replacement or a removal that was stopped: what `standing` finds gets its name back, other remains go."""
    old = folder.with_name(folder.name + OLD)
    if standing(folder) == old:
        old.rename(folder)
    else:
        remove(old)


def remove(folder: Path) -> None:
    """Removes a checkpoint, under another name, so that none is ever half gone."""
    if not folder.exists():
        return
    if folder.name.endswith((TMP, OLD)):
        (folder / FILE).unlink(missing_ok=True)  # first, so that one that is half gone is never taken back
        shutil.rmtree(folder)
        return
    old = folder.with_name(folder.name + OLD)
    remove(old)
    folder.rename(old)
    remove(old)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_all(paths: Iterable[Path]) -> None:
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
