"""Params as two trees: what is trained, and the rest."""

from typing import Any

import jax

from jzero.check import check_structure
from jzero.layout import Layout


def partition(params: Any, layout: Layout) -> tuple[Any, Any]:
    """Splits params into the trainable leaves and the rest: two trees of the same containers, None where a leaf is not.

    The optimizer sees the first only, and gradients have its structure. Nothing is copied.

    Args:
        params: A tree with the structure that the layout was made for.
        layout: Says which leaves are trained.

    Returns:
        `(trainable, rest)`.

    Raises:
        ValueError: `params` has another structure.

    Example:
        >>> layout = jzero.zero({"n": jnp.ones(2, int), "w": jnp.ones(2)}, stage=0, mesh=jzero.make_mesh(data=-1))
        >>> partition({"n": 3, "w": 0.5}, layout)
        ({'n': None, 'w': 0.5}, {'n': 3, 'w': None})
    """
    leaves = [leaf for _, leaf in check_structure("params", params, layout.treedef)]
    pairs = [(x, None) if leaf.trainable else (None, x) for x, leaf in zip(leaves, layout.leaves, strict=True)]
    return layout.treedef.unflatten([a for a, _ in pairs]), layout.treedef.unflatten([b for _, b in pairs])


def combine(trainable: Any, rest: Any) -> Any:
    """Puts the two trees of `partition` together again.

    Args:
        trainable: The first tree.
        rest: The second; it has None where the first has a leaf. A None in both is the user's own.

    Returns:
        The tree of both.

    Raises:
        ValueError: The trees do not fit together.

    Example:
        >>> combine({"n": None, "w": 0.5}, {"n": 3, "w": None})
        {'n': 3, 'w': 0.5}
    """

    def either(path, a, b):
        if a is not None and b is not None:
            raise ValueError(f"combine: both trees have a leaf at {jax.tree_util.keystr(path) or 'the root'}.")
        return b if a is None else a

    return jax.tree_util.tree_map_with_path(either, trainable, rest, is_leaf=lambda x: x is None)
