"""Bytes per device: what theory says, what a layout stores, and what live arrays take."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jzero.layout import Layout
from jzero.rules import Leaf
from jzero.stage import Placement, Stage, as_stage


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that each device holds between steps.

    Attributes:
        params: Bytes of the params.
        opt_state: Bytes of the optimizer state.
    """

    params: int
    opt_state: int

    @property
    def total(self) -> int:
        """Params and optimizer state together."""
        return self.params + self.opt_state


def leaf_bytes(layout: Layout, leaf: Leaf, placement: Placement) -> int:
    """Bytes of a leaf on one device, padding included."""
    local = layout.sharding(layout.spec(leaf, placement)).shard_shape(leaf.placed(placement).shape)
    return math.prod(local) * leaf.dtype.itemsize


def stored_bytes(layout: Layout, tx: optax.GradientTransformation) -> StoredBytes:
    """Bytes per device of params and optimizer state under a layout, leaf by leaf, from shapes alone.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((512, 64), "float32")}
        >>> layout = jzero.zero(params, stage=1, mesh=jzero.make_mesh(data=-1))
        >>> stored_bytes(layout, optax.sgd(0.1, momentum=0.9))
        StoredBytes(params=131072, opt_state=16384)
    """
    _, opt = layout.opt_leaves(tx)
    return StoredBytes(
        sum(leaf_bytes(layout, leaf, layout.stage.params) for leaf in layout.leaves),
        sum(leaf_bytes(layout, leaf, layout.stage.opt_state) for leaf in opt),
    )


def formula(stage: int | Stage, *, params: int, shards: int, param_bytes: int = 4, moments: int = 2) -> float:
    """Bytes per device that ZeRO promises between steps: 12P, 4P + 8P/N and 12P/N for Adam in float32.

    Counts the papers' way: every element is cut, scalars are left out (arXiv:1910.02054, section 5).

    Args:
        stage: 0 to 3, or a `Stage`.
        params: P, number of param elements.
        shards: N, number of devices over which they are cut.
        param_bytes: Bytes of one param, and of one element of a moment.
        moments: Elements of optimizer state per param: 2 for Adam, 1 for momentum, 0 for plain SGD.

    Example:
        >>> [formula(stage, params=1_000_000, shards=8) for stage in range(4)]
        [12000000.0, 5000000.0, 5000000.0, 1500000.0]
    """
    stage = as_stage(stage)
    if shards < 1:
        raise ValueError(f"formula: shards={shards}; wanted 1 or more.")
    share = {"replicated": 1, "sharded": shards}
    return params * param_bytes * (1 / share[stage.params] + moments / share[stage.opt_state])


def live_bytes(tree: Any) -> dict[jax.Device, int]:
    """Bytes that the arrays of a tree take on each device of this process, counted on their shards."""
    found: dict[jax.Device, int] = defaultdict(int)
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"live_bytes: a {type(leaf).__name__} lives on no device; pass jax.Arrays.")
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return dict(found)
