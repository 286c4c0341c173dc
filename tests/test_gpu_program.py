"""The programs that GPUs run, compiled ahead of time: dtypes, overlap and memory, which XLA:CPU does not tell.

No GPU is needed, but what compiles for them: pip install -e ".[preflight]", and JAX_PLATFORMS=cpu.
"""

import functools
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from experiments.schedule.config import Config
from experiments.schedule.models import MODELS
from experiments.schedule.program import compile_program
from jzero.schedule import shares
from jzero.targets import target_mesh
from tests import gpus

pytestmark = [pytest.mark.slow, gpus.compiles]
compiled = functools.cache(compile_program)
MiB = 2**20
BLOCK = 12 * 2048**2 * 2  # bytes of one block's weights in bfloat16, of the default model


def share_of(program):
    """Shares of gathers forward and backward, and of scatters, that have a matmul in their window."""
    found = {(share.kind, share.purpose): share.share for share in shares(program.windows)}
    return found["all-gather", "forward"], found["all-gather", "backward"], found["reduce-scatter", "scatter"]


@pytest.mark.parametrize(
    ("mesh", "ahead"), [((("data", 8),), False), ((("data", 8),), True), ((("data", 4), ("model", 2)), True)]
)
def test_weights_travel_in_bfloat16_and_asynchronously(mesh, ahead):
    program = compiled(Config(mesh=mesh, layers=4, ahead=ahead))
    gathers = [window for window in program.windows if window.kind == "all-gather" and window.purpose]
    scatters = [window for window in program.windows if window.purpose == "scatter"]
    assert gathers
    assert {piece.dtype for window in gathers + scatters for piece in window.pieces} == {"bfloat16"}
    assert all(window.asynchronous for window in gathers)
    assert {window.kind for window in scatters} == {"reduce-scatter"}
    assert not [window for window in program.windows if window.kind == "all-to-all"]
    assert {window.axes for window in gathers + scatters} == {("data",)}


def test_scanned_blocks_are_gathered_ahead_and_reduced_behind():
    """Every byte in the loops has a matmul beside it, for less than one more gathered block and its gradients."""
    ahead, plain = compiled(Config()), compiled(Config(ahead=False, xla_defaults=True))
    assert share_of(ahead) == (1, 1, 1)
    assert share_of(plain)[0] < 0.7
    assert share_of(plain)[1] < 0.8
    assert ahead.temp_bytes - plain.temp_bytes < 2 * BLOCK


@pytest.mark.parametrize("mesh", [(("data", 4), ("model", 2)), (("data", 2), ("model", 4))])
def test_beside_a_model_axis_weights_are_early_as_well(mesh):
    program = compiled(Config(mesh=mesh))
    assert share_of(program) == (1, 1, 1)
    sums = [window for window in program.windows if window.kind == "all-reduce" and window.loop]
    assert any(window.matmuls for window in sums if window.axes == ("model",))


def test_a_sum_over_replicas_on_another_host_leaves_the_matmuls_to_others_as_well():
    """Of blocks so large that their shards would be summed in several parts, were they not joined."""
    program = compiled(Config(target="h200x2x8", mesh=(("replica", 2), ("data", 8)), layers=6, width=4096, heads=32))
    assert min(share_of(program)) > 0.95
    sums = [window for window in program.windows if window.kind == "all-reduce" and window.loop]
    assert {window.axes for window in sums} == {("replica",)}
    assert all(window.matmuls for window in sums)


def test_written_out_blocks_are_gathered_ahead_too():
    """Behind the reductions of the last two leaves there is nothing left to compute."""
    assert min(share_of(compiled(Config(unrolled=True)))) > 0.95


def test_reductions_of_written_out_blocks_at_the_end_of_a_step_are_early_as_well():
    found = {share.kind: share.share for share in shares(compiled(Config(stage=1, unrolled=True)).windows)}
    assert found["reduce-scatter"] > 0.95


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_of_written_out_blocks_grows_by_activations_and_gradient_shards(stage):
    """24 blocks against 12. Left alone, XLA joins the reductions of all blocks, and so keeps all gradients whole.

    Where params are whole, XLA:GPU undoes the remat of blocks that are written out; so there it is what plain JAX takes
    on as many GPUs that counts.
    """
    width, tokens = 512, 8 * 1024
    sizes = {"width": width, "heads": 4, "context": 1024, "batch": 8, "unrolled": True, "ahead": False}
    bucket = 4 * width * width * 2  # the largest leaf in bfloat16
    configs = [Config(stage=stage, layers=layers, bucket_bytes=bucket, **sizes) for layers in (12, 24)]
    few, many = (compiled(config).temp_bytes for config in configs)
    weights = 12 * width**2
    if stage == 3:
        activations = 12 * tokens * width * 2
    else:
        few_plain, many_plain = map(temp_bytes_of_plain_jit, configs)
        activations = many_plain - few_plain
    assert many - few <= activations + 12 * weights * (2 + 4) // 8  # shards, reduced in bfloat16 and then cast


def temp_bytes_of_plain_jit(config):
    """Data parallelism by shardings alone."""
    model, mesh = MODELS[config.model](config), target_mesh("h200x8", data=8)
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), model.params)
    batch = model.batch.update(shape=(8 * config.batch, *model.batch.shape[1:]), sharding=cut)
    analysis: Any = jax.jit(jax.value_and_grad(model.loss_fn)).lower(params, batch).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def test_options_for_gpus():
    params = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    layout = jzero.zero(params, stage=3, mesh=target_mesh("h200x8", data=8))
    assert layout.ahead
    options = jzero.compiler_options(layout, bucket_bytes=8 * MiB)
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == MiB  # of the shard
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] == 8 * MiB
    mesh = target_mesh("h200x2x8", replica=2, data=8)
    replicated = jzero.zero(params, stage=3, mesh=mesh, replica_axes=("replica",))
    assert jzero.compiler_options(replicated)["xla_gpu_all_reduce_combine_threshold_bytes"] == 256 * MiB
    reduced_once = jzero.zero(params, stage=1, mesh=layout.mesh)
    assert set(options) - set(jzero.compiler_options(reduced_once)) == {
        "xla_gpu_experimental_parallel_collective_overlap_limit"
    }
