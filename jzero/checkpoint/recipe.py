"""How the leaves of a new checkpoint are made of parts of those of another: nothing is read here.

A leaf is made of parts, each a block of one leaf of the source. Stacking, unstacking, splitting and merging move such
blocks, and so may follow each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import Region, overlap
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.names import Path, shown


@dataclass(frozen=True)
class Part:
    """A block of a leaf of the source, and where it is in the new leaf.

    Attributes:
        source: The leaf that it is of.
        begin: Where it begins there.
        dims: For each dim of the source, the dim of the new leaf that it is; None: it is gone, and one element long.
        region: Where it is in the new leaf.
    """

    source: Entry
    begin: tuple[int, ...]
    dims: tuple[int | None, ...]
    region: Region

    def origin(self, region: Region) -> Region:
        """Where a region of the new leaf, inside of this part, is in the source."""
        return tuple(
            (begin, begin + 1)
            if dim is None
            else (begin + region[dim][0] - self.region[dim][0], begin + region[dim][1] - self.region[dim][0])
            for begin, dim in zip(self.begin, self.dims, strict=True)
        )

    def image(self, origin: Region) -> Region:
        """The inverse of `origin`."""
        region = list(self.region)
        for (first, last), begin, dim in zip(origin, self.begin, self.dims, strict=True):
            if dim is not None:
                region[dim] = (self.region[dim][0] + first - begin, self.region[dim][0] + last - begin)
        return tuple(region)


@dataclass(frozen=True)
class Made:
    """A leaf that is to be made.

    Attributes:
        path: Where it is in the tree.
        shape: Its shape.
        words: Further dims that it is stored with: one for random keys.
        dtype: Name of its dtype, as in `Entry`.
        read: Name of the dtype that its parts have; another one if it is cast.
        parts: What it is made of.
        spec: The mesh axes of each dim where it was saved from; None if that is not known.
    """

    path: Path
    shape: tuple[int, ...]
    words: tuple[int, ...]
    dtype: str
    read: str
    parts: tuple[Part, ...]
    spec: tuple[tuple[str, ...], ...] | None

    @property
    def name(self) -> str:
        """Its path as messages and patterns have it."""
        return shown(self.path)

    @property
    def stored(self) -> str | None:
        """Name of the dtype that it is stored in; None if it has no elements."""
        return None if 0 in self.stored_shape else encoding.stored_dtype(self.dtype)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that it is stored in."""
        return self.shape + self.words

    @property
    def described(self) -> str:
        """Its dtype and shape, for messages."""
        return f"{self.dtype}{self.shape}" + ("" if self.read == self.dtype else f" cast from {self.read}")


def same(entry: Entry) -> Made:
    """A leaf as it is."""
    whole = tuple((0, size) for size in entry.stored_shape)
    dims = tuple(range(len(whole)))
    parts = () if entry.stored is None else (Part(entry, (0,) * len(whole), dims, whole),)
    words = entry.stored_shape[len(entry.shape) :]
    return Made(entry.path, entry.shape, words, entry.dtype, entry.dtype, parts, entry.spec)


def stacked(leaves: Sequence[Made], path: Path, dim: int) -> Made:
    """Leaves of one shape and dtype as one, along a new dim."""
    first = leaves[0]

    def part(number, old: Part) -> Part:
        region = (*old.region[:dim], (number, number + 1), *old.region[dim:])
        return replace(old, region=region, dims=tuple(d if d is None or d < dim else d + 1 for d in old.dims))

    return replace(
        first,
        path=path,
        shape=(*first.shape[:dim], len(leaves), *first.shape[dim:]),
        parts=tuple(part(number, old) for number, leaf in enumerate(leaves) for old in leaf.parts),
        spec=None if first.spec is None else (*first.spec[:dim], (), *first.spec[dim:]),
    )


def unstacked(leaf: Made, number: int, path: Path, dim: int) -> Made:
    """One of those that were stacked along a dim."""

    def part(old: Part) -> Part:
        begin = tuple(
            b + number - old.region[dim][0] if d == dim else b for b, d in zip(old.begin, old.dims, strict=True)
        )
        dims = tuple(None if d is None or d == dim else d - (d > dim) for d in old.dims)
        return Part(old.source, begin, dims, _without(old.region, dim))

    return replace(
        leaf,
        path=path,
        shape=_without(leaf.shape, dim),
        parts=tuple(part(old) for old in leaf.parts if old.region[dim][0] <= number < old.region[dim][1]),
        spec=None if leaf.spec is None else _without(leaf.spec, dim),
    )


def split(leaf: Made, begin: int, end: int, path: Path, dim: int) -> Made:
    """What is between two places along a dim."""
    wanted = tuple((begin, end) if d == dim else (0, size) for d, size in enumerate(leaf.stored_shape))

    def part(old: Part, both: Region) -> Part:
        moved = tuple((a - begin, b - begin) if d == dim else (a, b) for d, (a, b) in enumerate(both))
        return Part(old.source, tuple(first for first, _ in old.origin(both)), old.dims, moved)

    return replace(
        leaf,
        path=path,
        shape=tuple(end - begin if d == dim else size for d, size in enumerate(leaf.shape)),
        parts=tuple(part(old, both) for old in leaf.parts if (both := overlap(old.region, wanted)) is not None),
    )


def merged(leaves: Sequence[Made], path: Path, dim: int) -> Made:
    """Leaves one after another along a dim; their other dims must be the same."""
    parts, length = [], 0
    for leaf in leaves:
        for old in leaf.parts:
            first, last = old.region[dim]
            region = (*old.region[:dim], (first + length, last + length), *old.region[dim + 1 :])
            parts.append(replace(old, region=region))
        length += leaf.shape[dim]
    first = leaves[0]
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return replace(first, path=path, shape=shape, parts=tuple(parts))


def _without(values: tuple, dim: int) -> tuple:
    return (*values[:dim], *values[dim + 1 :])
