"""How the dims of a tensor become those of a leaf: turned, cut into factors, and joined of them.

A map says it as einops does: "(head k) d -> d head k" cuts the first dim of a tensor into heads and what each has, and
puts the other dim before them. Of which boxes of the tensor a slice of the leaf is made is known, and no more is read.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jzero.checkpoint.chunks import Region, inside

Groups = tuple[tuple[str, ...], ...]
"""For each dim the names of its factors, the slowest first."""


@dataclass(frozen=True)
class Piece:
    """What one box of a tensor is of a slice of a leaf.

    Attributes:
        region: The box of the tensor.
        where: The part of the slice that it lies in,
        factors: the shape of that part when its dims are cut into factors,
        within: and where in it, cut so, it lies.
        order: For each factor, in the order of the tensor, which it is in that of the leaf.
    """

    region: Region
    where: tuple[slice, ...]
    factors: tuple[int, ...]
    within: tuple[slice, ...]
    order: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """It in an array that holds the slice of the leaf, its dims cut into factors as the tensor has them; a view."""
        part = array[(*self.where, ...)].reshape(self.factors)  # cuts dims only, and so copies nothing
        return part[(*self.within, ...)].transpose(self.order)

    def alone(self, values: np.ndarray) -> np.ndarray:
        """The slice of the leaf, if this is all of it, of what the box of the tensor holds."""
        shape = [self.factors[factor] for factor in self.order]
        lengths = [part.stop - part.start for part in self.where]
        return values.reshape(shape).transpose(np.argsort(self.order) if self.order else ()).reshape(lengths)


@dataclass(frozen=True)
class Turn:
    """The dims of a tensor and those of a leaf, made of the same factors.

    Attributes:
        sizes: The length of each factor.
        tensor: For each dim of the tensor its factors, by number, the slowest first.
        leaf: For each dim of the leaf, likewise.

    Example:
        >>> turn = Dims.parse("(head k) d -> d head k", {"head": 4}).turn((12, 5), "tensor")
        >>> turn.leaf_shape, [piece.region for piece in turn.pieces(((0, 5), (1, 3), (0, 3)))]
        ((5, 4, 3), [((3, 9), (0, 5))])
    """

    sizes: tuple[int, ...]
    tensor: tuple[tuple[int, ...], ...]
    leaf: tuple[tuple[int, ...], ...]

    @classmethod
    def of_order(cls, shape: Sequence[int], order: Sequence[int]) -> "Turn":
        """That of a tensor of this shape whose dims are only turned; for each dim of the leaf the dim of the tensor."""
        return cls(tuple(shape), tuple((dim,) for dim in range(len(shape))), tuple((dim,) for dim in order))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(math.prod(self._of(dim)) for dim in self.tensor)

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return tuple(math.prod(self._of(dim)) for dim in self.leaf)

    @property
    def fastest(self) -> list[int]:
        """The dims of the leaf, first those whose elements lie closest together in the tensor."""
        places = list(itertools.chain.from_iterable(self.tensor))
        return sorted(range(len(self.leaf)), key=lambda dim: -places.index(self.leaf[dim][-1]))

    def pieces(self, region: Region) -> Iterator[Piece]:
        """What of the tensor a slice of the leaf is, box by box; each element of the slice is in one of them."""
        numbers = list(itertools.chain.from_iterable(self.leaf))
        order = tuple(numbers.index(factor) for dim in self.tensor for factor in dim)
        cuts = [list(_boxes(*ends, self._of(dim))) for ends, dim in zip(region, self.leaf, strict=True)]
        for boxes in itertools.product(*cuts):
            box = tuple(itertools.chain.from_iterable(boxes))
            spans = [_span(one, self._of(dim)) for one, dim in zip(boxes, self.leaf, strict=True)]
            where = inside(tuple(spans), region)
            factors = tuple(end - begin for begin, end in box)
            mine = [tuple(box[numbers.index(factor)] for factor in dim) for dim in self.tensor]
            for parts in itertools.product(*map(list, map(_runs, mine, map(self._of, self.tensor)))):
                slice_ = tuple(_span(one, self._of(dim)) for one, dim in zip(parts, self.tensor, strict=True))
                found = dict(zip(order, itertools.chain.from_iterable(parts), strict=True))
                within = inside(tuple(found[at] for at in range(len(box))), box)
                yield Piece(slice_, where, factors, within, order)

    def _of(self, dim: Sequence[int]) -> list[int]:
        return [self.sizes[factor] for factor in dim]


def _boxes(begin: int, end: int, sizes: Sequence[int]) -> Iterator[Region]:
    """A range of a dim that is made of factors, as boxes of these of which each is a range again.

    Example:
        >>> list(_boxes(3, 17, [4, 5]))
        [((0, 1), (3, 5)), ((1, 3), (0, 5)), ((3, 4), (0, 2))]
    """
    if begin == end:
        return
    if len(sizes) == 1:
        yield ((begin, end),)
        return
    rest, inner = sizes[1:], math.prod(sizes[1:])
    first, last = -(-begin // inner), end // inner  # between them it has all of the other factors
    if first > last:
        yield from (((last, first), *box) for box in _boxes(begin - last * inner, end - last * inner, rest))
        return
    if begin < first * inner:
        yield from (((first - 1, first), *box) for box in _boxes(begin % inner, inner, rest))
    if first < last:
        yield ((first, last), *((0, size) for size in rest))
    if last * inner < end:
        yield from (((last, last + 1), *box) for box in _boxes(0, end % inner, rest))


def _runs(box: Region, sizes: Sequence[int]) -> Iterator[Region]:
    """A box of the factors of a dim as boxes of which each is a range of the dim.

    Example:
        >>> list(_runs(((1, 3), (0, 1), (0, 5)), [4, 2, 5]))
        [((1, 2), (0, 1), (0, 5)), ((2, 3), (0, 1), (0, 5))]
    """
    last = max((at for at, size in enumerate(sizes) if box[at] != (0, size)), default=0)
    for index in itertools.product(*(range(*ends) for ends in box[:last])):
        yield (*((at, at + 1) for at in index), *box[last:])


def _span(box: Region, sizes: Sequence[int]) -> tuple[int, int]:
    """Begin and end in a dim of a box of its factors that is a range."""
    begin = last = 0
    for (first, end), size in zip(box, sizes, strict=True):
        begin, last = begin * size + first, last * size + end - 1
    return begin, last + 1


@dataclass(frozen=True)
class Dims:
    """How dims are turned, cut and joined, as a map has it.

    Attributes:
        text: As it is written.
        tensor: For each dim of the tensor the names of its factors.
        leaf: For each dim of the leaf, likewise.
        sizes: The lengths of factors that the map names.
    """

    text: str
    tensor: Groups
    leaf: Groups
    sizes: Mapping[str, int]

    @classmethod
    def parse(cls, text: Any, sizes: Mapping[str, int]) -> "Dims":
        """Reads "(head k) d -> d head k".

        Args:
            text: Before the arrow the dims of the tensor, behind it those of the leaf; a dim is a name, or several in
                parentheses, of which the first is the slowest.
            sizes: Lengths of some of them.

        Raises:
            ValueError: Another form, or other names on one side than on the other.
        """
        name = r"[A-Za-z_]\w*"
        side = rf"(?:\s*(?:{name}\b|\(\s*{name}(?:\s+{name})*\s*\)))+\s*"
        match = re.fullmatch(f"({side})->({side})", text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"dims = {text!r}; wanted the dims of the tensor and, behind an arrow, those of the leaf, such as "
                f'"(head k) d -> d head k"'
            )
        tensor, leaf = (
            tuple(tuple(group.strip("()").split()) for group in re.findall(rf"\([^)]*\)|{name}", one))
            for one in match.groups()
        )
        names = [sorted(itertools.chain.from_iterable(groups)) for groups in (tensor, leaf)]
        if names[0] != names[1] or len(set(names[0])) < len(names[0]):
            raise ValueError(f"dims = {text!r}; wanted each name once on each side of the arrow")
        return cls(text, tensor, leaf, {name: sizes[name] for name in names[0] if name in sizes})

    def turn(self, shape: Sequence[int], of: Literal["tensor", "leaf"]) -> Turn:
        """The same with the lengths that a tensor, or a leaf, has.

        Raises:
            ValueError: It cannot be of this shape.
        """
        groups, known = self.tensor if of == "tensor" else self.leaf, dict(self.sizes)
        if len(shape) != len(groups):
            raise ValueError(f'has {len(shape)} dims, where dims = "{self.text}" of the map has {len(groups)}')
        for dim, (length, names) in enumerate(zip(shape, groups, strict=True)):
            free, rest = [name for name in names if name not in known], math.prod(known.get(name, 1) for name in names)
            given = ", ".join(f"{name} = {known[name]}" for name in names if name in known)
            wants = f'has {length} in its dim {dim}, but dims = "{self.text}" of the map makes it {" x ".join(names)}'
            if len(free) > 1:
                raise ValueError(f"{wants}; name the length of {' or '.join(free)} in [sizes] of the map")
            if (length % rest) if free else (length != rest):
                raise ValueError(f"{wants}, with {given}")
            known |= dict.fromkeys(free, length // rest)
        names = list(itertools.chain.from_iterable(self.tensor))
        tensor, leaf = (tuple(tuple(map(names.index, dim)) for dim in side) for side in (self.tensor, self.leaf))
        return Turn(tuple(known[name] for name in names), tensor, leaf)
