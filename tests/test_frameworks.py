"""linen, nnx and equinox: a recipe of a few lines for each, with tied embeddings, batch norm and dropout.

Each recipe makes `init(key) -> (params, model_state)` and `loss_fn`, which are all that jzero needs. Batch norm reduces
its statistics over the data axis, by name, and so sees the whole batch.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero

VOCABULARY, WIDTH, EXAMPLES = 24, 16, 32


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_recipe(rate):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, train):
            embed = nn.Embed(VOCABULARY, WIDTH)
            x = nn.Dense(WIDTH)(embed(tokens))
            x = nn.relu(nn.BatchNorm(use_running_average=not train, axis_name="data")(x))
            x = nn.Dropout(rate, deterministic=not train)(x)
            return embed.attend(x)

    model = Model()

    def init(key):
        model_state = model.init(key, jnp.zeros(1, int), train=False)
        return model_state.pop("params"), model_state

    def loss_fn(params, batch, *, key, model_state):
        variables = {"params": params, **model_state}
        logits, model_state = model.apply(
            variables, batch["x"], train=True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["y"]), model_state

    return init, loss_fn, dict


def nnx_recipe(rate):
    class Model(nnx.Module):
        def __init__(self, rngs):
            # The one layer that computes in the dtype it was made with, and not in that of its param.
            self.embed = nnx.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, rngs=rngs)
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, axis_name="data", rngs=rngs)
            self.dropout = nnx.Dropout(rate)  # its key comes with the call, so that it is no state

        def __call__(self, tokens, rngs):
            x = nnx.relu(self.norm(self.dense(self.embed(tokens))))
            return self.embed.attend(self.dropout(x, rngs=rngs))

    def init(key):
        _, params, model_state = nnx.split(Model(nnx.Rngs(key)), nnx.Param, ...)
        return params, model_state

    graph = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def loss_fn(params, batch, *, key, model_state):
        model = nnx.merge(graph, params, model_state)
        loss = cross_entropy(model(batch["x"], nnx.Rngs(dropout=key)), batch["y"])
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    return init, loss_fn, nnx.State


def equinox_recipe(rate):
    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            keys = jax.random.split(key)
            self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
            self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
            self.norm = eqx.nn.BatchNorm(WIDTH, axis_name=("batch", "data"), mode="batch")
            self.dropout = eqx.nn.Dropout(rate)

        def __call__(self, token, model_state, key):  # one example, as usual in equinox
            x, model_state = self.norm(self.linear(self.embed(token)), model_state)
            return self.embed.weight @ self.dropout(jax.nn.relu(x), key=key), model_state

    def init(key):
        model, model_state = eqx.nn.make_with_state(Model)(key)
        return eqx.filter(model, eqx.is_array), model_state

    model, _ = eqx.filter_eval_shape(eqx.nn.make_with_state(Model), jax.random.key(0))
    _, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss_fn(params, batch, *, key, model_state):
        forward = jax.vmap(eqx.combine(params, static), in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
        logits, model_state = forward(batch["x"], model_state, jax.random.split(key, len(batch["x"])))
        return cross_entropy(logits, batch["y"]), model_state

    return init, loss_fn, Model


RECIPES = {"linen": linen_recipe, "nnx": nnx_recipe, "equinox": equinox_recipe}


@functools.cache
def recipe(name, rate):
    return RECIPES[name](rate)


frameworks = pytest.mark.parametrize("name", RECIPES)


def in_float64(init):
    """The same init, in the dtype in which sharded against one device is exact."""

    def wide(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return lambda key: jax.tree.map(wide, init(key))


def make_batch(step=0):
    rng = np.random.default_rng(step)
    return {name: rng.integers(VOCABULARY, size=EXAMPLES) for name in "xy"}


def on_one_device(loss_fn, shards):
    """Loss and model state of a batch in `shards` parts, as one program for one device, with jzero's keys."""

    def loss(params, batch, key, model_state):
        split = jax.tree.map(lambda x: x.reshape(shards, -1), batch)
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), 0))(jnp.arange(shards))
        part = jax.vmap(
            lambda x, key, state: loss_fn(params, x, key=key, model_state=state), (0, 0, None), axis_name="data"
        )
        losses, states = part(split, keys, model_state)
        return losses.mean(), jax.tree.map(lambda x: x.mean(0).astype(x.dtype), states)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def make_layout(init, stage):
    params, _ = jax.eval_shape(init, jax.random.key(0))
    return jzero.zero(params, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=WIDTH + 1)


def assert_close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


@functools.cache
def trained_on_one_device(name):
    with jax.enable_x64(True):
        init, loss_fn, _ = recipe(name, rate=0.5)
        params, model_state = in_float64(init)(jax.random.key(0))
        tx = optax.sgd(0.3, momentum=0.9)
        opt_state, key, losses = tx.init(params), jax.random.key(1), []
        grad = on_one_device(loss_fn, shards=8)
        for step in range(3):
            (loss, model_state), grads = grad(params, make_batch(step), jax.random.fold_in(key, step), model_state)
            updates, opt_state = tx.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            losses.append(loss)
        return params, opt_state, model_state, losses


@frameworks
@pytest.mark.parametrize("stage", [1, 3])
def test_three_steps_are_those_of_one_device(name, stage, x64):
    """With dropout at work: one device that cuts the batch in the same way draws the same masks."""
    init, loss_fn, container = recipe(name, rate=0.5)
    init = in_float64(init)
    layout, tx, key = make_layout(init, stage), optax.sgd(0.3, momentum=0.9), jax.random.key(0)
    _, model_state = init(key)
    state = jzero.init(lambda key: init(key)[0], tx, layout, key, key=jax.random.key(1), model_state=model_state)
    step = jzero.train_step(loss_fn, tx, layout, with_key=True, with_model_state=True)
    losses = []
    for index in range(3):
        state, metrics = step(state, make_batch(index))
        losses.append(metrics["loss"])
    params, opt_state, wanted_state, wanted_losses = trained_on_one_device(name)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-12)
    assert_close(state.params, params)
    assert_close(state.opt_state, opt_state)
    assert_close(state.model_state, wanted_state)
    # The state keeps the user's tree, and at stage 3 what is large is stored in eighths.
    assert type(state.params) is container
    assert type(state.model_state) is type(model_state)
    large = [x for x in jax.tree.leaves(state.params) if x.size > WIDTH]
    assert len(large) == 2  # the tied embedding is one leaf
    assert all(x.addressable_shards[0].data.size * (8 if stage == 3 else 1) == x.size for x in large)


@frameworks
def test_batch_norm_sees_the_whole_batch(name, x64):
    """Gradient and running statistics are those of one device that does not cut the batch."""
    init, loss_fn, _ = recipe(name, rate=0.0)
    init = in_float64(init)
    layout, batch, key = make_layout(init, stage=3), make_batch(), jax.random.key(1)
    params, model_state = init(jax.random.key(0))
    (loss, wanted_state), wanted = on_one_device(loss_fn, shards=1)(params, batch, key, model_state)
    (value, got_state), grads = jzero.value_and_grad(loss_fn, layout, with_key=True, with_model_state=True)(
        jax.device_put(params, layout.param_shardings), batch, key=key, model_state=model_state
    )
    np.testing.assert_allclose(value, loss, rtol=1e-12)
    assert_close(grads, wanted)
    assert_close(got_state, wanted_state)
    moved = [not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (got_state, model_state)), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_may_use_up_the_model_state_that_it_is_given(microbatches):
    """An equinox State is void once a value was set in it; only what the loss returns is to be used after that."""
    counter = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))
    layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)

    def loss_fn(params, x, *, model_state):
        return jnp.mean((x @ params["w"]) ** 2), model_state.set(counter, model_state.get(counter) + 1)

    call = jzero.value_and_grad(loss_fn, layout, microbatches=microbatches, with_model_state=True)
    given = eqx.nn.State(counter)
    (_, model_state), _ = call({"w": jnp.ones(8)}, jnp.ones((16, 8)), model_state=given)
    assert int(model_state.get(counter)) == microbatches
    assert int(given.get(counter)) == 0
