"""Lookups in a table that model axes cut along the vocabulary, and their gradient.

Each model shard looks up the rows that it has, and the results are summed: an all-reduce of the activations over the
model axes, as in Megatron-LM (arXiv:1909.08053, section 3). The gradient adds up, on each model shard, the rows that it
has. The partitioner would gather the table, or all-reduce its whole gradient, where that takes fewer bytes than a long
batch does.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from jzero import scopes
from jzero.collectives import on_model_shards
from jzero.layout import Layout
from jzero.rules import Model


def looked_up(layout: Layout, eqn: Any, table: jax.Array, indices: jax.Array, model: Model) -> jax.Array | None:
    """The result of a `gather` equation, whole on all model shards; None if it is no lookup along the cut dim."""
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    if len(dims.start_index_map) != 1 or dims.collapsed_slice_dims != dims.start_index_map:
        return None
    (dim,) = dims.start_index_map
    if dims.operand_batching_dims or not jnp.issubdtype(table.dtype, jnp.inexact):
        return None
    last = table.shape[dim] - 1
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))  # the vocabulary may not fit an int8
    sizes = params["slice_sizes"]
    if any(axes and at != dim and sizes[at] != table.shape[at] for at, axes in enumerate(model)):
        return None
    if params["mode"] != GatherScatterMode.FILL_OR_DROP:
        indices = jnp.clip(indices, 0, last)

    def local(part, indices):
        own = indices - lax.axis_index(model[dim]) * part.shape[dim] if model[dim] else indices
        drop = {"mode": GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
        own_sizes = tuple(1 if at == dim else min(size, part.shape[at]) for at, size in enumerate(sizes))
        found = lax.gather(part, own, dims, own_sizes, **drop)
        if not model[dim]:
            return found
        with scopes.collective("lookup"):
            return lax.psum(found, model[dim])

    out: list[tuple[str, ...]] = [()] * eqn.outvars[0].aval.ndim
    for at, axes in zip(dims.offset_dims, [axes for at, axes in enumerate(model) if at != dim], strict=True):
        out[at] = axes
    found = on_model_shards(layout, local, [model, ()], out, table, indices)
    if params["mode"] == GatherScatterMode.FILL_OR_DROP:
        there = ((indices >= 0) & (indices <= last))[..., 0]
        rows = [at for at in range(found.ndim) if at not in dims.offset_dims]
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        found = jnp.where(lax.broadcast_in_dim(there, found.shape, rows), found, jnp.asarray(fill, found.dtype))
    return found


def added_up(layout: Layout, eqn: Any, ins: list[jax.Array], model: Model) -> jax.Array | None:
    """The result of a `scatter-add` equation, cut along the vocabulary; None if it adds no rows along that dim."""
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    if dims.operand_batching_dims:
        return None
    if len(dims.scatter_dims_to_operand_dims) != 1 or dims.inserted_window_dims != dims.scatter_dims_to_operand_dims:
        return None
    (dim,) = dims.scatter_dims_to_operand_dims
    beside = [at for at in range(len(model)) if at != dim]
    shape, updates = ins[0].shape, list[tuple[str, ...]]([()] * ins[2].ndim)
    for at, to in zip(beside, dims.update_window_dims, strict=True):
        if model[at] and ins[2].shape[to] != shape[at]:
            return None
        updates[to] = model[at]

    operand, indices, values = ins
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    if params["mode"] == GatherScatterMode.CLIP:  # unlike a lookup, it drops what is out of bounds otherwise
        indices = jnp.clip(indices, 0, shape[dim] - 1)

    def local(part, indices, updates):
        own = indices - lax.axis_index(model[dim]) * part.shape[dim] if model[dim] else indices
        # Not a negative index, which would count from the end.
        own = jnp.where(own < 0, part.shape[dim], own)
        return lax.scatter_add(part, own, updates, dims, mode=GatherScatterMode.FILL_OR_DROP)

    return on_model_shards(layout, local, [model, (), updates], model, operand, indices, values)
