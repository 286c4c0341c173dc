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
        TypeError: No dict of patterns.
    """
    if not isinstance(patterns, Mapping) or not all(isinstance(pattern, str) for pattern in patterns.values()):
        raise TypeError(f"norm_groups={patterns!r}; wanted a dict of names and path patterns.")
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
        opt_state, "learning_rate", lambda path, _: len(path) > 1 and getattr(path[-2], "name", "") == "hyperparams"
    )
    if len(found) > 1:
        groups = [_words(path[:-1], "key", "idx") for path, _ in found]
        if len(set(groups)) < len(groups):
            groups = [_words(path[:-1], "key", "idx", "name") for path, _ in found]
        return {"learning_rate": dict(zip(groups, (rate for _, rate in found), strict=True))}
    return {"learning_rate": found[0][1]} if found else {}


def global_norm(grads: Any) -> jax.Array:
    """L2 norm over all leaves, in float32 or wider: low-precision squares would overflow or vanish."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))


def _words(path: Any, *kinds: str) -> str:
    """What a path says by keys of these kinds."""
    return "/".join(str(getattr(key, kind)) for key in path for kind in kinds if hasattr(key, kind))
