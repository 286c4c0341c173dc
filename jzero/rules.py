"""Which dim of a leaf is cut, and how far it is padded."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jzero.stage import Placement

MIN_SHARD_SIZE = 4096
"""Leaves with fewer elements stay whole by default: their bytes are few, and each would cost a collective."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of a tree and the dim along which it is cut where a stage shards it.

    Attributes:
        path: Where it is in its tree, as in "blocks/0/kernel".
        shape: Its shape as the loss and the optimizer see it: the logical shape.
        dtype: Its dtype.
        dim: The dim that is cut into one part per shard; None if the leaf stays whole on every device.
        stored: Its shape where it is cut: the logical shape, with `dim` padded by zeros until it divides.
        trainable: Whether it gets a gradient and optimizer state.
        reason: Why it stays whole or is padded; empty if it is neither.
        regather: Whether it is gathered again in the backward pass, or kept from the forward pass.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    stored: tuple[int, ...]
    trainable: bool = True
    reason: str = ""
    regather: bool = True

    def placed(self, placement: Placement) -> jax.ShapeDtypeStruct:
        """Global shape and dtype under a placement: the stored shape if sharded, the logical one if replicated."""
        return jax.ShapeDtypeStruct(self.stored if placement == "sharded" else self.shape, self.dtype)

    def local(self, placement: Placement, shards: int) -> tuple[int, ...]:
        """Shape of what one device holds under a placement."""
        shape = self.placed(placement).shape
        if placement == "replicated":
            return shape
        return tuple(size // shards if dim == self.dim else size for dim, size in enumerate(shape))


def place(path: str, abstract: Any, shards: int, min_shard_size: int, *, padded: bool, trainable: bool = True) -> Leaf:
    """Chooses the dim to cut into `shards` parts.

    That is the largest dim that divides, the first one only where no other does: it may be a stacked layer dim, and a
    scan over layers cannot gather one layer of a leaf that is cut along the layers. Among equals the earlier dim wins:
    its shards are longer runs in memory. Where no dim divides, it is the dim that needs the least padding.

    Args:
        path: Path of the leaf, kept for messages.
        abstract: Anything with a shape and a dtype.
        shards: Number of parts.
        min_shard_size: Leaves with fewer elements than this stay whole.
        padded: Whether a leaf with no dim that divides is padded; otherwise it stays whole.
        trainable: Kept in the result.
    """
    shape, dtype = tuple(abstract.shape), abstract.dtype
    size = math.prod(shape)
    whole = Leaf(path, shape, dtype, None, shape, trainable)

    def stays(reason: str) -> Leaf:
        return Leaf(path, shape, dtype, None, shape, trainable, f"whole on every device: {reason}")

    def up(length: int) -> int:
        return -(-length // shards) * shards

    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return stays(f"{dtype} has no elements that could be cut")
    if not shape:
        return stays("a scalar")
    if size == 0 or size < min_shard_size:
        return stays(f"{size} elements are fewer than min_shard_size={min_shard_size}" if size else "no elements")
    dims = range(len(shape))
    even = [dim for dim in dims if shape[dim] % shards == 0]
    if even:
        dim = max(even, key=lambda dim: (dim > 0, shape[dim], -dim))
        return Leaf(path, shape, dtype, dim, whole.stored, trainable)
    if not padded:
        return stays(f"no dim of {shape} divides by {shards}")
    dim = min(dims, key=lambda dim: (up(shape[dim]) / shape[dim], dim == 0, -shape[dim]))
    stored = (*shape[:dim], up(shape[dim]), *shape[dim + 1 :])
    return Leaf(
        path, shape, dtype, dim, stored, trainable, f"no dim of {shape} divides by {shards}: stored padded to {stored}"
    )
