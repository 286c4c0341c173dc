"""Losses written for one device, with JAX's control flow and its transformations, run over a mesh as they are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero

AXES = ("replica", "data")  # the batch axes of every layout here
EXAMPLES, WIDTH = 32, 8  # 32 = 8 devices x 2 microbatches x 2
TABLE = np.random.default_rng(2).normal(size=(EXAMPLES // 8, WIDTH))


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape) / 2)


def matrices():
    return {"w": array(WIDTH, WIDTH), "v": array(WIDTH, 16), "b": array(WIDTH, seed=1), "c": array()}


def inputs():
    return {"x": array(EXAMPLES, WIDTH), "y": array(EXAMPLES, seed=3)}


def mean_square(h, batch):
    return jnp.mean((h.sum(-1) - batch["y"]) ** 2)


def rnn(params, batch):
    """The carry begins as a constant, which no device holds a part of."""

    def cell(h, _):
        h = jnp.tanh(h @ params["w"] + batch["x"] + params["b"])
        return h, h @ params["v"]

    _, out = lax.scan(cell, jnp.zeros_like(batch["x"]), length=4)
    return mean_square(out[-1] * params["c"], batch)


def scan_accumulator(params, batch):
    """Adds up a scalar over the examples, from a literal 0."""

    def add(total, example):
        x, y = example
        return total + (jnp.tanh(x @ params["w"]) @ params["v"] * params["c"] - y + params["b"][0]).sum() ** 2, None

    total, _ = lax.scan(add, 0.0, (batch["x"], batch["y"]))
    return total / len(batch["y"])


def cond(params, batch):
    """The branch depends on the batch, and so differs between devices; one of them is a constant."""

    def term(example):
        x, y = example
        h = x @ params["w"] @ params["v"] * params["c"] + params["b"][0]
        return lax.cond(y > 0, lambda: (h**2).sum(), lambda: 0.0)

    return lax.map(term, (batch["x"], batch["y"])).mean()


def while_loop(params, batch):
    """A loop whose trip count the batch decides, so differently on each device, solves a linear system."""

    def solve(matvec, b):
        def body(carry):
            y, _, n = carry
            return b - matvec(y) + y, y, n + 1

        def unfinished(carry):
            y, old, n = carry
            return (jnp.abs(y - old).max() > 1e-16) & (n < 100)

        return lax.while_loop(unfinished, body, (b, jnp.zeros_like(b), 0))[0]

    def matvec(y):
        return y + 0.1 * jnp.tanh(params["c"]) * (y @ params["w"])

    y = lax.custom_linear_solve(matvec, batch["x"] + params["b"], solve, transpose_solve=solve)
    return mean_square(y @ params["v"], batch)


def checkpointed(policy):
    def loss_fn(params, batch):
        @functools.partial(jax.checkpoint, policy=policy)
        def block(x, scale):
            return x + jnp.tanh(x @ params["w"] + params["b"]) * scale, None

        h, _ = lax.scan(block, batch["x"], jnp.arange(1.0, 4.0) * params["c"])
        return mean_square(h @ params["v"], batch)

    return loss_fn


@jax.custom_vjp
def half_gradient(x):
    return x


half_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


def custom_vjp(params, batch):
    h = half_gradient(batch["x"] @ half_gradient(params["w"])) @ params["v"]
    return mean_square(h * params["c"], batch) + half_gradient(params["b"]).sum() ** 2


def nested_grad(params, batch):
    """An energy whose force is fitted: the loss differentiates the model before it is differentiated itself."""

    def energy(x):
        return params["c"] * jnp.tanh(jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]).sum()

    return mean_square(jax.vmap(jax.grad(energy))(batch["x"]), batch)


def inner_steps(params, batch):
    """Learning to learn (MAML): each example is a task, and two steps of gradient descent adapt the params to it."""

    def task(example):
        def fit(params):
            return mean_square(jnp.tanh(example["x"] @ params["w"] + params["b"]) @ params["v"] * params["c"], example)

        def descend(params, _):
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(fit)(params)), None

        return fit(lax.scan(descend, params, length=2)[0])

    return jax.vmap(task)(batch).mean()


def vmapped(params, batch):
    def one(x, y):
        h = lax.scan(lambda h, _: (jnp.tanh(params["w"] @ h + params["b"]), None), x, length=2)[0]
        return ((h @ params["v"]).sum() * params["c"] - y) ** 2

    return jax.vmap(one)(batch["x"], batch["y"]).mean()


def tied(params, batch):
    """One leaf, used at both ends and in the middle of a scan."""
    h = batch["x"] @ params["w"]
    h, _ = lax.scan(lambda h, scale: (jnp.tanh(h @ params["w"]) * scale, None), h, params["b"])
    return mean_square(h @ params["w"].T @ params["v"] * params["c"], batch)


def unused(params, batch):
    return mean_square(batch["x"] @ params["v"] * params["c"], batch)


def constant(params, batch):
    """Closes over arrays: of NumPy's, of JAX's, and one as wide as a device's part of the batch."""
    h = batch["x"] @ params["w"] + jnp.asarray(TABLE)[0] * params["b"]
    return mean_square(h @ params["v"] * params["c"] * array(16, seed=9), batch)


LOSSES: dict[str, Any] = {
    "rnn": rnn,
    "scan": scan_accumulator,
    "cond": cond,
    "while": while_loop,
    "checkpoint": checkpointed(None),
    "checkpoint dots": checkpointed(jax.checkpoint_policies.dots_saveable),
    "checkpoint nothing": checkpointed(jax.checkpoint_policies.nothing_saveable),
    "custom_vjp": custom_vjp,
    "nested grad": nested_grad,
    "inner steps": inner_steps,
    "vmap": vmapped,
    "tied": tied,
    "unused": unused,
    "constant": constant,
}


def contrastive(params, batch, axes: tuple[str, ...] = ()):
    """InfoNCE over the whole batch: each example's other view is to be told from those on all devices."""
    a, b = (x @ params["w"] @ params["v"] + params["b"].sum() for x in (batch["x"], jnp.tanh(batch["x"])))
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    first = len(a) * lax.axis_index(axes) if axes else 0
    others = lax.all_gather(b, axes, tiled=True) if axes else b
    logits = jnp.exp(params["c"]) * a @ others.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, first + jnp.arange(len(a))).mean()


def batch_norm(params, batch, axes: tuple[str, ...] = ()):
    """Mean and variance of the whole batch."""

    def mean(x):
        return lax.pmean(x.mean(0), axes) if axes else x.mean(0)

    h = batch["x"] @ params["w"]
    centred = h - mean(h)
    return mean_square((centred / jnp.sqrt(mean(centred**2) + 1e-3) * params["b"]) @ params["v"] * params["c"], batch)


def own_mean(params, batch, axes: tuple[str, ...] = ()):
    """Ends in a sum of its own over the axes: the loss is the whole batch's already on each device."""
    loss = mean_square(jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"] * params["c"], batch)
    return lax.psum(loss, axes) / lax.psum(1, axes) if axes else loss


COLLECTIVE_LOSSES: dict[str, Any] = {"contrastive": contrastive, "batch norm": batch_norm, "own mean": own_mean}


@functools.cache
def one_device(loss_fn):
    return jax.jit(jax.value_and_grad(loss_fn))(matrices(), inputs())


def make_layout(stage, **axes):
    axes = axes or {"replica": 2, "data": 4}
    mesh = jzero.make_mesh(devices=jax.devices()[: int(np.prod(list(axes.values())))], **axes)
    return jzero.zero(matrices(), stage=stage, mesh=mesh, replica_axes=AXES[:1], min_shard_size=0)


def check(layout, loss_fn, reference, microbatches=1, wrap=lambda f: f):
    """Compares loss and gradients with one device's, relative to the largest gradient; returns the gradients."""
    params = jax.device_put(matrices(), layout.param_shardings)
    f = wrap(jzero.value_and_grad(loss_fn, layout, microbatches=microbatches))
    loss, grads = f(params, layout.put_batch(inputs()))
    loss_of_one, grads_of_one = reference
    size = max(np.abs(g).max() for g in jax.tree.leaves(grads_of_one))
    assert abs(loss - loss_of_one) <= 1e-12 * abs(loss_of_one)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(grad - grads_of_one[path[0].key]).max() <= 1e-12 * size, path
    return grads


# By default at stage 3 and at one of the others, which take turns.
@pytest.mark.parametrize(
    ("name", "stage", "microbatches"),
    [
        pytest.param(name, stage, microbatches, marks=() if stage in (turn % 3, 3) else pytest.mark.slow)
        for turn, name in enumerate(LOSSES)
        for stage, microbatches in [(0, 1), (1, 2), (2, 1), (3, 2)]
    ],
)
def test_loss(x64, name, stage, microbatches):
    check(make_layout(stage), LOSSES[name], one_device(LOSSES[name]), microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("stage", "microbatches"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_loss_with_the_other_microbatches(x64, name, stage, microbatches):
    check(make_layout(stage), LOSSES[name], one_device(LOSSES[name]), microbatches)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage in (turn, 3) else pytest.mark.slow)
        for turn, name in enumerate(COLLECTIVE_LOSSES)
        for stage in range(4)
    ],
)
def test_collectives_in_the_loss(x64, name, stage):
    loss_fn = COLLECTIVE_LOSSES[name]
    layout = make_layout(stage)
    check(layout, functools.partial(loss_fn, axes=layout.batch_axes), one_device(loss_fn))


def test_collectives_in_the_loss_run_on_one_device(x64):
    layout = make_layout(3, replica=1, data=1)
    check(layout, functools.partial(contrastive, axes=layout.batch_axes), one_device(contrastive))


@pytest.mark.parametrize("stage", range(4))
def test_a_leaf_that_the_loss_does_not_use_has_zero_gradient(x64, stage):
    grads = check(make_layout(stage), unused, one_device(unused), microbatches=2)
    assert not np.any(grads["w"])
    assert not np.any(grads["b"])
    assert np.all(grads["v"])


@pytest.mark.parametrize("stage", [1, 3])
def test_the_weight_is_a_constant_to_the_gradient(x64, stage):
    """Even one that the params make, as a learned mask would."""

    def total_and_weight(params, batch):
        return ((batch["x"] @ params["w"] @ params["v"]) ** 2).sum(), jax.nn.sigmoid(batch["x"] @ params["b"]).sum()

    def loss_of_one(params, batch):
        total, weight = total_and_weight(params, batch)
        return total / lax.stop_gradient(weight)

    reference = jax.jit(jax.value_and_grad(loss_of_one))(matrices(), inputs())
    check(make_layout(stage), lambda *args: jzero.Weighted(*total_and_weight(*args)), reference, microbatches=2)


@pytest.mark.parametrize("stage", [1, 3])
def test_under_set_mesh(x64, stage):
    layout = make_layout(stage)
    with jax.set_mesh(layout.mesh):
        check(layout, rnn, one_device(rnn))
        check(layout, functools.partial(contrastive, axes=layout.batch_axes), one_device(contrastive), wrap=jax.jit)


@pytest.mark.parametrize("stage", [0, 3])
def test_inside_of_jit_with_a_value_of_the_outer_function(x64, stage):
    """The loss closes over a tracer, as one with a schedule for a coefficient does."""
    layout = make_layout(stage)

    def outer(params, batch, coefficient):
        def loss_fn(params, batch):
            return coefficient * rnn(params, batch)

        return jzero.value_and_grad(loss_fn, layout, microbatches=2)(params, batch)

    reference = jax.tree.map(lambda x: 3 * x, one_device(rnn))
    check(layout, rnn, reference, wrap=lambda _: lambda params, batch: jax.jit(outer)(params, batch, 3.0))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_loss_sees_whole_params_and_its_own_part_of_the_batch(stage):
    seen = []

    def loss_fn(params, batch):
        seen.append((jax.tree.map(jnp.shape, params), jax.tree.map(jnp.shape, batch)))
        return rnn(params, batch)

    layout = make_layout(stage)
    jzero.value_and_grad(loss_fn, layout, microbatches=2)(
        jax.device_put(matrices(), layout.param_shardings), layout.put_batch(inputs())
    )
    for params, batch in seen:
        assert params == {"w": (8, 8), "v": (8, 16), "b": (8,), "c": ()}
        assert batch == {"x": (2, 8), "y": (2,)}
    assert seen


# The aux: 8 devices sum it, and microbatches.


def test_an_aux_in_float16_is_weighted_and_summed_in_float32():
    """1024 times a weight of 1024 is more than float16 holds."""
    layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))

    def loss(params, batch):
        return jzero.Weighted(params["w"].sum() * 1024, jnp.float16(1024)), {"size": batch.max().astype(jnp.float16)}

    call = jzero.value_and_grad(loss, layout, has_aux=True, microbatches=2)
    (_, aux), _ = call({"w": jnp.ones(8)}, layout.put_batch(np.full(16, 1024)))
    assert (float(aux["size"]), aux["size"].dtype) == (1024, jnp.float32)


def test_an_aux_in_bfloat16_does_not_stall_over_microbatches():
    """In bfloat16 256 + 1 is 256, so that a mean of ones over 1024 microbatches would be 1/4."""
    layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))

    def loss(params, batch):
        return params["w"].sum() * batch.mean(), batch.mean().astype(jnp.bfloat16)

    call = jzero.value_and_grad(loss, layout, has_aux=True, microbatches=1024)
    (_, aux), _ = call({"w": jnp.ones(8)}, layout.put_batch(np.ones(8 * 1024, np.float32)))
    assert (float(aux), aux.dtype) == (1, jnp.float32)
