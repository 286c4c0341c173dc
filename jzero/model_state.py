"""Model state: what a loss changes without a gradient (running means, counters), made equal on all batch shards."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from jzero import scopes
from jzero.collectives import all_reduce, wide
from jzero.layout import Layout
from jzero.padding import is_concrete


def _averaged(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def must_agree(model_state: Any) -> list[str]:
    """Paths of the leaves that no mean can reconcile: integers, bools and random keys."""
    return [keystr(path) for path, x in tree_flatten_with_path(model_state)[0] if not _averaged(x)]


def merge(layout: Layout, model_state: Any) -> tuple[Any, jax.Array]:
    """Makes the model states of all batch shards one, inside of `value_and_grad`.

    Floating leaves are averaged: one all-reduce each. The others must be the same everywhere: their minimum and maximum
    over the batch axes are compared, and the maximum is kept, so that devices never drift apart.

    Returns:
        The state, and one bool for each of `must_agree(model_state)`: whether its shards differ.
    """
    axes = wide(layout, layout.batch_axes)
    differ = []

    def one(x):
        if _averaged(x):
            return (all_reduce(layout, x) / layout.batch_shards).astype(x.dtype)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if is_key else x.astype(jnp.int32) if x.dtype == bool else x
        with scopes.collective("agree"):
            low, high = (lax.pmin(data, axes), lax.pmax(data, axes)) if axes else (data, data)
        differ.append(jnp.any(low != high))
        return jax.random.wrap_key_data(high, impl=jax.random.key_impl(x)) if is_key else high.astype(x.dtype)

    merged = jax.tree.map(one, model_state)
    return merged, jnp.stack(differ) if differ else jnp.zeros(0, bool)


def warn_differing(model_state: Any, differ: jax.Array) -> None:
    """Warns, on the host, of leaves that were not the same on all batch shards; tracers pass."""
    if not is_concrete(differ) or not differ.size:
        return
    paths = [path for path, differs in zip(must_agree(model_state), jax.device_get(differ), strict=True) if differs]
    if paths:
        warnings.warn(
            f"model_state{', model_state'.join(paths)}: loss_fn returned different values on different batch shards, "
            f"and integers, bools and random keys cannot be averaged; the largest was kept. Update them in the same "
            f"way on every shard, or reduce them over layout.batch_axes in the loss.",
            stacklevel=3,
        )
