"""Chunks to and from the disk, through tensorstore, a bounded number of bytes at a time."""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jzero.checkpoint import orbax_format
from jzero.checkpoint.chunks import Region
from jzero.checkpoint.entry import ARRAYS, Entry, Sum

IN_FLIGHT = 16 * 2**20
"""Bytes of chunks that are being read or written at once. Tensorstore holds two or three times as much."""

AT_ONCE = 64
"""Most chunks, and most descriptions of arrays, at once."""


@dataclass(frozen=True)
class Piece:
    """What one chunk holds.

    Attributes:
        leaf: The leaf.
        chunk: Its number in each dim.
        region: What it covers of the array.
        array: That, in the dtype that is stored.
    """

    leaf: Entry
    chunk: tuple[int, ...]
    region: Region
    array: np.ndarray


Job = tuple[int, Callable[[], Any], Callable[[Any], Any]]
"""Its bytes, what starts it and returns a future, and what takes the result."""


def results(jobs: Iterable[Job], limit: int = IN_FLIGHT) -> Iterator[Any]:
    """Runs jobs that overlap, and yields in their order what becomes of each.

    When one fails, those that run come to their end before its error is raised, so that nothing is written behind it.
    """
    running: deque[tuple[int, Any, Callable[[Any], Any]]] = deque()
    held = 0

    def finish():
        nonlocal held
        nbytes, future, done = running.popleft()
        held -= nbytes
        return done(future)

    try:
        for nbytes, start, done in jobs:
            while running and (held + nbytes > limit or len(running) >= AT_ONCE):
                yield finish()
            held += nbytes
            running.append((nbytes, start(), done))
        while running:
            yield finish()
    finally:
        for _, future, _ in running:  # after an error: what is removed next must not be written to any more
            with contextlib.suppress(Exception):
                future.result()


def windowed(jobs: Iterable[Job], limit: int = IN_FLIGHT) -> None:
    """Runs jobs as `results` does, for what they do."""
    for _ in results(jobs, limit):
        pass


def create(folder: Path, leaves: Sequence[Entry]) -> None:
    """Makes the folders of leaves, and zarr's descriptions in them."""
    context = _context()

    def job(leaf):
        spec = _spec(folder, leaf) | {"metadata": orbax_format.zarr(leaf)}
        return 0, lambda: ts.open(spec, create=True, context=context), lambda future: future.result()

    windowed(job(leaf) for leaf in leaves if leaf.stored is not None)


def write(folder: Path, pieces: Iterable[Piece]) -> dict[str, Sum]:
    """Writes chunks into arrays that were created; returns the sum of each file."""
    files = {}

    def job(array, piece):
        where = array[tuple(slice(begin, end) for begin, end in piece.region)]

        def done(future):
            future.result()
            name = piece.leaf.file(piece.chunk)
            files[name] = Sum.of_chunk(folder / name)

        return piece.array.nbytes, lambda: where.write(piece.array, can_reference_source_data_indefinitely=True), done

    def jobs():
        leaf = array = None
        for piece in pieces:
            if piece.leaf is not leaf:
                leaf, array = piece.leaf, open_array(folder, piece.leaf, write=True)
            yield job(array, piece)

    windowed(jobs())
    return files


def open_array(folder: Path, leaf: Entry, *, write: bool = False) -> Any:
    """The array of a leaf, as tensorstore opens it. Its description must be checked before, if it is to be read."""
    # The description is known, so that nothing is read here.
    spec = _spec(folder, leaf) | {"metadata": orbax_format.zarr(leaf)}
    return ts.open(spec, open=True, assume_metadata=True, read=True, write=write, context=_context()).result()


def _spec(folder: Path, leaf: Entry) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": orbax_format.store(folder, f"{ARRAYS}/{leaf.folder}/"),
        # A chunk of zeros is a file as any other, so that one that is missing is never taken for zeros.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


@functools.cache
def _context() -> Any:
    # One for the process, which is never given up: threads that it has may still be at their last task when a call
    # returns, and tensorstore 0.1.86 crashes if it goes then.
    # Files are forced to the disk by `write`, all together, which is several times as fast as one by one.
    return ts.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 2}, "file_io_sync": False}
    )
