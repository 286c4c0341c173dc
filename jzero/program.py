"""What a program communicates: its collectives, counted on the program itself.

Two views of one jitted function. `collectives` reads the lowered program (StableHLO, before partitioning), which holds
the collectives that were written down: jzero's own, and any in the user's loss. `compiled_collectives` reads the
optimised program, which holds what XLA left of these, and what the partitioner put in.

Read dtypes from the lowered program: XLA:CPU runs bfloat16 collectives in float32. Counts, too, may differ for good
reasons: XLA moves collectives out of loops, joins small ones, and drops a reduce-scatter of what was just gathered.

Not counted: `send`, `recv` and `ragged_all_to_all`.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jzero import hlo, scopes

# How often an array crosses each device's link in a ring algorithm, before the factor (n - 1) / n.
_RING = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective on one shape of array, and how often a call of the program runs it.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute" or "collective-broadcast".
      dtype: numpy's name of the dtype on the wire, such as "float32" or "bfloat16".
      shape: of the whole array: the gathered result, the scattered input, the reduced, exchanged or sent operand.
      axes: the mesh axes that it runs over, in the mesh's order, without those of size 1; () when they cannot be told.
      group: how many devices take part in each group.
      count: runs per call of the program, with the trip counts of the loops around it multiplied in.
      exact: False where the program does not tell `count`: in a `while` of unknown trip count, `count` is for one pass;
        in a conditional, what every branch runs is exact, and what some branch runs beyond that is not.

    Example:
      >>> row = Collective("all-reduce", "bfloat16", (1024,), axes=("data",), group=8, count=3)
      >>> row.bytes, row.wire_bytes
      (6144, 10752.0)
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    group: int
    count: int = 1
    exact: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of the whole array, times `count`."""
        bits = math.prod(self.shape) * jax.dtypes.itemsize_bits(jax.numpy.dtype(self.dtype))
        return self.count * -(-bits // 8)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends: `bytes` times (n - 1) / n in a group of n, twice that for an all-reduce.

        This is what ring algorithms send, and no all-reduce can do with less (Patarasuk and Yuan, "Bandwidth optimal
        all-reduce algorithms for clusters of workstations", 2009). A permute or a broadcast sends the array once.
        """
        return self.bytes * wire_factor(self.kind, self.group)


def wire_factor(kind: str, group: int) -> float:
    """Bytes that each device of a group sends in a collective, over the bytes of the whole array.

    Example:
      >>> wire_factor("all-reduce", 4), wire_factor("all-gather", 4), wire_factor("collective-permute", 4)
      (1.5, 0.75, 1.0)
    """
    return _RING[kind] * (group - 1) / group if kind in _RING else 1.0


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose a collective is.

    Attributes:
      purpose: What jzero does it for (`scopes.Purpose`); "loss" for one that the loss itself makes, "partitioner" for
        one that the partitioner has put in, "unnamed" where XLA has lost the name.
      leaf: Path of the leaf, if it is of one.
      name: Of those that are not jzero's, what jax calls the operation, as in "shard_map/psum" or "norm/reduce_sum".
    """

    purpose: str
    leaf: str = ""
    name: str = ""


Row = tuple[Origin, Collective]
_ANY = Origin("")


def collectives(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh) -> tuple[Collective, ...]:
    """Counts the explicit collectives of a lowered program: `psum`, `all_gather`, `psum_scatter` and their like.

    The partitioner has not run yet, so none of its own are there, and inside a shard_map that leaves some axes
    automatic, shapes are not yet divided over those.

    Args:
      lowered: `jax.jit(f).lower(...)`, or a train step's `lower`.
      mesh: the mesh that the program runs on, to name the axes.

    Returns:
      One row for each distinct collective, counts added up, in the order of first appearance in the program.

    Raises:
      TypeError: `lowered` is not a lowered program.
      ValueError: the program runs on another mesh.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
      ... def f(x):
      ...     y, _ = jax.lax.scan(lambda x, _: (jax.lax.pmean(x, "data"), None), x, length=3)
      ...     return jax.lax.psum_scatter(y, ("data", "model"), tiled=True)
      >>> for row in collectives(f.lower(jax.numpy.ones(16)), mesh):
      ...     print(row.kind, row.dtype, row.shape, row.axes, row.group, row.count, row.bytes, row.wire_bytes)
      all-reduce float32 (16,) ('data',) 4 3 192 288.0
      reduce-scatter float32 (16,) ('data', 'model') 8 1 64 56.0
    """
    return tuple(row for _, row in _of_lowered(lowered, mesh, lambda name: _ANY))


def collectives_by_origin(
    lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh
) -> tuple[tuple[Origin, Collective], ...]:
    """The same as `collectives`, each with what it is for and of which leaf, by the names that jzero gives its own."""
    return tuple(_of_lowered(lowered, mesh, lambda name: _origin(name) or Origin("loss", name=_short(name))))


def _of_lowered(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, origin_of: Callable[[str], Origin]) -> list[Row]:
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
    by_groups = hlo.axes_by_groups(mesh, int(module.operation.attributes["mhlo.num_partitions"]))

    # What is around a collective names it as well: a function of its own, or a region for the model shards, has names
    # that begin anew.
    @functools.cache
    def in_function(name: str, around: str) -> list[Row]:
        return in_region(functions[name].regions[0], around)

    def in_region(region: Any, around: str) -> list[Row]:
        return _merged(row for block in region.blocks for op in block.operations for row in in_op(op.operation, around))

    def in_op(op: Any, around: str) -> Iterable[Row]:
        kind = op.name.removeprefix("stablehlo.").replace("_", "-")
        if not op.regions and kind not in (*hlo.COLLECTIVES, "func.call", "composite"):
            return []
        name = f"{around}/{hlo.location_name(op)}" if kind != "while" else around
        if kind in hlo.COLLECTIVES:
            over = hlo.participants(kind, _stablehlo_groups(op, mesh), by_groups)
            arrays = [x.type for x in (op.results if kind == "all-gather" else op.operands)]
            return [
                (origin_of(name), Collective(kind, hlo.dtype_name(str(x.element_type)), tuple(x.shape), *over))
                for x in arrays
            ]
        regions = [in_region(region, name) for region in op.regions]
        if kind == "while":
            return _loop(*regions, trips=hlo.stablehlo_trip_count(op))
        if kind == "case":
            return _either(regions)
        if kind in ("func.call", "composite"):
            return in_function(op.attributes["callee" if kind == "func.call" else "decomposition"].value, name)
        return itertools.chain(*regions)

    return in_function("main", "")


def compiled_collectives(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh | None = None
) -> tuple[Collective, ...]:
    """Counts all collectives of a compiled program: the explicit ones and the partitioner's, as XLA left them.

    Shapes are one device's. A combined collective gives one row for each array in it; an asynchronous pair (`-start`
    and `-done`) counts once. An all-to-all of n separate pieces is one row, its shape (n, *piece).

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, on any backend, also ahead of time for a GPU that is not there.
      mesh: the mesh that the program runs on, to name the axes; without it `axes` is ().

    Returns:
      One row for each distinct collective, counts added up, in the order of first appearance in the program.

    Raises:
      TypeError: `compiled` is not a compiled program.
      ValueError: the program runs on another mesh.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
      >>> x = jax.device_put(np.ones((8, 32), np.float32), NamedSharding(mesh, P("data")))
      >>> mean = jax.jit(lambda x: x.mean(0), out_shardings=NamedSharding(mesh, P())).lower(x)
      >>> collectives(mean, mesh)
      ()
      >>> compiled_collectives(mean.compile(), mesh)
      (Collective(kind='all-reduce', dtype='float32', shape=(32,), axes=('data',), group=8, count=1, exact=True),)
    """
    return tuple(row for _, row in _of_compiled(compiled, mesh, lambda names, n: [_ANY] * n))


def compiled_collectives_by_origin(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh | None = None
) -> tuple[tuple[Origin, Collective], ...]:
    """The same as `compiled_collectives`, each with whose it is, as far as XLA has left the names."""
    return tuple(_of_compiled(compiled, mesh, _origins))


def _of_compiled(
    compiled: jax.stages.Compiled,
    mesh: jax.sharding.Mesh | None,
    origins_of: Callable[[list[str], int], list[Origin]],
) -> list[Row]:
    text = compiled.as_text() if hasattr(compiled, "as_text") else None
    if not text or not text.startswith("HloModule"):
        raise TypeError(
            f"compiled_collectives: wanted a compiled program, which jax.jit(f).lower(...).compile() returns; got "
            f"{type(compiled).__name__}. For a lowered program call collectives."
        )
    program = hlo.parse(text)
    by_groups = None if mesh is None else hlo.axes_by_groups(mesh, program.n_devices)

    @functools.cache
    def in_computation(name: str, start: hlo.Instruction | None = None) -> list[Row]:
        return _merged(row for line in program.computations[name] for row in in_instruction(name, line, start))

    def in_instruction(name: str, instruction: hlo.Instruction, start: hlo.Instruction | None) -> list[Row]:
        if kind := instruction.collective:
            axes, group = hlo.participants(kind, program.groups(instruction), by_groups)
            arrays = program.exchanged(name, instruction)
            names = instruction.op_names or (start.op_names if start else [])
            return [
                (origin, Collective(kind, dtype, shape, axes, group))
                for origin, (dtype, shape) in zip(origins_of(names, len(arrays)), arrays, strict=True)
            ]
        if instruction.opcode.endswith(("-done", "-update")):
            return []
        # What an asynchronous computation is called stands where it starts.
        start = instruction if instruction.opcode == "async-start" else None
        called = [in_computation(name, start) for name in instruction.called]
        if instruction.opcode == "while":
            return _loop(*called, trips=instruction.trip_count)
        if instruction.opcode == "conditional":
            return _either(called)
        return list(itertools.chain(*called))

    return in_computation(program.entry)


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Equal rows as one, counts added up."""
    counts: dict[Row, int] = {}
    for row in rows:
        one = _run(row, 1)
        counts[one] = counts.get(one, 0) + row[1].count
    return [_run(one, n) for one, n in counts.items() if n]


def _run(row: Row, count: int, *, exact: bool = True) -> Row:
    """The same, run so often."""
    origin, one = row
    return origin, dataclasses.replace(one, count=count, exact=one.exact and exact)


def _loop(condition: list[Row], body: list[Row], trips: int | None) -> list[Row]:
    if trips is None:
        return [_run(row, row[1].count, exact=False) for row in condition + body]
    # The condition runs once more than the body, to find that the loop is over.
    runs = [(row, trips + 1) for row in condition] + [(row, trips) for row in body]
    return [_run(row, row[1].count * n) for row, n in runs]


def _either(branches: list[list[Row]]) -> list[Row]:
    counts = [{_run(row, 1): row[1].count for row in branch} for branch in branches]
    rows = []
    for one in dict.fromkeys(itertools.chain(*counts)):
        n = [branch.get(one, 0) for branch in counts]
        rows.append(_run(one, min(n)))
        rows.append(_run(one, max(n) - min(n), exact=False))
    return rows


def _origin(name: str) -> Origin | None:
    found = scopes.read(name)
    return None if found is None else Origin(*found)


def _short(name: str) -> str:
    """The end of a name: the operation, and the last scope around it that says something."""
    return "/".join([part for part in name.split("/") if part and part not in _NOTHING][-2:])


_NOTHING = {"while", "body", "cond", "closed_call", "eval_jaxpr", "shard_map", "jit(main)"}
_EXPLICIT = re.compile(r"(psum|pmin|pmax|pmean|all_gather|reduce_scatter|all_to_all|ppermute|pbroadcast)")


def _origins(names: list[str], arrays: int) -> list[Origin]:
    """Whose each array of a compiled collective is. XLA keeps a name for each, or one for all; or loses some."""

    def one(name: str) -> Origin:
        kind = "loss" if _EXPLICIT.match(name.rsplit("/", 1)[-1]) else "partitioner"
        return _origin(name) or Origin(kind, name=_short(name))

    found = [one(name) for name in names]
    if len(found) == arrays:
        return found
    # Several in one array, as XLA:GPU packs small ones; or a name less than arrays. The loss goes along with gradients.
    purposes = {origin.purpose for origin in found} - {"sum"} or {origin.purpose for origin in found}
    if len(purposes) != 1:
        return [Origin("unnamed")] * arrays
    leaves, rest = (dict.fromkeys(x for origin in found if (x := getattr(origin, name))) for name in ("leaf", "name"))
    return [Origin(purposes.pop(), " + ".join(leaves), " + ".join(rest))] * arrays


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


def _stablehlo_groups(op: Any, mesh: jax.sharding.Mesh) -> hlo.Groups:
    attribute = op.attributes["replica_groups" if "replica_groups" in op.attributes else "source_target_pairs"]
    # jax 0.10 writes device ids; jax 0.12 writes mesh axes where it can, in an attribute without accessors in Python.
    axes = re.findall(r'axis_ref<name = "([^"]+)"', str(attribute))
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"{op.name} runs over the axes {missing}, but the mesh has {mesh.axis_names}: pass the mesh that the "
            "program runs on."
        )
    return hlo.groups_over(mesh, axes) if axes else np.array(attribute).tolist()
