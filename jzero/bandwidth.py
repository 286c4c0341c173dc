"""How fast a mesh axis carries each collective, after NVIDIA's nccl-tests.

One collective at a time, as a jitted program that holds nothing else, over one named axis. Where the mesh has other
axes, all groups along the axis run at once, as they do in training, and share what links they share.

What "size" means, and bus bandwidth, are those of nccl-tests' doc/PERFORMANCE.md. The size S is the bytes of the whole
array: what each device reduces, exchanges or sends, the input of a reduce-scatter, the result of an all-gather.

    algbw = S / t                how long an array of another size would take
    busbw = algbw x factor       what a device's link carries, to be compared with its speed in one direction

    factor = 2(n - 1)/n for all-reduce; (n - 1)/n for reduce-scatter, all-gather and all-to-all; 1 for permute

which is `jzero.program`'s `wire_bytes / t`. A time is that of one call of a jitted function, with what JAX takes to
start it: that is most of it where arrays are small.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.mesh import platform_of
from jzero.sweep import Sweep, Timing
from jzero.tally import Collective

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "permute")
"""The collectives that can be measured. A permute sends to the next device of the axis, around in a ring."""

DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")
"""The dtypes that can be measured. XLA:CPU runs collectives of bfloat16 in float32, with a cast on both sides."""

_WARM_UP = 2
_IN_FLIGHT = 10  # calls started before the first is waited for, so that starting them is hidden; nccl-tests: 20


def check(mesh: Mesh, axis: str, kind: str, sizes: Sequence[int], dtype: Any) -> None:
    """Raises the ValueError that `measure` would raise for these arguments, before anything runs."""
    if kind not in KINDS:
        raise ValueError(f"collective {kind!r}; wanted one of {', '.join(KINDS)}.")
    if axis not in mesh.shape:
        raise ValueError(f"axis {axis!r}; wanted one of the mesh's: {', '.join(map(repr, mesh.shape))}.")
    if (n := mesh.shape[axis]) < 2:
        wide = [name for name, size in mesh.shape.items() if size > 1]
        fix = f"Name another ({', '.join(map(repr, wide))})." if wide else "Make the mesh over more devices."
        raise ValueError(f"axis {axis!r} has one device, so that nothing is sent; wanted two or more. {fix}")
    item = jnp.dtype(_name(dtype)).itemsize
    if not sizes:
        raise ValueError("sizes is empty; wanted one or more, in bytes.")
    for size in sizes:
        if size < 1 or size % (n * item):
            below, above = size // (n * item) * n * item, (max(size, 0) // (n * item) + 1) * n * item
            near = f"{below} or {above}" if below > 0 else f"{above}"
            raise ValueError(
                f"size {size}: {n} devices cannot share it out in whole numbers of {_name(dtype)} ({item} bytes); "
                f"wanted a multiple of {n * item} bytes. Near it: {near}."
            )


def sizes_between(first: int, last: int, multiple: int = 1) -> tuple[int, ...]:
    """Sizes that double from the first up to the last, each rounded up to a multiple of so many bytes.

    Raises:
        ValueError: Not 1 <= first <= last.

    Example:
        >>> sizes_between(1024, 5000)
        (1024, 2048, 4096)
        >>> sizes_between(1024, 5000, multiple=24)
        (1032, 2064, 4104)
    """
    if not 1 <= first <= last:
        raise ValueError(f"sizes from {first} to {last} bytes; wanted the smaller first, and both positive.")
    sizes = []
    while first <= last:
        sizes.append(-(-first // multiple) * multiple)
        first *= 2
    return tuple(dict.fromkeys(sizes))


def program(
    mesh: Mesh, axis: str, kind: str, size: int, dtype: Any
) -> tuple[jax.stages.Wrapped, jax.ShapeDtypeStruct, Collective]:
    """The program that is timed: one collective over the axis, and nothing else.

    The all-reduce donates its operand. XLA:GPU reduces in place, and would copy first what it must not overwrite.

    Returns:
        A jitted function, what it takes, and the collective that it holds. `measure` calls it as it is; on a mesh of
        `jzero.targets.target_mesh` it can be compiled and looked at without the GPUs.

    Raises:
        ValueError: As `measure`.

    Example:
        >>> mesh = jzero.make_mesh(data=4, model=2)
        >>> f, operand, collective = program(mesh, "data", "all-gather", 1024, "float32")
        >>> jzero.program.collectives(f.lower(operand), mesh) == (collective,)
        True
    """
    check(mesh, axis, kind, [size], dtype)
    n, name = mesh.shape[axis], _name(dtype)
    count = size // jnp.dtype(name).itemsize
    local: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all-reduce": partial(lax.psum, axis_name=axis),
        "reduce-scatter": partial(lax.psum_scatter, axis_name=axis, tiled=True),
        "all-gather": partial(lax.all_gather, axis_name=axis, tiled=True),
        "all-to-all": partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True),
        "permute": partial(lax.ppermute, axis_name=axis, perm=[(i, (i + 1) % n) for i in range(n)]),
    }
    # Each device has its own array, also where all end up with the same: then what goes in can be what comes out.
    spec = PartitionSpec(axis)
    mapped = jax.shard_map(local[kind], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    whole = count if kind == "all-gather" else count * n
    operand = jax.ShapeDtypeStruct((whole,), jnp.dtype(name), sharding=NamedSharding(mesh, spec))
    collective = Collective("collective-permute" if kind == "permute" else kind, name, (count,), (axis,), n)
    return jax.jit(mapped, donate_argnums=(0,) if kind == "all-reduce" else ()), operand, collective


def measure(mesh: Mesh, axis: str, kind: str, sizes: Sequence[int], dtype: Any = "float32", repeats: int = 20) -> Sweep:
    """Times one collective over one axis of a mesh, on arrays of several sizes.

    On accelerators each repeat starts ten calls and waits for the last, so that starting them is hidden behind those
    that run; on CPU it is one call, as simulated devices that run ahead can time out. Two repeats more warm up. Arrays
    of zeros are used. Each device holds an operand and a result of the size, or for an all-reduce one of them.

    In a run of several processes, call it on each.

    Args:
        mesh: The devices.
        axis: The axis that the collective runs over.
        kind: Of `KINDS`.
        sizes: Bytes of the whole array. They must divide into whole elements for each device.
        dtype: Of `DTYPES`, by name or as a dtype.
        repeats: How often each size is timed.

    Returns:
        The sizes in ascending order and the median time of each.

    Raises:
        ValueError: An axis that the mesh lacks or that has one device, an unknown collective or dtype, a size that
            does not divide, or no repeats.

    Example:
        >>> sweep = measure(jzero.make_mesh(data=-1), "data", "all-reduce", [1024, 2048], repeats=2)
        >>> [timing.collective.bytes for timing in sweep.timings], sweep.measures
        ([1024, 2048], 'memory')
        >>> sweep.plateau, sweep.latency, sweep.verdict(link=450e9)  # doctest: +SKIP
    """
    check(mesh, axis, kind, sizes, dtype)
    if repeats < 1:
        raise ValueError(f"repeats={repeats}; wanted 1 or more.")
    platform = platform_of(mesh)
    calls = 1 if platform == "cpu" else _IN_FLIGHT
    timings = []
    for size in sorted(set(sizes)):
        f, operand, collective = program(mesh, axis, kind, size, dtype)
        seconds = _times(f, operand, repeats, calls)
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if repeats > 1 else seconds * 3
        timings.append(Timing(collective, statistics.median(seconds), (quartiles[0], quartiles[2])))
    return Sweep(kind, _name(dtype), axis, mesh.shape[axis], platform, tuple(timings))


def _times(f: Callable, operand: jax.ShapeDtypeStruct, repeats: int, calls: int) -> list[float]:
    """Seconds of one call, in each of the repeats."""
    x = jax.jit(lambda: jnp.zeros(operand.shape, operand.dtype), out_shardings=operand.sharding)()
    seconds = []
    for _ in range(_WARM_UP + repeats):
        jax.block_until_ready(x)
        start, y = perf_counter(), x
        for _ in range(calls):
            y = f(x)
            x = y if y.shape == x.shape else x  # where it was donated it must be
        jax.block_until_ready(y)
        seconds.append((perf_counter() - start) / calls)
    return seconds[_WARM_UP:]


def _name(dtype: Any) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}; wanted one of {', '.join(DTYPES)}.")
    return name
