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
from jax.sharding import PartitionSpec as P

from jzero.layout import Layout, spec_of
from jzero.rules import Model


def looked_up(layout: Layout, eqn: Any, table: jax.Array, indices: jax.Array, model: Model) -> jax.Array | None:
    """The result of a `gather` equation, whole on all model shards; None if it is no lookup along the cut dim."""
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    dim = _cut_dim(model)
    if dim is None or dims.start_index_map != (dim,) or dims.collapsed_slice_dims != (dim,):
        return None
    if dims.operand_batching_dims or not jnp.issubdtype(table.dtype, jnp.inexact):
        return None
    last = table.shape[dim] - 1
    if params["mode"] == GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, last)

    def local(part, indices):
        own = indices - lax.axis_index(model[dim]) * part.shape[dim]
        drop = {"mode": GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
        return lax.psum(lax.gather(part, own, dims, params["slice_sizes"], **drop), model[dim])

    found = _on_model_shards(layout, local, (spec_of(model), P()), P())(table, indices)
    if params["mode"] == GatherScatterMode.FILL_OR_DROP:
        there = ((indices >= 0) & (indices <= last))[..., 0]
        rows = [at for at in range(found.ndim) if at not in dims.offset_dims]
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        found = jnp.where(lax.broadcast_in_dim(there, found.shape, rows), found, jnp.asarray(fill, found.dtype))
    return found


def added_up(layout: Layout, eqn: Any, ins: list[jax.Array], model: Model) -> jax.Array | None:
    """The result of a `scatter-add` equation, cut along the vocabulary; None if it adds no rows along that dim."""
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    dim = _cut_dim(model)
    if dim is None or dims.scatter_dims_to_operand_dims != (dim,) or dims.inserted_window_dims != (dim,):
        return None
    if dims.operand_batching_dims or params["mode"] == GatherScatterMode.CLIP:
        return None

    def local(part, indices, updates):
        own = indices - lax.axis_index(model[dim]) * part.shape[dim]
        # Not a negative index, which would count from the end.
        own = jnp.where(own < 0, part.shape[dim], own)
        return lax.scatter_add(part, own, updates, dims, mode=GatherScatterMode.FILL_OR_DROP)

    return _on_model_shards(layout, local, (spec_of(model), P(), P()), spec_of(model))(*ins)


def _cut_dim(model: Model) -> int | None:
    """The only dim that is cut; None if there are several."""
    cut = [dim for dim, axes in enumerate(model) if axes]
    return cut[0] if len(cut) == 1 else None


def _on_model_shards(layout, f, in_specs, out_specs):
    mesh, axes = jax.sharding.get_abstract_mesh(), set(layout.model_axes)
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)
