"""A layout and a step made again on another mesh are those that are made there directly."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from jzero.mesh import abstract_mesh

PARAMS = {"up": jnp.ones((16, 24)), "down": jnp.ones((24, 16)), "scale": jnp.ones(16)}
RULES = [("up", P(None, "model")), ("down", P("model"))]


def loss_fn(params, batch, **_):
    return jnp.mean((jax.nn.relu(batch * params["scale"] @ params["up"]) @ params["down"] - batch) ** 2)


def mesh_of(**axes):
    size = 1
    for length in axes.values():
        size *= length
    return jzero.make_mesh(devices=jax.devices()[:size], **axes)


OPTIONS = {
    "plain": {"stage": 3, "min_shard_size": 0},
    "other choices": {
        "stage": 2,
        "min_shard_size": 100,
        "rules": RULES,
        "trainable": lambda path, leaf: path != "scale",
        "regather": [("up", False)],
        "ahead": True,
        "precision": "bf16",
    },
    "stage of one's own": {"stage": jzero.Stage("replicated", "sharded", "sharded", "end"), "min_shard_size": 0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layout_is_that_of_the_other_mesh(options):
    layout = jzero.zero(PARAMS, mesh=mesh_of(data=4, model=1), **options)
    for axes in ({"data": 3, "model": 2}, {"data": 8, "model": 1}):
        mesh = mesh_of(**axes)
        assert layout.on(mesh) == jzero.zero(PARAMS, mesh=mesh, **options)
        assert layout.on(mesh) != layout
        assert layout.on(mesh).on(layout.mesh) == layout
    assert not [x for x in jax.tree.leaves(layout.remade.keywords) if isinstance(x, jax.Array)]


def test_every_option_is_remembered():
    layout = jzero.zero(PARAMS, stage=3, mesh=mesh_of(data=8))
    step = jzero.train_step(loss_fn, optax.sgd(0.1), layout)
    assert set(layout.remade.keywords) == set(inspect.signature(jzero.zero).parameters)
    assert set(step.options) == set(inspect.signature(jzero.train_step).parameters)


@pytest.mark.parametrize("case", ["plain", "all options"])
def test_step_is_the_program_that_is_made_there(case):
    options = {}
    if case == "all options":
        options = {"microbatches": 2, "clip_norm": 1.0, "loss_scale": jzero.DynamicLossScale(), "spike": 9.0}
        options |= {"with_key": True, "norm_groups": {"all": "*"}, "nonfinite": "skip"}
    tx = optax.adam(1e-3)
    here = jzero.zero(PARAMS, stage=3, mesh=mesh_of(data=8), min_shard_size=0)
    there = jzero.zero(PARAMS, stage=3, mesh=mesh_of(data=4), min_shard_size=0)

    def init(key):
        given = {"key": key, "loss_scale": options["loss_scale"]} if options else {}
        return jzero.init(lambda: PARAMS, tx, there, **given)

    state, batch = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((16, 16), "float32")
    direct = jzero.train_step(loss_fn, tx, there, **options).lower(state, batch).as_text()
    moved = jzero.train_step(loss_fn, tx, here, **options).on(here.on(there.mesh))
    assert moved.layout == there
    assert moved.lower(state, batch).as_text() == direct
    assert moved.on(there).lower(state, batch).as_text() == direct


def test_a_mesh_without_the_axes_says_so():
    layout = jzero.zero(PARAMS, stage=3, mesh=mesh_of(data=2, model=2), rules=RULES)
    with pytest.raises(ValueError, match="names 'model', but the mesh has axes"):
        layout.on(mesh_of(data=4))
    with pytest.raises(ValueError, match="dim 0 of size 24 does not divide by 5"):
        layout.on(abstract_mesh(data=1, model=5))
