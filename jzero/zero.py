"""`zero`: from a stage and a mesh to a `Layout`."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

from jzero.check import path_name, warn_shared
from jzero.choices import check_matches, regathered, ruled, trained
from jzero.dtypes import dtypes_of
from jzero.layout import Layout
from jzero.mesh import platform_of
from jzero.precision import Precision, as_precision
from jzero.rules import MIN_SHARD_SIZE, Leaf, axes_of, place
from jzero.stage import Stage, as_stage


def zero(
    params: Any,
    *,
    stage: int | Stage,
    mesh: Mesh | AbstractMesh,
    data_axes: Sequence[str] = ("data",),
    replica_axes: Sequence[str] = (),
    min_shard_size: int = MIN_SHARD_SIZE,
    rules: Sequence[tuple[str, P]] = (),
    trainable: Any | Callable[[str, Any], bool] | None = None,
    regather: bool | Sequence[tuple[str, bool]] = True,
    ahead: bool | None = None,
    precision: str | Precision | None = None,
) -> Layout:
    """Decides where params, gradients and optimizer state live, at a ZeRO stage on a mesh.

    A leaf is cut along its largest dim that divides by the number of shards, along the first only where no other
    does; where none divides it is stored padded. Small leaves stay whole on every device. `explain` says what became of
    each leaf and why. Nothing is computed or moved.

    Args:
        params: A tree of arrays or `jax.ShapeDtypeStruct`s (as from `jax.eval_shape`).
        stage: 0, 1, 2, 3 or a `Stage` of your own.
        mesh: A mesh whose axes are of type `Auto`, as `make_mesh` makes it; one without devices
            (`jzero.mesh.abstract_mesh`) will do to look at the layout, but not to run anything.
        data_axes: Axes over which leaves are cut.
        replica_axes: Axes over which the cut leaves are repeated: hybrid sharding (HSDP; MiCS, arXiv:2205.00119).
        min_shard_size: Leaves with fewer elements than this stay whole.
        rules: Tensor parallelism: a list of `(path pattern, PartitionSpec)` over the mesh's other axes, with shell
            patterns on paths, at most one for each leaf. Such a leaf is cut so at every stage, its gradient and its
            optimizer state too, and over the data axes along another dim, or along the same one if no other divides;
            only its model shards travel over the data axes. The loss stays as it is: inside of `value_and_grad` these
            axes are automatic, and the partitioner adds what the model shards exchange.
        trainable: Which leaves get a gradient and optimizer state; the others are kept as they are, and still sharded.
            A tree of bools with the structure of `params`, or a predicate on path and leaf, where a path looks like
            "blocks/0/kernel". None: all floating and complex leaves. Integer, bool and random-key leaves never are.
        regather: Whether a leaf that is gathered in the forward pass is dropped and gathered again in the backward pass
            (True, ZeRO-3 as published) or kept (False: FSDP's `reshard_after_forward=False`), which saves a third of
            the traffic for the memory of whole params. A list of `(path pattern, bool)` decides leaf by leaf, with
            shell patterns on paths; the first that matches counts, and leaves that none matches are gathered again.
        ahead: Whether a block is gathered while the one before it computes, and in a scan its gradients are
            reduce-scattered while the next one does (DeepSpeed's prefetch, Megatron-LM's overlap): the same collectives
            and the same numbers, for the memory of one more gathered block and one block's whole gradients. With remat
            or without; loops of one or two blocks stay as they are. None: on GPUs only, where collectives run beside
            matmuls.
        precision: In which dtypes params are stored, used, reduced and updated: a `Precision`, or "bf16" or "fp16"
            (that dtype for the loss, float32 master weights), "fp32" (all of it), "bf16-pure" (all stored in bfloat16,
            rounded at random). None: as the params, the loss and the optimizer have it.

    Returns:
        The `Layout`.

    Raises:
        ValueError: An unknown stage; an axis that the mesh lacks or that is named twice; a mesh axis that is not
            `Auto`; a negative `min_shard_size`; no array leaf; `trainable` or a pattern of `regather`, `rules` or the
            precision's `exempt` that matches nothing, or a mask of another structure; two rules for one leaf; a rule
            that names a data axis, more dims than the leaf has, or a dim that does not divide; an unknown precision.
        TypeError: An option of another type; a leaf that is no array; `trainable` names a leaf whose dtype cannot be
            trained.

    Warns:
        UserWarning: One array stands at two paths. In JAX these are two params, which will drift apart; to tie them,
            keep one leaf and use it twice in the loss.

    Example:
        >>> params = {"table": jax.ShapeDtypeStruct((512, 64), "float32"), "scale": jax.ShapeDtypeStruct((), "float32")}
        >>> layout = zero(params, stage=3, mesh=jzero.make_mesh(data=-1), trainable=lambda path, leaf: path != "table")
        >>> layout.param_specs, layout.grad_specs
        ({'scale': P(), 'table': P(None, 'data')}, {'scale': P(), 'table': None})
    """
    asked = dict(locals())  # every option, for `Layout.on`
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"zero: mesh is a {type(mesh).__name__}; make one with jzero.make_mesh(data=-1).")
    stage = as_stage(stage)
    data_axes = _axes("data_axes", data_axes, mesh)
    replica_axes = _axes("replica_axes", replica_axes, mesh)
    if not data_axes:
        raise ValueError("zero: data_axes is empty; name at least one mesh axis to cut the params over.")
    if both := set(data_axes) & set(replica_axes):
        raise ValueError(f"zero: mesh axis {sorted(both)} is named in data_axes and in replica_axes; choose one.")
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            raise ValueError(
                f"zero: mesh axis {name!r} has type {kind}; jzero needs Auto. Make the mesh with jzero.make_mesh, or "
                f"pass axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)} to jax.make_mesh."
            )
    if not isinstance(min_shard_size, Integral) or isinstance(min_shard_size, bool) or min_shard_size < 0:
        raise ValueError(f"zero: min_shard_size={min_shard_size!r}; it counts elements, so an int of 0 or more.")
    if not isinstance(ahead, bool | None):
        raise TypeError(f"zero: ahead={ahead!r}; wanted True, False or None.")
    named, treedef = tree_flatten_with_path(params)
    if not named:
        raise ValueError(f"zero: params has no array leaf (got {type(params).__name__}: {treedef}).")
    for path, leaf in named:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"zero: params{keystr(path)} is a {type(leaf).__name__}, not an array. Pass arrays or "
                f"ShapeDtypeStructs; register your own containers with jax.tree_util.register_dataclass."
            )
    warn_shared("params", params)
    shards, precision = math.prod(mesh.shape[axis] for axis in data_axes), as_precision(precision)
    check_matches("the precision's exempt", precision.exempt, named)
    leaves = tuple(
        _in_dtypes(
            place(
                path_name(path),
                leaf,
                shards,
                min_shard_size,
                padded=True,
                trainable=chosen,
                model=model,
                sizes=mesh.shape,
            ),
            precision,
            stage,
            again,
        )
        for (path, leaf), model, chosen, again in zip(
            named,
            ruled(named, rules, mesh, (*replica_axes, *data_axes)),
            trained(named, treedef, trainable),
            regathered(named, regather),
            strict=True,
        )
    )
    if isinstance(mesh, Mesh):  # one that is only looked at may be for a model without rules as yet
        _warn_idle(mesh, data_axes + replica_axes, rules)
    early = isinstance(mesh, Mesh) and platform_of(mesh) == "gpu" if ahead is None else ahead
    mesh = cast(Mesh, mesh)  # all that only looks at a layout takes an AbstractMesh just as well
    asked["params"] = treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in named])
    return Layout(
        mesh,
        stage,
        data_axes,
        replica_axes,
        min_shard_size,
        treedef,
        leaves,
        early,
        precision,
        remade=functools.partial(zero, **asked),
    )


def _warn_idle(mesh: Mesh, batch_axes: tuple[str, ...], rules) -> None:
    named = {axis for _, spec in rules for entry in axes_of(spec) for axis in entry} | set(batch_axes)
    for axis in [axis for axis, size in mesh.shape.items() if size > 1 and axis not in named]:
        warnings.warn(
            f"zero: nothing is cut over the mesh axis {axis!r} ({mesh.shape[axis]} devices), which then repeat each "
            f"other's work. Name it in data_axes= or replica_axes=, give rules= for it, or leave it out of the mesh; "
            f"if hints or the loss itself use it, ignore this.",
            stacklevel=3,
        )


def _in_dtypes(leaf: Leaf, precision: Precision, stage: Stage, regather: bool) -> Leaf:
    stored, others = dtypes_of(precision, stage, leaf.path, leaf.dtype, trainable=leaf.trainable)
    return replace(leaf, dtype=stored, dtypes=others, regather=regather)


def _axes(option: str, axes: Sequence[str], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(f"zero: {option} names {axis!r}, but the mesh has axes {mesh.axis_names}.")
        if axes.count(axis) > 1:
            raise ValueError(f"zero: {option}={axes} names {axis!r} twice.")
    return axes
