"""What rules make of the leaves that they name: something of each, or one of several."""

from collections.abc import Callable, Sequence

from jzero.checkpoint.names import Path, shown
from jzero.checkpoint.patterns import Found, Pattern
from jzero.checkpoint.recipe import Made


def each(
    rule: str,
    left: Pattern,
    leaves: Sequence[Made],
    problems: list[str],
    make: Callable[[Made, Found], list[Made]],
) -> list[Made]:
    """The leaves, each that a pattern names replaced by what is made of it.

    Args:
        rule: The rule, for messages.
        left: The pattern.
        leaves: The leaves.
        problems: Gets a sentence if the pattern names none.
        make: Makes others of a leaf and of what the wildcards found.
    """
    made, matched = [], False
    for leaf in leaves:
        found = left.match(leaf.path)
        matched |= found is not None
        made += [leaf] if found is None else make(leaf, found)
    if not matched:
        problems.append(_nothing(rule, leaves))
    return made


def together(
    rule: str,
    leaves: Sequence[Made],
    problems: list[str],
    member: Callable[[Made], tuple[Path, int] | None],
    make: Callable[[Path, dict[int, Made]], Made | None],
) -> list[Made]:
    """The leaves, those that belong together replaced by one, in the place of the first of them.

    Args:
        rule: The rule, for messages.
        leaves: The leaves.
        problems: Gets a sentence if none belong together, and for each that takes the place of another.
        member: The path of the leaf that one becomes a part of, and its number there; None: it stays.
        make: Makes a leaf of its parts, by their numbers; None: it cannot be made, and it has said so.
    """
    groups: dict[Path, dict[int, Made]] = {}
    for leaf in leaves:
        if (found := member(leaf)) is not None:
            path, number = found
            if number in (parts := groups.setdefault(path, {})):
                problems.append(f"{leaf.name}: {rule} finds part {number} of {shown(path)} twice.")
            parts[number] = leaf
    if not groups:
        problems.append(_nothing(rule, leaves))
    made: dict[Path, Made | None] = {}
    for path, parts in groups.items():
        made |= {leaf.path: None for leaf in parts.values()}
        made[parts[min(parts)].path] = make(path, parts)
    kept = [made.get(leaf.path, leaf) for leaf in leaves]
    return [leaf for leaf in kept if leaf is not None]


def _nothing(rule: str, leaves: Sequence[Made]) -> str:
    names = [leaf.name for leaf in leaves]
    have = f"they are from {names[0]} to {names[-1]}" if names else "there are none"
    return f"{rule} matches none of the {len(names)} leaves; {have}. `jzero inspect` lists them."
