"""Bad options, batches and losses are refused before any work, by messages that say what came and what was wanted."""

# ruff: noqa: F401, F811 - fixtures are imported, and asked for by their names

import re
import warnings
from typing import Any

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
    refuses,
    source,
    state,
    step,
)

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
    ],
)
def test_params_with_a_leaf_that_is_no_array(leaf, parts):
    params = {"a": [np.ones(3, np.float32), {"x": leaf}]}
    call = lambda: jzero.zero(params, stage=0, mesh=jzero.make_mesh(data=-1))  # noqa: E731
    refuses(call, "params['a'][1]['x']", *parts, error=TypeError)


@pytest.mark.parametrize("leaf", [np.arange(3), np.ones(3, bool)], ids=["int64", "bool"])
def test_leaf_that_cannot_be_trained(leaf):
    """It is kept beside others, but cannot be all there is, nor be asked for."""

    def call(params, **options):
        return lambda: jzero.zero(params, stage=0, mesh=jzero.make_mesh(data=-1), **options)

    params = {"a": [np.ones(3, np.float32), {"x": leaf}]}
    assert call(params)().grad_specs == {"a": [P(), {"x": None}]}
    parts = ["params['a'][1]['x']", f"dtype {leaf.dtype}", "floating and complex", "Leave it out"]
    refuses(call(params, trainable=lambda path, leaf: True), *parts, error=TypeError)
    refuses(call({"x": leaf}), "none of the 1 leaves of params would be trained", "no leaf is floating or complex")


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
    batch = {"y": np.ones((12, 3), np.float32)}
    message = refuses(lambda: run(batch), "batch['y']", "(12, 3)", "12 examples", "8 equal parts", "mesh axes data 8")
    assert "microbatches)" not in message.split("Use")[0]
    assert re.search(r"batch of (8|16) examples", message)


@pytest.mark.parametrize("call", WITH_BATCH)
def test_batch_leaves_with_different_numbers_of_examples(call, state, layout, step):
    """The shorter one would be cut into as many parts, and the loss would meet them beside one another."""
    run = calls_with_batch(state, layout, step, 1)[call]
    batch = make_batch(16) | {"mask": np.ones((8, 3), np.float32), "y": np.ones(16)}
    refuses(lambda: run(batch), "different numbers of examples", "8 in batch['mask']; 16 in batch['x'], batch['y']")


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


def random_loss(params, batch, *, key):
    return loss_fn(params, batch) + jax.random.normal(key)


def stateful_loss(params, batch, *, model_state):
    return loss_fn(params, batch), model_state


@pytest.mark.parametrize(
    ("loss", "name", "options"),
    [
        (random_loss, "key", {}),
        (stateful_loss, "model_state", {"with_key": True}),
        (lambda params, batch, rate: loss_fn(params, batch), "rate", {}),
        (loss_fn, "key", {"with_key": True}),
    ],
    ids=["key", "model_state", "another", "too many"],
)
def test_a_loss_that_takes_other_arguments_is_told_what_it_gets(loss, name, options, layout):
    parts = ["loss_fn cannot be called as loss_fn(params, batch", repr(name), "with_key=True", "with_model_state=True"]
    refuses(lambda: jzero.value_and_grad(loss, layout, **options), *parts, error=TypeError)
    refuses(lambda: jzero.train_step(loss, SGD, layout, **options), *parts, error=TypeError)
    given: dict[str, Any] = {"key": jax.random.key(0)} if options else {}
    refuses(lambda: jzero.explain(layout, loss, make_batch(), **given), *parts, "explain: where", error=TypeError)


def test_put_batch_says_that_microbatches_want_more(layout):
    call = lambda: layout.put_batch(make_batch(12))  # noqa: E731
    message = refuses(call, "Use a batch of 16 examples, and with microbatches a multiple of 8 times as many")
    assert "other microbatches" not in message


def test_arguments_in_the_wrong_order_are_named():
    layout: Any = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))
    tx: Any = optax.sgd(0.1)
    state: Any = None
    loss_fn, params = (lambda params, x: x.sum()), {"w": jnp.ones(8)}
    for call in (
        lambda: jzero.train_step(loss_fn, layout, tx),
        lambda: jzero.init(lambda: params, layout, tx),
        lambda: jzero.apply_gradients(state, params, layout, tx),
    ):
        with pytest.raises(TypeError, match=r"\(.*tx, layout\): tx is a Layout; wanted an optax optimizer"):
            call()
    with pytest.raises(TypeError, match=r"train_step\(.*\): layout is a Mesh; wanted what jzero.zero returns"):
        jzero.train_step(loss_fn, tx, layout.mesh)
    for call in (lambda: jzero.explain(layout.mesh), lambda: jzero.value_and_grad(loss_fn, layout.mesh)):
        with pytest.raises(TypeError, match="layout is a Mesh"):
            call()


def test_an_axis_over_which_nothing_is_cut_is_named():
    mesh = jzero.make_mesh(replica=2, data=4)
    with pytest.warns(UserWarning, match="nothing is cut over the mesh axis 'replica' .2 devices.*replica_axes="):
        jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=mesh, replica_axes=("replica",))
