"""A training state as leaves with names and logical shapes, the same at every stage, and back.

| part | what |
|---|---|
| params | of each trained param what the optimizer moves: its master copy, or the param itself; the other params |
| opt_state | the state of the optimizer |
| step, key, model_state, loss_scale, skipped | as in `TrainState` |

The copy of the params in the compute dtype, which stages 0 to 2 keep beside the master weights, is not saved: it is the
master weights rounded, and is made again in the same way.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding
from jax.tree_util import tree_flatten_with_path

from jzero.checkpoint import encoding
from jzero.checkpoint.names import Path, keys
from jzero.guard import Skipped
from jzero.layout import Layout
from jzero.loss_scale import DynamicLossScale, as_loss_scale
from jzero.padding import unpad
from jzero.partition import combine, partition
from jzero.rounding import cast
from jzero.rules import Leaf
from jzero.state import TrainState, check_state, owned

PARTS = ("params", "opt_state", "step", "key", "model_state", "loss_scale", "skipped")
"""The parts of a state, in the order in which they are saved."""


def chosen(method: str, only: Sequence[str]) -> tuple[str, ...]:
    """The parts that are named, in their order."""
    if isinstance(only, str) or not only or not set(only) <= set(PARTS):
        raise ValueError(f"{method}: only={only!r}; wanted a list of some of {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if part in only)


@dataclass(frozen=True)
class Item:
    """One leaf of a state that is to be saved.

    Attributes:
        path: Where it is in the tree of the checkpoint.
        array: The array, padded if the layout pads it.
        shape: Its logical shape.
    """

    path: Path
    array: jax.Array
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Want:
    """One leaf of a state that is to be restored.

    Attributes:
        path: Where it is in the tree of the checkpoint.
        shape: Its logical shape.
        dtype: Name of its dtype.
        stored: The shape of the array to make: the logical one, padded if the layout pads it.
        sharding: Where that lives.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    stored: tuple[int, ...]
    sharding: Sharding


def items(state: TrainState, tx: Any, layout: Layout, only: Sequence[str] = PARTS) -> list[Item]:
    """The leaves of a state.

    Raises:
        ValueError: It is not a state of this layout and `tx`.
    """
    check_state(state, tx, layout)
    params = combine(layout.trainable_treedef.unflatten(owned(state, layout)), partition(state.params, layout)[1])
    trees = {name: getattr(state, name) for name in PARTS} | {"params": params}
    leaves = {"params": layout.leaves, "opt_state": layout.opt_leaves(tx)[1]}
    found = []
    for part in only:
        named = tree_flatten_with_path(trees[part])[0]
        for (path, x), leaf in zip(named, leaves.get(part) or [None] * len(named), strict=True):
            array = x if isinstance(x, jax.Array) else jnp.asarray(x)
            found.append(Item((part, *keys(path)), array, array.shape if leaf is None else leaf.shape))
    return found


def wants(
    tx: Any,
    layout: Layout,
    only: Sequence[str] = PARTS,
    *,
    key: Any = None,
    model_state: Any = None,
    loss_scale: float | DynamicLossScale | None = None,
) -> dict[str, tuple[Any, list[Want]]]:
    """For each part of a state its structure, and what its leaves should be.

    Raises:
        TypeError: A leaf of the model state has no shape and dtype.
    """
    stage, whole = layout.stage, layout.sharding(jax.sharding.PartitionSpec())
    scale = None if loss_scale is None else as_loss_scale(loss_scale).init()
    others = {"step": jnp.int32(0), "key": key, "model_state": model_state, "loss_scale": scale}
    others["skipped"] = Skipped.none()

    def placed(path, leaf: Leaf, dtype, placement):
        sharding = layout.sharding(layout.spec(leaf, placement))
        return Want(path, leaf.shape, str(dtype), leaf.placed(placement).shape, sharding)

    def plain(path, x):
        if not hasattr(x, "dtype"):
            x = jnp.asarray(x)
        return Want(path, tuple(x.shape), encoding.name_of(x), tuple(x.shape), whole)

    found: dict[str, tuple[Any, list[Want]]] = {}
    for part in only:
        if part == "params":
            named = tree_flatten_with_path(layout.treedef.unflatten(layout.leaves))[0]
            found[part] = (
                layout.treedef,
                [
                    placed(
                        (part, *keys(path)),
                        leaf,
                        leaf.dtypes.master,
                        stage.opt_state if leaf.has_master else stage.params,
                    )
                    for path, leaf in named
                ],
            )
        elif part == "opt_state":
            treedef, leaves = layout.opt_leaves(tx)
            named = tree_flatten_with_path(treedef.unflatten(leaves))[0]
            found[part] = (
                treedef,
                [placed((part, *keys(path)), leaf, leaf.dtype, stage.opt_state) for path, leaf in named],
            )
        else:
            named, treedef = tree_flatten_with_path(others[part])
            found[part] = treedef, [plain((part, *keys(path)), x) for path, x in named]
    return found


def params_of(arrays: Sequence[jax.Array], layout: Layout) -> tuple[Any, Any]:
    """The params and the master copies of a state, from what was saved as params."""
    params = [_copy(x, leaf, layout) if leaf.has_master else x for x, leaf in zip(arrays, layout.leaves, strict=True)]
    masters = [x for x, leaf in zip(arrays, layout.leaves, strict=True) if leaf.has_master]
    return layout.treedef.unflatten(params), layout.masters[0].unflatten(masters)


def _copy(master: jax.Array, leaf: Leaf, layout: Layout) -> jax.Array:
    """The param that is a copy of its master, rounded and placed as the update of a step does."""
    placement = layout.stage.params
    shape, sharding = leaf.placed(placement).shape, layout.sharding(layout.spec(leaf, placement))
    return _rounded(master, shape, leaf.dtype, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rounded(master, shape, dtype, sharding):
    return lax.with_sharding_constraint(unpad(cast(master, dtype), shape), sharding)


def each(found: dict[str, tuple[Any, list[Want]]]) -> Iterator[Want]:
    """All leaves that are wanted, in order."""
    for _, wanted in found.values():
        yield from wanted


def described(layout: Layout) -> dict[str, Any]:
    """What a manifest says of a layout."""
    precision = {
        name: value if isinstance(value, bool | tuple | str | None) else str(value)
        for name, value in asdict(layout.precision).items()
    }
    return {
        "mesh": dict(layout.mesh.shape),
        "data_axes": layout.data_axes,
        "replica_axes": layout.replica_axes,
        "processes": jax.process_count(),
        "stage": asdict(layout.stage),
        "min_shard_size": layout.min_shard_size,
        "precision": precision,
    }
