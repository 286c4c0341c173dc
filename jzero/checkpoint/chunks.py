"""How a leaf is cut into chunks, each of which is one file, written by one process."""

import itertools
import math
from collections.abc import Iterator, Sequence

Region = tuple[tuple[int, int], ...]
"""Begin and end in each dim."""

LARGEST = 16 * 2**20
"""Most bytes of a chunk by default: what saving, restoring and resharding hold in memory are a few of these."""


def halved(shape: Sequence[int], itemsize: int, largest: int, *, cut: Sequence[bool] | None = None) -> tuple:
    """The shape of chunks of at most `largest` bytes: the largest dim is divided until they are.

    A chunk that is about as long in each dim is read in any layout without much that is not needed.

    Args:
        shape: The shape to divide.
        itemsize: Bytes of an element.
        largest: Most bytes of a chunk.
        cut: Dims that chunks must divide evenly, since there the shape is one process's part of more.

    Example:
        >>> halved((1024, 1024), 4, 2**20)
        (512, 512)
        >>> halved((6, 1000), 4, 2**10)
        (6, 32)
    """
    chunk, cut = [max(1, size) for size in shape], cut or [False] * len(shape)
    while math.prod(chunk) * itemsize > largest:
        options = []
        for dim, size in enumerate(chunk):
            parts = next((p for p in (2, 3, 5, 7, 11, 13) if size % p == 0), size) if cut[dim] else 2
            if size > 1:
                options.append((size, -dim, -(-size // parts)))
        if not options:
            break
        _, dim, size = max(options)
        chunk[-dim] = size
    return tuple(chunk)


def grid(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Region]]:
    """Each chunk's number in each dim, and what it covers of the array."""
    counts = [range(-(-size // step)) for size, step in zip(shape, chunk, strict=True)]
    for number in itertools.product(*counts):
        yield (
            number,
            tuple((n * step, min((n + 1) * step, size)) for n, step, size in zip(number, chunk, shape, strict=True)),
        )


def overlap(a: Region, b: Region) -> Region | None:
    """What two regions share; None if nothing."""
    both = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b, strict=True))
    return None if any(begin >= end for begin, end in both) else both


def inside(region: Region, of: Region) -> tuple[slice, ...]:
    """A region as slices of an array that covers `of`."""
    return tuple(slice(x - u, y - u) for (x, y), (u, _) in zip(region, of, strict=True))


def region_of(index: tuple[slice, ...], shape: Sequence[int]) -> Region:
    """The region that an index of a sharding stands for."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
