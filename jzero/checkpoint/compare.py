"""Two checkpoints, leaf by leaf and bit by bit, whatever their chunks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jzero.checkpoint import encoding
from jzero.checkpoint.blocks import Progress, Reader, budget, regions, shape_of_blocks, side_by_side
from jzero.checkpoint.chunks import Region
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CorruptCheckpoint
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.recipe import Made, same


@dataclass(frozen=True)
class Difference:
    """A leaf that two checkpoints do not have alike.

    Attributes:
        leaf: Its path, such as "params/w".
        reason: How they differ.
    """

    leaf: str
    reason: str


def different(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape and dtype differ in a bit: NaNs of one payload are the same, 0 and -0 are not."""
    return _bits(a) != _bits(b)


def _bits(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.complex128:
        return np.ascontiguousarray(array).view("V16")  # compares bytes
    return array.view(f"u{array.dtype.itemsize}")


def compare(
    one: Origin, other: Origin, memory: int, progress: Progress = lambda task, done, total: None
) -> Iterator[Difference]:
    """Every leaf that differs: it is in one only, has another shape or dtype, other bits, or cannot be read.

    Args:
        one: A checkpoint.
        other: Another one.
        memory: Bytes that may be taken.
        progress: Is told how many bytes were compared.

    Raises:
        LimitExceeded: The memory is too little for the chunks that there are.
    """
    others = {leaf.path: leaf for leaf in other.leaves}
    pairs = [(leaf, others.pop(leaf.path, None)) for leaf in one.leaves]
    alike = [(a, b) for a, b in pairs if b is not None and _kind(a) == _kind(b) and a.stored is not None]
    shared = budget(
        f"compare {one.folder} and {other.folder}",
        memory,
        max((leaf.chunk_nbytes for pair in alike for leaf in pair), default=0),
        max((b.chunk_nbytes for _, b in alike), default=0),
    )
    total, done = sum(a.nbytes for a, _ in alike), 0
    for leaf in others.values():
        yield Difference(leaf.name, f"only {other.folder} has it: {_kind(leaf)}")
    with side_by_side(Reader(one, shared.reading), Reader(other, shared.reading)) as both:
        for a, b in pairs:
            if b is None:
                yield Difference(a.name, f"only {one.folder} has it: {_kind(a)}")
            elif _kind(a) != _kind(b):
                yield Difference(a.name, f"{one.folder} has {_kind(a)}, {other.folder} has {_kind(b)}")
            elif a.stored is not None:
                try:
                    found = _bitwise(same(a), same(b), both, shape_of_blocks(same(a), b.chunk, shared.block))
                except CorruptCheckpoint as error:
                    found = f"it cannot be read: {error}"
                if found:
                    yield Difference(a.name, found)
                done += a.nbytes
                progress("comparing", done, total)


def _kind(leaf: Entry) -> str:
    return f"{leaf.dtype}{leaf.shape}"


def _bitwise(a: Made, b: Made, both: Callable, block: tuple[int, ...]) -> str:
    """In how many elements a leaf differs, and where first; empty if in none."""
    count, first, largest = 0, "", 0.0
    for region in regions(a, block):
        x, y = both(a, b, region)
        where = different(x, y)
        if not where.any():
            del x, y  # before the next ones are read
            continue
        count += int(where.sum())
        x, y = encoding.values(x, a.dtype)[where], encoding.values(y, a.dtype)[where]
        if not first:
            index = _first(where, region)
            first = f"the first at {index}: {x[0]} and {y[0]}"
        if x.dtype != bool and not a.dtype.startswith(encoding.KEY):
            wide = complex if x.dtype.kind == "c" else float
            with np.errstate(invalid="ignore", over="ignore"):
                gap = np.abs(x.astype(wide) - y.astype(wide))
            largest = max(largest, float(np.nanmax(gap, initial=0.0)))
    if not count:
        return ""
    total = int(np.prod(a.stored_shape))
    return f"{count} of {total} elements differ, by up to {largest:g}, {first}"


def _first(where: np.ndarray, region: Region) -> tuple[int, ...]:
    inside = np.unravel_index(int(np.argmax(where)), where.shape)
    return tuple(int(i) + begin for i, (begin, _) in zip(inside, region, strict=True))
