"""The collectives of a lowered program, which JAX gives as MLIR operations."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

from jzero.groups import Groups, axes_by_groups, groups_over, participants
from jzero.hlo import COLLECTIVES, dtype_name
from jzero.tally import Collective, Origin, Row, either, merged, repeated


def rows(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, origin_of: Callable[[str], Origin]) -> list[Row]:
    """Counts them, each with whose it is by its name."""
    if not isinstance(lowered, jax.stages.Lowered):
        raise TypeError(
            f"collectives: wanted a jax.stages.Lowered, which jax.jit(f).lower(...) returns; got "
            f"{type(lowered).__name__}. For a compiled program call compiled_collectives."
        )
    module: Any = lowered.compiler_ir("stablehlo")
    _check_mesh(module, mesh)
    functions = {
        op.attributes["sym_name"].value: op for op in module.body.operations if op.operation.name == "func.func"
    }
    by_groups = axes_by_groups(mesh, int(module.operation.attributes["mhlo.num_partitions"]))

    # What is around a collective names it as well: a function of its own, or a region for the model shards, has names
    # that begin anew.
    @functools.cache
    def in_function(name: str, around: str) -> list[Row]:
        return in_region(functions[name].regions[0], around)

    def in_region(region: Any, around: str) -> list[Row]:
        return merged(row for block in region.blocks for op in block.operations for row in in_op(op.operation, around))

    def in_op(op: Any, around: str) -> Iterable[Row]:
        kind = op.name.removeprefix("stablehlo.").replace("_", "-")
        if not op.regions and kind not in (*COLLECTIVES, "func.call", "composite"):
            return []
        name = f"{around}/{name_of(op)}" if kind != "while" else around
        if kind in COLLECTIVES:
            over = participants(kind, _groups(op, mesh), by_groups)
            arrays = [x.type for x in (op.results if kind == "all-gather" else op.operands)]
            return [
                (origin_of(name), Collective(kind, dtype_name(str(x.element_type)), tuple(x.shape), *over))
                for x in arrays
            ]
        regions = [in_region(region, name) for region in op.regions]
        if kind == "while":
            return repeated(*regions, trips=trip_count(op))
        if kind == "case":
            return either(regions)
        if kind in ("func.call", "composite"):
            return in_function(op.attributes["callee" if kind == "func.call" else "decomposition"].value, name)
        return itertools.chain(*regions)

    return in_function("main", "")


def _check_mesh(module: Any, mesh: jax.sharding.Mesh) -> None:
    """Raises if the program names a mesh whose axes have other sizes than those of `mesh`."""
    for op in module.body.operations:
        sizes = re.findall(r'"([^"]+)"=(\d+)', str(op)) if op.operation.name == "sdy.mesh" else []
        for axis, size in sizes:
            if mesh.shape.get(axis, int(size)) != int(size):
                raise ValueError(
                    f"collectives: the program runs on a mesh with {axis}={size}, but the mesh given has "
                    f"{axis}={mesh.shape[axis]}. Pass the mesh of the layout."
                )


def _groups(op: Any, mesh: jax.sharding.Mesh) -> Groups:
    attribute = op.attributes["replica_groups" if "replica_groups" in op.attributes else "source_target_pairs"]
    # jax 0.10 writes device ids; jax 0.12 writes mesh axes where it can, in an attribute without accessors in Python.
    axes = re.findall(r'axis_ref<name = "([^"]+)"', str(attribute))
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"{op.name} runs over the axes {missing}, but the mesh has {mesh.axis_names}: pass the mesh that the "
            "program runs on."
        )
    return groups_over(mesh, axes) if axes else np.array(attribute).tolist()


def name_of(op: Any) -> str:
    """What jax calls an operation of a lowered program: its scopes, and what it is; "" if it does not say."""
    match = re.match(r'loc\("((?:[^"\\]|\\.)*)"', str(op.location))
    if match is None:
        return ""
    raw = re.sub(rb"\\([0-9A-Fa-f]{2})", lambda code: bytes([int(code[1], 16)]), match[1].encode())
    return raw.replace(b'\\"', b'"').replace(b"\\\\", b"\\").decode(errors="replace")


def trip_count(loop: Any) -> int | None:
    """Trip count of a `while` that counts a carry up by a constant until it reaches another; None for any other."""
    condition, body = (region.blocks[0] for region in loop.regions)
    test = _producer(_returned(condition, 0), "stablehlo.compare")
    if test is None or "LT" not in str(test.attributes["comparison_direction"]):
        return None
    counter, limit = map(_unwrapped, test.operands)
    if not isinstance(counter, ir.BlockArgument) or counter.owner != condition:
        return None
    n = counter.arg_number
    step = _producer(_returned(body, n), "stablehlo.add")
    addends = [_unwrapped(value) for value in step.operands] if step else []
    if body.arguments[n] not in addends:
        return None
    addends.remove(body.arguments[n])
    start, stop, stride = map(_constant, (loop.operands[n], limit, addends[0]))
    if start is None or stop is None or stride is None or stride <= 0:
        return None
    return max(0, -((start - stop) // stride))


def _constant(value: Any) -> int | None:
    """The integer that a value always is, also where loops carry it unchanged."""
    value = _unwrapped(value)
    if not isinstance(value.type.element_type, ir.IntegerType):
        return None
    if constant := _producer(value, "stablehlo.constant"):
        return int(np.array(constant.attributes["value"]))
    loop = value.owner.owner.operation if isinstance(value, ir.BlockArgument) else None
    if loop is None or loop.name != "stablehlo.while":
        return None
    n, body = value.arg_number, loop.regions[1].blocks[0]
    return _constant(loop.operands[n]) if _returned(body, n) == body.arguments[n] else None


def _returned(block: Any, n: int) -> Any:
    return _unwrapped(block.operations[len(block.operations) - 1].operands[n])


def _unwrapped(value: Any) -> Any:
    # In a shard_map that leaves axes automatic, jax constrains the placement of every value, loop counters as well.
    while constraint := _producer(value, "sdy.sharding_constraint"):
        value = constraint.operands[0]
    return value


def _producer(value: Any, name: str) -> Any:
    """The operation that makes a value, if it has that name; a block's argument has none."""
    if isinstance(value, ir.BlockArgument):
        return None
    operation = value.owner.operation
    return operation if operation.name == name else None
