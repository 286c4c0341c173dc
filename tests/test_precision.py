"""Mixed precision: what is stored, what the loss gets, and what its gradients are. Bytes are those of live arrays."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero import Precision, memory
from tests.precision_model import MESHES, elements_per_model_shard, init_params, make_batch, make_layout

ADAM = optax.adam(1e-2)
COUNTERS = 20  # bytes of the step, of what is counted of skipped steps and of Adam's own count
PRESETS = ["fp32", "bf16", "fp16", "bf16-pure"]
# Bytes stored at stage 0, at 1 and 2, and at 3: of P elements, cut into N.
STORED = {
    "fp32": lambda P, N: (12 * P, 4 * P + 8 * P / N, 12 * P / N),
    "bf16": lambda P, N: (14 * P, 2 * P + 12 * P / N, 12 * P / N),
    "fp16": lambda P, N: (14 * P, 2 * P + 12 * P / N, 12 * P / N),
    "bf16-pure": lambda P, N: (6 * P, 2 * P + 4 * P / N, 6 * P / N),
}
COMPUTE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bf16-pure": "bfloat16"}
CASES = list(itertools.product(PRESETS, range(4), MESHES))


def by_default(preset, stage, axes):
    """On one mesh each preset at three stages, and on the others at one."""
    turn = (PRESETS.index(preset) - stage - len(axes) - ("model" in axes)) % 4
    return turn > 0 and stage != 2 if axes == MESHES[0] else turn == 0


def marked(cases):
    return [pytest.param(*case, marks=() if by_default(*case) else pytest.mark.slow) for case in cases]


def per_device(tree):
    """Bytes of a tree, which must be the same on each device of the mesh."""
    (n,) = set(memory.live_bytes(tree).values())
    return n


def dtypes(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.parametrize(("preset", "stage", "axes"), marked(CASES), ids=str)
def test_each_preset_stores_the_bytes_that_the_design_says(preset, stage, axes):
    layout = make_layout(stage, preset, axes)
    state = jzero.init(init_params, ADAM, layout)
    P, N = elements_per_model_shard(axes), axes["data"]
    wanted = STORED[preset](P, N)[(0, 1, 1, 2)[stage]]
    assert per_device((state.params, state.master, state.opt_state)) == wanted + 4, "with Adam's own count"
    assert per_device(state) == wanted + COUNTERS
    stored = memory.stored_bytes(layout, ADAM)
    assert (stored.params, stored.master) == (per_device(state.params), per_device(state.master) if state.master else 0)
    assert stored.total == wanted + 4
    assert memory.formula(stage, params=P, shards=N, precision=preset).stored == wanted

    mixed, whole = preset in ("bf16", "fp16"), stage < 3
    assert dtypes(state.params) == {"float32" if mixed and not whole else COMPUTE[preset]}
    assert dtypes(state.master) == ({"float32"} if mixed and whole else set())
    assert dtypes(state.opt_state) == {"bfloat16" if preset == "bf16-pure" else "float32"}


def squares(params, batch):
    """Costs little to compile; its gradient has the dtype of its params."""
    return jnp.mean(batch["x"]) * sum(jnp.sum(x**2).astype(jnp.float32) for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("precision", "dtype", "stage", "axes"),
    [
        ("bf16", "float32", 0, MESHES[0]),
        ("bf16", "float32", 1, MESHES[0]),
        ("bf16-pure", "float32", 2, MESHES[0]),
        ("fp32", "float32", 3, MESHES[2]),
        (Precision(accumulate="bfloat16"), "bfloat16", 0, MESHES[0]),
        (Precision(accumulate="bfloat16"), "bfloat16", 2, MESHES[1]),
        (Precision(accumulate="bfloat16"), "bfloat16", 3, MESHES[0]),
        (Precision(accumulate=None), "bfloat16", 1, MESHES[0]),
        (Precision(accumulate=None, compute="float16"), "float16", 3, MESHES[0]),
    ],
    ids=str,
)
def test_gradients_take_the_bytes_of_the_accumulate_dtype(precision, dtype, stage, axes):
    """4P or 2P whole at stage 0, and cut into N beyond."""
    layout = make_layout(stage, precision, axes)
    params = jzero.init(init_params, ADAM, layout).params
    batch = layout.put_batch({"x": np.ones(16, np.int32)})
    _, grads = jzero.value_and_grad(squares, layout, microbatches=1 + stage % 2)(params, batch)
    P, N = elements_per_model_shard(axes), axes["data"]
    wanted = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype] * P / (N if stage else 1)
    assert dtypes(grads) == {dtype}
    assert per_device(grads) == memory.gradient_bytes(layout) == wanted
    assert memory.formula(stage, params=P, shards=N, precision=precision).gradients == wanted


# What the loss gets.

LEAVES = {
    "norm/scale": "float32",
    "kernel": "float32",
    "half": "float16",
    "brain": "bfloat16",
    "eighth": "float8_e4m3fn",
    "index": "int32",
    "mask": "bool",
}


def seen_by_the_loss(stage, precision, frozen=()):
    """The dtype of each leaf as the loss is given it, and the layout."""
    seen = {}
    tree = {path: jax.ShapeDtypeStruct((8, 8), dtype) for path, dtype in LEAVES.items()}
    tree["key"] = jax.eval_shape(lambda: jax.random.key(0))
    layout = make_layout(
        stage,
        precision,
        params=tree,
        trainable=lambda path, leaf: jnp.issubdtype(leaf.dtype, jnp.floating) and path not in {"eighth", *frozen},
    )

    def record(params, batch):
        seen.update({path: str(x.dtype) for path, x in params.items()})
        return jnp.mean(batch) * sum(jnp.sum(params[x]).astype(jnp.float32) for x in ("kernel", "norm/scale", "half"))

    placed = layout.treedef.unflatten([leaf.placed(layout.stage.params) for leaf in layout.leaves])
    jax.eval_shape(jzero.value_and_grad(record, layout), placed, jax.ShapeDtypeStruct((8,), "int32"))
    return seen, layout


@pytest.mark.parametrize("stage", range(4))
def test_the_loss_gets_the_compute_dtype_but_for_what_is_exempt_or_no_wide_float(stage):
    kept = {"eighth": "float8_e4m3fn", "index": "int32", "mask": "bool", "key": "key<fry>"}
    for name in PRESETS:
        seen, _ = seen_by_the_loss(stage, name)
        assert seen == dict.fromkeys(("norm/scale", "kernel", "half", "brain"), COMPUTE[name]) | kept
    seen, layout = seen_by_the_loss(stage, Precision(exempt=["norm/*", "half"]))
    assert seen == {"norm/scale": "float32", "kernel": "bfloat16", "half": "float16", "brain": "bfloat16"} | kept
    masters = [leaf.path for leaf in layout.trainable if leaf.has_master]
    assert masters == (["brain", "half", "kernel"] if stage < 3 else [])
    seen, layout = seen_by_the_loss(stage, None)
    assert seen == LEAVES | {"key": "key<fry>"}
    assert not layout.masters[1]


@pytest.mark.parametrize("stage", range(4))
def test_what_is_not_trained_is_stored_as_narrow_as_the_loss_gets_it(stage):
    seen, layout = seen_by_the_loss(stage, "bf16", frozen={"norm/scale", "brain"})
    stored = {leaf.path: str(leaf.dtype) for leaf in layout.leaves}
    assert (stored["norm/scale"], stored["brain"], seen["norm/scale"]) == ("bfloat16", "bfloat16", "bfloat16")
    assert stored["kernel"] == ("float32" if stage == 3 else "bfloat16")
    seen, layout = seen_by_the_loss(stage, "fp32", frozen={"norm/scale", "brain"})
    stored = {leaf.path: str(leaf.dtype) for leaf in layout.leaves}
    assert (stored["norm/scale"], stored["brain"], seen["brain"]) == ("float32", "bfloat16", "float32")
    assert stored["half"] == "float32", "it is trained, in float32"


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_leaves_come_back_from_master_params_as_they_were_given(stage):
    params = {"w": jnp.full((8, 3), 1.001), "frozen": jnp.full((8, 5), 1.001)}
    layout = make_layout(stage, "bf16", params=params, trainable=lambda path, leaf: path == "w")
    state = jzero.init(lambda p: p, ADAM, layout, params)
    assert state.params["frozen"].dtype == jnp.bfloat16
    master = jzero.master_params(state, layout)
    assert jax.tree.map(lambda x: str(x.dtype), master) == {"w": "float32", "frozen": "float32"}
    assert master["w"][0, 0] == np.float32(1.001)
    assert master["frozen"][0, 0] == 1, "its last bits went with narrow storage"


# Master weights.


def with_padding():
    shapes = {"table": (64, 16), "w": (16, 32), "odd": (7, 5)}
    return {path: jnp.sin(jnp.arange(math.prod(shape)) ** 1.5).reshape(shape) for path, shape in shapes.items()}


def loss_with_padding(params, batch):
    x = params["table"][batch["tokens"]] @ params["w"]
    return jnp.mean(jnp.tanh(x).astype(jnp.float32) * batch["next"][..., None]) + jnp.mean(params["odd"] ** 2)


@functools.cache
def after_three_steps(stage):
    layout = make_layout(stage, "bf16", params=jax.eval_shape(with_padding))
    state = jzero.init(with_padding, ADAM, layout)
    step = jzero.train_step(loss_with_padding, ADAM, layout)
    for _ in range(3):
        state, _ = step(state, layout.put_batch(make_batch()))
    return layout, state


@pytest.mark.parametrize("stage", range(4))
def test_master_params_are_the_same_float32_tree_at_every_stage(stage):
    layout, state = after_three_steps(stage)
    master = jzero.master_params(state, layout, replicate=True)
    inside = jax.jit(lambda state: jzero.master_params(state, layout))(state)
    for x, y, abstract in zip(*map(jax.tree.leaves, (master, inside, jax.eval_shape(with_padding))), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) == (abstract.shape, jnp.float32)
        np.testing.assert_array_equal(x, y)
    assert all((x != x.astype(jnp.bfloat16)).any() for x in jax.tree.leaves(master)), "more than bfloat16 holds"
    layout, state = after_three_steps(1)
    first = jzero.master_params(state, layout, replicate=True)
    for x, y in zip(jax.tree.leaves(master), jax.tree.leaves(first), strict=True):
        if stage:
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stage", range(4))
def test_params_are_the_master_params_cast_bit_for_bit(stage):
    layout, state = after_three_steps(stage)
    params = layout.logical(state.params, replicate=True)
    master = jzero.master_params(state, layout, replicate=True)
    for x, wide in zip(jax.tree.leaves(params), jax.tree.leaves(master), strict=True):
        assert x.dtype == (jnp.bfloat16 if stage < 3 else jnp.float32)
        np.testing.assert_array_equal(x, wide.astype(x.dtype))
    computed = layout.computed(state.params, replicate=True)
    for x, wide in zip(jax.tree.leaves(computed), jax.tree.leaves(master), strict=True):
        assert (x.shape, x.dtype) == (wide.shape, jnp.bfloat16)
        np.testing.assert_array_equal(x, wide.astype(jnp.bfloat16))


def test_a_fresh_copy_is_made_from_its_master_as_later_ones_are():
    """Where the copy is the finer one, it holds no bits that its master has lost."""
    precision = Precision(master="bfloat16", compute="float16", stochastic_rounding=True)
    params = {"w": jnp.full(8, 1.001)}
    state = jzero.init(lambda p: p, ADAM, make_layout(1, precision, params=params), params)
    assert (state.master["w"].dtype, state.params["w"].dtype) == (jnp.bfloat16, jnp.float16)
    np.testing.assert_array_equal(state.master["w"], 1)
    np.testing.assert_array_equal(state.params["w"], 1)


def test_padded_master_params_outside_of_jit_ask_for_replicate():
    layout, state = after_three_steps(2)
    with pytest.raises(ValueError, match="replicate=True"):
        jzero.master_params(state, layout)


def test_a_loss_may_still_cast_its_params_back_to_float32():
    """A model that wants a leaf wider casts it; the gather stays narrow, the gradient comes in float32."""
    layout = make_layout(3, Precision(cast_batch=()), params={"w": jax.ShapeDtypeStruct((16, 16), "float32")})

    def loss(params, x):
        return jnp.sum((x @ params["w"].astype(jnp.float32)) ** 2)

    state = jzero.init(lambda: {"w": jnp.full((16, 16), 1.001)}, ADAM, layout)
    value, grads = jzero.value_and_grad(loss, layout)(state.params, jnp.ones((8, 16)))
    assert value == 16 * 16**2, "of weights of 1, not of 1.001"
    assert grads["w"].dtype == jnp.float32
    assert lax.reduce_max(grads["w"], (0, 1)) == 2 * 16
