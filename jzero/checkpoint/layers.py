"""Rules for layers: one leaf made of those that differ in a number, as a scan over layers has it, and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from jzero.checkpoint.matching import each, together
from jzero.checkpoint.names import Path, shown
from jzero.checkpoint.notation import check_wildcards, pair, unfit
from jzero.checkpoint.patterns import Pattern
from jzero.checkpoint.recipe import Made, stacked, unstacked


@dataclass(frozen=True)
class Stack:
    """Makes one leaf of those that differ in one number: `params/blocks/#=params/blocks`.

    The new dim is the first one, or the one that `@DIM` names.
    """

    text: str
    left: Pattern
    right: Pattern
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Stack":
        """Reads `LEFT=RIGHT[@DIM]`; the left side has one "#"."""
        return cls(text, *_parsed(text, "left", "params/blocks/#=params/blocks"))

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, stacked where the rule says so."""

        def member(leaf: Made) -> tuple[Path, int] | None:
            found = self.left.match(leaf.path)
            return None if found is None else (self.right.filled(found), int(found["#"][0]))

        def one(path: Path, layers: dict[int, Made]) -> Made | None:
            ordered = [layers[number] for number in sorted(layers)]
            if found := _unlike(f"--stack {self.text}", path, layers, self.dim):
                problems.extend(found)
                return None
            return stacked(ordered, path, self.dim)

        return together(f"--stack {self.text}", leaves, problems, member, one)


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
        return cls(text, *_parsed(text, "right", "params/blocks=params/blocks/#"))

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

        return each(f"--unstack {self.text}", self.left, leaves, problems, layers)


def _parsed(text: str, numbered: str, example: str) -> tuple[Pattern, Pattern, int]:
    """Both sides, of which one has the number of the layer, and the dim."""
    wanted = f"LEFT=RIGHT[@DIM] with # for the number of the layer on the {numbered}, such as {example}"
    left, right, dim = pair(text, wanted)
    counts = (left.count("#"), right.count("#"))
    if counts != ((1, 0) if numbered == "left" else (0, 1)) or (dim or 0) < 0:
        raise unfit(text, wanted)
    check_wildcards(text, left, right, ("**", "*"))
    return left, right, dim or 0


def _unlike(rule: str, path: Path, layers: dict[int, Made], dim: int) -> list[str]:
    """Why these are not the layers of one leaf; empty if they are."""
    if sorted(layers) != list(range(len(layers))):
        missing = next(number for number in range(len(layers)) if number not in layers)
        return [f"{shown(path)}: {rule} wants layers 0 to {max(layers)}; layer {missing} is not there."]
    first = layers[0]
    odd = [layers[number] for number in sorted(layers) if _kind(layers[number]) != _kind(first)]
    if not odd and dim > len(first.shape):
        return [f"{first.name}: {first.described} has no place for a new dim {dim} (--stack)."]
    return [
        f"{leaf.name}: it is {leaf.described}, but {first.name} {first.described}; {rule} wants equal layers. Stack "
        f"fewer of them with a narrower pattern."
        for leaf in odd
    ]


def _kind(leaf: Made) -> tuple:
    """All that must be the same for leaves to be stacked."""
    return leaf.dtype, leaf.read, leaf.words, leaf.shape
