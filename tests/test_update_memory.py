"""Temp memory of `apply_gradients` with a donated state: no more than is worked on at a time."""

import importlib.util
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import jzero
from tests.compiled_update import WITH_BARRIERS, lower_update, temp_bytes

TREES = {
    "alike": [(512, 1024)] * 8,
    "different": [(512 + 64 * i, 1024 - 64 * i) for i in range(8)],
    "padded": [(511, 1021)] * 8,
}
OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(1e-3)}

SMALL = 2**14  # scalars, tables of pointers, what alignment adds

HAS_CUDA_PLUGIN = bool(importlib.util.find_spec("jax_plugins")) and any(
    importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
)

H200 = """
    gpu_device_info {
        threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
        shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
        device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
        cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
    }
    platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 }
    device_description_str: "NVIDIA H200 141GB"
"""


def temp_and_limit(tx, shapes, stage, mesh, options):
    """Temp bytes of the update, and what it may take: two shards, and where params are whole two gathered leaves."""
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    layout = jzero.zero(params, stage=stage, mesh=mesh)
    whole = max(4 * math.prod(leaf.stored) for leaf in layout.leaves)
    limit = 2 * whole // layout.shards + (2 * whole if stage < 3 else 0) + SMALL
    return temp_bytes(lower_update(tx, layout), options), limit


# XLA:CPU keeps the shards of padded leaves; XLA:GPU does not, as the next test sees.
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tree", ["alike", "different"])
def test_an_update_takes_two_shards_and_two_gathered_leaves(tree, name, stage):
    temp, limit = temp_and_limit(OPTIMIZERS[name], TREES[tree], stage, jzero.make_mesh(data=8), WITH_BARRIERS)
    assert temp <= limit


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_CUDA_PLUGIN or os.environ.get("JAX_PLATFORMS") != "cpu",
    reason="no GPU is needed, but its compiler: pip install 'jax[cuda12-local]' and set JAX_PLATFORMS=cpu",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tree", TREES)
def test_so_it_does_in_the_program_for_eight_h200(tree, name, stage):
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x8")
    mesh = Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))
    temp, limit = temp_and_limit(OPTIMIZERS[name], TREES[tree], stage, mesh, {})
    assert temp <= limit
