"""Gradients and training over a mesh are those of `jax.value_and_grad` and optax on one device.

In float64 what is right is exact, and what is only close fails. Raw gradients and SGD come first: Adam divides a
constant factor out of the gradient, and would hide one that is N times too large.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from tests.models import STAGES

MESHES: dict[str, dict[str, int]] = {
    "8": {"data": 8},
    "2x4": {"replica": 2, "data": 4},
    "3": {"data": 3},
    "1": {"data": 1},
    "4 model 2": {"data": 4, "model": 2},  # `model` is named in no axes: the partitioner's own
    "2x2x2": {"node": 2, "replica": 2, "data": 2},  # cut over (data, node), which is not the mesh's order
}
LOSSES = ["mean", "uneven", "gaps"]
OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
}
EXAMPLES, LENGTH, VOCABULARY = 96, 6, 24  # 96 = 8 devices x 4 microbatches x 3, and 3 devices x 4 microbatches x 8


class Layers(NamedTuple):
    up: Any
    down: Any
    scale: Any


def init_params(dtype):
    """Leaves that divide, that do not, that divide along the stacked dim alone (by 3), and a scalar."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 3, dtype)

    return {
        "embed": normal(VOCABULARY, 8),
        "position": [normal(LENGTH, 5), normal(5, 8)],
        "layers": Layers(normal(3, 8, 16), normal(3, 16, 8), normal(3)),
        "bias": normal(VOCABULARY),
        "log_temperature": normal(),
    }


def predict(params, tokens):
    """Loss of each token under a small scanned model whose embedding is tied to its head: (B, T + 1) -> (B, T)."""
    x_BTD = params["embed"][tokens[:, :-1]] + params["position"][0] @ params["position"][1]

    def layer(x, layer):
        return x + jnp.tanh(x @ layer.up) @ layer.down * (1 + layer.scale), None

    x_BTD, _ = lax.scan(layer, x_BTD, params["layers"])
    logits_BTV = jnp.exp(params["log_temperature"]) * (x_BTD @ params["embed"].T) + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens[:, 1:])


def mean_loss(params, batch):
    losses = predict(params, batch["tokens"])
    return losses.mean(), {"squares": (losses**2).mean(), "lengths": [batch["mask"].sum(1).mean()]}


def weighted_loss(params, batch):
    losses, mask = predict(params, batch["tokens"]), batch["mask"]
    weight = mask.sum()
    squares = (losses**2 * mask).sum() / jnp.maximum(weight, 1)  # a weighted mean of its own
    return jzero.Weighted((losses * mask).sum(), weight), {"squares": squares, "lengths": [jnp.ones(2)]}


def loss_of(kind):
    return mean_loss if kind == "mean" else weighted_loss


def make_batch(kind):
    """Tokens, and a mask: real weights, of uneven lengths; with "gaps" whole devices and microbatches weigh 0."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, LENGTH + 1, EXAMPLES)
    mask = (np.arange(LENGTH) < lengths[:, None]) * rng.uniform(1, 2, (EXAMPLES, LENGTH))
    if kind == "gaps":
        # Of 8 devices the second has no weight; of those that have, some only in their last quarter.
        mask[12:24] = mask[:9] = mask[40:64] = 0
    elif kind == "nothing":
        mask[:] = 0
    return {"tokens": rng.integers(0, VOCABULARY, (EXAMPLES, LENGTH + 1)), "mask": mask}


@functools.cache
def plain_value_and_grad(kind):
    """(params, batch) -> ((loss, aux), grads) in plain JAX, the quotient of a `Weighted` written out."""

    def loss_fn(params, batch):
        out, aux = loss_of(kind)(params, batch)
        return (out.total / out.weight if isinstance(out, jzero.Weighted) else out), aux

    return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))


@functools.cache
def one_device(kind):
    return plain_value_and_grad(kind)(init_params(jnp.float64), make_batch(kind))


def make_layout(stage, mesh, dtype):
    axes = MESHES[mesh]
    return jzero.zero(
        init_params(dtype),
        stage=STAGES[stage],
        mesh=jzero.make_mesh(devices=jax.devices()[: int(np.prod(list(axes.values())))], **axes),
        data_axes=("data", "node") if "node" in axes else ("data",),
        replica_axes=("replica",) if "replica" in axes else (),
        min_shard_size=0,
    )


def over_mesh(stage, mesh, microbatches, kind, dtype: Any = np.float64):
    """((loss, aux), grads) by jzero."""
    layout = make_layout(stage, mesh, dtype)
    params = jax.device_put(layout.stored(init_params(dtype)), layout.param_shardings)
    f = jzero.value_and_grad(loss_of(kind), layout, microbatches=microbatches, has_aux=True)
    value, grads = f(params, layout.put_batch(make_batch(kind)))
    placed = jax.tree.map(lambda g, s: g.sharding.is_equivalent_to(s, g.ndim), grads, layout.grad_shardings)
    assert all(jax.tree.leaves(placed)), placed
    return value, layout.logical(grads, replicate=True)


def largest(tree):
    return max(np.abs(np.asarray(x, np.float64)).max() for x in jax.tree.leaves(tree))


def error(tree, reference):
    """Largest difference, against the largest absolute value of the reference."""
    differences = jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), tree, reference)
    return largest(differences) / largest(reference)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def covering(*factors):
    """The whole product; all but a few rows, in which each pair of values meets, are marked slow."""
    rows = list(itertools.product(*factors))

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    left, kept = set().union(*map(pairs, rows)), set()
    while left:
        best = max(rows, key=lambda row: len(pairs(row) & left))
        left, kept = left - pairs(best), kept | {best}
    return [pytest.param(*row, marks=() if row in kept else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(
    ("stage", "mesh", "microbatches", "kind"),
    covering(["0", "1", "2", "3"], MESHES, [1, 4], LOSSES)
    + covering(["deepspeed1", "no_sync", "by_block"], ["8", "2x4", "3"], [1, 4], LOSSES),
)
def test_gradients(x64, stage, mesh, microbatches, kind):
    (loss, aux), grads = over_mesh(stage, mesh, microbatches, kind)
    (loss_of_one, aux_of_one), grads_of_one = one_device(kind)
    assert error(grads, grads_of_one) <= 1e-12
    assert error(loss, loss_of_one) <= 1e-12
    assert error(aux, aux_of_one) <= 1e-12
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype("float64")}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_reference_depends_on_each_param(x64, kind):
    (loss, _), grads = one_device(kind)
    assert np.isfinite(loss)
    smallest = min(np.abs(np.asarray(g)).max() for g in jax.tree.leaves(grads))
    assert smallest > 1e-4 * largest(grads), "a leaf without weight in the comparison would test nothing"


def test_the_mean_of_means_is_another_gradient(x64):
    """What the tests of `Weighted` would fail to see if all parts weighed the same."""
    batch, params = make_batch("uneven"), init_params(jnp.float64)

    def mean_of_means(params):
        parts = [jax.tree.map(lambda x, i=i: x[12 * i : 12 * (i + 1)], batch) for i in range(8)]
        outs = [weighted_loss(params, part)[0] for part in parts]
        return sum(out.total / out.weight for out in outs) / 8

    assert error(jax.jit(jax.grad(mean_of_means))(params), one_device("uneven")[1]) > 1e-3


@pytest.mark.parametrize(("stage", "microbatches"), [("0", 4), ("1", 1), ("2", 4), ("3", 1), ("3", 4)])
def test_no_weight_at_all(x64, stage, microbatches):
    (loss, aux), grads = over_mesh(stage, "2x4", microbatches, "nothing")
    assert loss == 0
    assert largest(aux) == 0
    assert largest(grads) == 0


@functools.cache
def ten_steps_on_one_device(optimizer, kind):
    tx = OPTIMIZERS[optimizer]
    params = init_params(jnp.float64)
    opt_state, update, log = tx.init(params), jax.jit(tx.update), []
    for batch in ten_batches(kind):
        (loss, _), grads = plain_value_and_grad(kind)(params, batch)
        log.append((loss, np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads)))))
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state, np.array(log)


def ten_batches(kind):
    """Each step sees the examples in another order, so that the weights wander over the devices."""
    batch = make_batch(kind)
    return [jax.tree.map(lambda x, n=n: np.roll(x, 7 * n, axis=0), batch) for n in range(10)]


def run_ten_steps(stage, mesh, microbatches, optimizer, kind):
    layout, tx = make_layout(stage, mesh, jnp.float64), OPTIMIZERS[optimizer]
    state = jzero.init(lambda params: params, tx, layout, init_params(jnp.float64))
    step = jzero.train_step(loss_of(kind), tx, layout, microbatches=microbatches, has_aux=True)
    log = []
    for batch in ten_batches(kind):
        state, metrics = step(state, layout.put_batch(batch))
        log.append((metrics["loss"], metrics["grad_norm"]))
    params = layout.logical(state.params, replicate=True)
    return state.step, params, layout.logical(state.opt_state, tx=tx, replicate=True), np.array(log)


def check_ten_steps(stage, mesh, microbatches, optimizer, kind):
    step, over_mesh, opt_state_over_mesh, log = run_ten_steps(stage, mesh, microbatches, optimizer, kind)
    params, opt_state, log_of_one = ten_steps_on_one_device(optimizer, kind)
    assert step == 10
    assert error(over_mesh, params) <= 1e-10
    np.testing.assert_allclose(log, log_of_one, rtol=1e-10)
    if jax.tree.leaves(opt_state):
        assert error(opt_state_over_mesh, opt_state) <= 1e-10
    moved = error(params, init_params(jnp.float64))
    assert moved > 1e-2, "params that hardly move would hide a wrong gradient"


@pytest.mark.parametrize(
    ("stage", "optimizer", "microbatches", "kind"),
    covering(["0", "1", "2", "3"], OPTIMIZERS, [1, 4], ["mean", "gaps"]),
)
def test_ten_steps(x64, stage, optimizer, microbatches, kind):
    check_ten_steps(stage, "2x4" if optimizer == "adamw" else "8", microbatches, optimizer, kind)


@pytest.mark.parametrize(
    ("stage", "mesh", "microbatches", "optimizer", "kind"),
    [
        ("deepspeed1", "2x4", 1, "adamw", "uneven"),
        ("no_sync", "8", 4, "momentum", "mean"),
        ("by_block", "2x4", 4, "adamw", "gaps"),
        ("3", "3", 4, "adamw", "uneven"),
        ("1", "4 model 2", 1, "adamw", "mean"),
        ("2", "2x2x2", 4, "momentum", "uneven"),
        pytest.param("2", "1", 4, "momentum", "gaps", marks=pytest.mark.slow),
        pytest.param("3", "4 model 2", 4, "sgd", "uneven", marks=pytest.mark.slow),
        pytest.param("3", "2x2x2", 1, "adamw", "mean", marks=pytest.mark.slow),
    ],
)
def test_ten_steps_elsewhere(x64, stage, mesh, microbatches, optimizer, kind):
    check_ten_steps(stage, mesh, microbatches, optimizer, kind)


@pytest.mark.parametrize("stage", ["1", *(pytest.param(s, marks=pytest.mark.slow) for s in ("0", "2", "3"))])
def test_the_opened_step_is_the_step(x64, stage):
    layout, tx = make_layout(stage, "2x4", jnp.float64), OPTIMIZERS["adamw"]
    batch = layout.put_batch(make_batch("uneven"))
    state = jzero.init(lambda params: params, tx, layout, init_params(jnp.float64))
    (loss, aux), grads = jzero.value_and_grad(weighted_loss, layout, microbatches=4, has_aux=True)(state.params, batch)
    opened = jzero.apply_gradients(state, grads, tx, layout)
    state, metrics = jzero.train_step(weighted_loss, tx, layout, microbatches=4, has_aux=True)(state, batch)
    assert opened.step == state.step == 1
    assert error(opened.params, state.params) <= 1e-13
    assert error(opened.opt_state, state.opt_state) <= 1e-13
    assert error((loss, aux), (metrics["loss"], metrics["aux"])) <= 1e-13
    assert jax.tree.map(lambda x: x.sharding.spec, opened) == jax.tree.map(lambda x: x.sharding.spec, state)


@pytest.mark.parametrize("mesh", ["8", "2x4"])
def test_float32_gradients_are_the_same_bits_at_stages_1_to_3(mesh):
    one, two, three = (over_mesh(stage, mesh, 1, "uneven", np.float32) for stage in ("1", "2", "3"))
    assert bits(one) == bits(two) == bits(three)


def test_float32_gradients_with_microbatches_agree():
    one, two, three = (over_mesh(stage, "8", 4, "uneven", np.float32)[1] for stage in ("1", "2", "3"))
    assert error(two, one) <= 1e-5
    assert error(three, one) <= 1e-5


@pytest.mark.parametrize(("stage", "microbatches"), [("0", 1), ("1", 4), ("2", 4), ("3", 1)])
def test_float32_gradients_are_the_same_bits_from_run_to_run(stage, microbatches):
    """Each run traces and compiles anew."""
    first, again = (over_mesh(stage, "2x4", microbatches, "uneven", np.float32) for _ in range(2))
    assert bits(first) == bits(again)


@pytest.mark.parametrize(("stage", "microbatches"), [("0", 4), ("1", 1), ("2", 4), ("3", 1)])
def test_bfloat16_gradients(stage, microbatches):
    """Gradients come in the params' dtype, as near to float32 as 32 parts rounded and summed in bfloat16 can be.

    The loss itself computes in float32, so that nothing but the sum is measured.
    """
    layout, batch = make_layout(stage, "8", jnp.bfloat16), make_batch("uneven")

    def wide_loss(params, batch):
        out, _ = weighted_loss(jax.tree.map(lambda x: x.astype(jnp.float32), params), batch)
        return out

    def loss_of_one(params):
        out = wide_loss(params, batch)
        return out.total / out.weight

    params = init_params(jnp.bfloat16)
    f = jzero.value_and_grad(wide_loss, layout, microbatches=microbatches)
    loss, grads = f(jax.device_put(layout.stored(params), layout.param_shardings), layout.put_batch(batch))
    grads = layout.logical(grads, replicate=True)
    loss_of_one, grads_of_one = jax.jit(jax.value_and_grad(loss_of_one))(
        jax.tree.map(lambda x: x.astype(jnp.float32), params)
    )
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(jnp.bfloat16)}
    assert loss.dtype == jnp.float32
    assert error(loss, loss_of_one) < 1e-5
    assert error(grads, grads_of_one) < 0.02
