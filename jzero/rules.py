"""Which dim of a leaf is sharded."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

MIN_SHARD_SIZE = 4096
"""Leaves with fewer elements stay replicated by default: their bytes are few, and each would cost a collective."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of a tree and the dim along which it is cut where a stage shards it.

    Attributes:
        path: Where it is in its tree, as `jax.tree_util.keystr` writes it.
        shape: Its whole shape.
        dtype: Its dtype.
        dim: The dim that is cut into one part per shard; None if the leaf stays whole on every device.
        reason: Why `dim` is None; empty otherwise.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None
    reason: str

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """The whole leaf's shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def shard_shape(self, shards: int) -> tuple[int, ...]:
        """Shape of one of `shards` parts; the whole shape if the leaf is not cut."""
        return tuple(size // shards if dim == self.dim else size for dim, size in enumerate(self.shape))


def place(path: str, abstract, shards: int, min_shard_size: int) -> Leaf:
    """Chooses the dim to cut into `shards` parts: the largest that divides, the first dim only where no other does.

    The first dim comes last because it may be a stacked layer dim, and a scan over layers cannot gather one layer of
    a leaf that is cut along the layers. Among equals the earlier dim wins: its shards are longer runs in memory.

    Args:
        path: Path of the leaf, kept for messages.
        abstract: Anything with a shape and a dtype.
        shards: Number of parts.
        min_shard_size: Leaves with fewer elements than this stay whole.
    """
    shape, dtype = tuple(abstract.shape), jnp.dtype(abstract.dtype)
    size = math.prod(shape)
    fits = [dim for dim, length in enumerate(shape) if length and length % shards == 0]
    dim = None
    if not shape:
        reason = "a scalar stays whole"
    elif size < min_shard_size:
        reason = f"{size} elements are fewer than min_shard_size={min_shard_size}"
    elif not fits:
        reason = f"no dim of {shape} divides by {shards}"
    else:
        reason = ""
        dim = max(fits, key=lambda dim: (dim > 0, shape[dim], -dim))
    return Leaf(path, shape, dtype, dim, reason)
