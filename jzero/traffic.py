"""What a step moves over the links, from the stage table and the params alone.

The same rules as in `jzero.collectives`, without a program. What a program really holds may be less: a leaf whose value
the backward pass does not need is not gathered again. Left out are single numbers (the loss, norms), what a loss casts
by itself, what an optimizer that computes over whole leaves (Muon) exchanges, and what model shards exchange, which are
activations. `jzero.audit` compares the two, line by line.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

from jzero.dtypes import dtypes_of
from jzero.layout import Layout
from jzero.precision import Precision
from jzero.rules import Leaf
from jzero.stage import Stage


@dataclass(frozen=True)
class Traffic:
    """One kind of collective, all of a step together, on one device.

    Attributes:
        what: "gather, forward", "gather, backward", "gather, update" (of the new params, at stages 1 and 2) or "reduce"
            (of gradients).
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        axes: The mesh axes that it runs over.
        group: How many devices these are.
        dtype: On the wire.
        elements: Of the whole arrays that it runs on, of one model shard, added up over the step.
    """

    what: Literal["gather, forward", "gather, backward", "gather, update", "reduce"]
    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    axes: tuple[str, ...]
    group: int
    dtype: str
    elements: float

    @property
    def volume(self) -> float:
        """Elements as the papers count them: an all-reduce is a reduce-scatter and a gather, and counts twice."""
        return self.elements * (2 if self.kind == "all-reduce" else 1)

    @property
    def bytes(self) -> float:
        """Bytes of these elements."""
        return self.volume * jnp.dtype(self.dtype).itemsize

    @property
    def wire_bytes(self) -> float:
        """Bytes that the device sends: (n - 1)/n of them, in a group of n; its own part is there already."""
        return self.bytes * (self.group - 1) / self.group


@dataclass(frozen=True)
class Piece:
    """What matters of a leaf: how many elements travel, and in which dtypes.

    Attributes:
        elements: Of one model shard.
        stored: The same with padding.
        is_cut: Whether a stage that shards it cuts it.
        trainable: Whether it has a gradient.
        again: Whether it is gathered again in the backward pass.
        dtype: In which it is stored.
        compute: In which it is gathered and its gradient is born.
    """

    elements: float
    stored: float
    is_cut: bool
    trainable: bool
    again: bool
    dtype: Any
    compute: Any


def pieces_of(layout: Layout) -> list[Piece]:
    """The pieces of a layout, one for each leaf."""

    def piece(leaf: Leaf) -> Piece:
        parts = layout.size([axis for axes in leaf.model for axis in axes])
        whole, stored = math.prod(leaf.shape) // parts, math.prod(leaf.stored) // parts
        return Piece(
            whole, stored, leaf.dim is not None, leaf.trainable, leaf.regather, leaf.dtype, leaf.dtypes.compute
        )

    return [piece(leaf) for leaf in layout.leaves]


def piece_of_count(params: float, stage: Stage, precision: Precision) -> Piece:
    """All params of one model shard as one piece that is cut."""
    stored, dtypes = dtypes_of(precision, stage, "", jnp.dtype("float32"), trainable=True)
    return Piece(params, params, True, True, True, stored, dtypes.compute)


def traffic(
    pieces: Iterable[Piece],
    stage: Stage,
    precision: Precision,
    *,
    data: Mapping[str, int],
    replica: Mapping[str, int],
    microbatches: int = 1,
) -> tuple[Traffic, ...]:
    """What each device moves in one step of m microbatches.

    Stage 0 moves 2M elements (an all-reduce), 1 M + M, 2 mM + M, 3 2mM + mM. With replicas the reduced shard, M/N, is
    all-reduced over them as often as it is reduced.

    Args:
        pieces: What is moved.
        stage: The stage.
        precision: Gives the dtype of the reduction.
        data: Sizes of the axes that cut.
        replica: Sizes of the axes that repeat.
        microbatches: m.

    Returns:
        One row for each kind, in the order of a step; axes of size 1 move nothing.

    Example:
        >>> from jzero.precision import PRECISIONS
        >>> bf16, stage = PRECISIONS["bf16"], jzero.STAGES[1]
        >>> for row in traffic([piece_of_count(1000, stage, bf16)], stage, bf16, data={"data": 8}, replica={}):
        ...     print(row.what, row.kind, row.dtype, row.volume, row.bytes, row.wire_bytes)
        reduce reduce-scatter float32 1000 4000 3500.0
        gather, update all-gather bfloat16 1000 2000 1750.0
    """
    sizes = {**replica, **data}
    over, across, batch = ([axis for axis in axes if sizes[axis] > 1] for axes in (data, replica, sizes))
    shards = math.prod(data.values())
    rows: list[Traffic] = []

    def add(what, kind, axes, dtype, elements):
        if axes:
            group = math.prod(sizes[axis] for axis in axes)
            rows.append(Traffic(what, kind, tuple(axes), group, str(dtype), elements))

    for piece in pieces:
        is_sharded = stage.params == "sharded" and piece.is_cut
        if is_sharded:
            add("gather, forward", "all-gather", over, piece.compute, microbatches * piece.stored)
            if piece.again:
                add("gather, backward", "all-gather", over, piece.compute, microbatches * piece.stored)
        if not piece.trainable:
            continue
        in_backward = stage.reduce == "block" and (stage.grads == "replicated" or piece.is_cut)
        times = microbatches if in_backward else 1
        wire = precision.reduce or piece.compute
        if piece.is_cut and stage.grads == "sharded":
            add("reduce", "reduce-scatter", over, wire, times * piece.stored)
            add("reduce", "all-reduce", across, wire, times * piece.stored / shards)
        else:
            add("reduce", "all-reduce", batch, wire, times * piece.elements)
        if piece.is_cut and stage.opt_state == "sharded" and not is_sharded:
            add("gather, update", "all-gather", over, piece.dtype, piece.stored)
    return _merged(rows)


def _merged(rows: list[Traffic]) -> tuple[Traffic, ...]:
    sums: dict[Traffic, float] = {}
    for row in rows:
        one = replace(row, elements=0)
        sums[one] = sums.get(one, 0) + row.elements
    order = ("gather, forward", "gather, backward", "reduce", "gather, update")
    return tuple(replace(one, elements=sums[one]) for one in sorted(sums, key=lambda row: order.index(row.what)))
