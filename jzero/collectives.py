"""The collectives that ZeRO promises, leaf by leaf. All but `gather_params` run inside `value_and_grad`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jzero import scopes
from jzero.layout import Layout
from jzero.padding import pad, unpad
from jzero.rounding import scaled
from jzero.rules import Cut, Leaf, Model, spec_of


def wide(layout: Layout, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes with more than one device: a collective over the others would only cost a launch."""
    return tuple(axis for axis in axes if layout.mesh.shape[axis] > 1)


def on_model_shards(
    layout: Layout, f: Callable[..., jax.Array], ins: Sequence[Model], out: Model, *arrays: jax.Array
) -> jax.Array:
    """Runs a function on each model shard apart, within `value_and_grad`.

    The model axes are automatic around it, and in front of a collective of the data axes the partitioner would gather
    an array over them. What arrives in another form, such as a sum that is still in parts on them, is brought into the
    form wanted first.

    Args:
        layout: Names the model axes; without any, `f` runs as it is.
        f: A function of the model shards.
        ins: How the model axes cut each of the arrays.
        out: How they cut the result.
        *arrays: What `f` is given.
    """
    if not layout.model_axes:
        return f(*arrays)
    return jax.shard_map(
        f,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=tuple(map(spec_of, ins)),
        out_specs=spec_of(out),
        axis_names=set(layout.model_axes),
        check_vma=False,
    )(*arrays)


def all_reduce(layout: Layout, x: jax.Array, leaf: Leaf | None = None) -> jax.Array:
    """Sums over all batch axes: one all-reduce of the whole array, or of each model shard of a leaf's gradient."""
    axes = wide(layout, layout.batch_axes)
    if not axes:
        return x
    with scopes.collective("reduce", leaf.path) if leaf else scopes.collective("sum"):
        model = leaf.model if leaf else ()
        return on_model_shards(layout, lambda x: lax.psum(x, axes), [model], model, x)


def gather(layout: Layout, shard: jax.Array, cut: Cut, phase: Literal["forward", "backward"]) -> jax.Array:
    """Makes an array whole, without padding: one all-gather, of each model shard, over the data axes."""
    axes = wide(layout, layout.data_axes)
    whole, dim = shard, cut.dim
    assert dim is not None
    if axes:
        with scopes.collective(phase, cut.path):
            collective = functools.partial(lax.all_gather, axis_name=axes, axis=dim, tiled=True)
            whole = on_model_shards(layout, collective, [cut.model], cut.model, shard)
    return unpad(whole, (*whole.shape[:dim], cut.length, *whole.shape[dim + 1 :]))


def scatter_over_data(layout: Layout, grad: jax.Array, cut: Cut, share: float, born: Any = None) -> jax.Array:
    """The first half of reducing a whole local gradient, times `share`, to this device's shard of it, padded.

    One reduce-scatter over the data axes, of each model shard; in the dtype of the gradient, or `born`, unless the
    precision asks for another.
    """
    dim, axes = cut.dim, wide(layout, layout.data_axes)
    assert dim is not None
    grad = pad(grad, (*grad.shape[:dim], cut.stored, *grad.shape[dim + 1 :]))
    grad = _to_wire(layout, grad, share, grad.dtype if born is None else born)
    collective = functools.partial(lax.psum_scatter, axis_name=axes, scatter_dimension=dim, tiled=True)
    return _in_scope(layout, collective, cut, grad) if axes else grad


def sum_over_replicas(layout: Layout, shard: jax.Array, cut: Cut, share: float) -> jax.Array:
    """The second half: one all-reduce of the shard over the replica axes. It comes as it is accumulated."""
    axes = wide(layout, layout.replica_axes)
    shard = _in_scope(layout, functools.partial(lax.psum, axis_name=axes), cut, shard) if axes else shard
    return _from_wire(layout, shard, share)


def _in_scope(layout: Layout, collective: Callable[..., jax.Array], cut: Cut, x: jax.Array) -> jax.Array:
    with scopes.collective("scatter", cut.path):
        return on_model_shards(layout, collective, [cut.model], cut.model, x)


def reduce(layout: Layout, leaf: Leaf, grad: jax.Array, share: float) -> jax.Array:
    """Sums a leaf's whole local gradient, times `share`, and keeps what the stage's `grads` placement keeps.

    It goes in the dtype that the loss gets the leaf in, whatever it was summed in over microbatches.
    """
    born = leaf.dtypes.compute
    if leaf.cut is None or layout.stage.grads == "replicated":
        return _from_wire(layout, all_reduce(layout, _to_wire(layout, grad, share, born), leaf), share)
    return sum_over_replicas(layout, scatter_over_data(layout, grad, leaf.cut, share, born), leaf.cut, share)


def wire_dtype(layout: Layout, born: Any) -> Any:
    """In which dtype a gradient is reduced that is born in this one."""
    asked = layout.precision.reduce
    return born if asked is None or not jnp.issubdtype(born, jnp.floating) else asked


def _to_wire(layout: Layout, grad: jax.Array, share: float, born: Any) -> jax.Array:
    """A gradient as it is reduced: in the dtype that the precision asks for, times `share` if that comes first."""
    wire = wire_dtype(layout, born)
    return scaled(grad, share, wire) if layout.precision.divides_before(wire) else grad.astype(wire)


def _from_wire(layout: Layout, grad: jax.Array, share: float) -> jax.Array:
    """What becomes of it once it is reduced: it is rounded once more at most, when all is done to it."""
    precision, kept = layout.precision, layout.precision.sum_dtype(grad.dtype)
    return grad.astype(kept) if precision.divides_before(grad.dtype) else scaled(grad, share, kept)


def gather_params(layout: Layout, shards: Sequence[jax.Array]) -> list[jax.Array]:
    """Makes updated trainable params whole again, in the global view: one all-gather a leaf over the data axes.

    The gather is explicit because the partitioner may otherwise choose to gather something else, in another dtype.
    Leaves go in buckets no larger than the largest leaf, and each bucket waits for the one before the last, so that
    what is on the way never takes more memory than two leaves. Left alone, XLA gathers all of them at once.
    """
    cut = [index for index, leaf in enumerate(layout.trainable) if leaf.dim is not None]
    axes = wide(layout, layout.data_axes)
    if not cut or not axes:
        return list(shards)
    leaves = [layout.trainable[index] for index in cut]

    def whole(leaf, part):
        # The shards are put in place explicitly: a gather along an inner dim gets that copy from the compiler, which
        # is free to keep what it copies from until the very end.
        with scopes.collective("update", leaf.path):
            parts = jnp.moveaxis(lax.all_gather(part, axes), 0, leaf.dim)
        whole = parts.reshape(*part.shape[: leaf.dim], -1, *part.shape[leaf.dim + 1 :])
        if leaf.stored == leaf.shape:
            return whole
        return unpad(whole, (*whole.shape[: leaf.dim], leaf.shape[leaf.dim], *whole.shape[leaf.dim + 1 :]))

    def local(parts):
        done = []
        for bucket in _buckets(leaves):
            some = [parts[index] for index in bucket]
            if len(done) >= 2:
                some, done[-2] = lax.optimization_barrier((some, done[-2]))
            done.append([whole(leaves[index], part) for index, part in zip(bucket, some, strict=True)])
        return [leaf for bucket in done for leaf in bucket]

    before, after = ([layout.spec(leaf, placement) for leaf in leaves] for placement in ("sharded", "replicated"))
    gathered = jax.shard_map(local, mesh=layout.mesh, in_specs=(before,), out_specs=after, check_vma=False)(
        [shards[index] for index in cut]
    )
    new = dict(zip(cut, gathered, strict=True))
    return [new.get(index, shard) for index, shard in enumerate(shards)]


def _buckets(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Groups neighbours, as many as fit in the bytes of the largest leaf."""
    sizes = [math.prod(leaf.stored) * leaf.dtype.itemsize for leaf in leaves]
    buckets, free = [], 0
    for index, size in enumerate(sizes):
        if size > free:
            buckets.append([])
            free = max(sizes)
        buckets[-1].append(index)
        free -= size
    return buckets
