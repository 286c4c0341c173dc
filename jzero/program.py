"""What a program communicates: its collectives, counted on the program itself.

Two views of one jitted function. `collectives` reads the lowered program (StableHLO, before partitioning), which holds
the collectives that were written down: jzero's own, and any in the user's loss. `compiled_collectives` reads the
optimised program, which holds what XLA left of these, and what the partitioner put in.

Read dtypes from the lowered program: XLA:CPU runs bfloat16 collectives in float32. Counts, too, may differ for good
reasons: XLA moves collectives out of loops, joins small ones, and drops a reduce-scatter of what was just gathered.

Not counted: `send`, `recv` and `ragged_all_to_all`.
"""

import functools
import itertools
import re
from collections.abc import Callable

import jax

from jzero import hlo, scopes, stablehlo
from jzero.groups import axes_by_groups, participants
from jzero.tally import Collective, Origin, Row, either, merged, repeated, wire_factor

__all__ = [
    "Collective",
    "Origin",
    "collectives",
    "collectives_by_origin",
    "compiled_collectives",
    "compiled_collectives_by_origin",
    "wire_factor",
]

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
    return tuple(row for _, row in stablehlo.rows(lowered, mesh, lambda name: _ANY))


def collectives_by_origin(
    lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh
) -> tuple[tuple[Origin, Collective], ...]:
    """The same as `collectives`, each with what it is for and of which leaf, by the names that jzero gives its own."""
    return tuple(stablehlo.rows(lowered, mesh, lambda name: _origin(name) or Origin("loss", name=_short(name))))


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
    program = hlo.parse(hlo.text_of("compiled_collectives", compiled, " For a lowered program call collectives."))
    by_groups = None if mesh is None else axes_by_groups(mesh, program.n_devices)

    @functools.cache
    def in_computation(name: str) -> list[Row]:
        return merged(row for line in program.computations[name] for row in in_instruction(name, line))

    def in_instruction(name: str, instruction: hlo.Instruction) -> list[Row]:
        if started := program.started(name, instruction):
            return [row for one in started for row in exchanged(one)]
        if instruction.opcode.endswith(("-done", "-update")):
            return []
        called = list(map(in_computation, instruction.called))
        if instruction.opcode == "while":
            return repeated(*called, trips=instruction.trip_count)
        if instruction.opcode == "conditional":
            return either(called)
        return list(itertools.chain(*called))

    def exchanged(one: hlo.Exchange) -> list[Row]:
        axes, group = participants(one.kind, one.groups, by_groups)
        return [
            (origin, Collective(one.kind, dtype, shape, axes, group))
            for origin, (dtype, shape) in zip(origins_of(one.names, len(one.arrays)), one.arrays, strict=True)
        ]

    return in_computation(program.entry)


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
    # Several in one array, as XLA:GPU packs small ones; or a name less than arrays.
    purpose = scopes.common(origin.purpose for origin in found)
    if not purpose:
        return [Origin("unnamed")] * arrays
    leaves, rest = (dict.fromkeys(x for origin in found if (x := getattr(origin, name))) for name in ("leaf", "name"))
    return [Origin(purpose, " + ".join(leaves), " + ".join(rest))] * arrays
