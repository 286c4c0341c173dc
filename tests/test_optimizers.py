"""Any optax optimizer runs as on one device, and its state lives with the params that it belongs to."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from jzero import memory
from jzero.guard import Skipped

SHAPES = {"embed": (24, 16), "layers": [{"w": (16, 32), "b": (32,)}, {"w": (32, 16), "b": (3,)}], "scale": ()}
STEPS = 5

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=2, decay_steps=STEPS)

OPTIMIZERS = {
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.01, STEPS), momentum=0.9, nesterov=True),
    "lamb": optax.lamb(1e-2, weight_decay=0.1),
    "adafactor": optax.adafactor(SCHEDULE, min_dim_size_to_factor=16, momentum=0.9),
    "chain": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(b2=0.99),
        optax.masked(optax.add_decayed_weights(0.1), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.scale_by_trust_ratio(),
        optax.scale_by_learning_rate(SCHEDULE),
        optax.ema(0.9),
    ),
}

# Only shapes are looked at here, so these cost next to nothing.
MORE = OPTIMIZERS | {
    "sgd": optax.sgd(0.1),
    "lion": optax.lion(1e-3),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "split": optax.partition(
        {"matrix": optax.adafactor(1e-3), "rest": optax.adamw(1e-3)},
        lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params),
    ),
    "accumulating": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
    "finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "lookahead of bf16 momentum": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
}


@functools.cache
def arrays(dtype="float64"):
    rng = np.random.default_rng(0)

    def normal(shape):
        return rng.normal(size=shape).astype(dtype)

    params = jax.tree.map(normal, SHAPES, is_leaf=lambda x: type(x) is tuple)
    return params, [{"x": normal((16, 24)), "y": normal((16, 16))} for _ in range(STEPS)]


def loss_fn(params, batch):
    x = batch["x"] @ params["embed"]
    x = jnp.tanh(x @ params["layers"][0]["w"] + params["layers"][0]["b"])
    x = x @ params["layers"][1]["w"] * jnp.exp(params["scale"])
    return jnp.mean((x - batch["y"]) ** 2) + jnp.sum(params["layers"][1]["b"] ** 3)


def on_one_device(tx):
    """Plain optax: the params and the state after each step."""
    params, batches = arrays()
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def update(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = update(params, opt_state, batch)
    return params, opt_state


def make_layout(stage, mesh=None, min_shard_size=0):
    params, _ = arrays()
    mesh = mesh or jzero.make_mesh(data=-1)
    replica_axes = [axis for axis in mesh.axis_names if axis == "replica"]
    return jzero.zero(params, stage=stage, mesh=mesh, replica_axes=replica_axes, min_shard_size=min_shard_size)


def assert_close(got, wanted, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def param_shaped(opt_state, tx, layout, params):
    """(param's index, state leaf) of each state leaf with a param's logical shape, as optax itself pairs them."""
    indices = jax.tree.unflatten(jax.tree.structure(params), range(len(jax.tree.leaves(params))))

    def paired(state):
        found = []
        optax.tree_map_params(
            tx, lambda leaf, index: found.append((index, leaf)), state, indices, transform_non_params=lambda leaf: leaf
        )
        return found

    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    logical = paired(layout.logical(opt_state, tx=tx, replicate=True))
    return [pair for pair, (i, leaf) in zip(paired(opt_state), logical, strict=True) if leaf.shape == shapes[i]]


# Adam divides a constant factor out of the gradient; SGD, Adafactor's first steps and clipping do not. By default each
# runs at two stages.
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage in (turn % 4, (turn + 2 + turn // 4) % 4) else pytest.mark.slow)
        for turn, name in enumerate(OPTIMIZERS)
        for stage in range(4)
    ],
)
def test_five_steps_are_those_of_one_device(name, stage, x64):
    tx, (params, batches) = OPTIMIZERS[name], arrays()
    # Every optimizer at every stage; each meets both meshes and both ways to make a step.
    hybrid, opened = (stage + len(name)) % 2, (stage // 2 + len(name)) % 2
    layout = make_layout(stage, jzero.make_mesh(replica=2, data=4) if hybrid else None)
    state = jzero.init(lambda p: p, tx, layout, params)
    placed = jax.tree.map(lambda x: x.sharding, state)

    if opened:
        gradient = jzero.value_and_grad(loss_fn, layout)
        step = jax.jit(lambda s, batch: (jzero.apply_gradients(s, gradient(s.params, batch)[1], tx, layout), None))
    else:
        step = jzero.train_step(loss_fn, tx, layout)
    for batch in batches:
        state, _ = step(state, layout.put_batch(batch))

    right_params, right_opt_state = on_one_device(tx)
    assert_close(layout.logical(state.params, replicate=True), right_params, 1e-9)
    assert_close(layout.logical(state.opt_state, tx=tx, replicate=True), right_opt_state, 1e-9)
    assert int(state.step) == STEPS

    moved = jax.tree.map(lambda x, was: x.sharding.is_equivalent_to(was, x.ndim), state, placed)
    assert jax.tree.all(moved)
    pairs = param_shaped(state.opt_state, tx, layout, params)
    assert pairs
    for index, leaf in pairs:
        leaf_of_params = layout.leaves[index]
        held = leaf_of_params.local(layout.stage.opt_state, layout.shards)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {held}
        assert leaf.sharding.is_equivalent_to(
            layout.sharding(layout.spec(leaf_of_params, layout.stage.opt_state)), leaf.ndim
        )


@pytest.mark.parametrize(("stage", "share"), [(0, 0.5), (1, 0.5), (3, 0.5), (2, 2.0), (3, 2.0), (3, None)])
def test_clipping_to_a_share_of_the_norm(stage, share, x64):
    """The norm counts each param once, whether it is cut, whole, or repeated along the replica axis."""
    params, (batch, *_) = arrays()
    layout = make_layout(stage, jzero.make_mesh(replica=2, data=4), min_shard_size=100)
    assert {leaf.dim is None for leaf in layout.leaves} == {True, False}
    grads = jax.device_get(jax.jit(jax.grad(loss_fn))(params, batch))
    norm = float(np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads))))
    clip_norm = None if share is None else share * norm

    tx = optax.sgd(1.0)
    state = jzero.init(lambda p: p, tx, layout, params)
    state, metrics = jzero.train_step(loss_fn, tx, layout, clip_norm=clip_norm)(state, layout.put_batch(batch))
    factor = 0.5 * norm / (norm + 1e-6) if share == 0.5 else 1.0
    assert_close(state.params, jax.tree.map(lambda p, g: jnp.asarray(p - factor * g), params, grads), 1e-12)
    more = {"clipped_norm", "loss_scale", "skipped", "skipped_in_a_row"}
    assert set(metrics) == {"loss", "grad_norm", "clipped", "step"} | more
    np.testing.assert_allclose(metrics["clipped_norm"], factor * norm, rtol=1e-12)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
    np.testing.assert_allclose(metrics["loss"], loss_fn(params, batch), rtol=1e-12)
    assert (metrics["clipped"].dtype, bool(metrics["clipped"])) == (bool, share == 0.5)
    assert int(metrics["step"]) == int(state.step) == 1
    assert all(value.is_fully_replicated for value in metrics.values())


@pytest.mark.parametrize("name", MORE)
def test_specs_have_the_structure_of_the_state(name, x64):
    tx, (params, _) = MORE[name], arrays()
    state = jax.eval_shape(tx.init, params)
    for stage in (0, 3):
        layout = make_layout(stage)
        specs = layout.opt_specs(tx)
        assert jax.tree.structure(specs) == jax.tree.structure(state)
        assert all(isinstance(spec, P) for spec in jax.tree.leaves(specs))
        assert jax.tree.structure(layout.opt_shardings(tx)) == jax.tree.structure(state)
        stored = jax.eval_shape(lambda state, layout=layout: layout.stored(state, tx=tx), state)
        for spec, leaf, held in zip(*map(jax.tree.leaves, (specs, state, stored)), strict=True):
            cut = [dim for dim, axis in enumerate(spec) if axis == "data"]
            # The only param without a dim that divides has 3 elements, and is padded where it is cut.
            assert held.shape == ((8,) if stage == 3 and leaf.shape == (3,) else leaf.shape)
            assert all(held.shape[dim] % 8 == 0 for dim in cut)
            assert bool(cut) == (stage == 3 and any(size and size % 8 == 0 for size in held.shape))


def test_two_params_of_one_shape_do_not_lend_each_other_their_placement():
    """`w` at two depths has two shapes; a state leaf goes with the param whose whole path it ends in."""
    shape = jax.ShapeDtypeStruct
    params = {"a": {"w": shape((16, 8), "float32")}, "w": shape((16, 9), "float32"), "z": [shape((8, 9), "float32")]}
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    wanted = {"a": {"w": P(None, "data")}, "w": P("data"), "z": [P("data")]}
    assert layout.param_specs == wanted
    adam = layout.opt_specs(optax.adam(1e-3))[0]
    assert (adam.mu, adam.nu) == (wanted, wanted)


def test_factored_leaves_follow_the_size_rule():
    shapes = {"w": (64, 24), "no dim": (20, 40), "small": (40, 16), "b": (16,)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=24)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    state = jzero.init(lambda p: p, tx, layout, params)
    shapes = jax.tree.map(lambda x: (x.shape, x.addressable_shards[0].data.shape), state.opt_state[0])
    none = ((1,), (1,))
    assert shapes.v_row == {"w": ((24,), (3,)), "no dim": ((20,), (20,)), "small": ((16,), (16,)), "b": none}
    assert shapes.v_col == {"w": ((64,), (8,)), "no dim": ((40,), (5,)), "small": ((40,), (5,)), "b": none}
    assert shapes.v == {"w": none, "no dim": none, "small": none, "b": ((16,), (16,))}
    assert memory.live_bytes(state.opt_state)[jax.devices()[0]] == memory.stored_bytes(layout, tx).opt_state


def test_momentum_in_another_dtype_lives_with_its_param():
    params, _ = arrays("float32")
    tx = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16)
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    trace = jzero.init(lambda p: p, tx, layout, params).opt_state[0].trace
    assert trace["embed"].dtype == jnp.bfloat16
    assert trace["embed"].addressable_shards[0].data.shape == (24, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_with_and_without_a_mesh_in_context_and_in_and_outside_of_jit(stage, x64):
    """Every way to run the same step gives the same state in the same places."""
    rng, tx = np.random.default_rng(0), optax.sgd(0.1, momentum=0.9)
    params, batch = {"w": rng.normal(size=(8, 16)), "b": rng.normal(size=3)}, rng.normal(size=(16, 8))

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)

    layout = jzero.zero(params, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    gradient = jzero.value_and_grad(loss_fn, layout)
    step = jzero.train_step(loss_fn, tx, layout)

    def opened(state, batch):
        return jzero.apply_gradients(state, gradient(state.params, batch)[1], tx, layout)

    # The last one donates the state.
    ways = {
        "opened": opened,
        "opened in jit": jax.jit(opened),
        "step in jit": jax.jit(lambda state, batch: step(state, batch)[0]),
        "step": lambda state, batch: step(state, batch)[0],
    }
    updates, opt_state = tx.update(jax.jit(jax.grad(loss_fn))(params, batch), tx.init(params), params)
    wanted = jzero.TrainState(optax.apply_updates(params, updates), opt_state, jnp.int32(1), skipped=Skipped.none())
    for context in (contextlib.nullcontext, lambda: jax.set_mesh(layout.mesh)):
        with context():
            state = jzero.init(lambda p: p, tx, layout, params)
            for name, way in ways.items():
                got = way(state, layout.put_batch(batch))
                logical = dataclasses.replace(
                    got,
                    params=layout.logical(got.params, replicate=True),
                    opt_state=layout.logical(got.opt_state, tx=tx, replicate=True),
                )
                assert_close(logical, wanted, 1e-12)
                for tree, specs in ((got.params, layout.param_specs), (got.opt_state, layout.opt_specs(tx))):
                    for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
                        assert x.sharding.is_equivalent_to(layout.sharding(spec), x.ndim), name
