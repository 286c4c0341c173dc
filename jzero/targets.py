"""GPUs by name, to compile programs for on a machine that has none.

XLA needs only a description of the GPU and jax's pjrt package, no driver and no CUDA; nothing can be run or timed. The
compiled program is the one that such GPUs run: its collectives, its schedule and its memory are those of the real one.
"""

import functools
import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from jzero.mesh import make_mesh

EXTRA = "preflight"
"""The optional dependencies of jzero that hold the pjrt package."""


@dataclass(frozen=True)
class Gpu:
    """What XLA wants to know of a GPU.

    Attributes:
        name: As the driver names it.
        memory: Bytes of device memory. XLA's scheduler holds more in flight where more is free.
        bandwidth: Bytes per second to and from that memory.
        cores: Streaming multiprocessors.
        lanes: float32 units of each.
        clock: GHz.
        cache: Bytes of the level 2 cache.
        shared: Bytes of shared memory of each core; a block may have all but 1 KiB.
        capability: CUDA's compute capability, as (9, 0).
        threads: How many a core holds at a time.
    """

    name: str
    memory: int
    bandwidth: int
    cores: int
    lanes: int
    clock: float
    cache: int
    shared: int
    capability: tuple[int, int]
    threads: int = 2048

    def describe(self, memory: int) -> str:
        """XLA's GpuTargetConfigProto in text form, with so much memory. XLA refuses fields that it does not know."""
        return f"""
            gpu_device_info {{
              device_memory_size: {memory} memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache}
              core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock}
              cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {self.threads}
              registers_per_block_limit: 65536 registers_per_core_limit: 65536
              shared_memory_per_core: {self.shared} shared_memory_per_block: {48 << 10}
              shared_memory_per_block_optin: {self.shared - 1024}
              block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1} block_dim_limit_z: {2**16 - 1}
            }}
            platform_name: "CUDA"
            runtime_version {{ major: 12 minor: 8 }} dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
        """


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040_000_000, 108, 64, 1.41, 40 << 20, 164 << 10, (8, 0)),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000, 132, 128, 1.98, 50 << 20, 228 << 10, (9, 0)
    ),
    "h200": Gpu("NVIDIA H200 141GB", 151_397_597_184, 4_800_000_000_000, 132, 128, 1.98, 50 << 20, 228 << 10, (9, 0)),
    "b200": Gpu("NVIDIA B200", 191_514_411_008, 7_672_320_000_000, 148, 128, 1.965, 132_644_864, 228 << 10, (10, 0)),
    "l40s": Gpu("NVIDIA L40S", 47_690_000_000, 864_096_000_000, 142, 128, 2.52, 96 << 20, 100 << 10, (8, 9), 1536),
}
"""The GPUs that a target can name."""


def target_mesh(target: str, *, device_memory: int | None = None, **axes: int) -> Mesh:
    """A mesh of GPUs that are not there: programs can be lowered and compiled for it, and nothing can be run.

    Args:
        target: The GPU and how many: "h200x8" is one host of 8, "h200x2x8" two hosts of 8.
        device_memory: Bytes of memory of each GPU; the real thing's if None.
        **axes: Size of each axis by name, as for `make_mesh`; one of them may be -1.

    Returns:
        A `jax.sharding.Mesh` over all the target's devices, the GPUs of a host next to one another.

    Raises:
        ValueError: No such target, or axes that do not multiply to its number of devices.
        RuntimeError: jax cannot compile for GPUs here: its pjrt package is missing, or it was told to start the GPUs.

    Example:
        >>> mesh = target_mesh("h200x2x8", replica=2, data=8)  # doctest: +SKIP
        >>> layout = jzero.zero(params, stage=3, mesh=mesh, replica_axes=("replica",))  # doctest: +SKIP
        >>> program = jax.jit(jzero.value_and_grad(loss_fn, layout))  # doctest: +SKIP
        >>> program.lower(params, batch).compile().memory_analysis()  # doctest: +SKIP
    """
    name, hosts, count = parse_target(target)
    gpu = GPUS[name]
    if device_memory is not None and device_memory < 1:
        raise ValueError(f"device_memory={device_memory}; wanted a number of bytes, or None for the {gpu.name}'s own.")
    try:
        topology = _topology(gpu.describe(device_memory or gpu.memory), f"1x{hosts}x{count}")
    except NotImplementedError as error:
        raise RuntimeError(f"Cannot compile for {target} here: {_why()}") from error
    product = math.prod(axes.values())
    if min(axes.values(), default=1) > 0 and product != hosts * count:  # else make_mesh fills or refuses
        given = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"target_mesh({target!r}, {given}): {hosts * count} GPUs, but the axes multiply to {product}.")
    return make_mesh(devices=topology.devices, **axes)


@functools.cache
def _topology(description: str, shape: str) -> Any:
    """The same devices for the same target, so that meshes of it are equal."""
    return topologies.get_topology_desc(platform="cuda", target_config=description, topology=shape)


def parse_target(target: str) -> tuple[str, int, int]:
    """Short name of the GPU, number of hosts, GPUs of each.

    Raises:
        ValueError: No such target.

    Example:
        >>> parse_target("h200x2x8"), parse_target("l40sx4")
        (('h200', 2, 8), ('l40s', 1, 4))
    """
    match = re.fullmatch(r"([a-z]\w*?)(?:x([1-9]\d*))?x([1-9]\d*)", target)
    if match is None or match[1] not in GPUS:
        raise ValueError(
            f"target {target!r}; wanted a GPU ({', '.join(GPUS)}) and how many, for example h200x8 (one host of 8) or "
            f"h200x2x8 (two hosts of 8)."
        )
    return match[1], int(match[2] or 1), int(match[3])


def has_pjrt() -> bool:
    """Whether a pjrt package for GPUs is installed, which is what compiling for them takes."""
    found = importlib.util.find_spec("jax_plugins")
    return found is not None and any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))


def _why() -> str:
    if not has_pjrt():
        return (
            f'jax\'s pjrt package for GPUs is missing. Install it with `pip install "jzero[{EXTRA}]"`; no GPU, driver '
            f"or CUDA is needed."
        )
    return (
        "jax has looked for GPUs and found none that it could start. Set JAX_PLATFORMS=cpu before jax starts; the "
        "program is still compiled for GPUs. (Or the pjrt package is of another version than jax.)"
    )
