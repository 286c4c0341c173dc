"""Bad input is refused before any work, by messages that say where, what came, and what was wanted."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

SGD = optax.sgd(0.1, momentum=0.9)


def make_params():
    return {"body": {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}, "head": [jnp.ones((16, 8))]}


def loss_fn(params, batch):
    h = jnp.tanh(batch["x"] @ params["body"]["w"] + params["body"]["b"])
    return jnp.mean((h @ params["head"][0]) ** 2)


def make_batch(examples=16):
    return {"x": np.ones((examples, 8), np.float32)}


def make_layout(stage=3, mesh=None, **options):
    mesh = mesh or jzero.make_mesh(data=-1)
    return jzero.zero(make_params(), stage=stage, mesh=mesh, min_shard_size=0, **options)


def make_state(layout, tx=SGD):
    return jzero.init(lambda p: p, tx, layout, make_params())


def refuses(call, *parts, error: type[Exception] = ValueError):
    """Runs `call`, which must raise `error` with all of `parts` in its message."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    return message


@pytest.fixture(scope="module")
def layout():
    return make_layout()


@pytest.fixture(scope="module")
def step(layout):
    """One compiled step for all tests of this module."""
    return jzero.train_step(loss_fn, SGD, layout)


@pytest.fixture(scope="module")
def source(layout):
    """A state that no test may donate."""
    return make_state(layout)


@pytest.fixture
def state(source):
    """A state of one's own, which must be alive and whole when the test is over."""
    state = jax.tree.map(jnp.copy, source)
    yield state
    for leaf, original in zip(jax.tree.leaves(state), jax.tree.leaves(source), strict=True):
        np.testing.assert_array_equal(leaf, original)


# zero


@pytest.mark.parametrize("stage", [4, -1, True, 2.0, "3", None])
def test_unknown_stage(stage):
    refuses(lambda: make_layout(stage), f"stage={stage!r}", "0, 1, 2, 3", "jzero.Stage")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"data_axes": ("model",)}, ["data_axes", "'model'", "('replica', 'data')"]),
        ({"data_axes": "dat"}, ["data_axes", "'dat'", "('replica', 'data')"]),
        ({"replica_axes": ("node",)}, ["replica_axes", "'node'", "('replica', 'data')"]),
        ({"data_axes": ("data", "data")}, ["data_axes=('data', 'data')", "'data' twice"]),
        ({"replica_axes": ("replica", "replica")}, ["replica_axes=", "'replica' twice"]),
        ({"replica_axes": ("replica", "data")}, ["'data'", "data_axes", "replica_axes", "choose one"]),
        ({"data_axes": ()}, ["data_axes is empty"]),
    ],
)
def test_axes_that_the_mesh_lacks_or_that_are_named_twice(options, parts):
    refuses(lambda: make_layout(mesh=jzero.make_mesh(replica=2, data=4), **options), *parts)


def test_axes_that_are_not_auto():
    mesh = jax.make_mesh((2, 4), ("model", "data"), axis_types=(AxisType.Auto, AxisType.Explicit))
    refuses(lambda: make_layout(mesh=mesh), "'data'", "Explicit", "Auto", "jzero.make_mesh")


@pytest.mark.parametrize("params", [{}, [], None, {"a": [None, {}]}])
def test_params_without_an_array_leaf(params):
    refuses(lambda: jzero.zero(params, stage=0, mesh=jzero.make_mesh(data=-1)), "no array leaf", type(params).__name__)


@pytest.mark.parametrize(
    ("leaf", "parts"),
    [
        (1.0, ["float", "not an array", "ShapeDtypeStruct"]),
        ("x", ["str", "not an array"]),
        (object(), ["object", "not an array", "register_dataclass"]),
        (np.arange(3), ["int64", "floating"]),
        (np.ones(3, bool), ["bool", "floating"]),
        (jax.ShapeDtypeStruct((3,), "complex64"), ["complex64", "floating"]),
    ],
)
def test_params_with_a_leaf_that_cannot_be_trained(leaf, parts):
    params = {"a": [np.ones(3, np.float32), {"x": leaf}]}
    call = lambda: jzero.zero(params, stage=0, mesh=jzero.make_mesh(data=-1))  # noqa: E731
    refuses(call, "params['a'][1]['x']", *parts, error=TypeError)


def test_negative_min_shard_size():
    call = lambda: jzero.zero(make_params(), stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=-1)  # noqa: E731
    refuses(call, "min_shard_size=-1", "elements")


# init


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"body": {"w": jnp.ones((8, 16)), "b": jnp.ones(16)}}, ["missing ['head'][0]"]),
        (make_params() | {"tail": jnp.ones(3)}, ["not expected ['tail']"]),
        (make_params() | {"head": (jnp.ones((16, 8)),)}, ["other containers", "[*]", "(*,)"]),
        (make_params() | {"head": [jnp.ones((16, 9))]}, ["['head'][0]", "(16, 9)", "(16, 8)"]),
        (make_params() | {"head": [jnp.ones((16, 8), "bfloat16")]}, ["['head'][0]", "bfloat16", "float32"]),
    ],
    ids=["missing", "extra", "container", "shape", "dtype"],
)
def test_init_that_makes_other_params(params, parts, layout):
    refuses(lambda: jzero.init(lambda: params, SGD, layout), "init_params(...)", *parts)


@pytest.mark.parametrize("where", ["one device", "other devices", "other order"])
def test_init_from_arrays_elsewhere(where, layout):
    devices = jax.devices()
    sharding = {
        "one device": devices[0],
        "other devices": NamedSharding(Mesh(np.array(devices[:4]), ("data",)), P()),
        "other order": NamedSharding(Mesh(np.array(devices[::-1]), ("data",)), P()),
    }[where]
    params = jax.device_put(make_params(), sharding)
    refuses(lambda: jzero.init(lambda p: p, SGD, layout, params), "args[0]['body']['b']", "device")
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


# Batches. Each call that takes a batch refuses it, and leaves the state as it was.


def calls_with_batch(state, layout, step, microbatches, loss=loss_fn):
    if microbatches != 1:
        step = jzero.train_step(loss, SGD, layout, microbatches=microbatches)
    gradient = jzero.value_and_grad(loss, layout, microbatches=microbatches)
    return {
        "step": lambda batch: step(state, batch),
        "lower": lambda batch: step.lower(state, batch),
        "value_and_grad": lambda batch: gradient(state.params, batch),
        "value_and_grad in jit": lambda batch: jax.jit(gradient)(state.params, batch),
        "put_batch": layout.put_batch,
    }


WITH_BATCH = ["step", "lower", "value_and_grad", "value_and_grad in jit", "put_batch"]


@pytest.mark.parametrize("call", WITH_BATCH)
def test_batch_that_does_not_divide_by_the_devices(call, state, layout, step):
    run = calls_with_batch(state, layout, step, 1)[call]
    batch = make_batch() | {"y": np.ones((12, 3), np.float32)}
    message = refuses(lambda: run(batch), "batch['y']", "(12, 3)", "12 examples", "8 equal parts", "mesh axes data 8")
    assert "microbatches)" not in message.split("Use")[0]
    assert re.search(r"batch of (8|16) examples", message)


@pytest.mark.parametrize("call", WITH_BATCH[:4])
def test_batch_that_does_not_divide_by_devices_times_microbatches(call, state, layout, step):
    run = calls_with_batch(state, layout, step, 3)[call]
    parts = ["batch['x']", "(16, 8)", "16 examples", "24 equal parts", "8 batch shards", "data 8", "3 microbatches"]
    refuses(lambda: run(make_batch(16)), *parts, "batch of 24 examples")


def test_arithmetic_of_several_batch_axes():
    mesh = jzero.make_mesh(replica=2, data=2, model=2)
    layout = make_layout(mesh=mesh, replica_axes=("replica",))
    refuses(lambda: layout.put_batch(np.ones((6, 2))), "batch (6, 2)", "4 batch shards", "replica 2 x data 2")


@pytest.mark.parametrize("call", WITH_BATCH)
@pytest.mark.parametrize("scalar", [1.0, np.float32(1), jnp.ones(())], ids=["python", "numpy", "jax"])
def test_scalar_batch_leaf(call, scalar, state, layout, step):
    run = calls_with_batch(state, layout, step, 1)[call]
    refuses(lambda: run(make_batch() | {"scale": scalar}), "batch['scale']", "is a scalar", "first dim")


@pytest.mark.parametrize("call", WITH_BATCH)
def test_batch_without_leaves_or_examples(call, state, layout, step):
    run = calls_with_batch(state, layout, step, 1)[call]
    refuses(lambda: run({"x": None}), "batch has no array leaf")
    refuses(lambda: run(make_batch(0)), "batch['x']", "(0, 8)", "0 examples")


@pytest.mark.parametrize("call", ["step", "value_and_grad"])
@pytest.mark.parametrize("where", ["other devices", "one device"])
def test_batch_on_another_mesh(call, where, state, layout, step):
    devices = jax.devices()
    other = NamedSharding(Mesh(np.array(devices[:4]), ("data",)), P("data"))
    batch = jax.device_put(make_batch(), other if where == "other devices" else devices[3])
    run = calls_with_batch(state, layout, step, 1)[call]
    refuses(lambda: run(batch), "batch['x']", "put_batch")


# The loss


@pytest.mark.parametrize("call", ["step", "value_and_grad", "value_and_grad in jit"])
@pytest.mark.parametrize(
    ("result", "error", "parts"),
    [
        (lambda loss: jnp.full(3, loss), ValueError, ["loss", "(3,)", "scalar", "mean", "Weighted"]),
        (lambda loss: loss[None, None], ValueError, ["loss", "(1, 1)", "scalar"]),
        (lambda loss: loss.astype(int), TypeError, ["loss", "int32", "floating"]),
        (lambda loss: (loss, {}), TypeError, ["tuple", "has_aux=True"]),
        (lambda loss: jzero.Weighted(jnp.full(3, loss), 1.0), ValueError, ["Weighted.total", "(3,)", "scalar"]),
        (lambda loss: jzero.Weighted(loss, jnp.ones(4)), ValueError, ["Weighted.weight", "(4,)", "scalar"]),
    ],
    ids=["vector", "matrix", "int", "pair", "total", "weight"],
)
def test_loss_that_is_no_scalar(call, result, error, parts, state, layout):
    loss = lambda params, batch: result(loss_fn(params, batch))  # noqa: E731
    step = jzero.train_step(loss, SGD, layout)
    run = calls_with_batch(state, layout, step, 1, loss)[call]
    refuses(lambda: run(make_batch()), *parts, error=error)


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (lambda loss: loss, ["(loss, aux)"]),
        (lambda loss: (loss, loss, loss), ["tuple", "(loss, aux)"]),
        (lambda loss: jzero.Weighted(loss, 1.0), ["Weighted", "(loss, aux)"]),
        (lambda loss: (loss, {"right": jnp.int32(3)}), ["aux['right']", "int32", "floating"]),
        (lambda loss: (loss, [loss, loss > 0]), ["aux[1]", "bool", "floating"]),
    ],
    ids=["no pair", "triple", "weighted", "int", "bool"],
)
def test_aux_that_cannot_be_averaged(result, parts, state, layout):
    step = jzero.train_step(lambda params, batch: result(loss_fn(params, batch)), SGD, layout, has_aux=True)
    refuses(lambda: step(state, make_batch()), *parts, error=TypeError)


# Options of a step


@pytest.mark.parametrize("microbatches", [0, -2, 2.0, True, "2", None])
def test_microbatches(microbatches, layout):
    refuses(lambda: jzero.value_and_grad(loss_fn, layout, microbatches=microbatches), f"microbatches={microbatches!r}")
    refuses(lambda: jzero.train_step(loss_fn, SGD, layout, microbatches=microbatches), f"microbatches={microbatches!r}")


@pytest.mark.parametrize("clip_norm", [0, 0.0, -1.0, float("nan")])
def test_clip_norm(clip_norm, layout):
    call = lambda: jzero.train_step(loss_fn, SGD, layout, clip_norm=clip_norm)  # noqa: E731
    refuses(call, f"clip_norm={clip_norm!r}", "positive", "None")


# State: params, optimizer state and gradients of another structure, shape, place, or time


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
