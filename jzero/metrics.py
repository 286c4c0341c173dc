"""What a step says of itself beside its loss: norms, and the learning rate."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.layout import Layout


def matching(patterns: Mapping[str, str], layout: Layout) -> dict[str, list[int]]:
    """For each name the indices of the trainable leaves whose paths its pattern matches.

    Raises:
        ValueError: A pattern that matches none.
    """
    paths = [leaf.path for leaf in layout.trainable]
    groups = {
        name: [index for index, path in enumerate(paths) if fnmatchcase(path, pattern)]
        for name, pattern in patterns.items()
    }
    if empty := [name for name, group in groups.items() if not group]:
        raise ValueError(
            f"norm_groups: {empty[0]!r} has a pattern {patterns[empty[0]]!r} that matches none of the {len(paths)} "
            f"trainable paths, from {paths[0]!r} to {paths[-1]!r}."
        )
    return groups


def learning_rates(opt_state: Any) -> dict[str, Any]:
    """The `learning_rate` that `optax.inject_hyperparams` keeps in its state: one, or a dict by group; {} if none."""
    found = optax.tree.get_all_with_path(
        opt_state, "learning_rate", lambda path, _: getattr(path[-2], "name", "") == "hyperparams"
    )
    if len(found) > 1:
        groups = [[str(getattr(key, "key", getattr(key, "idx", ""))) for key in path[:-1]] for path, _ in found]
        return {"learning_rate": {"/".join(filter(None, g)): rate for g, (_, rate) in zip(groups, found, strict=True)}}
    return {"learning_rate": found[0][1]} if found else {}


def global_norm(grads: Any) -> jax.Array:
    """L2 norm over all leaves, in float32 or wider: low-precision squares would overflow or vanish."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))
