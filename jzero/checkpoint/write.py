"""A checkpoint onto the disk."""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from jzero.checkpoint import orbax_format, place, store
from jzero.checkpoint.entry import ARRAYS, Sum
from jzero.checkpoint.errors import BeingWritten, CorruptCheckpoint, InTheWay, SaveFailed
from jzero.checkpoint.manifest import FILE, Manifest
from jzero.checkpoint.processes import Processes
from jzero.checkpoint.store import Piece


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
        InTheWay: A `FileExistsError`: one is there.
        BeingWritten: Another job is at it.
        CorruptCheckpoint: What `pieces` reads is damaged, or what was written, as `check` says; it is removed.
        SaveFailed: It could not be written, by this process or another; what was written is removed.
    """
    processes = processes or Processes()
    place.check_new(folder, overwrite)
    tmp, first = place.tmp(folder), processes.index == 0
    with ExitStack() as stack:

        def begin():
            if first:
                stack.enter_context(place.locked(folder))
                place.begin(folder, overwrite)
                stack.callback(shutil.rmtree, tmp, ignore_errors=True)  # unless it has its name by then
                (tmp / ARRAYS).mkdir()
                store.create(tmp, manifest.leaves)

        def fill():
            files = store.write(tmp, pieces)
            place.sync_all(tmp / name for name in files)
            part = {name: [sum.size, sum.check] for name, sum in files.items()}
            place.write_text(tmp / f"part-{processes.index}", json.dumps(part))

        def commit():
            if first:
                _commit(tmp, folder, manifest, processes.count, check)

        for name, work in (("begin", begin), ("fill", fill), ("commit", commit)):
            failure = _failure(work)
            try:
                failed = processes.meet(f"{folder}/{name}", failure)
            except Exception as error:
                raise SaveFailed(f"{folder} was not written: the other processes did not come ({error}).") from error
            if isinstance(failure, BeingWritten | InTheWay | CorruptCheckpoint):
                raise failure
            if failed:
                of = {index: text for index, text in failed.items() if index != processes.index}
                why = f": {failure}" if failure else "".join(f" by process {n}: {text}" for n, text in of.items())
                raise SaveFailed(place.unwritten(folder, why, failure)) from failure


def _failure(work: Callable[[], None]) -> Exception | None:
    """What goes wrong in a part of the work."""
    try:
        work()
    except Exception as error:
        return error
    return None


def _commit(tmp: Path, folder: Path, manifest: Manifest, count: int, check) -> None:
    files: dict[str, Sum] = {}
    for index in range(count):
        part = tmp / f"part-{index}"
        files |= {name: Sum(*sum) for name, sum in json.loads(part.read_text()).items()}
        part.unlink()
    for name, text in orbax_format.files(manifest).items():
        place.write_text(tmp / name, text)
        files[name] = Sum.of(tmp / name)
    for leaf in manifest.leaves:
        if leaf.stored is not None:
            files[leaf.file()] = Sum.of(tmp / leaf.file())
    manifest = manifest.with_files(files)
    place.write_text(tmp / FILE, manifest.to_json())
    if check is not None:
        check(tmp, manifest)
    place.sync_all(tmp / leaf.file() for leaf in manifest.leaves if leaf.stored is not None)
    place.put(folder)
