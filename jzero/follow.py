"""Which param each leaf of an optimizer's state follows, so that both are cut alike.

A state leaf with the shape of a param is cut and padded as the param is, by the same rule; where params of that shape
differ over the model axes, it follows the one whose path its own path ends with. Others (the row and column means of
Adafactor, say) follow the rule on their own shape, and stay whole where no dim divides. Placement never changes what is
computed, since the optimizer runs in the global view. Shapes are used rather than `optax.tree_map_params`, which runs
every `tx.init` on placeholders that are no arrays, and so fails for an optimizer that looks at its params.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jzero.check import path_name
from jzero.dtypes import moment_dtype
from jzero.precision import Precision
from jzero.rules import Leaf, Model


def followers(
    state: Iterable[tuple[Any, Any]], params: Sequence[Leaf], cut: Callable[..., Leaf], precision: Precision
) -> Iterator[Leaf]:
    """The leaves of an optimizer's state, cut.

    Args:
        state: Path, and shape and dtype, of each of its leaves.
        params: The params that it is the state of.
        cut: `rules.place` for the shards of a layout.
        precision: In which dtypes it is stored.
    """
    by_path: dict[tuple[int, ...], dict[str, Leaf]] = {}
    models: dict[tuple[int, ...], set[Model]] = {}
    for leaf in params:
        by_path.setdefault(leaf.shape, {}).setdefault(leaf.path, leaf)
        models.setdefault(leaf.shape, set()).add(leaf.model)
    for path, x in state:
        name, alike = path_name(path), by_path.get(x.shape, {})
        owner = _owner(name, alike)
        known = models.get(x.shape, set()) if owner is None else {owner.model}
        leaf = cut(name, x, padded=bool(alike), model=next(iter(known)) if len(known) == 1 else ())
        owner = (owner or next(iter(alike.values()), None)) if x.shape else None
        yield leaf if owner is None else replace(leaf, dtype=moment_dtype(precision, x.dtype, owner.dtypes))


def _owner(name: str, alike: Mapping[str, Leaf]) -> Leaf | None:
    """The leaf whose path the name ends with; of several the one with the longest."""
    ends = (0, *(at + 1 for at, letter in enumerate(name) if letter == "/"), len(name))
    return next((alike[name[start:]] for start in ends if name[start:] in alike), None)
