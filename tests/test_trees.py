"""Params in any container come back in that container, trained as on one device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import jzero

N_IN, HIDDEN = 6, 16


class Linear(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclass
class Mlp:
    up: Linear
    down: Any


def weights():
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape) for shape in ((N_IN, HIDDEN), (HIDDEN,), (HIDDEN, 8))]


def mlp(x, w, b, v):
    return jnp.mean((jnp.tanh(x @ w + b) @ v) ** 2)


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(HIDDEN, param_dtype=jnp.float64)(x)
        return nn.Dense(8, use_bias=False, param_dtype=jnp.float64)(jnp.tanh(x))


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(
            [
                nnx.Linear(N_IN, HIDDEN, param_dtype=jnp.float64, rngs=rngs),
                nnx.Linear(HIDDEN, 8, use_bias=False, param_dtype=jnp.float64, rngs=rngs),
            ]
        )

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def linen(wrap):
    model = LinenMlp()
    variables = wrap(model.init(jax.random.key(0), jnp.zeros((1, N_IN))))

    def loss_fn(variables, x):
        y: Any = model.apply(variables, x)
        return jnp.mean(y**2)

    return variables, loss_fn


def split_nnx():
    graph, state = nnx.split(NnxMlp(nnx.Rngs(0)), nnx.Param)
    return state, lambda state, x: jnp.mean(nnx.merge(graph, state)(x) ** 2)


def plain(make, take):
    return lambda: (make(*weights()), lambda params, x: mlp(x, *take(params)))


TREES = {
    "nested dicts": plain(
        lambda w, b, v: {"up": {"kernel": w, "bias": b}, "down": {"kernel": v}},
        lambda p: (p["up"]["kernel"], p["up"]["bias"], p["down"]["kernel"]),
    ),
    "list": plain(lambda w, b, v: [[w, b], v], lambda p: (*p[0], p[1])),
    "tuple": plain(lambda w, b, v: ((w, b), v), lambda p: (*p[0], p[1])),
    "NamedTuple": plain(
        lambda w, b, v: {"layers": [Linear(w, b), Linear(v, None)]},
        lambda p: (p["layers"][0].w, p["layers"][0].b, p["layers"][1].w),
    ),
    "dataclass": plain(lambda w, b, v: Mlp(Linear(w, b), v), lambda p: (p.up.w, p.up.b, p.down)),
    "numbered": plain(lambda w, b, v: {0: w, 1: {"x": b}, 2: [v]}, lambda p: (p[0], p[1]["x"], p[2][0])),
    "linen": lambda: linen(dict),
    "frozen linen": lambda: linen(FrozenDict),
    "nnx": split_nnx,
    "bare array": lambda: (weights()[0], lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)),
}


def types(tree):
    """The types of all containers, outermost first."""
    inner = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    return [type(tree), *(types(x) for x in inner if x is not tree)]


# By default at one of the stages, in turn.
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage == (1, 3)[turn % 2] else pytest.mark.slow)
        for turn, name in enumerate(TREES)
        for stage in (1, 3)
    ],
)
def test_one_step_keeps_the_users_tree_and_matches_one_device(name, stage, x64):
    params, loss_fn = TREES[name]()
    batch = np.random.default_rng(2).normal(size=(16, N_IN))
    tx = optax.sgd(0.1, momentum=0.9)
    layout = jzero.zero(params, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    state = jzero.init(lambda p: p, tx, layout, params)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)

    loss_wanted, grads_wanted = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    updates, opt_state = tx.update(grads_wanted, tx.init(params), params)
    wanted = optax.apply_updates(params, updates)

    value, grads = jzero.value_and_grad(loss_fn, layout)(state.params, batch)
    state, metrics = jzero.train_step(loss_fn, tx, layout)(state, layout.put_batch(batch))
    np.testing.assert_allclose([value, metrics["loss"]], [loss_wanted] * 2, rtol=1e-12)
    for got, right in ((grads, grads_wanted), (state.params, wanted), (state.opt_state, opt_state)):
        assert jax.tree.structure(got) == jax.tree.structure(right)
        assert types(got) == types(right)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)
    # The result is the user's own: the loss still takes it.
    assert jax.jit(loss_fn)(state.params, batch) < loss_wanted

    for specs in (layout.param_specs, layout.grad_specs, layout.param_shardings):
        assert jax.tree.structure(specs) == jax.tree.structure(params)
    sizes = [leaf.addressable_shards[0].data.size * (8 if stage == 3 else 1) for leaf in jax.tree.leaves(state.params)]
    assert sizes == [leaf.size for leaf in jax.tree.leaves(params)]


def test_paths_name_leaves_whatever_holds_them():
    params = Mlp(Linear(np.ones((6, 16)), np.ones(16)), [np.ones((16, 8))])
    rows = jzero.explain(jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1)))
    assert [row.path for row in rows] == ["up/w", "up/b", "down/0"]


def test_one_array_at_two_paths_is_two_params(x64):
    """It is stored twice and trained apart, and both copies can be donated."""
    w = np.random.default_rng(0).normal(size=(8, 16))
    params, batch = {"a": w, "b": w}, np.random.default_rng(1).normal(size=(16, 8))

    def loss_fn(params, x):
        return jnp.mean((x @ params["a"]) ** 2) + jnp.mean(jnp.abs(x @ params["b"]) ** 3)

    tx = optax.sgd(0.1)
    with pytest.warns(UserWarning, match=r"params\['b'\] is the same array as params\['a'\]"):
        layout = jzero.zero(params, stage=0, mesh=jzero.make_mesh(data=-1))
    shared = jax.device_put(w, layout.param_shardings["a"])
    state = jzero.init(lambda p: p, tx, layout, {"a": shared, "b": shared})
    state, _ = jzero.train_step(loss_fn, tx, layout)(state, batch)
    for key, grad in jax.jit(jax.grad(loss_fn))(params, batch).items():
        np.testing.assert_allclose(state.params[key], w - 0.1 * grad, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(shared, w)


def test_a_leaf_used_at_two_places_is_tied(x64):
    rng = np.random.default_rng(0)
    params, batch = {"embed": rng.normal(size=(16, 8))}, rng.integers(16, size=(16, 5))

    def loss_fn(params, tokens):
        logits = params["embed"][tokens[:, :-1]] @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    _, grads = jzero.value_and_grad(loss_fn, layout)(jax.device_put(params, layout.param_shardings), batch)
    np.testing.assert_allclose(grads["embed"], jax.jit(jax.grad(loss_fn))(params, batch)["embed"], rtol=0, atol=1e-13)
