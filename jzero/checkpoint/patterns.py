"""Patterns on the paths of leaves, as the command line and rename rules have them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jzero.checkpoint.names import Path

WILDCARDS = ("**", "*", "#")

Found = dict[str, list]
"""What the wildcards of a pattern stood for, by kind and in order: keys for "**", text for "*" and "#"."""


@dataclass(frozen=True)
class Pattern:
    """A pattern such as "params/blocks/*/kernel"; it stands for a leaf, or for all that is below a level of the tree.

    `**` stands for any number of levels, `*` for any text within one level, `#` for a number.

    Attributes:
        text: The pattern.

    Raises:
        ValueError: It is empty, or has an empty level.

    Example:
        >>> Pattern("params/**/kernel").match(("params", "blocks", "0", "kernel"))
        {'**': [('blocks', '0')], '*': [], '#': [], 'below': [()]}
        >>> Pattern("opt_state").match(("opt_state", "0", "mu", "w"))["below"]
        [('0', 'mu', 'w')]
        >>> Pattern("params/*/b").match(("params", "w")) is None
        True
    """

    text: str

    def __post_init__(self):
        if not all(self.text.split("/")):
            raise ValueError(f"pattern {self.text!r} has an empty level; wanted for example params/blocks/**")

    @cached_property
    def _levels(self) -> list[re.Pattern[str] | None]:
        """What each level must be; None where it may be any number of them."""
        pieces = {"*": "(.*)", "#": "([0-9]+)"}
        return [
            None
            if level == "**"
            else re.compile("".join(pieces.get(piece, re.escape(piece)) for piece in _pieces(level)), re.DOTALL)
            for level in self.text.split("/")
        ]

    def count(self, wildcard: str) -> int:
        """How often it has a wildcard."""
        return sum(_pieces(level).count(wildcard) for level in self.text.split("/"))

    def match(self, path: Path) -> Found | None:
        """What its wildcards stand for in a path, and what is "below" the level that it names; None: no match."""
        found = _match(self._levels, path)
        if found is None:
            return None
        *wild, (_, below) = found
        kinds = [piece for level in self.text.split("/") for piece in _pieces(level) if piece in WILDCARDS]
        by_kind: Found = {kind: [] for kind in WILDCARDS}
        for kind, value in zip(kinds, [value for _, value in wild], strict=True):
            by_kind[kind].append(value)
        return by_kind | {"below": [below]}

    def filled(self, found: Found) -> Path:
        """The path that it is with these in the place of its wildcards, the first "*" for the first one, and so on."""
        left = {kind: iter(values) for kind, values in found.items()}
        path: list[str] = []
        for level in self.text.split("/"):
            if level == "**":
                path += next(left["**"])
            else:
                path.append("".join(next(left[piece]) if piece in ("*", "#") else piece for piece in _pieces(level)))
        return (*path, *next(left["below"]))


def any_match(patterns: Sequence[Pattern], path: Path) -> bool:
    """Whether one of them matches."""
    return any(pattern.match(path) is not None for pattern in patterns)


def _pieces(level: str) -> list[str]:
    return [level] if level == "**" else re.findall(r"[*#]|[^*#]+", level)


def _match(levels, path) -> list[tuple[str, object]] | None:
    if not levels:
        return [("below", path)]
    first, *rest = levels
    if first is None:
        for count in range(len(path) + 1):
            found = _match(rest, path[count:])
            if found is not None:
                return [("**", path[:count]), *found]
        return None
    if not path or (match := first.fullmatch(path[0])) is None:
        return None
    found = _match(rest, path[1:])
    return None if found is None else [*(("text", text) for text in match.groups()), *found]
