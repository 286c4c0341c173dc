"""Rules that make the leaves of one tree out of those of another: other names, other dtypes, and all rules in turn.

Each is written `LEFT=RIGHT`, of patterns; the wildcards of the right side stand for what those of the left side found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jzero.checkpoint import encoding
from jzero.checkpoint.errors import CheckpointMismatch
from jzero.checkpoint.joints import Merge, Split
from jzero.checkpoint.layers import Stack, Unstack
from jzero.checkpoint.matching import each
from jzero.checkpoint.names import Path, shown
from jzero.checkpoint.notation import check_wildcards, pair, unfit
from jzero.checkpoint.patterns import Pattern
from jzero.checkpoint.recipe import Made


@dataclass(frozen=True)
class Rename:
    """Gives leaves other names: `params/h=params/blocks`, `**/w=**/kernel`."""

    text: str
    left: Pattern
    right: Pattern

    @classmethod
    def parse(cls, text: str) -> "Rename":
        """Reads `LEFT=RIGHT`."""
        wanted = "LEFT=RIGHT, such as params/h=params/blocks"
        left, right, dim = pair(text, wanted)
        if dim is not None:
            raise unfit(text, wanted)
        check_wildcards(text, left, right)
        return cls(text, left, right)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves under their new names."""

        def renamed(leaf, found):
            return [replace(leaf, path=self.right.filled(found))]

        return each(f"--rename {self.text}", self.left, leaves, problems, renamed)


@dataclass(frozen=True)
class Cast:
    """Stores floats in another dtype, rounded to the nearest: `params/**=bfloat16`."""

    text: str
    left: Pattern
    dtype: str

    @classmethod
    def parse(cls, text: str) -> "Cast":
        """Reads `PATTERN=DTYPE`."""
        wanted = "PATTERN=DTYPE of a float dtype, such as params/**=bfloat16"
        left, right, dim = pair(text, wanted)
        if dim is not None or not encoding.is_float(right.text):
            raise unfit(text, wanted)
        return cls(text, left, right.text)

    def apply(self, leaves: Sequence[Made], problems: list[str]) -> list[Made]:
        """The leaves, those that the rule names in its dtype."""

        def as_dtype(leaf, found):
            if encoding.is_float(leaf.dtype):
                return [replace(leaf, dtype=self.dtype)]
            problems.append(
                f"{leaf.name}: the checkpoint has {leaf.described}, asked for {self.dtype}; only floats are cast to "
                f"floats. Choose a narrower pattern."
            )
            return [leaf]

        return each(f"--cast {self.text}", self.left, leaves, problems, as_dtype)


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
