"""Structural operations (transpose, reshape, slice, pad) on one shard of an array, and where they move its cut dim."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.rules import Cut


def moved_dim(eqn: Any, dim: int) -> int | None:
    """Where an operation on the whole array moves the dim that is cut; None if it does not keep the shards intact."""
    before, after, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    match eqn.primitive.name:
        case "convert_element_type" | "copy":
            return dim
        case "transpose":
            return params["permutation"].index(dim)
        case "squeeze":
            gone = [d % len(before) for d in params["dimensions"]]
            return None if dim in gone else dim - sum(d < dim for d in gone)
        case "reshape":
            return None if params["dimensions"] is not None else _reshaped_dim(before, after, dim)
        case "broadcast_in_dim":
            to = params["broadcast_dimensions"][dim]
            return to if after[to] == before[dim] else None
        case "pad":
            return dim if tuple(map(int, params["padding_config"][dim])) == (0, 0, 0) else None
        case "slice":
            whole = params["start_indices"][dim] == 0 and params["limit_indices"][dim] == before[dim]
            return dim if whole and (params["strides"] is None or params["strides"][dim] == 1) else None
        case "dynamic_slice":
            return dim if params["slice_sizes"][dim] == before[dim] else None
    return None


def moved(eqn: Any, cut: Cut) -> Cut | None:
    """How the result of an operation on the whole array is cut; None if it does not keep the shards intact."""
    to = {dim: moved_dim(eqn, dim) for dim, axes in enumerate(cut.model) if axes or dim == cut.dim}
    if None in to.values():
        return None
    back = {after: before for before, after in to.items()}
    model = tuple(cut.model[back[dim]] if dim in back else () for dim in range(len(eqn.outvars[0].aval.shape)))
    return replace(cut, dim=None if cut.dim is None else to[cut.dim], model=model)


def moved_from(eqn: Any, cut: Cut) -> Cut | None:
    """How the operand is cut of an operation whose result is cut so; None if the shards would not stay intact."""
    back = {moved_dim(eqn, dim): dim for dim in range(len(eqn.invars[0].aval.shape))}
    if any(dim not in back for dim, axes in enumerate(cut.model) if axes or dim == cut.dim):
        return None
    before = {dim: to for to, dim in back.items() if to is not None}
    model = tuple(cut.model[before[dim]] if dim in before else () for dim in range(len(eqn.invars[0].aval.shape)))
    return replace(cut, dim=None if cut.dim is None else back[cut.dim], model=model)


def _reshaped_dim(before, after, dim):
    ahead = math.prod(before[:dim])
    for to, length in enumerate(after):
        if length == before[dim] and math.prod(after[:to]) == ahead:
            return to
    return None


def on_shard(eqn: Any, shard: jax.Array, dim: int | None, *others: Any) -> jax.Array:
    """Does to a shard, cut along `dim`, what the equation does to the whole array. `moved_dim` must not be None."""
    params = eqn.params
    length, to = (0, None) if dim is None else (shard.shape[dim], moved_dim(eqn, dim))
    shape = tuple(length if d == to else size for d, size in enumerate(eqn.outvars[0].aval.shape))

    def at(values, own):
        return tuple(own if d == dim else value for d, value in enumerate(values))

    match eqn.primitive.name:
        case "convert_element_type":
            return shard.astype(params["new_dtype"])
        case "copy":
            return shard
        case "transpose":
            return lax.transpose(shard, params["permutation"])
        case "squeeze" | "reshape":
            return lax.reshape(shard, shape)
        case "broadcast_in_dim":
            return lax.broadcast_in_dim(shard, shape, params["broadcast_dimensions"])
        case "pad":
            return lax.pad(shard, jnp.asarray(others[0], shard.dtype), params["padding_config"])
        case "slice":
            return lax.slice(shard, params["start_indices"], at(params["limit_indices"], length), params["strides"])
        case "dynamic_slice":
            return lax.dynamic_slice(shard, others, at(params["slice_sizes"], length))
    raise AssertionError(eqn.primitive.name)
