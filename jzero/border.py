"""Across the border of `value_and_grad`'s shard_map: from global arrays to what each data shard holds, and back.

A shard_map that is manual over the data axes only can take a dim apart over these, or leave it to the automatic axes,
but where both cut one dim it puts the data axes first. Shards of whole model shards need them last. So such a dim
crosses the border as two, the model shards and what is in each; the reshapes move nothing.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.layout import Layout
from jzero.rules import Leaf, spec_of
from jzero.stage import Placement


def border_spec(layout: Layout, leaf: Leaf, placement: Placement) -> P:
    """PartitionSpec over the data axes of what crosses the border."""
    if placement == "replicated" or leaf.dim is None:
        return P()
    return spec_of([*[()] * (leaf.dim + leaf.twice_cut), layout.data_axes])


def enter(layout: Layout, leaf: Leaf, x: jax.Array, placement: Placement) -> jax.Array:
    """Outside, before the border: the global array as it crosses."""
    if not layout.model_axes:
        return x
    x = _constrained(layout, x, layout.spec(leaf, placement))
    return _constrained(layout, _split(layout, leaf, x), _split_spec(layout, leaf)) if _two(leaf, placement) else x


def entered(leaf: Leaf, x: jax.Array, placement: Placement) -> jax.Array:
    """Inside, behind the border: what the data shard holds."""
    return _merge(leaf, x) if _two(leaf, placement) else x


def leave(layout: Layout, leaf: Leaf, x: jax.Array, placement: Placement) -> jax.Array:
    """Inside, before the border: what the data shard holds, as it crosses."""
    return _split(layout, leaf, x) if _two(leaf, placement) else x


def left(layout: Layout, leaf: Leaf, x: jax.Array, placement: Placement) -> jax.Array:
    """Outside, behind the border: the global array."""
    if not layout.model_axes:
        return x
    x = _merge(leaf, _constrained(layout, x, _split_spec(layout, leaf))) if _two(leaf, placement) else x
    return _constrained(layout, x, layout.spec(leaf, placement))


def _two(leaf: Leaf, placement: Placement) -> bool:
    return placement == "sharded" and leaf.twice_cut


def _split(layout: Layout, leaf: Leaf, x: Any) -> jax.Array:
    dim = leaf.dim
    assert dim is not None
    return x.reshape(*x.shape[:dim], layout.size(leaf.model[dim]), -1, *x.shape[dim + 1 :])


def _merge(leaf: Leaf, x: Any) -> jax.Array:
    dim = leaf.dim
    assert dim is not None
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _split_spec(layout: Layout, leaf: Leaf) -> P:
    assert leaf.dim is not None
    return spec_of([*leaf.model[: leaf.dim + 1], layout.data_axes, *leaf.model[leaf.dim + 1 :]])


def _constrained(layout: Layout, x: Any, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(x, layout.sharding(spec))
