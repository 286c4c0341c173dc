"""Every file of a checkpoint against its checksum."""

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from jzero.checkpoint import store
from jzero.checkpoint.blocks import BASE, COPIES, Progress
from jzero.checkpoint.chunks import grid
from jzero.checkpoint.errors import CorruptCheckpoint, LimitExceeded
from jzero.checkpoint.manifest import FILE, Manifest
from jzero.checkpoint.origin import Origin, find
from jzero.wording import size


@dataclass(frozen=True)
class Verified:
    """What `verify` found.

    Attributes:
        folder: The checkpoint.
        problems: Every file that is missing or damaged; empty if all is well.
        files: How many files were checked.
        bytes: How many bytes of arrays were read.
        unknown: Files that are not of it, relative to it; they do no harm.
        has_checksums: Whether it has checksums; if not, only what cannot be read at all is noticed.
    """

    folder: Path
    problems: tuple[CorruptCheckpoint, ...]
    files: int
    bytes: int
    unknown: tuple[str, ...]
    has_checksums: bool


def verify(
    folder: str | PathLike[str],
    *,
    memory: int,
    progress: Progress = lambda task, done, total: None,
) -> Verified:
    """Reads all of a checkpoint and checks all that can be checked.

    Args:
        folder: The checkpoint, or a folder of them, of which the latest is taken.
        memory: Bytes of memory that may be taken.
        progress: Is told how many bytes were read.

    Raises:
        FileNotFoundError: There is no checkpoint.
        LimitExceeded: The memory is too little for the largest chunk.
    """
    folder = find(Path(folder))
    problems: list[CorruptCheckpoint] = []
    try:
        if (folder / FILE).is_file():
            origin = Origin(folder, Manifest.read(folder))
        else:
            origin = Origin.open(folder)
    except CorruptCheckpoint as error:
        return Verified(folder, (error,), 1, 0, (), (folder / FILE).is_file())
    leaves = [leaf for leaf in origin.leaves if leaf.stored is not None]
    largest = max((leaf.chunk_nbytes for leaf in leaves), default=0)
    needed = BASE + COPIES * largest
    if needed > memory:
        raise LimitExceeded(
            f"verify {folder}: needs --max-memory {-(-needed // 10**6)}MB, for a chunk of {size(largest)}; "
            f"{memory // 10**6}MB are allowed.",
            needed,
            memory,
        )
    files = 1
    if origin.has_checksums:
        files += _small(origin, problems)
    total, done = sum(leaf.nbytes for leaf in leaves), 0

    def taken(nbytes):
        nonlocal done
        done += nbytes
        progress("verifying", done, total)

    def jobs():
        nonlocal files
        for leaf in leaves:
            files += 1
            try:
                array = origin.array(leaf)
            except CorruptCheckpoint as error:
                problems.append(error)
                # Its chunks are checked all the same, as the manifest describes them.
                array = store.open_array(folder, leaf) if origin.has_checksums else None
            if array is not None:
                for number, region in grid(leaf.stored_shape, leaf.chunk):
                    files += 1
                    try:
                        yield _safe(origin.job(leaf, array, number, region, lambda _, x: taken(x.nbytes)), problems)
                    except CorruptCheckpoint as error:
                        problems.append(error)

    store.windowed(jobs(), max(largest, min(store.IN_FLIGHT, (memory - BASE) // COPIES)))
    unknown = _unknown(origin) if origin.has_checksums else ()
    return Verified(folder, tuple(problems), files, done, unknown, origin.has_checksums)


def _safe(job, problems: list[CorruptCheckpoint]):
    """A job that notes damage and goes on."""
    nbytes, start, done = job

    def noted(future):
        try:
            done(future)
        except CorruptCheckpoint as error:
            problems.append(error)

    return nbytes, start, noted


def _small(origin: Origin, problems: list[CorruptCheckpoint]) -> int:
    """Checks the files that belong to no array; returns how many there are."""
    for name in origin.manifest.small:
        try:
            origin.manifest.check_file(origin.folder, name)
        except CorruptCheckpoint as error:
            problems.append(error)
    return len(origin.manifest.small)


def _unknown(origin: Origin) -> tuple[str, ...]:
    found = []
    for top, _, names in os.walk(origin.folder):
        inside = Path(top).relative_to(origin.folder)
        found += [(inside / name).as_posix() for name in names]
    return tuple(sorted(name for name in found if name not in origin.manifest.files and name != FILE))
