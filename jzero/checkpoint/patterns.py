"""Patterns on the paths of leaves, as the command line and rename rules have them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jzero.checkpoint.names import Path

WILDCARDS = ("**", "*", "#")

SPECIAL = r"\/*#=@,:"
"""Characters that mean something in patterns and rules; behind a backslash they stand for themselves."""

Found = dict[str, list]
"""What the wildcards of a pattern stood for, by kind and in order: keys for "**", text for "*" and "#"."""


@dataclass(frozen=True)
class Pattern:
    r"""A pattern such as "params/blocks/*/kernel"; it stands for a leaf, or for all that is below a level of the tree.

    `**` stands for any number of levels, `*` for any text within one level, `#` for a number. A backslash before one of
    these, before a "/" or another backslash lets it stand for itself; so it does before what means something in rules.

    Attributes:
        text: The pattern.

    Raises:
        ValueError: It is empty, has an empty level, or a backslash before anything else.

    Example:
        >>> Pattern("params/**/kernel").match(("params", "blocks", "0", "kernel"))
        {'**': [('blocks', '0')], '*': [], '#': [], 'below': [()]}
        >>> Pattern("opt_state").match(("opt_state", "0", "mu", "w"))["below"]
        [('0', 'mu', 'w')]
        >>> Pattern("params/*/b").match(("params", "w")) is None
        True
        >>> Pattern(r"params/a\=\*").match(("params", "a=*"))["below"]
        [()]
    """

    text: str

    def __post_init__(self):
        if not all(separated(self.text, "/")):
            raise ValueError(f"pattern {self.text!r} has an empty level; wanted for example params/blocks/**")
        for token in _tokens(self.text):
            if token[0] == "\\" and token[1:] not in tuple(SPECIAL):
                raise ValueError(
                    f"pattern {self.text}: a backslash stands before one of {SPECIAL} only, which then stands for "
                    f"itself; a backslash in a name is written as two"
                )

    @cached_property
    def _levels(self) -> list[list[str]]:
        """The pieces of each level: wildcards, and text between them with its backslashes."""
        return [_pieces(level) for level in separated(self.text, "/")]

    @cached_property
    def _expressions(self) -> list[re.Pattern[str] | None]:
        """What each level must be; None where it may be any number of them."""
        kinds = {"*": "(.*)", "#": "([0-9]+)"}
        return [
            None
            if pieces == ["**"]
            else re.compile("".join(kinds.get(piece) or re.escape(_plain(piece)) for piece in pieces), re.DOTALL)
            for pieces in self._levels
        ]

    def count(self, wildcard: str) -> int:
        """How often it has a wildcard."""
        return sum(pieces.count(wildcard) for pieces in self._levels)

    def match(self, path: Path) -> Found | None:
        """What its wildcards stand for in a path, and what is "below" the level that it names; None: no match."""
        found = _match(self._expressions, path)
        if found is None:
            return None
        *wild, (_, below) = found
        kinds = [piece for pieces in self._levels for piece in pieces if piece in WILDCARDS]
        by_kind: Found = {kind: [] for kind in WILDCARDS}
        for kind, value in zip(kinds, [value for _, value in wild], strict=True):
            by_kind[kind].append(value)
        return by_kind | {"below": [below]}

    def filled(self, found: Found) -> Path:
        """The path that it is with these in the place of its wildcards, the first "*" for the first one, and so on."""
        left = {kind: iter(values) for kind, values in found.items()}
        path: list[str] = []
        for pieces in self._levels:
            if pieces == ["**"]:
                path += next(left["**"])
            else:
                path.append("".join(next(left[piece]) if piece in WILDCARDS else _plain(piece) for piece in pieces))
        return (*path, *next(left["below"]))


def any_match(patterns: Sequence[Pattern], path: Path) -> bool:
    """Whether one of them matches."""
    return any(pattern.match(path) is not None for pattern in patterns)


def separated(text: str, by: str) -> list[str]:
    r"""A text between the places where a character is without a backslash before it. Backslashes stay.

    Example:
        >>> separated(r"a\,b,c", ",")
        ['a\\,b', 'c']
    """
    parts = [""]
    for token in _tokens(text):
        if token == by:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def _tokens(text: str) -> list[str]:
    """Its characters, each with the backslash before it."""
    return re.findall(r"\\.|.", text, re.DOTALL)


def _pieces(level: str) -> list[str]:
    return [level] if level == "**" else re.findall(r"[*#]|(?:\\.|[^*#\\])+", level, re.DOTALL)


def _plain(piece: str) -> str:
    """Text without the backslashes before its characters."""
    return re.sub(r"\\(.)", r"\1", piece, flags=re.DOTALL)


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
