"""Which dim of a leaf the data axes cut, beside those that rules give to other axes, and how far it is padded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jzero.dtypes import Dtypes
from jzero.stage import Placement

MIN_SHARD_SIZE = 4096
"""Leaves with fewer elements stay whole by default: their bytes are few, and each would cost a collective."""


Model = Sequence[tuple[str, ...]]
"""For each dim, the axes beside the data axes that cut it: those of tensor parallelism."""


@dataclass(frozen=True)
class Cut:
    """How an array that is cut lies on the devices.

    Attributes:
        dim: The dim that the data axes cut; None if it is whole over them.
        length: Its length in the whole array.
        stored: The same with padding: a multiple of the number of shards.
        model: The axes that cut each dim beside them.
        path: Path of the leaf that it is, or is the gradient of.
    """

    dim: int | None
    length: int
    stored: int
    model: Model
    path: str = ""

    @property
    def first(self) -> bool:
        """Whether the first dim is cut."""
        return self.dim == 0 or bool(self.model[0])

    def inside(self) -> "Cut":
        """The same without the first dim."""
        return replace(self, dim=None if self.dim is None else self.dim - 1, model=self.model[1:])

    def outside(self) -> "Cut":
        """The same with one more dim in front."""
        return replace(self, dim=None if self.dim is None else self.dim + 1, model=((), *self.model))

    def gathered(self) -> "Cut":
        """The same, whole over the data axes."""
        return replace(self, dim=None)


@dataclass(frozen=True)
class Leaf:
    """One leaf of a tree and the dim along which it is cut where a stage shards it.

    Attributes:
        path: Where it is in its tree, as in "blocks/0/kernel".
        shape: Its shape as the loss and the optimizer see it: the logical shape.
        dtype: Its dtype as it is stored.
        dim: The dim that is cut into one part per shard; None if the leaf stays whole on every device.
        stored: Its shape where it is cut: the logical shape, with `dim` padded by zeros until it divides.
        dtypes: Its other dtypes.
        trainable: Whether it gets a gradient and optimizer state.
        reason: Why it stays whole or is padded; empty if it is neither.
        regather: Whether it is gathered again in the backward pass, or kept from the forward pass.
        model: For each dim, the axes that cut it at every stage, from the rules. Where `dim` is one of these dims, each
            model shard is cut once more.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    stored: tuple[int, ...]
    dtypes: Dtypes
    trainable: bool = True
    reason: str = ""
    regather: bool = True
    model: Model = ()

    @property
    def cut(self) -> Cut | None:
        """How it lies where a stage shards it; None if it stays whole over the data axes."""
        if self.dim is None:
            return None
        return Cut(self.dim, self.shape[self.dim], self.stored[self.dim], self.model, self.path)

    @property
    def model_cut(self) -> Cut | None:
        """How it lies where it is whole over the data axes; None if it is whole over the model axes as well."""
        return Cut(None, 0, 0, self.model) if any(self.model) else None

    @property
    def twice_cut(self) -> bool:
        """Whether model axes and data axes cut the same dim."""
        return self.dim is not None and bool(self.model) and bool(self.model[self.dim])

    @property
    def has_master(self) -> bool:
        """Whether the optimizer moves on a copy, and not on the param itself."""
        return self.dtype != self.dtypes.master

    def grad_dtype(self, *, scaled: bool) -> Any:
        """Dtype of its gradient; at least float32 where a loss scale is divided out, or what it saved would be lost."""
        return jnp.promote_types(self.dtypes.grad, jnp.float32) if scaled else self.dtypes.grad

    def placed(self, placement: Placement) -> jax.ShapeDtypeStruct:
        """Global shape and dtype under a placement: the stored shape if sharded, the logical one if replicated."""
        return jax.ShapeDtypeStruct(self.stored if placement == "sharded" else self.shape, self.dtype)

    def local(self, placement: Placement, shards: int) -> tuple[int, ...]:
        """Shape of what one data shard holds under a placement, over all model shards."""
        shape = self.placed(placement).shape
        if placement == "replicated":
            return shape
        return tuple(size // shards if dim == self.dim else size for dim, size in enumerate(shape))


def place(
    path: str,
    abstract: Any,
    shards: int,
    min_shard_size: int,
    *,
    padded: bool,
    trainable: bool = True,
    model: Model = (),
    sizes: Mapping[str, int] | None = None,
) -> Leaf:
    """Chooses the dim to cut into `shards` parts.

    That is the largest dim that divides, the first one only where no other does: it may be a stacked layer dim, and a
    scan over layers cannot gather one layer of a leaf that is cut along the layers. Among equals the earlier dim wins:
    its shards are longer runs in memory. A dim that model axes cut is taken only where no other divides. Where none
    does, it is the dim that needs the least padding.

    Args:
        path: Path of the leaf, kept for messages.
        abstract: Anything with a shape and a dtype.
        shards: Number of parts.
        min_shard_size: Leaves with fewer elements than this stay whole.
        padded: Whether a leaf with no dim that divides is padded; otherwise it stays whole.
        trainable: Kept in the result.
        model: The axes that cut each dim already.
        sizes: Size of each of these axes.
    """
    shape, dtype = tuple(abstract.shape), abstract.dtype
    size, dims = math.prod(shape), range(len(shape))
    model = model or ((),) * len(shape)
    parts = [math.prod((sizes or {})[axis] for axis in axes) for axes in model]

    def leaf(dim: int | None, stored: tuple[int, ...], reason: str = "") -> Leaf:
        return Leaf(path, shape, dtype, dim, stored, Dtypes.of(dtype), trainable, reason, model=model)

    def stays(reason: str) -> Leaf:
        return leaf(
            None, shape, f"whole on every data shard: {reason}" if any(model) else f"whole on every device: {reason}"
        )

    def up(length: int) -> int:
        return -(-length // shards) * shards

    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return stays(f"{dtype} has no elements that could be cut")
    if not shape:
        return stays("a scalar")
    if size == 0 or size < min_shard_size:
        return stays(f"{size} elements are fewer than min_shard_size={min_shard_size}" if size else "no elements")
    free = [dim for dim in dims if not model[dim]]
    even = [dim for dim in free if shape[dim] % shards == 0]
    if even:
        return leaf(max(even, key=lambda dim: (dim > 0, shape[dim], -dim)), shape)
    twice = [dim for dim in dims if model[dim] and shape[dim] % (parts[dim] * shards) == 0]
    if twice:
        return leaf(max(twice, key=lambda dim: (dim > 0, shape[dim], -dim)), shape)
    if not padded or not free:
        return stays(f"no dim of {shape} divides by {shards}" + (" beside its rule" if any(model) else ""))
    dim = min(free, key=lambda dim: (up(shape[dim]) / shape[dim], dim == 0, -shape[dim]))
    stored = (*shape[:dim], up(shape[dim]), *shape[dim + 1 :])
    return leaf(dim, stored, f"no dim of {shape} divides by {shards}: stored padded to {stored}")


def axes_of(spec: P) -> list[tuple[str, ...]]:
    """The axes of each dim that a PartitionSpec of axis names and None names."""
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]


def spec_of(axes: Sequence[tuple[str, ...]]) -> P:
    """A PartitionSpec from the axes of each dim, without the dims at the end that nothing cuts."""
    length = max((dim + 1 for dim, names in enumerate(axes) if names), default=0)
    return P(*(names[0] if len(names) == 1 else names or None for names in axes[:length]))


def is_plain(spec: Any) -> bool:
    """Whether this is a PartitionSpec of axis names and None."""
    return isinstance(spec, P) and P.UNCONSTRAINED not in tuple(spec)
