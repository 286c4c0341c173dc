"""What the options of `zero` that name leaves say of each of them: rules, trainable, regather."""

import math
from fnmatch import fnmatchcase

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from jzero.check import check_structure, path_name
from jzero.rules import Model, axes_of, is_plain


def check_matches(option, patterns, named):
    """Raises for a pattern that matches no path."""
    paths = [path_name(path) for path, _ in named]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(
                f"zero: {option} has a pattern {pattern!r} that matches none of the {len(paths)} paths of params, from "
                f"{paths[0]!r} to {paths[-1]!r}."
            )


def ruled(named, rules, mesh: Mesh | AbstractMesh, batch_axes: tuple[str, ...]) -> list[Model]:
    """For each leaf the axes that its rule gives to each of its dims."""
    if not isinstance(rules, list | tuple) or not all(
        isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str) and is_plain(rule[1])
        for rule in rules
    ):
        raise TypeError(
            f"zero: rules={rules!r}; wanted a list of (path pattern, PartitionSpec of axis names and None)."
        )
    check_matches("rules", [pattern for pattern, _ in rules], named)
    model = []
    for path, leaf in named:
        matching = [(pattern, spec) for pattern, spec in rules if fnmatchcase(path_name(path), pattern)]
        if len(matching) > 1:
            raise ValueError(
                f"zero: params{keystr(path)} is matched by {len(matching)} rules, {matching[0][0]!r} and "
                f"{matching[1][0]!r}; wanted one. Make the patterns narrower."
            )
        pattern, spec = matching[0] if matching else ("", P())
        rule, shape = f"the rule ({pattern!r}, {spec})", tuple(leaf.shape)
        if len(spec) > len(shape):
            raise ValueError(
                f"zero: params{keystr(path)} {shape} has {len(shape)} dims, but {rule} names {len(spec)} of them."
            )
        axes = axes_of(spec)
        for axis in (flat := [axis for entry in axes for axis in entry]):
            if axis not in mesh.axis_names:
                raise ValueError(f"zero: {rule} names {axis!r}, but the mesh has axes {mesh.axis_names}.")
            if axis in batch_axes:
                raise ValueError(
                    f"zero: {rule} names {axis!r}, which is one of data_axes or replica_axes; the stage places leaves "
                    f"over these. Rules are for the mesh's other axes."
                )
            if flat.count(axis) > 1:
                raise ValueError(f"zero: {rule} names {axis!r} twice.")
        for dim, entry in enumerate(axes):
            parts = math.prod(mesh.shape[axis] for axis in entry)
            if shape[dim] % parts:
                raise ValueError(
                    f"zero: params{keystr(path)} {shape}: dim {dim} of size {shape[dim]} does not divide by {parts} "
                    f"(mesh axes {', '.join(map(repr, entry))}), as {rule} wants. Change the rule or the mesh, or make "
                    f"the dim a multiple of {parts}."
                )
        wide = [tuple(axis for axis in entry if mesh.shape[axis] > 1) for entry in axes]
        model.append((*wide, *[()] * (len(shape) - len(axes))))
    return model


def trained(named, treedef, trainable) -> list[bool]:
    """Whether each leaf is trained."""
    able = [jnp.issubdtype(leaf.dtype, jnp.inexact) for _, leaf in named]
    if trainable is None:
        chosen, how = able, "no leaf is floating or complex"
    elif callable(trainable):
        chosen = [_decided(path_name(path), trainable(path_name(path), leaf)) for path, leaf in named]
        how = "the predicate trainable is false for each"
    else:
        mask = check_structure("trainable", trainable, treedef, "Give it True or False at each leaf of params.")
        for path, value in mask:
            if not isinstance(value, bool | jnp.bool_):
                raise TypeError(f"zero: trainable{keystr(path)} is {value!r}; a mask has True or False at each leaf.")
        chosen, how = [bool(value) for _, value in mask], "the mask trainable is False everywhere"
    if not any(chosen):
        raise ValueError(
            f"zero: none of the {len(named)} leaves of params would be trained: {how}. Paths look like "
            f"{path_name(named[0][0])!r}; jzero.explain(jzero.zero(params, ...)) lists them."
        )
    for (path, leaf), one, can in zip(named, chosen, able, strict=True):
        if one and not can:
            raise TypeError(
                f"zero: trainable names params{keystr(path)}, whose dtype {leaf.dtype} cannot be trained; only "
                f"floating and complex leaves can. Leave it out, or cast it."
            )
    return chosen


def _decided(path, value) -> bool:
    if value is None or (np.ndim(value) == 0 and not isinstance(value, Tracer)):
        return bool(value)
    raise TypeError(f"zero: the predicate trainable returned {value!r} for {path!r}; wanted True or False.")


def regathered(named, regather) -> list[bool]:
    """Whether each leaf is gathered again in the backward pass."""
    if isinstance(regather, bool):
        return [regather] * len(named)
    pairs = isinstance(regather, list | tuple) and all(isinstance(pair, list | tuple) for pair in regather)
    if not pairs or not all(len(p) == 2 and isinstance(p[0], str) and isinstance(p[1], bool) for p in regather):
        raise TypeError(f"zero: regather={regather!r}; wanted True, False or a list of (path pattern, bool).")
    check_matches("regather", [pattern for pattern, _ in regather], named)
    return [
        next((again for pattern, again in regather if fnmatchcase(path_name(path), pattern)), True) for path, _ in named
    ]
