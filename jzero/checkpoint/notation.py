"""How rules are written: `LEFT=RIGHT`, patterns of names joined by commas, perhaps with a dim behind an "@"."""

import re
from dataclasses import dataclass

from jzero.checkpoint.patterns import Pattern


@dataclass(frozen=True)
class Sides:
    """A rule as it is written.

    Attributes:
        lefts: The patterns before the "=".
        rights: Those behind it.
        dim: The dim; None if none is named.
    """

    lefts: tuple[Pattern, ...]
    rights: tuple[Pattern, ...]
    dim: int | None


def sides(text: str, wanted: str) -> Sides:
    """Reads `LEFT,...=RIGHT,...[@DIM]`.

    Args:
        text: The rule.
        wanted: The form that it should have, and an example, for messages.

    Raises:
        ValueError: Another form.
    """
    match = re.fullmatch(r"([^=@]+)=([^=@]+)(?:@(-?\d+))?", text)
    if match is None:
        raise unfit(text, wanted)
    left, right = (tuple(Pattern(one.strip()) for one in side.split(",")) for side in match.groups()[:2])
    return Sides(left, right, None if match[3] is None else int(match[3]))


def pair(text: str, wanted: str) -> tuple[Pattern, Pattern, int | None]:
    """Reads `LEFT=RIGHT[@DIM]`, of one pattern each.

    Raises:
        ValueError: Another form.
    """
    found = sides(text, wanted)
    if len(found.lefts) + len(found.rights) != 2:
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
    return ValueError(f"{text!r}; wanted {wanted}")
