"""What a step moves for each leaf, three times: by the ledger, by the engine's own account, and in its program."""

from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp

from jzero.collectives import wide
from jzero.layout import Layout
from jzero.run import Account
from jzero.stream import reduces_in_backward
from jzero.tally import Collective, Origin
from jzero.traffic import pieces_of, traffic

LEAVES = {
    "forward": "gather, forward",
    "backward": "gather, backward",
    "update": "gather, update",
    "scatter": "reduce",
    "reduce": "reduce",
}
"""What the ledger calls the purposes of the collectives that jzero runs on a leaf."""


Key = tuple[str, str, str, tuple[str, ...]]  # what, leaf, kind, axes
Sizes = dict[Key, Counter[str]]  # bytes of the whole arrays by dtype


def of_ledger(layout: Layout, microbatches: int) -> Sizes:
    """By the stage table and the params alone."""
    data, replica = (
        {axis: layout.mesh.shape[axis] for axis in axes} for axes in (layout.data_axes, layout.replica_axes)
    )
    sizes: Sizes = {}
    for leaf, piece in zip(layout.leaves, pieces_of(layout), strict=True):
        rows = traffic([piece], layout.stage, layout.precision, data=data, replica=replica, microbatches=microbatches)
        for row in rows:
            key = row.what, leaf.path, row.kind, ordered(layout, row.axes)
            sizes.setdefault(key, Counter())[row.dtype] += round(row.elements * jnp.dtype(row.dtype).itemsize)
    return sizes


def of_engine(layout: Layout, account: Account, ledger: Sizes, microbatches: int) -> Sizes:
    """What the engine says that it does; the ledger for what it always does the same way."""
    over, across = (ordered(layout, wide(layout, axes)) for axes in (layout.data_axes, layout.replica_axes))
    by_path = {leaf.path: leaf for leaf in layout.leaves}
    unused = {leaf.path for leaf, zero in zip(layout.trainable, account.unused, strict=True) if zero}

    def in_account(path: str) -> bool:
        leaf = by_path[path]
        return reduces_in_backward(layout, leaf) and layout.stage.grads == "sharded" and leaf.cut is not None

    sizes: Sizes = {}
    for key, of in ledger.items():
        what, path, _, _ = key
        if what == "gather, update" or (what == "reduce" and path not in unused and not in_account(path)):
            sizes[key] = Counter(of)

    def add(what: str, path: str, kind: str, axes: tuple[str, ...], dtype: str, size: int):
        if axes:
            sizes.setdefault((what, path, kind, axes), Counter())[dtype] += size

    for one in account.gatherings:
        add(f"gather, {one.phase}", one.path, "all-gather", over, one.dtype, microbatches * one.times * one.padded)
    for one in account.reductions:
        size = microbatches * one.times * one.padded
        add("reduce", one.path, "reduce-scatter", over, one.dtype, size)
        add("reduce", one.path, "all-reduce", across, one.dtype, size // layout.shards)
    return sizes


def of_program(layout: Layout, rows: list[tuple[Origin, Collective]]) -> tuple[Sizes, Counter[Key], set[Key]]:
    """In the lowered program; also how many collectives, and which keys have some of unknown number."""
    sizes: Sizes = {}
    counts, inexact = Counter[Key](), set[Key]()
    for origin, row in rows:
        if origin.purpose in LEAVES:
            key = LEAVES[origin.purpose], origin.leaf, row.kind, ordered(layout, row.axes)
            sizes.setdefault(key, Counter())[row.dtype] += row.bytes
            counts[key] += row.count
            inexact |= set() if row.exact else {key}
    return sizes, counts, inexact


def ordered(layout: Layout, axes: Sequence[str]) -> tuple[str, ...]:
    """Axes in the mesh's order."""
    return tuple(axis for axis in layout.mesh.axis_names if axis in axes)
