"""Leaves in blocks: what is read of the source at once, so that memory is bounded and little is read twice."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jzero.checkpoint import encoding, store
from jzero.checkpoint.chunks import Region, grid, inside, overlap
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import LimitExceeded
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.recipe import Made
from jzero.wording import size

MEMORY = 300 * 10**6
"""Bytes of memory that a command takes at most by default, over those of the process before."""

Progress = Callable[[str, int, int], None]
"""Is told what is going on, how many bytes of it are done, and how many there are."""

BASE = 40 * 2**20
"""Bytes that tensorstore's threads and their memory take, whatever is read."""

ENOUGH = 32 * 2**20
"""Bytes of a block beyond which it grows only to cut fewer chunks."""

COPIES = 3
"""How many times the bytes of a chunk that is on its way take, from file to decoded or back."""


@dataclass(frozen=True)
class Budget:
    """Bytes of memory, and what they are for.

    Attributes:
        block: A block, of which there may be two at a time: one that is read while what was made of the one before is
            on its way.
        reading: Chunks of the source that are on their way.
        ahead: Whether there may be a third one: the next is then read while one is used.
    """

    block: int
    reading: int
    ahead: bool


def budget(what: str, memory: int, source: int, chunk: int) -> Budget:
    """Shares memory out.

    Args:
        what: What it is for, in messages.
        memory: Bytes that may be taken.
        source: Bytes of the largest chunk that is read, decoded.
        chunk: Bytes of the largest chunk that is written, or compared with.

    Raises:
        LimitExceeded: It is too little.
    """
    writing = max(chunk, store.IN_FLIGHT)
    # Orbax makes chunks of any size. A large one is a block; it may be compressed, and it is compared with a copy.
    large = source > ENOUGH
    least = max(chunk, source) if large else chunk
    needed = BASE + COPIES * (source + writing) + (source if large else 2 * chunk)
    if needed > memory:
        raise LimitExceeded(
            f"{what}: needs --max-memory {-(-needed // 10**6)}MB; {memory // 10**6}MB are allowed. The largest chunk "
            f"to read is {size(source)}, the largest to write {size(chunk)}.",
            needed,
            memory,
        )
    spare = memory - needed
    more = min(spare // 3 // COPIES, max(0, store.IN_FLIGHT - source))
    rest = spare - COPIES * more
    ahead = not large and rest >= least
    return Budget(least + ((rest - least) // 3 if ahead else rest // 2), source + more, ahead)


def shape_of_blocks(leaf: Made, chunk: Sequence[int], largest: int) -> tuple[int, ...]:
    """The shape of blocks of whole chunks, at most `largest` bytes, that cut few chunks of the source.

    Args:
        leaf: The leaf.
        chunk: Shape of the chunks that are written.
        largest: Most bytes of a block; one chunk at least.
    """
    shape, itemsize = leaf.stored_shape, encoding.dtype_of(encoding.stored_dtype(leaf.read)).itemsize
    steps = [1] * len(shape)
    for part in leaf.parts[:1]:
        for dim, step in zip(part.dims, part.source.chunk, strict=True):
            if dim is not None:
                steps[dim] = step
    block = [min(step, size) for step, size in zip(chunk, shape, strict=True)]

    def cost(dim: int, length: int) -> float:
        """How many times elements are read, along one dim."""
        if length >= shape[dim] or length % steps[dim] == 0:
            return 1.0
        return steps[dim] / length if steps[dim] % length == 0 else 1 + steps[dim] / length

    for dim in sorted(range(len(shape)), key=lambda dim: -cost(dim, block[dim])):
        rest = math.prod(block) // block[dim] * itemsize
        wanted = min(shape[dim], math.lcm(chunk[dim], steps[dim]))
        if rest * wanted > largest:
            wanted = max(block[dim], min(wanted, largest // rest // chunk[dim] * chunk[dim]))
        if cost(dim, wanted) < cost(dim, block[dim]):
            block[dim] = wanted
    for dim in reversed(range(len(shape))):  # small leaves are read whole
        rest = math.prod(block) // block[dim] * itemsize
        block[dim] = min(shape[dim], max(1, min(largest, ENOUGH) // rest // block[dim]) * block[dim])
    return tuple(block)


def regions(leaf: Made, block: Sequence[int]) -> Iterator[Region]:
    """The blocks of a leaf, in order."""
    return (region for _, region in grid(leaf.stored_shape, block))


class Reader:
    """Reads blocks of leaves that are made of those of a checkpoint.

    Args:
        origin: The checkpoint.
        limit: Bytes of chunks that are on their way at once.
        progress: Is told how many bytes were read, as they are.
    """

    def __init__(self, origin: Origin, limit: int, progress: Callable[[int], None] = lambda nbytes: None):
        self.origin, self.limit, self.progress = origin, limit, progress
        self._open: tuple[Entry, Any] | None = None

    def _array(self, leaf: Entry):
        if self._open is None or self._open[0] is not leaf:
            self._open = leaf, self.origin.array(leaf)
        return self._open[1]

    def block(self, leaf: Made, region: Region) -> np.ndarray:
        """One block, in the dtype that the leaf is stored in.

        Raises:
            CorruptCheckpoint: A file of the source is missing or damaged.
        """
        found: list[np.ndarray] = []

        def job(part, both):
            def take(where: Region, values: np.ndarray) -> None:
                image = part.image(where)
                values = values.reshape([end - begin for begin, end in image])
                if image == region:
                    found.append(values)  # one chunk has all of it: no copy
                    return
                if not found:
                    found.append(np.empty([end - begin for begin, end in region], values.dtype))
                found[0][inside(image, region)] = values

            return self.origin.jobs(part.source, self._array(part.source), part.origin(both), take)

        parts = [(part, both) for part in leaf.parts if (both := overlap(part.region, region)) is not None]
        store.windowed(itertools.chain.from_iterable(job(part, both) for part, both in parts), self.limit)
        self.progress(found[0].nbytes)
        return cast(found[0], leaf)

    def blocks(self, wanted: Iterable[tuple[Made, Region]], ahead: bool) -> Iterator[np.ndarray]:
        """Blocks in order; with `ahead` a thread reads the next one while one is used."""
        if not ahead:
            yield from (self.block(leaf, region) for leaf, region in wanted)
            return
        with ThreadPoolExecutor(1) as beside:
            coming = None
            for leaf, region in wanted:
                following = beside.submit(self.block, leaf, region)
                if coming is not None:
                    yield coming.result()
                coming = following
            if coming is not None:
                yield coming.result()


@contextmanager
def side_by_side(one: Reader, other: Reader) -> Iterator[Callable[[Made, Made, Region], tuple[np.ndarray, np.ndarray]]]:
    """Reads the same block of two checkpoints at once."""
    with ThreadPoolExecutor(1) as beside:

        def both(mine: Made, theirs: Made, region: Region) -> tuple[np.ndarray, np.ndarray]:
            coming = beside.submit(one.block, mine, region)
            found = other.block(theirs, region)
            return coming.result(), found

        yield both


def cast(array: np.ndarray, leaf: Made) -> np.ndarray:
    """An array as the parts of a leaf have it, in the dtype that the leaf is stored in."""
    if leaf.read == leaf.dtype:
        return array
    with np.errstate(over="ignore"):  # what is too large becomes infinite or NaN, as in any such cast
        values = encoding.cast(encoding.values(array, leaf.read), leaf.dtype)
    return encoding.bits(values, encoding.stored_dtype(leaf.dtype))
