"""Where the leaves of a checkpoint would lie on a mesh, and chunks that suit it: nothing is read here.

A training state is placed by `jzero.zero` from params, rules and an optimizer. Of a checkpoint only shapes are known,
and which axes cut each dim where it was saved; so model axes cut here what they cut there, and the data axes what the
stage says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import halved
from jzero.checkpoint.recipe import Made
from jzero.dtypes import dtypes_of
from jzero.precision import DTYPES, Precision
from jzero.rules import MIN_SHARD_SIZE, Leaf, place
from jzero.stage import STAGES, Placement

DATA, REPLICA = ("data",), ("replica",)
"""Names of axes that cut and repeat, where a checkpoint does not say which do."""


@dataclass(frozen=True)
class Placed:
    """A leaf on a mesh.

    Attributes:
        leaf: The leaf.
        shard: What one device holds of it, in the shape that it is stored in.
        axes: For each dim, the axes that cut it.
        bytes: Bytes on each device: of the leaf, and of the copy in the compute dtype if the stage keeps one.
        padding: Those of them that are padding.
        note: Why it is padded, stays whole, or cannot be; empty if all divides.
        refused: Whether `jzero.zero` would refuse it.
    """

    leaf: Made
    shard: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    bytes: int
    padding: int
    note: str
    refused: bool = False


def placed(leaves: Sequence[Made], saved_from: Mapping[str, Any], mesh: Mapping[str, int], stage: int) -> list[Placed]:
    """Where leaves lie on a mesh at a stage, by the rules of `jzero.zero`.

    Args:
        leaves: The leaves.
        saved_from: What the checkpoint says of where it was saved from; empty if nothing.
        mesh: Size of each axis.
        stage: 0 to 3.

    Raises:
        ValueError: The mesh has no data axis, or the stage is none.
    """
    data = tuple(axis for axis in saved_from.get("data_axes", DATA) if axis in mesh) or tuple(
        axis for axis in DATA if axis in mesh
    )
    if not data:
        wanted = " or ".join(map(repr, saved_from.get("data_axes", DATA)))
        raise ValueError(f"the mesh {dict(mesh)} has no data axis; wanted {wanted}.")
    if not 0 <= stage < len(STAGES):
        raise ValueError(f"stage {stage}; wanted 0, 1, 2 or 3.")
    batch = {*data, *_batch(saved_from)}
    params = {leaf.shape for leaf in leaves if leaf.path[0] == "params"}
    return [_placed(leaf, saved_from, mesh, stage, data, batch, params) for leaf in leaves]


def idle(where: Sequence[Placed], saved_from: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, str]:
    """The axes of a mesh that cut no leaf there, and what that means.

    Args:
        where: What `placed` found.
        saved_from: As for `placed`.
        mesh: Likewise.
    """
    cut = {axis for one in where for axes in one.axes for axis in axes}
    named = {axis for one in where for axes in one.leaf.spec or () for axis in axes}
    known, batch = any(one.leaf.spec is not None for one in where), _batch(saved_from)
    others = " and ".join(map(repr, sorted(named - batch - mesh.keys())))
    found = {}
    for axis in (axis for axis, size in mesh.items() if size > 1 and axis not in cut):
        if axis in batch:
            found[axis] = "cuts no leaf at this stage, and so all devices along it hold the same"
        elif axis in named:
            found[axis] = "would cut only leaves that this mesh does not divide"
        elif not known:
            found[axis] = "is not known to cut a leaf: the checkpoint does not say which axes cut its leaves"
        elif others:
            found[axis] = f"cuts no leaf: where the checkpoint was saved they were cut over {others} and not over it"
        else:
            found[axis] = "cuts no leaf: where the checkpoint was saved, no model axis did"
        if axis not in batch | named:
            found[axis] += ". Devices along it hold the same, unless rules= of `jzero.zero` cut leaves over it"
    return found


def _batch(saved_from: Mapping[str, Any]) -> set[str]:
    """The axes that divide a batch, as far as is known."""
    return {*saved_from.get("data_axes", DATA), *saved_from.get("replica_axes", REPLICA)}


def _placed(leaf: Made, saved_from, mesh, stage: int, data, batch, params) -> Placed:
    table, shards = STAGES[stage], math.prod(mesh[axis] for axis in data)
    spec = leaf.spec or ((),) * len(leaf.shape)
    model = tuple(
        tuple(axis for axis in axes if axis not in batch and mesh.get(axis, 1) > 1) for axes in spec[: len(leaf.shape)]
    )
    uneven = [
        f"dim {dim} of size {size} does not divide by {math.prod(mesh[axis] for axis in axes)} "
        f"(mesh axis {', '.join(map(repr, axes))})"
        for dim, (size, axes) in enumerate(zip(leaf.shape, model, strict=True))
        if size % math.prod(mesh[axis] for axis in axes)
    ]
    if uneven:
        whole = _bytes(leaf.stored_shape, leaf)
        return Placed(leaf, leaf.stored_shape, ((),) * len(leaf.shape), whole, 0, "; ".join(uneven), True)
    part = leaf.path[0]
    known = part in ("params", "opt_state") and not leaf.words and encoding.KEY not in leaf.dtype
    if not known:
        return Placed(leaf, leaf.stored_shape, ((),) * len(leaf.shape), _bytes(leaf.stored_shape, leaf), 0, "")
    rule = place(
        leaf.name,
        jax.ShapeDtypeStruct(leaf.shape, encoding.dtype_of(leaf.dtype)),
        shards,
        saved_from.get("min_shard_size", MIN_SHARD_SIZE),
        padded=part == "params" or leaf.shape in params,
        model=model,
        sizes=mesh,
    )
    copy = None if part == "opt_state" else _copy_dtype(leaf, saved_from, stage)
    # With a copy for the loss, what is saved is the master weights, which live with the optimizer state.
    placement: Placement = table.opt_state if part == "opt_state" or copy else table.params
    shard = _shard(rule, placement, mesh, shards)
    axes = tuple((*cut, *(data if placement == "sharded" and dim == rule.dim else ())) for dim, cut in enumerate(model))
    held, parts = _bytes(shard, leaf), math.prod(mesh[axis] for cut in axes for axis in cut)
    padding = held - _bytes(leaf.shape, leaf) // parts
    if copy is not None:
        held += math.prod(_shard(rule, table.params, mesh, shards)) * encoding.dtype_of(copy).itemsize
    tells = placement == "sharded" and shards > 1 and "divides" in rule.reason
    return Placed(leaf, shard, axes, held, padding, rule.reason if tells else "")


def _shard(rule: Leaf, placement: Placement, mesh, shards: int) -> tuple[int, ...]:
    model = rule.model or ((),) * len(rule.shape)
    local = rule.local(placement, shards)
    return tuple(size // math.prod(mesh[axis] for axis in axes) for size, axes in zip(local, model, strict=True))


def precision_of(saved_from: Mapping[str, Any]) -> Precision | None:
    """The precision that a checkpoint was saved with; None if it does not say."""
    said: Any = saved_from.get("precision")
    if said is None:
        return None
    options: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    return Precision(**options)


def _copy_dtype(leaf: Made, saved_from, stage: int) -> str | None:
    """The dtype of the copy of a param that the loss gets, if the state keeps one beside the master weights."""
    precision = precision_of(saved_from)
    if precision is None or leaf.dtype not in DTYPES:
        return None
    path = "/".join(leaf.path[1:])
    given = encoding.dtype_of(leaf.dtype)
    stored, dtypes = dtypes_of(precision, STAGES[stage], path, given, trainable=True)
    return str(stored) if dtypes.master == given and stored != given else None


def _bytes(shape: Sequence[int], leaf: Made) -> int:
    return 0 if leaf.stored is None else encoding.nbytes(tuple(shape), leaf.stored)


SMALL = 2**20
"""Bytes below which a chunk is not worth a file of its own: opening it takes longer than reading what is not needed."""


def chunk_for(one: Placed, largest: int) -> tuple[int, ...]:
    """The shape of chunks of which each device reads whole ones only, or, of small ones, few.

    Args:
        one: The leaf on the mesh.
        largest: Most bytes of a chunk.
    """
    leaf = one.leaf
    if leaf.stored is None:
        return leaf.stored_shape
    itemsize, shape = encoding.dtype_of(leaf.stored).itemsize, leaf.stored_shape
    cut = [bool(axes) for axes in one.axes] + [False] * len(leaf.words)
    shard = (*one.shard, *leaf.words)[: len(shape)]
    chunk = list(halved(shard, itemsize, largest, cut=cut))
    while 2 * math.prod(chunk) * itemsize <= min(SMALL, largest) and chunk != list(shape):
        dim = max(range(len(shape)), key=lambda dim: shape[dim] / chunk[dim])
        chunk[dim] = min(shape[dim], 2 * chunk[dim])
    return tuple(chunk)
