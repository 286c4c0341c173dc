"""Every optimizer of optax and optax.contrib runs as on one device, on leaves of any shape."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import keystr, tree_leaves_with_path
from optax import contrib

import jzero
from tests.optax_constructors import CASES, REFUSED, constructors, gradient_of_objective, objective

STEPS = 5
MIN_SHARD_SIZE = 8
# On 8 devices: one that divides, one padded along each dim, two that stay whole. No two have the same shape, so that
# the shape of a state leaf tells whose it is.
SHAPES: dict[str, Any] = {"even": (16, 8), "odd": {"rows": (23, 9), "cols": (9, 23)}, "bias": (5,), "scale": ()}
MESHES = ({"data": 8}, {"replica": 2, "data": 4}, {"data": 3})
NAMES = list(CASES)


value_and_grad_of_objective = jax.jit(jax.value_and_grad(objective))


def normal(name, seed):
    """A tree for this optimizer, and for lookahead its fast half."""
    rng = np.random.default_rng(seed)
    shapes = {path: shape for path, shape in SHAPES.items() if shape or CASES[name].scalars}
    return jax.tree.map(lambda shape: rng.normal(size=shape), shapes, is_leaf=lambda x: type(x) is tuple)


def first_params(name):
    return optax.LookaheadParams(normal(name, 0), normal(name, 0)) if name == "lookahead" else normal(name, 0)


def given(name, params, step):
    """Gradient and extra arguments of a step. What searches along the gradient gets that of its own objective."""
    needs = CASES[name].extra
    if "value_fn" in needs:
        value, grads = value_and_grad_of_objective(params)
        return grads, {"value": value, "grad": grads, "value_fn": objective}
    grads = normal(name, step + 1)
    if name == "lookahead":
        grads = optax.LookaheadParams(grads, jax.tree.map(np.zeros_like, grads))
    values = {"value": 1 / (step + 1), "obj_fn": objective, "grad_fn": gradient_of_objective}
    return grads, {need: values[need] for need in needs}


@functools.cache
def on_one_device(name):
    """Plain optax: what each step was given, and the params and the state after the last."""
    tx, params = CASES[name].make(), jax.tree.map(jnp.asarray, first_params(name))
    opt_state = tx.init(params)

    @functools.partial(jax.jit, static_argnames=("value_fn", "obj_fn", "grad_fn"))
    def update(grads, opt_state, params, **extra):
        updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    inputs = []
    for step in range(STEPS):
        grads, extra = given(name, params, step)
        inputs.append((grads, extra))
        params, opt_state = update(grads, opt_state, params, **extra)
    return inputs, params, opt_state


def make_layout(name, stage, axes):
    n = math.prod(axes.values())
    return jzero.zero(
        first_params(name),
        stage=stage,
        mesh=jzero.make_mesh(devices=jax.devices()[:n], **axes),
        replica_axes=[axis for axis in axes if axis == "replica"],
        min_shard_size=MIN_SHARD_SIZE,
    )


def as_stored(grads, layout):
    """Gradients as a step has them. NaNs in the padding: what stands there must not matter."""

    def put(leaf, grad, sharding):
        whole = np.full(leaf.placed(layout.stage.grads).shape, np.nan)
        whole[tuple(slice(size) for size in leaf.shape)] = grad
        return jax.device_put(whole, sharding)

    return jax.tree.map(put, layout.treedef.unflatten(layout.leaves), grads, layout.grad_shardings)


def assert_close(got, wanted, tolerance=1e-9):
    """Errors are measured against the largest number of the tree; what is not floating is equal."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = [(path, x, y) for (path, x), y in zip(tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)]
    floats = [np.asarray(y) for _, _, y in pairs if jnp.issubdtype(y.dtype, jnp.inexact) and y.size]
    largest = max((np.abs(y[np.isfinite(y)]).max(initial=0) for y in floats), default=0)
    for path, x, y in pairs:
        assert (x.shape, x.dtype) == (y.shape, y.dtype), keystr(path)
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        atol = tolerance * largest if jnp.issubdtype(y.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=keystr(path))


def assert_placed(state, tx, layout):
    """State leaves with a param's shape live as it does, others are cut if size and shape allow; `explain` says so."""
    params = {leaf.shape: leaf for leaf in layout.leaves}
    rows = jzero.explain(layout, tx=tx)[len(layout.leaves) :]
    for (path, x), row in zip(tree_leaves_with_path(state.opt_state), rows, strict=True):
        name = keystr(path, simple=True, separator="/")
        divides = any(size % layout.shards == 0 for size in row.shape)
        (local,) = {shard.data.shape for shard in x.addressable_shards}
        if layout.stage.opt_state == "replicated":
            assert local == row.shape == x.shape, name
        elif row.shape in params:
            assert local == params[row.shape].local("sharded", layout.shards), name
        elif x.size >= MIN_SHARD_SIZE and divides:
            assert math.prod(local) * layout.shards == x.size, name
        else:
            assert local == row.shape, name
        assert row.path == f"opt_state/{name}"
        assert (row.stored_shape, row.dtype) == (x.shape, x.dtype), name
        assert row.bytes_per_device == math.prod(local) * x.dtype.itemsize, name
        assert x.sharding.is_equivalent_to(layout.sharding(row.opt_state), x.ndim), name


def run_five_steps(name, stage, axes):
    inputs, params, opt_state = on_one_device(name)
    tx, layout = CASES[name].make(), make_layout(name, stage, axes)
    state = jzero.init(lambda p: p, tx, layout, first_params(name))
    assert_placed(state, tx, layout)
    for grads, extra in inputs:
        stored = as_stored(grads, layout)
        state = jzero.apply_gradients(
            state, stored, tx, layout, **extra | ({"grad": stored} if "grad" in extra else {})
        )
    assert_placed(state, tx, layout)
    assert_close(layout.logical(state.params, replicate=True), params)
    assert_close(layout.logical(state.opt_state, tx=tx, replicate=True), opt_state)
    assert int(state.step) == STEPS


def test_no_constructor_is_forgotten():
    """A new version of optax that brings a new one fails here."""
    tested = {name.split()[0] for name in CASES}
    assert set(constructors()) == tested | REFUSED.keys()
    assert not tested & REFUSED.keys()


# One or two of each kind: what they need beside gradients, what their state looks like, what they look at.
REPRESENTATIVES = [
    "adamw",  # two moments, a schedule, a mask
    "adafactor",  # means over rows and columns
    "lamb",  # norms of leaves
    "sm3",  # sums along each dim
    "contrib.muon",  # whole matrices
    "noisy_sgd",  # a random key
    "polyak_sgd",  # the loss
    "scale_by_backtracking_linesearch",  # a function of the loss, along the gradient
    "contrib.hutchinson_estimator_diag_hessian",  # the loss as a function
    "contrib.sam opaque_mode",  # its gradient
    "scale_by_lbfgs",  # params and gradients of steps before
    "contrib.galore",  # a projection of each leaf
    "contrib.prodigy",  # one number for all leaves
    "clip_by_global_norm",
    "centralize",
    "identity",  # no state
    "set_to_zero",
    "snapshot",
    "MultiSteps",
    "apply_if_finite",
    "chain",
    "conditionally_mask",
    "flatten",  # one vector of all leaves
    "freeze",
    "inject_hyperparams",
    "lookahead",  # two sets of params
    "masked",
    "multi_transform",
    "partition",
    "contrib.mechanize",
    "contrib.schedule_free_adamw",
    "contrib.split_real_and_imaginary",
]


# All stages and all meshes take turns.
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_five_steps_are_those_of_one_device(name, x64):
    index = REPRESENTATIVES.index(name)
    run_five_steps(name, index % 4, MESHES[index // 4 % 3])


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_five_steps_at_every_stage(name, stage, x64):
    run_five_steps(name, stage, MESHES[(NAMES.index(name) + stage) % 3])


def test_a_complex_leaf_is_padded_and_its_two_halves_live_with_it(x64):
    """Their paths in the state end in "real" and "imaginary", which no param's path does."""
    rng, tx = np.random.default_rng(0), contrib.split_real_and_imaginary(optax.adam(1e-2))
    params, grads = ({"w": rng.normal(size=(23, 9)) + 1j * rng.normal(size=(23, 9))} for _ in range(2))
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=0)
    state = jzero.init(lambda p: p, tx, layout, params)
    updates, opt_state = tx.update(grads, tx.init(params), params)
    state = jzero.apply_gradients(state, grads, tx, layout)
    assert_close(layout.logical(state.params, replicate=True), optax.apply_updates(params, updates))
    assert_close(layout.logical(state.opt_state, tx=tx, replicate=True), opt_state)
    halves = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(halves) == 4
    assert {shard.data.shape for x in halves for shard in x.addressable_shards} == {(3, 9)}


def small_run(tx, params):
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=0)
    return jzero.init(lambda p: p, tx, layout, params), layout


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("polyak_sgd", "'value'"),
        ("contrib.reduce_on_plateau", "'value'"),
        ("lbfgs", "'value', 'grad', and 'value_fn'"),
        ("contrib.sophia", "obj_fn must be provided"),
    ],
)
def test_what_an_optimizer_needs_beside_gradients_is_named(name, missing):
    tx, params = CASES[name].make(), {"w": np.ones((8, 4), np.float32)}
    state, layout = small_run(tx, params)
    with pytest.raises((TypeError, ValueError), match=missing) as raised:
        jzero.apply_gradients(state, params, tx, layout)
    assert "gets it from apply_gradients" in " ".join(raised.value.__notes__)


@pytest.mark.filterwarnings('ignore:"seed" is deprecated')
@pytest.mark.parametrize("name", ["contrib.dpsgd", "contrib.differentially_private_aggregate"])
def test_gradients_of_single_examples_are_refused(name):
    if name == "contrib.dpsgd":
        tx = contrib.dpsgd(1e-2, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0)
    else:
        tx = contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0))
    params = {"v": np.ones((8, 4), np.float32), "w": np.ones((8, 2), np.float32)}
    state, layout = small_run(tx, params)
    with pytest.raises(ValueError, match=r"grads\['v'\] is float32\(16, 8, 4\)"):
        jzero.apply_gradients(state, jax.tree.map(lambda p: np.stack([p] * 16), params), tx, layout)
    # These would take the first dim for that of the examples, and their update be broadcast over the params.
    with pytest.raises(ValueError, match=r"params\['v'\], whose shape is \(8, 4\).* one gradient for each example"):
        jzero.apply_gradients(state, params, tx, layout)


def test_a_state_that_changes_its_structure_is_refused():
    tx = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1))
    params = {"w": np.ones((8, 4), np.float32)}
    state, layout = small_run(tx, params)
    with pytest.raises(ValueError, match=r"state of another structure than tx.init.*optax.monitor"):
        jzero.apply_gradients(state, params, tx, layout)


def test_lookahead_over_plain_params_is_refused():
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    params = {"w": np.ones((8, 4), np.float32)}
    state, layout = small_run(tx, params)
    with pytest.raises(AttributeError, match="fast") as raised:
        jzero.apply_gradients(state, params, tx, layout)
    assert "from tx.update" in " ".join(raised.value.__notes__)
