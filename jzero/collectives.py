"""The collectives that ZeRO promises, leaf by leaf. All but `gather_params` run inside `value_and_grad`."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.layout import Layout
from jzero.padding import pad, unpad
from jzero.rules import Leaf


def wide(layout: Layout, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes with more than one device: a collective over the others would only cost a launch."""
    return tuple(axis for axis in axes if layout.mesh.shape[axis] > 1)


def all_reduce(layout: Layout, x: jax.Array) -> jax.Array:
    """Sums over all batch axes: one all-reduce of the whole array."""
    axes = wide(layout, layout.batch_axes)
    return lax.psum(x, axes) if axes else x


def gather(layout: Layout, shard: jax.Array, dim: int, length: int) -> jax.Array:
    """Makes an array whole from its shards along `dim`, cut to `length` there: one all-gather over the data axes."""
    axes = wide(layout, layout.data_axes)
    whole = lax.all_gather(shard, axes, axis=dim, tiled=True) if axes else shard
    return unpad(whole, (*whole.shape[:dim], length, *whole.shape[dim + 1 :]))


def scatter(layout: Layout, grad: jax.Array, dim: int, length: int) -> jax.Array:
    """Sums a whole local gradient over all batch axes and keeps this device's shard along `dim`, padded to `length`.

    One reduce-scatter over the data axes, then an all-reduce of the shard over the replica axes.
    """
    grad = pad(grad, (*grad.shape[:dim], length, *grad.shape[dim + 1 :]))
    if axes := wide(layout, layout.data_axes):
        grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
    if axes := wide(layout, layout.replica_axes):
        grad = lax.psum(grad, axes)
    return grad


def reduce(layout: Layout, leaf: Leaf, grad: jax.Array) -> jax.Array:
    """Sums a leaf's whole local gradient over all batch axes and keeps what the stage's `grads` placement keeps."""
    if leaf.dim is None or layout.stage.grads == "replicated":
        return all_reduce(layout, grad)
    return scatter(layout, grad, leaf.dim, leaf.stored[leaf.dim])


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
        parts = jnp.moveaxis(lax.all_gather(part, axes), 0, leaf.dim)
        return unpad(parts.reshape(leaf.stored), leaf.shape)

    def local(parts):
        done = []
        for bucket in _buckets(leaves):
            some = [parts[index] for index in bucket]
            if len(done) >= 2:
                some, done[-2] = lax.optimization_barrier((some, done[-2]))
            done.append([whole(leaves[index], part) for index, part in zip(bucket, some, strict=True)])
        return [leaf for bucket in done for leaf in bucket]

    specs = [layout.spec(leaf, "sharded") for leaf in leaves]
    gathered = jax.shard_map(
        local, mesh=layout.mesh, in_specs=(specs,), out_specs=P(), axis_names=set(layout.batch_axes), check_vma=False
    )([shards[index] for index in cut])
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
