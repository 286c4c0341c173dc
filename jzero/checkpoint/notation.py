"""How rules are written: `LEFT=RIGHT`, patterns of names joined by commas, perhaps with a dim behind an "@".

A backslash before any of these lets it stand for itself, as in `Pattern`.
"""

import re
from dataclasses import dataclass

from jzero.checkpoint.patterns import Pattern, separated


@dataclass(frozen=True)
class Sides:
    """A rule as it is written.

    Attributes:
        lefts: The patterns before the "=".
        rights: Those behind it.
        sizes: The numbers behind a ":" of these; none if there are none.
        dim: The dim; None if none is named.
    """

    lefts: tuple[Pattern, ...]
    rights: tuple[Pattern, ...]
    sizes: tuple[int, ...]
    dim: int | None


def sides(text: str, wanted: str) -> Sides:
    """Reads `LEFT,...=RIGHT[:SIZE],...[@DIM]`.

    Args:
        text: The rule.
        wanted: The form that it should have, and an example, for messages.

    Raises:
        ValueError: Another form.
    """
    left, *others = separated(text, "=")
    right, *dim = separated(others[0], "@") if len(others) == 1 else [""]
    pairs = [separated(one.strip(), ":") for one in separated(right, ",")]
    sizes = [size for _, *rest in pairs for size in rest]
    whole = left and right and len(separated(left, "@")) == 1 and len(dim) <= 1 and all(len(one) <= 2 for one in pairs)
    if not whole or not all(re.fullmatch(r"-?\d+", one) for one in dim) or not all(map(str.isdecimal, sizes)):
        raise unfit(text, wanted)
    return Sides(
        tuple(Pattern(one.strip()) for one in separated(left, ",")),
        tuple(Pattern(name) for name, *_ in pairs),
        tuple(map(int, sizes)),
        int(dim[0]) if dim else None,
    )


def pair(text: str, wanted: str) -> tuple[Pattern, Pattern, int | None]:
    """Reads `LEFT=RIGHT[@DIM]`, of one pattern each.

    Raises:
        ValueError: Another form.
    """
    found = sides(text, wanted)
    if len(found.lefts) + len(found.rights) != 2 or found.sizes:
        raise unfit(text, wanted)
    return found.lefts[0], found.rights[0], found.dim


def check_wildcards(text: str, left: Pattern, right: Pattern, kinds: tuple[str, ...] = ("**", "*", "#")) -> None:
    """Raises unless both sides have as many of each wildcard, so that it is known what those of the right stand for.

    Raises:
        ValueError: They have not.
    """
    for wildcard in kinds:
        if left.count(wildcard) != right.count(wildcard):
            raise ValueError(
                f"{text!r}: {left.text} has {left.count(wildcard)} {wildcard!r} and {right.text} has "
                f"{right.count(wildcard)}; wanted as many, to know what they stand for"
            )


def unfit(text: str, wanted: str) -> ValueError:
    """The error of a rule that has another form than is wanted."""
    return ValueError(rf"{text}; wanted {wanted} (in names a backslash goes before these: \= \@ \, \:)")
