"""What a training run will take on each device, before there is one: memory by stage and kind, and traffic per step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import jax.numpy as jnp
import optax

from jzero.dtypes import dtypes_of, moment_dtype
from jzero.inside import Inside, inside
from jzero.layout import Layout
from jzero.memory import StoredBytes, formula, leaf_bytes
from jzero.mesh import abstract_mesh
from jzero.papers import megatron_bytes, zero_bytes, zero_cut
from jzero.precision import Precision, as_precision
from jzero.rules import MIN_SHARD_SIZE
from jzero.stage import STAGES, Placement, Stage, as_stage
from jzero.traffic import Piece, Traffic, piece_of_count, pieces_of, traffic
from jzero.zero import zero

OPTIMIZERS: dict[str, tuple[int | None, optax.GradientTransformation]] = {
    "adam": (2, optax.adam(1e-3)),
    "adamw": (2, optax.adamw(1e-3)),
    "lamb": (2, optax.lamb(1e-3)),
    "lion": (1, optax.lion(1e-4)),
    "adagrad": (1, optax.adagrad(1e-2)),
    "rmsprop": (1, optax.rmsprop(1e-3)),
    "momentum": (1, optax.sgd(0.1, momentum=0.9)),
    "sgd": (0, optax.sgd(0.1)),
    "adafactor": (None, optax.adafactor(1e-3)),
    "muon": (None, optax.contrib.muon(1e-3)),
}
"""Optimizers by optax's names, and "momentum", which is sgd with it: elements of state per param, None where that
depends on shapes, and one of that kind. Rates change no byte."""

BY_COUNT = tuple(name for name, (moments, _) in OPTIMIZERS.items() if moments is not None)
"""Those whose state a count of params gives."""

LAYERS = 32
"""Blocks that a model is taken to consist of, unless told."""


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    Attributes:
        kind: "params", "master", "moments" (all optimizer state) or "gradients" (reduced ones, inside of a step).
        dtypes: The dtypes of its arrays.
        per_param: Bytes per param, before anything is cut.
        placement: Whether each device holds all of it or a part.
        bytes: On one device.
    """

    kind: Literal["params", "master", "moments", "gradients"]
    dtypes: tuple[str, ...]
    per_param: float
    placement: Placement
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """What one stage takes on each device.

    `stored` is exact where the params are known leaf by leaf: it is `memory.stored_bytes`, which live arrays equal. Of
    a count every element is cut, and single numbers such as Adam's count are left out. `inside` is an approximation,
    whose error against the peak of compiled steps is stated there; activations are in neither.

    Attributes:
        stage: The stage.
        params: P, number of params.
        axes: Size of each mesh axis.
        precision: The dtypes.
        microbatches: m.
        ledger: Params, master weights, moments and gradients.
        inside: Bytes that come on top inside of a step, without activations.
        papers: The ZeRO paper's total for this stage (`papers.zero_bytes`); None for a stage that it does not have.
        megatron: Megatron-LM's, which has stage 0 and 1, for Adam and what else is named and has two moments
            (`papers.megatron_bytes`); else None.
        traffic: What moves in one step.
    """

    stage: Stage
    params: int
    axes: tuple[tuple[str, int], ...]
    precision: Precision
    microbatches: int
    ledger: tuple[Entry, ...]
    inside: Inside
    papers: float | None
    megatron: float | None
    traffic: tuple[Traffic, ...]

    @property
    def stored(self) -> StoredBytes:
        """Bytes on each device between steps."""
        params, master, moments, _ = (entry.bytes for entry in self.ledger)
        return StoredBytes(params, moments, master)

    @property
    def total(self) -> int:
        """Bytes on each device in a step, without activations."""
        return self.stored.total + self.inside.total

    @property
    def number(self) -> int | None:
        """0 to 3; None for a stage of one's own."""
        return STAGES.index(self.stage) if self.stage in STAGES else None

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    def moved(self, axis: str | None = None) -> float:
        """Bytes that each device sends in a step, in all or over collectives that an axis takes part in."""
        return sum(row.wire_bytes for row in self.traffic if axis is None or axis in row.axes)


def estimate(
    params: float | Any,
    *,
    axes: Mapping[str, int],
    stage: int | Stage = 3,
    precision: str | Precision | None = "bf16",
    optimizer: str | optax.GradientTransformation = "adam",
    microbatches: int = 1,
    layers: int = LAYERS,
    rules: Any = (),
    regather: bool = True,
    min_shard_size: int = MIN_SHARD_SIZE,
) -> Estimate:
    """What a run with these params takes on each device: memory, and traffic per step. Needs no devices.

    Args:
        params: How many (every one is then taken to be cut, as the papers do), or a tree of arrays or
            ShapeDtypeStructs, which is placed leaf by leaf as `zero` does, with padding and leaves that stay whole.
        axes: Size of each mesh axis: "data" cuts, "replica" repeats (hybrid sharding), any other is a model axis. A
            count is taken to be cut by model axes everywhere, a tree by `rules`.
        stage: As for `zero`.
        precision: As for `zero`.
        optimizer: A name in `OPTIMIZERS`: "adam", "adamw", "lamb", "lion", "adagrad", "rmsprop", "momentum" or "sgd";
            with a tree also "adafactor", "muon", or an optax optimizer.
        microbatches: m.
        layers: How many blocks the params consist of, for what a block takes where it is gathered or reduced.
        rules: As for `zero`.
        regather: As for `zero`, all or nothing.
        min_shard_size: As for `zero`.

    Returns:
        The `Estimate`.

    Raises:
        ValueError: A count that is no whole positive number; an axis without a positive size, or no axis "data"; an
            unknown optimizer, stage or precision; for a count, which has no shapes, rules or an optimizer whose state
            depends on them; `microbatches` or `layers` below 1; and what `zero` raises.
        TypeError: As `zero`; an optimizer that is none.

    Example:
        >>> plan = estimate(7.5e9, axes={"data": 64}, stage=1)
        >>> [(entry.kind, entry.per_param, round(entry.bytes / 1e9, 2)) for entry in plan.ledger]
        [('params', 2.0, 15.0), ('master', 4.0, 0.47), ('moments', 8.0, 0.94), ('gradients', 4.0, 0.47)]
        >>> round(plan.stored.total / 1e9, 2), round(plan.papers / 1e9, 1)
        (16.41, 31.4)
    """
    stage, precision, axes = as_stage(stage), as_precision(precision), _checked(axes)
    for name, value in (("microbatches", microbatches), ("layers", layers)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"estimate: {name}={value!r}; wanted an int of 1 or more.")
    moments, tx = _optimizer(optimizer)
    data, replica = ({name: axes[name] for name in axes if name == kind} for kind in ("data", "replica"))
    if isinstance(params, Real):
        if moments is None or rules:
            named = f"optimizer={optimizer!r}" if isinstance(optimizer, str) else "an optax optimizer"
            what, way_out = ("rules", "") if rules else (named, f", or name one of {', '.join(BY_COUNT)}")
            raise ValueError(
                f"estimate: params={params!r} is a count, which has no shapes for {what} to work on. Pass the abstract "
                f"params (--model){way_out}."
            )
        count = _count(params)
        shard = count / math.prod(size for name, size in axes.items() if name not in data | replica)
        known = _of_count(shard, stage, precision, axes["data"], moments, regather)
    else:
        layout = zero(
            params,
            stage=stage,
            mesh=abstract_mesh(**axes),
            replica_axes=tuple(replica),
            precision=precision,
            rules=rules,
            regather=regather,
            min_shard_size=min_shard_size,
        )
        count, known = sum(math.prod(leaf.shape) for leaf in layout.leaves), _of_layout(layout, tx)
    megatron = moments == 2 and stage in STAGES[:2]
    return Estimate(
        stage=stage,
        params=count,
        axes=tuple(axes.items()),
        precision=precision,
        microbatches=microbatches,
        ledger=known.ledger,
        inside=inside(known.pieces, known.ledger[3].bytes, stage, precision, microbatches=microbatches, layers=layers),
        papers=known.papers,
        megatron=_megatron(known, axes["data"] if stage == STAGES[1] else 1) if megatron else None,
        traffic=traffic(known.pieces, stage, precision, data=data, replica=replica, microbatches=microbatches),
    )


@dataclass(frozen=True)
class _Known:
    """What is known of the params, be they a count or a tree."""

    ledger: tuple[Entry, ...]
    papers: float | None
    pieces: list[Piece]

    @property
    def shard(self) -> float:
        """Number of params of one model shard."""
        return sum(piece.elements for piece in self.pieces)


def _of_count(shard: float, stage: Stage, precision: Precision, shards: int, moments: int, regather: bool) -> _Known:
    """Of so many params in each model shard."""
    sizes: dict[str, Any] = {"precision": precision, "moments": moments}
    one, here = formula(stage, params=1, shards=1, **sizes), formula(stage, params=shard, shards=shards, **sizes)
    piece = replace(piece_of_count(shard, stage, precision), again=regather)
    _, dtypes = dtypes_of(precision, stage, "", jnp.dtype("float32"), trainable=True)
    moment = moment_dtype(precision, dtypes.update, dtypes)

    def entry(kind, dtype, per_param, placement, size):
        return Entry(kind, (str(dtype),) if size else (), float(per_param), placement, math.ceil(size))

    return _Known(
        (
            entry("params", piece.dtype, one.params, stage.params, here.params),
            entry("master", dtypes.master, one.master, stage.opt_state, here.master),
            entry("moments", moment, one.opt_state, stage.opt_state, here.opt_state),
            entry("gradients", dtypes.grad, one.gradients, stage.grads, here.gradients),
        ),
        zero_bytes(STAGES.index(stage), params=shard, shards=shards, **sizes) if stage in STAGES else None,
        [piece],
    )


def _of_layout(layout: Layout, tx: optax.GradientTransformation) -> _Known:
    """Of the leaves of a layout."""
    stage, pieces, opt_leaves = layout.stage, pieces_of(layout), layout.opt_leaves(tx)[1]
    shard = sum(piece.elements for piece in pieces)

    def uncut(leaves):
        return sum(leaf_bytes(layout, leaf, "replicated") for leaf in leaves)

    def entry(kind, leaves, placement):
        dtypes = tuple(dict.fromkeys(str(leaf.dtype) for leaf in leaves if leaf.shape))
        here = sum(leaf_bytes(layout, leaf, placement) for leaf in leaves)
        return Entry(kind, dtypes, uncut(leaves) / shard, placement, here)

    # At stage 0 params are stored in the compute dtype, and masters apart where theirs is another.
    computed = [replace(leaf, dtype=leaf.dtypes.compute) for leaf in layout.leaves]
    mixed = [leaf for leaf in layout.trainable if leaf.dtypes.master != leaf.dtypes.compute]
    state = uncut(opt_leaves) + uncut(replace(leaf, dtype=leaf.dtypes.master) for leaf in mixed)
    sizes: dict[str, Any] = {"params": uncut(computed), "state": state, "shards": layout.shards}
    return _Known(
        (
            entry("params", layout.leaves, stage.params),
            entry("master", layout.masters[1], stage.opt_state),
            entry("moments", opt_leaves, stage.opt_state),
            entry("gradients", [replace(leaf, dtype=leaf.dtypes.grad) for leaf in layout.trainable], stage.grads),
        ),
        zero_cut(STAGES.index(stage), **sizes) if stage in STAGES else None,
        pieces,
    )


def _megatron(known: _Known, shards: int) -> float:
    params, *_, gradients = known.ledger
    return known.shard * megatron_bytes(shards=shards, param=params.per_param, grad=gradients.per_param)


def _checked(axes: Mapping[str, int]) -> dict[str, int]:
    axes = dict(axes)
    if "data" not in axes:
        raise ValueError(f"estimate: axes={axes} has no axis 'data', which cuts; a size of 1 will do.")
    abstract_mesh(**axes)  # says what is wrong with a size
    return axes


def _optimizer(optimizer: str | optax.GradientTransformation) -> tuple[int | None, optax.GradientTransformation]:
    """Elements of state per param, None if only its shapes say so, and the optimizer."""
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise ValueError(
                f"estimate: optimizer={optimizer!r}; wanted {', '.join(OPTIMIZERS)}, or an optax optimizer."
            )
        return OPTIMIZERS[optimizer]
    return None, optimizer


def _count(params: Any) -> int:
    if isinstance(params, bool) or not math.isfinite(params) or params < 1 or params != int(params):
        raise ValueError(f"estimate: params={params!r}; wanted a whole positive number such as 7.5e9, or a tree.")
    return int(params)
