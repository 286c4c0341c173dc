"""States that do not fit are refused before any work: of another structure, shape or place, or used up by a step."""

# ruff: noqa: F401, F811 - fixtures are imported, and asked for by their names

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests.refusals import (
    SGD,
    layout,
    loss_fn,
    make_batch,
    make_layout,
    make_params,
    make_state,
    refuses,
    source,
    state,
    step,
)


def calls_with_state(layout, step, source):
    """Each call as a function of a state; all of its parts that do not come from the state are right."""
    gradient = jzero.value_and_grad(loss_fn, layout)
    apply = lambda state: jzero.apply_gradients(state, source.params, SGD, layout)  # noqa: E731
    return {
        "step": lambda state: step(state, make_batch()),
        "lower": lambda state: step.lower(state, make_batch()),
        "step in jit": lambda state: jax.jit(step)(state, make_batch()),
        "value_and_grad": lambda state: gradient(state.params, make_batch()),
        "value_and_grad in jit": lambda state: jax.jit(gradient)(state.params, make_batch()),
        "apply_gradients": apply,
        "apply_gradients in jit": lambda state: jax.jit(apply)(state),
    }


WITH_PARAMS = [
    "step", "lower", "step in jit", "value_and_grad", "value_and_grad in jit", "apply_gradients",
    "apply_gradients in jit",
]  # fmt: skip
WITH_STATE = [call for call in WITH_PARAMS if "value_and_grad" not in call]

BROKEN = {
    "missing": (lambda p: {"body": p["body"]}, ["structure", "missing ['head'][0]"]),
    "extra": (lambda p: p | {"tail": jnp.ones(2)}, ["structure", "not expected ['tail']"]),
    "renamed": (lambda p: {"body": p["body"], "tail": p["head"]}, ["missing ['head'][0]", "not expected ['tail'][0]"]),
    "container": (lambda p: p | {"head": tuple(p["head"])}, ["structure", "other containers", "[*]", "(*,)"]),
    "none": (lambda p: p | {"head": [None]}, ["structure", "missing ['head'][0]"]),
    "shape": (lambda p: p | {"head": [jnp.ones((8, 16))]}, ["['head'][0]", "(8, 16)", "(16, 8)"]),
    "rank": (lambda p: p | {"head": [jnp.ones(())]}, ["['head'][0]", "()", "(16, 8)"]),
    "dtype": (lambda p: p | {"head": [jnp.ones((16, 8), "float16")]}, ["['head'][0]", "float16", "float32"]),
}


@pytest.mark.parametrize("call", WITH_PARAMS)
@pytest.mark.parametrize("broken", BROKEN)
def test_params_of_another_structure_or_shape(broken, call, state, source, layout, step):
    change, parts = BROKEN[broken]
    bad = dataclasses.replace(state, params=change(state.params))
    name = "params" if call.startswith("value_and_grad") else "state.params"
    message = refuses(lambda: calls_with_state(layout, step, source)[call](bad), *parts)
    assert message.startswith(name)


@pytest.mark.parametrize("call", WITH_STATE)
@pytest.mark.parametrize("broken", BROKEN)
def test_optimizer_state_of_another_structure_or_shape(broken, call, state, source, layout, step):
    change, parts = BROKEN[broken]
    trace, rest = state.opt_state
    bad = dataclasses.replace(state, opt_state=(trace._replace(trace=change(trace.trace)), rest))
    parts = [part.replace("['", "[0].trace['", 1) for part in parts]
    parts = ["state.opt_state", *(p for p in parts if "*" not in p)]
    refuses(lambda: calls_with_state(layout, step, source)[call](bad), *parts)


@pytest.mark.parametrize("call", WITH_STATE)
def test_optimizer_state_of_another_optimizer(call, state, source, layout, step):
    bad = dataclasses.replace(state, opt_state=optax.adam(1e-3).init(state.params))
    parts = ["state.opt_state", "structure", "[0].trace['body']['b']", "[0].count", "tx"]
    refuses(lambda: calls_with_state(layout, step, source)[call](bad), *parts)


@pytest.mark.parametrize("broken", BROKEN)
def test_gradients_of_another_structure_or_shape(broken, state, layout):
    change, parts = BROKEN[broken]
    bad = change(state.params)
    for apply in (jzero.apply_gradients, jax.jit(jzero.apply_gradients, static_argnums=(2, 3))):
        assert refuses(lambda apply=apply: apply(state, bad, SGD, layout), *parts).startswith("grads")


@pytest.mark.parametrize("call", ["step", "apply_gradients"])
def test_state_that_is_no_state(call, state, source, layout, step):
    run = calls_with_state(layout, step, source)[call]
    refuses(lambda: run((state.params, state.opt_state, state.step)), "tuple", "TrainState", error=TypeError)


@pytest.mark.parametrize("call", ["step", "apply_gradients"])
@pytest.mark.parametrize("count", [None, jnp.zeros(3, jnp.int32), jnp.float32(1)], ids=["none", "vector", "float"])
def test_step_count_that_is_no_count(call, count, state, source, layout, step):
    bad = dataclasses.replace(state, step=count)
    with pytest.raises((ValueError, TypeError)) as caught:
        calls_with_state(layout, step, source)[call](bad)
    assert "state.step" in str(caught.value)


ELSEWHERE = ["other devices", "one device", "other order", "other mesh shape", "other placement"]


def elsewhere(state, layout, where):
    """The same values, committed to a place that is not the layout's; and what a message must say of it."""
    devices = np.array(jax.devices())
    if where == "other devices":
        mesh = Mesh(devices[:4], ("data",), axis_types=(AxisType.Auto,))
        shardings = jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), state)
        return jax.device_put(state, shardings), ["other devices", "'data': 4"]
    if where == "one device":
        return jax.device_put(state, devices[3]), ["other devices"]
    if where == "other order":
        mesh = Mesh(devices[::-1], ("data",), axis_types=(AxisType.Auto,))
        shardings = jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), state)
        return jax.device_put(state, shardings), ["order"]
    if where == "other mesh shape":
        mesh = jzero.make_mesh(replica=2, data=4)
        shardings = jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), state)
        return jax.device_put(state, shardings), ["'replica': 2", "'data': 4"]
    return jax.device_put(state, layout.sharding(P())), ["wanted", "P('data',)"]


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("call", ["step", "lower", "value_and_grad", "apply_gradients"])
def test_state_on_another_mesh_or_in_another_placement(call, where, source, layout, step):
    bad, parts = elsewhere(source, layout, where)
    parts += ["params['body']['b']", "{'data': 8}", "device_put", "param_shardings"]
    refuses(lambda: calls_with_state(layout, step, source)[call](bad), *parts)
    assert not any(x.is_deleted() for x in jax.tree.leaves(bad))


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("call", ["step", "apply_gradients"])
def test_optimizer_state_alone_on_another_mesh(call, where, state, source, layout, step):
    moved, parts = elsewhere(source, layout, where)
    bad = dataclasses.replace(state, opt_state=moved.opt_state)
    parts += ["state.opt_state[0].trace['body']['b']", "opt_shardings(tx)"]
    refuses(lambda: calls_with_state(layout, step, source)[call](bad), *parts)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_gradients_on_another_mesh(where, state, source, layout):
    moved, parts = elsewhere(source, layout, where)
    parts += ["grads['body']['b']", "grad_shardings"]
    refuses(lambda: jzero.apply_gradients(state, moved.params, SGD, layout), *parts)


def test_state_of_another_stage(state, source, layout, step):
    """Stage 1 keeps params whole: its state is none of stage 3, although the devices are the same."""
    first = make_state(make_layout(1))
    for call in ("step", "value_and_grad", "apply_gradients"):
        refuses(
            lambda call=call: calls_with_state(layout, step, source)[call](first), "params['body']['b']", "P('data',)"
        )


def test_arrays_that_jax_may_move_are_taken_from_anywhere(layout):
    """Not committed to a device, such as fresh from jax.numpy: no mistake can hide in them."""
    state = jzero.TrainState(make_params(), SGD.init(make_params()), jnp.int32(0))
    _, grads = jzero.value_and_grad(loss_fn, layout)(state.params, make_batch())
    state = jzero.apply_gradients(state, grads, SGD, layout)
    np.testing.assert_allclose(state.params["head"][0], 1 - 0.1 * np.asarray(grads["head"][0]), rtol=1e-6)


# A state used again


@pytest.mark.parametrize("call", WITH_PARAMS)
def test_state_used_again_after_donation(call, source, layout, step):
    old = jax.tree.map(jnp.copy, source)
    new, _ = step(old, make_batch())
    assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state)))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        calls_with_state(layout, step, source)[call](old)
    if "jit" not in call:  # there jax itself refuses it, in front of anything that jzero runs
        assert isinstance(caught.value, ValueError)
        for part in ("params['body']['b']", "deleted", "donated", "state, metrics = step(state, batch)"):
            assert part in str(caught.value)
    # What the step returned goes on.
    assert int(step(new, make_batch())[0].step) == 2


def test_optimizer_state_used_again_after_donation(state, source, layout, step):
    old = jax.tree.map(jnp.copy, source)
    step(old, make_batch())
    bad = dataclasses.replace(state, opt_state=old.opt_state)
    for call in ("step", "apply_gradients"):
        run = calls_with_state(layout, step, source)[call]
        refuses(lambda run=run: run(bad), "state.opt_state[0].trace['body']['b']", "deleted")


def test_gradients_used_after_they_were_deleted(state, source, layout):
    grads = jax.tree.map(jnp.copy, source.params)
    grads["head"][0].delete()
    refuses(lambda: jzero.apply_gradients(state, grads, SGD, layout), "grads['head'][0]", "deleted")


# Before any work


def test_the_loss_is_not_even_traced_for_bad_arguments(state, layout):
    traced = []

    def loss(params, batch):
        traced.append(1)
        return loss_fn(params, batch)

    step = jzero.train_step(loss, SGD, layout)
    gradient = jzero.value_and_grad(loss, layout)
    other, _ = elsewhere(state, layout, "other devices")
    bad = dataclasses.replace(state, opt_state=())
    for call in (
        lambda: step(state, make_batch(12)),
        lambda: step(bad, make_batch()),
        lambda: step(other, make_batch()),
        lambda: gradient(state.params, make_batch(12)),
        lambda: gradient(other.params, make_batch()),
        lambda: gradient({}, make_batch()),
    ):
        with pytest.raises(ValueError):
            call()
    assert not traced
    gradient(state.params, make_batch())
    assert traced


def test_the_state_still_trains_after_every_refusal(source, layout):
    """A loss that fails while it is traced, and a batch that is refused, have not cost the state."""
    state = jax.tree.map(jnp.copy, source)

    def moody(params, batch):
        if batch["x"].shape[-1] != 8:
            raise RuntimeError("the user's own")
        return loss_fn(params, batch)

    step = jzero.train_step(moody, SGD, layout)
    with pytest.raises(RuntimeError, match="the user's own"):
        step(state, {"x": np.ones((8, 7), np.float32)})
    refuses(lambda: step(state, make_batch(7)), "7 examples")
    refuses(lambda: step(state, {"x": 1.0}), "scalar")
    state, metrics = step(state, make_batch())
    assert int(metrics["step"]) == int(state.step) == 1
    assert np.isfinite(metrics["loss"])
