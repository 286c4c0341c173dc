"""Rules that cut leaves along a dim, and join them."""

from collections.abc import Sequence
from dataclasses import dataclass

from jzero.checkpoint.matching import each, together
from jzero.checkpoint.names import Path, shown
from jzero.checkpoint.notation import check_wildcards, sides, unfit
from jzero.checkpoint.patterns import Pattern
from jzero.checkpoint.recipe import Made, merged, split


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
        wanted = (
            "LEFT=RIGHT,RIGHT,...[@DIM] with all sizes or none, such as **/qkv=**/q,**/k,**/v or **/kv=**/k:64,**/v:128"
        )
        found = sides(text, wanted)
        if len(found.lefts) != 1 or len(found.rights) < 2 or len(found.sizes) not in (0, len(found.rights)):
            raise unfit(text, wanted)
        for right in found.rights:
            check_wildcards(text, found.lefts[0], right)
        return cls(text, found.lefts[0], found.rights, found.sizes, -1 if found.dim is None else found.dim)

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

        return each(f"--split {self.text}", self.left, leaves, problems, cut)


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
        wanted = "LEFT,LEFT,...=RIGHT[@DIM], such as **/q,**/k,**/v=**/qkv"
        found = sides(text, wanted)
        if len(found.lefts) < 2 or len(found.rights) != 1 or found.sizes:
            raise unfit(text, wanted)
        for left in found.lefts:
            check_wildcards(text, left, found.rights[0])
        return cls(text, found.lefts, found.rights[0], -1 if found.dim is None else found.dim)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, merged where the rule says so."""

        def member(leaf: Made) -> tuple[Path, int] | None:
            matches = ((number, left.match(leaf.path)) for number, left in enumerate(self.lefts))
            return next(((self.right.filled(found), number) for number, found in matches if found is not None), None)

        def one(path: Path, parts: dict[int, Made]) -> Made | None:
            first = parts[min(parts)]
            dim = _dim(first, self.dim)
            if len(parts) < len(self.lefts):
                absent = [left.text for number, left in enumerate(self.lefts) if number not in parts]
                problems.append(f"{shown(path)}: --merge {self.text} finds nothing for {', '.join(absent)}.")
            elif dim is None or any(_beside(leaf, dim) != _beside(first, dim) for leaf in parts.values()):
                what = ", ".join(f"{leaf.name} {leaf.described}" for leaf in parts.values())
                problems.append(f"{shown(path)}: {what} cannot be joined along dim {self.dim}.")
            else:
                return merged([parts[number] for number in range(len(parts))], path, dim)
            return None

        return together(f"--merge {self.text}", leaves, problems, member, one)


def _dim(leaf: Made, dim: int) -> int | None:
    """A dim counted from the front; None if the leaf does not have it."""
    ndim = len(leaf.shape)
    return dim % ndim if -ndim <= dim < ndim else None


def _beside(leaf: Made, dim: int) -> tuple:
    """All that must be the same for leaves to be joined along a dim."""
    return leaf.dtype, leaf.read, leaf.words, len(leaf.shape), leaf.shape[:dim], leaf.shape[dim + 1 :]
