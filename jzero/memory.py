"""Bytes per device: what theory says, what a layout stores, and what live arrays take."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.dtypes import dtypes_of, moment_dtype
from jzero.layout import Layout
from jzero.precision import Precision, as_precision
from jzero.rules import Leaf
from jzero.stage import Placement, Stage, as_stage


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that each device holds between steps.

    Attributes:
        params: Bytes of the params.
        opt_state: Bytes of the optimizer state.
        master: Bytes of the master copies; 0 where the optimizer moves on the params themselves.
    """

    params: int
    opt_state: int
    master: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.params + self.opt_state + self.master


def leaf_bytes(layout: Layout, leaf: Leaf, placement: Placement) -> int:
    """Bytes of a leaf on one device, padding included."""
    local = layout.sharding(layout.spec(leaf, placement)).shard_shape(leaf.placed(placement).shape)
    return math.prod(local) * leaf.dtype.itemsize


def stored_bytes(layout: Layout, tx: optax.GradientTransformation) -> StoredBytes:
    """Bytes per device of params, master copies and optimizer state under a layout, leaf by leaf, from shapes alone.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((512, 64), "float32")}
        >>> layout = jzero.zero(params, stage=1, mesh=jzero.make_mesh(data=-1))
        >>> stored_bytes(layout, optax.sgd(0.1, momentum=0.9))
        StoredBytes(params=131072, opt_state=16384, master=0)
    """
    _, opt = layout.opt_leaves(tx)
    return StoredBytes(
        sum(leaf_bytes(layout, leaf, layout.stage.params) for leaf in layout.leaves),
        sum(leaf_bytes(layout, leaf, layout.stage.opt_state) for leaf in opt),
        sum(leaf_bytes(layout, leaf, layout.stage.opt_state) for leaf in layout.masters[1]),
    )


def gradient_bytes(layout: Layout) -> int:
    """Bytes per device of the reduced gradients, which live only inside of a step; without a loss scale."""
    leaves = [replace(leaf, dtype=leaf.dtypes.grad) for leaf in layout.trainable]
    return sum(leaf_bytes(layout, leaf, layout.stage.grads) for leaf in leaves)


@dataclass(frozen=True)
class Formula:
    """Bytes per device that ZeRO promises.

    Attributes:
        params: The params, between steps.
        master: Their master copies; 0 where the optimizer moves on the params themselves.
        opt_state: Optimizer state.
        gradients: The reduced gradients inside of a step. At stages 2 and 3 whole ones of one block come on top.
    """

    params: float
    master: float
    opt_state: float
    gradients: float

    @property
    def stored(self) -> float:
        """Between steps: params, master copies and optimizer state."""
        return self.params + self.master + self.opt_state


def formula(
    stage: int | Stage, *, params: float, shards: int, precision: str | Precision = "fp32", moments: float = 2
) -> Formula:
    """Bytes per device that ZeRO promises: 12P, 4P + 8P/N and 12P/N stored, for Adam in float32.

    With `"bf16"` or `"fp16"` they are 14P, 2P + 12P/N and 12P/N, with `"bf16-pure"` half of float32. Counts the papers'
    way: every element is cut, scalars are left out (arXiv:1910.02054, section 5). The papers' totals, 16P for Adam in
    mixed precision, hold 2P of gradients as well, which jzero accumulates in float32 (4P) unless told otherwise.

    Args:
        stage: 0 to 3, or a `Stage`.
        params: P, number of param elements, in float32 in the caller's tree.
        shards: N, number of devices over which they are cut.
        precision: As for `zero`; none of the leaves exempt.
        moments: Elements of optimizer state per param: 2 for Adam, 1 for momentum, 0 for plain SGD.

    Example:
        >>> [formula(stage, params=1_000_000, shards=8).stored for stage in range(4)]
        [12000000.0, 5000000.0, 5000000.0, 1500000.0]
        >>> [formula(stage, params=1_000_000, shards=8, precision="bf16").stored for stage in range(4)]
        [14000000.0, 3500000.0, 3500000.0, 1500000.0]
    """
    stage, precision = as_stage(stage), as_precision(precision)
    if shards < 1:
        raise ValueError(f"formula: shards={shards}; wanted 1 or more.")
    share = {"replicated": 1, "sharded": shards}
    stored, dtypes = dtypes_of(precision, stage, "", jnp.dtype("float32"), trainable=True)
    master = 0 if stored == dtypes.master else dtypes.master.itemsize
    moment = moment_dtype(precision, dtypes.update, dtypes).itemsize
    return Formula(
        params * stored.itemsize / share[stage.params],
        params * master / share[stage.opt_state],
        params * moments * moment / share[stage.opt_state],
        params * dtypes.grad.itemsize / share[stage.grads],
    )


def live_bytes(tree: Any) -> dict[jax.Device, int]:
    """Bytes that the arrays of a tree take on each device of this process, counted on their shards."""
    found: dict[jax.Device, int] = defaultdict(int)
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"live_bytes: a {type(leaf).__name__} lives on no device; pass jax.Arrays.")
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return dict(found)
