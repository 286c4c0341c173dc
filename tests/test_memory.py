"""Bytes per device: those of live arrays, and those of the compiled step, whose state is donated."""

import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import memory

SHAPES = {"embed": (64, 16), "layers": (4, 16, 32), "bias": (32,)}  # all divide by 8 and by 4
P = 64 * 16 + 4 * 16 * 32 + 32
COUNTERS = 20  # bytes of the step, of what is counted of skipped steps and of Adam's own count: whole on every device
ADAM = optax.adam(1e-3)


def init_params():
    return {
        path: jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape) for path, shape in SHAPES.items()
    }


def loss_fn(params, x):
    h, _ = jax.lax.scan(
        lambda h, w: (h + jnp.tanh(h @ w + params["bias"]).mean(-1, keepdims=True), None), x, params["layers"]
    )
    return ((h @ params["embed"].T) ** 2).mean()


def make_layout(stage, **axes):
    params = jax.eval_shape(init_params)
    replica_axes = ("replica",) if "replica" in axes else ()
    return jzero.zero(params, stage=stage, mesh=jzero.make_mesh(**axes), replica_axes=replica_axes, min_shard_size=0)


def make_batch(layout):
    return layout.put_batch(np.ones((32, 16), np.float32))


def per_device(tree):
    """Bytes of a tree, which must be the same on each device of the mesh."""
    (n,) = set(memory.live_bytes(tree).values())
    return n


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("axes", [{"data": 8}, {"replica": 2, "data": 4}], ids=str)
def test_stored_bytes_are_those_of_the_papers(stage, axes):
    """12P, 4P + 8P/N and 12P/N for Adam in float32, to the byte."""
    layout, n = make_layout(stage, **axes), axes["data"]
    state = jzero.init(init_params, ADAM, layout)
    stored = [12 * P, 4 * P + 8 * P // n, 4 * P + 8 * P // n, 12 * P // n][stage]
    assert per_device(state) == stored + COUNTERS
    assert memory.stored_bytes(layout, ADAM).total == stored + 4, "with Adam's own count alone"
    assert memory.formula(stage, params=P, shards=n).stored == stored


@pytest.mark.parametrize(
    ("stage", "microbatches", "tx", "bytes_of_state"),
    [
        (0, 1, ADAM, 12 * P + COUNTERS),
        (1, 4, ADAM, 4 * P + 8 * P // 8 + COUNTERS),
        (2, 4, ADAM, 4 * P + 8 * P // 8 + COUNTERS),
        (3, 1, ADAM, 12 * P // 8 + COUNTERS),
        (3, 4, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)), 8 * P // 8 + 16),
        (2, 1, optax.sgd(0.1), 4 * P + 16),
    ],
    ids=["0", "1", "2", "3", "3 momentum", "2 sgd"],
)
def test_the_whole_state_is_donated(stage, microbatches, tx, bytes_of_state):
    layout = make_layout(stage, data=8)
    state, batch = jzero.init(init_params, tx, layout), make_batch(layout)
    step = jzero.train_step(loss_fn, tx, layout, microbatches=microbatches, clip_norm=1.0)
    compiled = step.lower(state, batch).compile().memory_analysis()
    assert compiled is not None
    assert compiled.alias_size_in_bytes == bytes_of_state
    assert compiled.argument_size_in_bytes == bytes_of_state + 32 * 16 * 4 // 8
    # Beside the state come 6 metrics of 4 bytes and 2 bools, and a table of pointers to all of them.
    outputs = len(jax.tree.leaves(state)) + 8
    assert compiled.output_size_in_bytes == bytes_of_state + 26 + 8 * outputs


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2)), 1, 3])
def test_a_step_leaves_nothing_of_the_old_state_alive(stage):
    layout = make_layout(stage, data=8)
    state, batch = jzero.init(init_params, ADAM, layout), make_batch(layout)
    step = jzero.train_step(loss_fn, ADAM, layout, microbatches=4)
    state, metrics = step(state, batch)  # what compiling keeps, it keeps here

    def buffers(arrays):
        """Address and bytes of each buffer, counted once however many arrays see it."""
        shards = [s.data for x in arrays if not x.is_deleted() for s in x.addressable_shards]
        return {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}

    def alive():
        gc.collect()
        return sum(buffers(jax.live_arrays()).values())

    before, old, place = alive(), state, buffers(jax.tree.leaves(state))
    state, metrics = step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert buffers(jax.tree.leaves(state)) == place, "the new state lies where the old one did"
    assert alive() == before
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("stage", [0, 3])
def test_params_that_were_handed_to_init_survive_the_steps(stage):
    layout = make_layout(stage, data=8)
    params = jax.device_put(init_params(), layout.param_shardings)
    before = jax.tree.map(np.array, params)
    state = jzero.init(lambda p: p, ADAM, layout, params)
    state, _ = jzero.train_step(loss_fn, ADAM, layout)(state, make_batch(layout))
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert not np.array_equal(state.params["embed"], before["embed"])


def test_apply_gradients_donates_nothing():
    layout = make_layout(2, data=8)
    state = jzero.init(init_params, ADAM, layout)
    _, grads = jzero.value_and_grad(loss_fn, layout)(state.params, make_batch(layout))
    jzero.apply_gradients(state, grads, ADAM, layout)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, grads)))
