"""Which param each leaf of an optimizer's state follows, so that both are cut alike.

A state leaf with the shape of a param is cut and padded as the param is, by the same rule; where params of that shape
differ over the model axes, it follows the one whose path its own path ends with. Others (the row and column means of
Adafactor, say) follow the rule on their own shape, and stay whole where no dim divides. Placement never changes what is
computed, since the optimizer runs in the global view. Shapes are used rather than `optax.tree_map_params`, which runs
every `tx.init` on placeholders that are no arrays, and so fails for an optimizer that looks at its params.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax
from jax.tree_util import PyTreeDef, tree_flatten_with_path

from jzero.check import path_name
from jzero.dtypes import moment_dtype
from jzero.precision import Precision
from jzero.rules import Leaf, Model


def followers(
    tx: optax.GradientTransformation,
    treedef: PyTreeDef,
    params: Sequence[Leaf],
    cut: Callable[..., Leaf],
    precision: Precision,
) -> tuple[PyTreeDef, tuple[Leaf, ...]]:
    """Structure and leaves of an optimizer's state.

    Args:
        tx: The optimizer.
        treedef: Structure of the params that it moves.
        params: Their leaves.
        cut: `rules.place` for the shards of a layout.
        precision: In which dtypes the state is stored.
    """
    by_path: dict[tuple[int, ...], dict[str, Leaf]] = {}
    models: dict[tuple[int, ...], set[Model]] = {}
    for leaf in params:
        by_path.setdefault(leaf.shape, {}).setdefault(leaf.path, leaf)
        models.setdefault(leaf.shape, set()).add(leaf.model)

    def follower(path: Any, x: jax.ShapeDtypeStruct) -> Leaf:
        name, alike = path_name(path), by_path.get(x.shape, {})
        owner = _owner(name, alike)
        known = models.get(x.shape, set()) if owner is None else {owner.model}
        leaf = cut(name, x, padded=bool(alike), model=next(iter(known)) if len(known) == 1 else ())
        owner = (owner or next(iter(alike.values()), None)) if x.shape else None
        return leaf if owner is None else replace(leaf, dtype=moment_dtype(precision, x.dtype, owner.dtypes))

    abstract = treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtypes.update) for leaf in params])
    state, structure = tree_flatten_with_path(jax.eval_shape(tx.init, abstract))
    return structure, tuple(follower(path, x) for path, x in state)


def _owner(name: str, alike: Mapping[str, Leaf]) -> Leaf | None:
    """The leaf whose path the name ends with; of several the one with the longest."""
    ends = (0, *(at + 1 for at, letter in enumerate(name) if letter == "/"), len(name))
    return next((alike[name[start:]] for start in ends if name[start:] in alike), None)
