"""Random keys and model state: which ones a loss gets, and what becomes of what it returns.

The reference is a loop on one device over the parts into which the mesh cuts the batch.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

MESHES = {"8": {"data": 8}, "3x2": {"data": 3, "replica": 2}}  # batches are cut over replica axes first
EXAMPLES, N_IN, N_OUT = 48, 8, 16


def make_layout(stage=3, axes=None):
    axes = axes or {"data": 8}
    size = int(np.prod(list(axes.values())))
    return jzero.zero(
        {"w": jax.ShapeDtypeStruct((N_IN, N_OUT), "float64")},
        stage=stage,
        mesh=jzero.make_mesh(devices=jax.devices()[:size], **axes),
        replica_axes=("replica",) if "replica" in axes else (),
        min_shard_size=0,
    )


def init_params():
    return {"w": jnp.asarray(np.random.default_rng(0).normal(size=(N_IN, N_OUT)))}


def placed_params(layout):
    return jax.device_put(layout.stored(init_params()), layout.param_shardings)


def make_batch(seed=1):
    return np.random.default_rng(seed).normal(size=(EXAMPLES, N_IN))


def fold(key, *indices):
    return functools.reduce(jax.random.fold_in, indices, key)


def dropout_loss(params, x, *, key):
    keep = jax.random.bernoulli(key, 0.5, (len(x), N_OUT))
    return jnp.mean((jnp.tanh(x @ params["w"]) * keep) ** 2)


def parts_of(batch, shards, microbatches):
    """Cuts a batch as jzero documents it: each shard holds consecutive examples, and so does each microbatch of it."""
    return batch.reshape(shards, microbatches, -1, *batch.shape[1:])


@functools.cache
def dropout_on_one_device(shards, microbatches):
    """(params, batch, key) -> (loss, grads), each part of the batch with its own key."""

    def loss(params, batch, key):
        def one(shard, microbatch, x):
            return dropout_loss(params, x, key=fold(key, shard, microbatch))

        rows = jax.vmap(lambda shard, xs: jax.vmap(one, (None, 0, 0))(shard, jnp.arange(microbatches), xs))
        return rows(jnp.arange(shards), parts_of(batch, shards, microbatches)).mean()

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("mesh, microbatches, stage", [("8", 3, s) for s in range(4)] + [("3x2", 1, 1), ("3x2", 2, 3)])
def test_each_part_of_the_batch_has_its_own_key(mesh, microbatches, stage, x64):
    """The same at every stage: `fold_in(fold_in(key, batch shard), microbatch)`, replica axes before data axes."""
    layout, key = make_layout(stage, MESHES[mesh]), jax.random.key(7)
    grad = jzero.value_and_grad(dropout_loss, layout, microbatches=microbatches, with_key=True)
    loss, grads = grad(placed_params(layout), make_batch(), key=key)
    reference = dropout_on_one_device(layout.batch_shards, microbatches)
    wanted, right = reference(init_params(), make_batch(), key)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    np.testing.assert_allclose(layout.logical(grads, replicate=True)["w"], right["w"], rtol=0, atol=1e-13)


def test_no_two_parts_of_the_batch_and_no_two_steps_draw_the_same(x64):
    """Counted on what the loss drew, over 8 shards, 3 microbatches and 4 steps."""

    def draw(params, x, *, key, model_state):
        index = jax.lax.axis_index("data") * 3 + model_state["microbatch"] % 3
        seen = jnp.zeros(24).at[index].set(jax.random.uniform(key)) * 8  # averaged over the 8 shards
        state = {"microbatch": model_state["microbatch"] + 1, "seen": model_state["seen"] + seen}
        return (params["w"] ** 2).mean(), state

    layout, tx = make_layout(), optax.sgd(0.1)
    first = {"microbatch": 0, "seen": jnp.zeros(24)}
    state = jzero.init(init_params, tx, layout, key=jax.random.key(7), model_state=first)
    step = jzero.train_step(draw, tx, layout, microbatches=3, with_key=True, with_model_state=True)
    seen = [np.zeros(24)]
    for _ in range(4):
        state, _ = step(state, make_batch())
        seen.append(np.asarray(state.model_state["seen"]))
    draws = np.diff(seen, axis=0)
    wanted = [
        [float(jax.random.uniform(fold(jax.random.key(7), step, shard, microbatch)))]
        for step in (0, 3)
        for shard, microbatch in ((0, 0), (7, 2))
    ]
    np.testing.assert_allclose(draws[[0, 0, 3, 3], [0, 23, 0, 23]], np.ravel(wanted), rtol=0, atol=1e-12)
    assert len(np.unique(draws.round(9))) == 8 * 3 * 4


@functools.cache
def trained(kind):
    """Two steps with dropout: params and the key that the state then holds."""
    with jax.enable_x64(True):
        layout, tx = make_layout(), optax.sgd(0.5)
        key = jax.random.key(7) if kind.startswith("typed") else jax.random.PRNGKey(7)
        state = jzero.init(init_params, tx, layout, key=key)
        step = jzero.train_step(dropout_loss, tx, layout, microbatches=3, with_key=True)
        for index in range(2):
            state, _ = step(state, make_batch(index))
        return np.asarray(state.params["w"]), state.key


def test_train_step_folds_the_key_by_step(x64):
    params, key = init_params(), jax.random.key(7)
    for step in range(2):
        _, grads = dropout_on_one_device(8, 3)(params, make_batch(step), fold(key, step))
        params = {"w": params["w"] - 0.5 * grads["w"]}
    got, kept = trained("typed")
    np.testing.assert_allclose(got, params["w"], rtol=0, atol=1e-12)
    assert kept == key  # the step folds it, and does not move it on


def test_training_is_reproducible_and_takes_raw_keys(x64):
    """Bit for bit from run to run, and the same with a raw uint32 key as with the typed one."""
    for kind in ("typed again", "raw"):
        np.testing.assert_array_equal(trained(kind)[0], trained("typed")[0])
    raw = trained("raw")[1]
    assert raw.dtype == jnp.uint32 and raw.shape == (2,)


def running_loss(params, x, *, model_state):
    """A mean that depends on the order of the microbatches, a count of examples, a flag, and a key that moves on."""
    mean = 0.5 * model_state["mean"] + x.mean(0)
    key, _ = jax.random.split(model_state["inner"][1])
    state = {
        "mean": mean,
        "inner": (model_state["inner"][0] + len(x), key),
        "low": model_state["low"] + x[0, 0].astype(jnp.bfloat16),
        "started": jnp.ones((), bool),
    }
    return jnp.mean(((x - mean) @ params["w"]) ** 2), state


def first_state():
    return {
        "mean": jnp.zeros(N_IN),
        "inner": (jnp.int32(5), jax.random.key(2)),
        "low": jnp.zeros((), jnp.bfloat16),
        "started": jnp.zeros((), bool),
    }


@pytest.mark.parametrize("stage, axes, microbatches", [(0, "8", 3), (1, "3x2", 2), (2, "8", 1), (3, "8", 3)])
def test_model_state_goes_through_microbatches_and_is_averaged_over_shards(stage, axes, microbatches, x64):
    layout, batch = make_layout(stage, MESHES[axes]), make_batch()
    parts = parts_of(batch, layout.batch_shards, microbatches)
    loss_and_state = jax.jit(
        jax.value_and_grad(lambda *args: running_loss(*args[:2], model_state=args[2]), has_aux=True)
    )
    losses, grads, states = [], [], []
    for shard in parts:
        state = first_state()
        for x in shard:
            (loss, state), grad = loss_and_state(init_params(), x, state)
            losses.append(loss)
            grads.append(grad["w"])
        states.append(state)

    def with_aux(params, x, *, model_state):
        loss, model_state = running_loss(params, x, model_state=model_state)
        return loss, (model_state, {"size": (x**2).mean()})

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all shards agree
        call = jzero.value_and_grad(with_aux, layout, microbatches=microbatches, has_aux=True, with_model_state=True)
        (loss, (state, aux)), got = call(placed_params(layout), batch, model_state=first_state())
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-12)
    np.testing.assert_allclose(aux["size"], np.mean(batch**2), rtol=1e-12)
    np.testing.assert_allclose(layout.logical(got, replicate=True)["w"], np.mean(grads, 0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["mean"], np.mean([s["mean"] for s in states], 0), rtol=0, atol=1e-14)
    assert int(state["inner"][0]) == 5 + EXAMPLES // layout.batch_shards
    assert state["inner"][1] == states[0]["inner"][1] and bool(state["started"])
    low = np.mean([np.float32(s["low"]) for s in states])
    np.testing.assert_allclose(np.float32(state["low"]), low, rtol=0, atol=0.02)
    for got, want in zip(*map(jax.tree.leaves, (state, first_state())), strict=True):
        assert got.dtype == want.dtype and got.is_fully_replicated and len(got.sharding.device_set) == layout.mesh.size


def differing_loss(params, x, *, model_state):
    """Returns the index of the batch shard where all shards should return the same."""
    index = jax.lax.axis_index("data").astype(jnp.int32)
    state = {
        "agrees": model_state["agrees"] + 1,
        "count": {"seen": jnp.stack([model_state["count"]["seen"][0] + 1, index])},
        "flag": index == 3,
        "key": jax.random.wrap_key_data(jnp.stack([jnp.uint32(1), index.astype(jnp.uint32)])),
        "mean": index.astype(jnp.float64),
    }
    return jnp.mean((x @ params["w"]) ** 2), state


def state_that_will_differ():
    return {
        "agrees": jnp.int32(0),
        "count": {"seen": jnp.zeros(2, jnp.int32)},
        "flag": jnp.zeros((), bool),
        "key": jax.random.wrap_key_data(jnp.array([1, 0], jnp.uint32)),
        "mean": jnp.zeros(()),
    }


def check_differing(record, filename=None):
    """One warning that names the three leaves that differ, and neither of the others."""
    (warning,) = record
    text = str(warning.message)
    for part in (
        "['count']['seen']",
        "['flag']",
        "['key']",
        "different values",
        "largest was kept",
        "layout.batch_axes",
    ):
        assert part in text
    assert "agrees" not in text and "mean" not in text
    assert filename in (None, warning.filename)


def check_largest(state, steps):
    assert [int(state["agrees"]), *map(int, state["count"]["seen"]), bool(state["flag"])] == [steps, steps, 7, True]
    assert jax.random.key_data(state["key"]).tolist() == [1, 7]
    assert float(state["mean"]) == 3.5
    for leaf in jax.tree.leaves(state["count"]):  # every device holds the same
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def test_value_and_grad_warns_of_state_that_differs(x64):
    layout, batch, first = make_layout(), make_batch(), state_that_will_differ()
    call = jzero.value_and_grad(differing_loss, layout, with_model_state=True)
    with pytest.warns(UserWarning) as record:
        (_, state), _ = call(placed_params(layout), batch, model_state=first)
    check_differing(record, __file__)
    check_largest(state, 1)
    # Inside of jit nobody is there to be told; the values are the same.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (_, state), _ = jax.jit(call)(placed_params(layout), batch, model_state=first)
    check_largest(state, 1)


@pytest.mark.parametrize("wait", [True, False])
def test_train_step_warns_of_state_that_differs(wait, x64):
    """At once if it waits, and otherwise when the next step is called: never in a way that makes it wait."""
    layout, tx = make_layout(), optax.sgd(0.1)
    state = jzero.init(init_params, tx, layout, model_state=state_that_will_differ())
    step = jzero.train_step(differing_loss, tx, layout, with_model_state=True, wait=wait)
    for index in range(3):
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            state, metrics = step(state, make_batch())
            jax.block_until_ready(metrics)
        if wait or index:
            check_differing(record)
        else:
            assert not record
    check_largest(state.model_state, 3)


def test_state_that_agrees_warns_of_nothing(x64):
    layout, tx = make_layout(), optax.sgd(0.1)
    state = jzero.init(init_params, tx, layout, model_state=first_state())
    step = jzero.train_step(running_loss, tx, layout, with_model_state=True, wait=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            state, _ = step(state, make_batch())
    assert int(state.model_state["inner"][0]) == 5 + 2 * EXAMPLES // 8


def test_python_numbers_do_not_make_it_compile_twice(x64):
    """They have weak types, in params as in model state, which the state of the next step does not have."""
    traced = []

    def loss_fn(params, x, *, model_state):
        traced.append(model_state)
        return params["scale"] * 2.0, {"steps": model_state["steps"] + 1, "rate": model_state["rate"] * 0.5}

    def init():
        return {"scale": jnp.asarray(0.5)}

    layout, tx = jzero.zero(jax.eval_shape(init), stage=3, mesh=jzero.make_mesh(data=-1)), optax.sgd(0.1)
    state = jzero.init(init, tx, layout, model_state={"steps": 0, "rate": 1.0})
    step = jzero.train_step(loss_fn, tx, layout, with_model_state=True)
    state, _ = step(state, make_batch())
    once = len(traced)
    for _ in range(2):
        state, _ = step(state, make_batch())
    assert (int(state.model_state["steps"]), float(state.model_state["rate"])) == (3, 0.125)
    np.testing.assert_allclose(state.params["scale"], 0.5 - 3 * 0.2, rtol=0, atol=1e-15)
    assert len(traced) == once


def test_a_key_or_model_state_that_is_missing(x64):
    layout, tx, batch = make_layout(), optax.sgd(0.1), make_batch()
    state = jzero.init(init_params, tx, layout)
    for name, loss_fn in (("key", dropout_loss), ("model_state", running_loss)):
        asked: Any = {f"with_{name}": True}
        text = rf"{name}=None, but with_{name}=True: pass {name}=, or give it to jzero.init"
        with pytest.raises(ValueError, match=text):
            jzero.value_and_grad(loss_fn, layout, **asked)(state.params, batch)
        with pytest.raises(ValueError, match=text):
            jzero.train_step(loss_fn, tx, layout, **asked)(state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


FORMS = {
    "structure": (lambda s: s | {"more": jnp.zeros(())}, ValueError, r"not expected \['more'\]"),
    "lost": (lambda s: {}, ValueError, r"missing \['n'\]"),
    "dtype": (
        lambda s: {"n": s["n"].astype(jnp.float32)},
        ValueError,
        r"float32\(3,\) at \['n'\]; it was given int64\(3,\)",
    ),
    "shape": (lambda s: {"n": s["n"].sum()}, ValueError, r"int64\(\) at \['n'\]; it was given int64\(3,\)"),
    "none": (lambda s: None, ValueError, r"missing \['n'\]"),
}


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_model_state_keeps_structure_shape_and_dtype(form, microbatches, x64):
    change, error, text = FORMS[form]
    layout = make_layout()

    def loss_fn(params, x, *, model_state):
        return (params["w"] ** 2).mean(), change(model_state)

    call = jzero.value_and_grad(loss_fn, layout, microbatches=microbatches, with_model_state=True)
    with pytest.raises(error, match=rf"model_state that loss_fn returned.*{text}"):
        call(placed_params(layout), make_batch(), model_state={"n": jnp.arange(3)})


def test_a_loss_that_does_not_return_the_pair_it_was_asked_for(x64):
    layout, first = make_layout(), {"n": jnp.arange(3)}

    def loss_fn(params, x, *, model_state):
        return (params["w"] ** 2).mean()

    for has_aux, form in ((False, r"\(loss, model_state\)"), (True, r"\(loss, \(model_state, aux\)\)")):
        call = jzero.value_and_grad(loss_fn, layout, has_aux=has_aux, with_model_state=True)
        with pytest.raises(TypeError, match=rf"it was asked for {form}"):
            call(placed_params(layout), make_batch(), model_state=first)


@pytest.mark.parametrize("placed", [False, True], ids=["anywhere", "on the mesh"])
def test_init_copies_key_and_model_state(placed, x64):
    """A step donates its state; what the caller gave to `init` outlives it, even if it lay where the state lies."""
    layout, tx = make_layout(), optax.sgd(0.1)
    given = {"key": jax.random.key(7), "raw": jax.random.PRNGKey(8), "stats": {"a": jnp.ones(3), "n": jnp.arange(3)}}
    if placed:
        given = jax.device_put(given, layout.sharding(jax.sharding.PartitionSpec()))

    def loss_fn(params, x, *, key, model_state):
        return (params["w"] ** 2).mean() * jax.random.uniform(key), jax.tree.map(lambda x: x + 1, model_state)

    for name in ("key", "raw"):
        state = jzero.init(init_params, tx, layout, key=given[name], model_state=given["stats"])
        step = jzero.train_step(loss_fn, tx, layout, with_key=True, with_model_state=True)
        first = state
        state, _ = step(state, make_batch())
        assert first.key.is_deleted() and first.model_state["a"].is_deleted()
        assert not any(x.is_deleted() for x in jax.tree.leaves(given))
        np.testing.assert_array_equal(given["stats"]["a"], np.ones(3))
        assert state.model_state["n"].tolist() == [1, 2, 3]
