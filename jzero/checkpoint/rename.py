"""Rules that make the leaves of one tree out of those of another: rename, stack, unstack, split, merge, cast.

Each is written `LEFT=RIGHT`, of patterns; the wildcards of the right side stand for what those of the left side found.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jzero.checkpoint import encoding
from jzero.checkpoint.errors import CheckpointMismatch
from jzero.checkpoint.names import Path, shown
from jzero.checkpoint.patterns import Found, Pattern
from jzero.checkpoint.recipe import Made, merged, split, stacked, unstacked


@dataclass(frozen=True)
class Rename:
    """Gives leaves other names: `params/h=params/blocks`, `**/w=**/kernel`."""

    text: str
    left: Pattern
    right: Pattern

    @classmethod
    def parse(cls, text: str) -> "Rename":
        """Reads `LEFT=RIGHT`."""
        lefts, rights, dim = _sides(text)
        if dim is not None or len(lefts) + len(rights) != 2:
            raise ValueError(f"{text!r}; wanted LEFT=RIGHT, such as params/h=params/blocks")
        _check_wildcards(text, lefts[0], rights[0])
        return cls(text, lefts[0], rights[0])

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves under their new names."""

        def renamed(leaf, found):
            return [_moved(leaf, self.right.filled(found))]

        return _each(self.text, self.left, leaves, problems, renamed)


@dataclass(frozen=True)
class Stack:
    """Makes one leaf of those that differ in one number: `params/blocks/#=params/blocks`, as a scan over layers does.

    The new dim is the first one, or the one that `@DIM` names.
    """

    text: str
    left: Pattern
    right: Pattern
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Stack":
        """Reads `LEFT=RIGHT[@DIM]`; the left side has one "#"."""
        lefts, rights, dim = _sides(text)
        if len(lefts) + len(rights) != 2 or lefts[0].count("#") != 1 or rights[0].count("#") or (dim or 0) < 0:
            raise ValueError(
                f"{text!r}; wanted LEFT=RIGHT with # for the number of the layer on the left, such as "
                f"params/blocks/#=params/blocks"
            )
        _check_wildcards(text, lefts[0], rights[0], numbers=False)
        return cls(text, lefts[0], rights[0], dim or 0)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, stacked where the rule says so, in the place of the first of each stack."""
        groups: dict[Path, dict[int, Made]] = {}
        for leaf in leaves:
            if (found := self.left.match(leaf.path)) is not None:
                layers, number = groups.setdefault(self.right.filled(found), {}), int(found["#"][0])
                if number in layers:
                    problems.append(f"{leaf.name}: --stack {self.text} finds layer {number} twice.")
                layers[number] = leaf
        if not groups:
            problems.append(_nothing("--stack", self.text, leaves))
        made: dict[Path, Made | None] = {}
        for path, layers in groups.items():
            ordered = [layers[number] for number in sorted(layers)]
            made |= {leaf.path: None for leaf in ordered}
            made[ordered[0].path] = self._one(path, layers, ordered, problems)
        kept = [made.get(leaf.path, leaf) for leaf in leaves]
        return [leaf for leaf in kept if leaf is not None]

    def _one(self, path, layers, ordered, problems) -> Made | None:
        first = ordered[0]
        if sorted(layers) != list(range(len(layers))):
            missing = next(number for number in range(len(layers)) if number not in layers)
            problems.append(
                f"{shown(path)}: --stack {self.text} wants layers 0 to {max(layers)}; layer {missing} is not there."
            )
            return None
        odd = [leaf for leaf in ordered if _kind(leaf) != _kind(first)]
        problems += [
            f"{leaf.name}: it is {leaf.described}, but {first.name} {first.described}; --stack {self.text} wants "
            f"equal layers. Stack fewer of them with a narrower pattern."
            for leaf in odd
        ]
        if not odd and self.dim > len(first.shape):
            problems.append(f"{first.name}: {first.described} has no place for a new dim {self.dim} (--stack).")
            return None
        return None if odd else stacked(ordered, path, self.dim)


@dataclass(frozen=True)
class Unstack:
    """The inverse of `Stack`: `params/blocks=params/blocks/#`."""

    text: str
    left: Pattern
    right: Pattern
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Unstack":
        """Reads `LEFT=RIGHT[@DIM]`; the right side has one "#"."""
        lefts, rights, dim = _sides(text)
        if len(lefts) + len(rights) != 2 or rights[0].count("#") != 1 or lefts[0].count("#") or (dim or 0) < 0:
            raise ValueError(
                f"{text!r}; wanted LEFT=RIGHT with # for the number of the layer on the right, such as "
                f"params/blocks=params/blocks/#"
            )
        _check_wildcards(text, lefts[0], rights[0], numbers=False)
        return cls(text, lefts[0], rights[0], dim or 0)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, each that the rule names as its layers."""

        def layers(leaf, found):
            if self.dim >= len(leaf.shape):
                problems.append(f"{leaf.name}: {leaf.described} has no dim {self.dim} to --unstack.")
                return [leaf]
            return [
                unstacked(leaf, number, self.right.filled(found | {"#": [str(number)]}), self.dim)
                for number in range(leaf.shape[self.dim])
            ]

        return _each(self.text, self.left, leaves, problems, layers)


@dataclass(frozen=True)
class Split:
    """Cuts a leaf along a dim: `**/qkv=**/q,**/k,**/v`, evenly, or in given sizes: `**/kv=**/k:64,**/v:128@0`.

    The dim is the last one, or the one that `@DIM` names.
    """

    text: str
    left: Pattern
    rights: tuple[Pattern, ...]
    sizes: tuple[int, ...]
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Reads `LEFT=RIGHT,RIGHT,...[@DIM]`."""
        plain, sizes = re.subn(r":\d+(?=,|@|$)", "", text)[0], tuple(map(int, re.findall(r":(\d+)(?=,|@|$)", text)))
        lefts, rights, dim = _sides(plain)
        if len(lefts) != 1 or len(rights) < 2 or len(sizes) not in (0, len(rights)):
            raise ValueError(
                f"{text!r}; wanted LEFT=RIGHT,RIGHT,... with all sizes or none, such as **/qkv=**/q,**/k,**/v or "
                f"**/kv=**/k:64,**/v:128"
            )
        for right in rights:
            _check_wildcards(text, lefts[0], right)
        return cls(text, lefts[0], rights, sizes, -1 if dim is None else dim)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, each that the rule names in its parts."""

        def cut(leaf, found):
            dim = _dim(leaf, self.dim)
            length = 0 if dim is None else leaf.shape[dim]
            sizes = self.sizes or (length // len(self.rights),) * len(self.rights)
            if dim is None or sum(sizes) != length:
                wanted = f"{' + '.join(map(str, self.sizes))} elements" if self.sizes else f"{len(sizes)} equal parts"
                problems.append(f"{leaf.name}: {leaf.described} cannot be cut into {wanted} along dim {self.dim}.")
                return [leaf]
            ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
            return [
                split(leaf, end - size, end, right.filled(found), dim)
                for size, end, right in zip(sizes, ends, self.rights, strict=True)
            ]

        return _each(self.text, self.left, leaves, problems, cut)


@dataclass(frozen=True)
class Merge:
    """Joins leaves along a dim: `**/q,**/k,**/v=**/qkv`; the last one, or the one that `@DIM` names."""

    text: str
    lefts: tuple[Pattern, ...]
    right: Pattern
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Merge":
        """Reads `LEFT,LEFT,...=RIGHT[@DIM]`."""
        lefts, rights, dim = _sides(text)
        if len(lefts) < 2 or len(rights) != 1:
            raise ValueError(f"{text!r}; wanted LEFT,LEFT,...=RIGHT, such as **/q,**/k,**/v=**/qkv")
        for left in lefts:
            _check_wildcards(text, left, rights[0])
        return cls(text, lefts, rights[0], -1 if dim is None else dim)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, merged where the rule says so, in the place of the first of each."""
        groups: dict[Path, dict[int, Made]] = {}
        for leaf in leaves:
            for index, left in enumerate(self.lefts):
                if (found := left.match(leaf.path)) is not None:
                    groups.setdefault(self.right.filled(found), {}).setdefault(index, leaf)
                    break
        if not groups:
            problems.append(_nothing("--merge", self.text, leaves))
        made: dict[Path, Made | None] = {}
        for path, group in groups.items():
            first = group[min(group)]
            made |= {leaf.path: None for leaf in group.values()}
            dim = _dim(first, self.dim)
            if len(group) < len(self.lefts):
                absent = [left.text for index, left in enumerate(self.lefts) if index not in group]
                problems.append(f"{shown(path)}: --merge {self.text} finds nothing for {', '.join(absent)}.")
            elif dim is None or any(_beside(leaf, dim) != _beside(first, dim) for leaf in group.values()):
                what = ", ".join(f"{leaf.name} {leaf.described}" for leaf in group.values())
                problems.append(f"{shown(path)}: {what} cannot be joined along dim {self.dim}.")
            else:
                made[first.path] = merged([group[index] for index in range(len(group))], path, dim)
        kept = [made.get(leaf.path, leaf) for leaf in leaves]
        return [leaf for leaf in kept if leaf is not None]


@dataclass(frozen=True)
class Cast:
    """Stores floats in another dtype, rounded to the nearest: `params/**=bfloat16`."""

    text: str
    left: Pattern
    dtype: str

    @classmethod
    def parse(cls, text: str) -> "Cast":
        """Reads `PATTERN=DTYPE`."""
        pattern, equals, dtype = text.rpartition("=")
        if not equals or not is_float(dtype):
            raise ValueError(f"{text!r}; wanted PATTERN=DTYPE of a float dtype, such as params/**=bfloat16")
        return cls(text, Pattern(pattern), dtype)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, those that the rule names in its dtype."""

        def as_dtype(leaf, found):
            if is_float(leaf.dtype):
                return [_cast(leaf, self.dtype)]
            problems.append(
                f"{leaf.name}: the checkpoint has {leaf.described}, asked for {self.dtype}; only floats are cast to "
                f"floats. Choose a narrower pattern."
            )
            return [leaf]

        return _each(self.text, self.left, leaves, problems, as_dtype)


Rule = Rename | Stack | Unstack | Split | Merge | Cast


def applied(what: str, rules: Sequence[Rule], leaves: Sequence[Made]) -> list[Made]:
    """The leaves that rules make, one rule after another.

    Args:
        what: The checkpoint, for messages.
        rules: The rules.
        leaves: The leaves to begin with.

    Raises:
        CheckpointMismatch: A rule matches nothing or does not fit, or leaves get in each other's way; all of them.
    """
    made, problems = list(leaves), []
    for rule in rules:
        made = rule.apply(made, problems)
    if not problems:
        problems += _clashes(made)
    if problems:
        raise CheckpointMismatch(what, problems)
    return made


def is_float(name: str) -> bool:
    """Whether this is the name of a dtype of floats."""
    return name in encoding.NATIVE | encoding.BITS and jnp.issubdtype(encoding.dtype_of(name), jnp.floating)


def _clashes(leaves: Sequence[Made]) -> list[str]:
    seen: set[Path] = set()
    problems = []
    for leaf in leaves:
        if leaf.path in seen:
            problems.append(f"{leaf.name}: two leaves would have this name. Rename or drop one of them.")
        seen.add(leaf.path)
    for leaf in leaves:
        for depth in range(1, len(leaf.path)):
            if leaf.path[:depth] in seen:
                problems.append(f"{leaf.name}: it would be below {shown(leaf.path[:depth])}, which is a leaf as well.")
    return problems


def _each(text, left: Pattern, leaves, problems, make: Callable[[Made, Found], list[Made]]) -> list[Made]:
    made, matched = [], False
    for leaf in leaves:
        found = left.match(leaf.path)
        matched |= found is not None
        made += [leaf] if found is None else make(leaf, found)
    if not matched:
        problems.append(_nothing("the rule", text, leaves))
    return made


def _nothing(option: str, text: str, leaves: Sequence[Made]) -> str:
    names = [leaf.name for leaf in leaves]
    have = f"they are from {names[0]} to {names[-1]}" if names else "there are none"
    return f"{option} {text} matches none of the {len(names)} leaves; {have}."


def _moved(leaf: Made, path: Path) -> Made:
    return replace(leaf, path=path)


def _cast(leaf: Made, dtype: str) -> Made:
    return replace(leaf, dtype=dtype)


def _dim(leaf: Made, dim: int) -> int | None:
    """A dim counted from the front; None if the leaf does not have it."""
    ndim = len(leaf.shape)
    return dim % ndim if -ndim <= dim < ndim else None


def _kind(leaf: Made) -> tuple:
    """All that must be the same for leaves to be stacked."""
    return leaf.dtype, leaf.read, leaf.words, leaf.shape


def _beside(leaf: Made, dim: int) -> tuple:
    """All that must be the same for leaves to be joined along a dim."""
    return leaf.dtype, leaf.read, leaf.words, len(leaf.shape), leaf.shape[:dim], leaf.shape[dim + 1 :]


def _sides(text: str) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...], int | None]:
    match = re.fullmatch(r"([^=@]+)=([^=@]+)(?:@(-?\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r}; wanted LEFT=RIGHT, of patterns of names, perhaps with @DIM at its end")
    left, right = (tuple(Pattern(one.strip()) for one in side.split(",")) for side in match.groups()[:2])
    return left, right, None if match[3] is None else int(match[3])


def _check_wildcards(text: str, left: Pattern, right: Pattern, *, numbers: bool = True) -> None:
    for wildcard in ("**", "*", *(("#",) if numbers else ())):
        if left.count(wildcard) != right.count(wildcard):
            raise ValueError(
                f"{text!r}: {left.text} has {left.count(wildcard)} {wildcard!r} and {right.text} has "
                f"{right.count(wildcard)}; wanted as many, to know what they stand for"
            )
