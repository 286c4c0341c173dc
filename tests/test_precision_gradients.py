"""Gradients in low precision: what division before the reduction saves, and what sums over microbatches keep."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import Precision
from jzero.precision import as_precision
from tests import precision_model
from tests.precision_model import MESHES, init_params, make_layout

EIGHT, REPLICAS, _ = MESHES

W = {"w": jax.ShapeDtypeStruct((16, 8), "float32")}


def dot(params, batch):
    """Its gradient is the mean of the batch."""
    return jnp.mean(jnp.sum(params["w"] * batch["x"].astype(params["w"].dtype), (1, 2)).astype(jnp.float32))


def gradient(layout, x, microbatches=1, dtype="float32"):
    """The gradient of `dot` where example i is x[i] everywhere."""
    batch = layout.put_batch({"x": np.broadcast_to(np.asarray(x, np.int32)[:, None, None], (len(x), 16, 8))})
    params = jax.device_put({"w": jnp.ones((16, 8), layout.leaves[0].dtype)}, layout.param_shardings)
    _, grads = jzero.value_and_grad(dot, layout, microbatches=microbatches)(params, batch)
    assert grads["w"].dtype == dtype
    return np.asarray(grads["w"], np.float64)


# Division: 8 gradients of 16384 sum to 131072, and float16 ends at 65504.


@pytest.mark.parametrize(
    ("stage", "axes", "microbatches"), [(0, EIGHT, 1), (1, EIGHT, 2), (2, REPLICAS, 1), (3, EIGHT, 2)]
)
@pytest.mark.parametrize("divide", [None, "after"])
def test_float16_sums_overflow_unless_gradients_are_divided_before(divide, stage, axes, microbatches):
    precision = Precision(compute="float16", reduce="float16", divide=divide)
    layout = make_layout(stage, precision, axes, W)
    found = gradient(layout, [16384] * 16, microbatches)
    np.testing.assert_array_equal(found, np.inf if divide == "after" else 16384)


@pytest.mark.parametrize("reduce", ["float16", None])
@pytest.mark.parametrize("stage", [0, 1])
def test_sums_over_microbatches_are_divided_before_they_are_float16(stage, reduce):
    """16 microbatches of 16384 sum to 262144 on each device, before anything is reduced."""
    layout = make_layout(stage, Precision(compute="float16", reduce=reduce), params=W)
    np.testing.assert_array_equal(gradient(layout, [16384] * 128, 16), 16384)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_division_before_and_after_give_the_same_where_nothing_overflows(reduce):
    x = np.random.default_rng(0).integers(-100, 100, 48)
    before, after = (
        gradient(make_layout(3, Precision(reduce=reduce, divide=divide), params=W), x, 3)
        for divide in ("before", "after")
    )
    scale = np.abs(x).mean()
    np.testing.assert_allclose(before, after, rtol=0, atol=scale * {"float32": 1e-6, "bfloat16": 2**-6}[reduce])
    np.testing.assert_allclose(after, x.mean(), rtol=0, atol=scale * {"float32": 1e-6, "bfloat16": 2**-5}[reduce])


@pytest.mark.parametrize(("reduce", "before"), [("bfloat16", False), ("float16", True)])
def test_only_float16_is_divided_before_unless_told(reduce, before):
    """8 devices and 3 microbatches with a gradient of 1: the sum is exact in either dtype, and 1/24 is not."""
    layout = make_layout(3, Precision(reduce=reduce), params=W)
    error = np.abs(gradient(layout, [1] * 24, 3) - 1).max()
    assert (error > 1e-6) == before


# Accumulation: 64 microbatches, one with a gradient of 256 and the others with one of 1/2, below half of the last bit
# of 256 in bfloat16. All of it is 256 + 63/2, and its mean 4.49; without the small ones it is 4.


def halves(params, batch):
    return dot(params, batch) / 2


@pytest.mark.parametrize(
    ("name", "stage"),
    [("bf16", stage) for stage in range(4)]
    + [("bf16-pure", 3), ("params in bfloat16", 0), ("params in bfloat16", 1), ("params in bfloat16", 3)]
    + [("accumulate in bfloat16", 1), ("accumulate in bfloat16", 3)],
)
def test_small_gradients_are_not_lost_among_many_microbatches(name, stage):
    params = W if name != "params in bfloat16" else {"w": jax.ShapeDtypeStruct((16, 8), "bfloat16")}
    precision = {"params in bfloat16": None, "accumulate in bfloat16": Precision(accumulate="bfloat16")}.get(name, name)
    dtype = "float32" if name in ("bf16", "bf16-pure") else "bfloat16"
    layout = make_layout(stage, precision, params=params)
    each = np.array([512] + [1] * 63)
    batch = {"x": np.broadcast_to(np.tile(each, 8)[:, None, None], (512, 16, 8)).astype(np.int32)}
    arrays = jax.device_put({"w": jnp.ones((16, 8), layout.leaves[0].dtype)}, layout.param_shardings)
    _, grads = jzero.value_and_grad(halves, layout, microbatches=64)(arrays, layout.put_batch(batch))
    assert grads["w"].dtype == dtype
    found = np.asarray(grads["w"], np.float64)
    if name == "accumulate in bfloat16":
        np.testing.assert_array_equal(found, 4)
    else:
        np.testing.assert_allclose(found, (256 + 31.5) / 64, rtol=1e-6 if dtype == "float32" else 2**-8)


# Rounding: 6 devices sum integers, which is exact, and the weights of their losses sum to 7. A sum over 7 is the sum
# over 6 times 6/7; rounded in between, it comes out another number for many of the sums.


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_is_rounded_once_whatever_it_is_divided_by(stage):
    sums = np.arange(252)
    six, params = {"data": 6}, {"w": jax.ShapeDtypeStruct((252,), "float32")}
    layout = make_layout(stage, Precision(reduce=None, accumulate=None, cast_batch=()), six, params)

    def loss(params, batch):
        return jzero.Weighted(jnp.sum(params["w"] * batch["x"].astype(params["w"].dtype)), batch["weight"].sum())

    batch = {"x": np.zeros((6, 252), np.int32), "weight": np.array([1, 1, 1, 1, 1, 2], np.int32)}
    batch["x"][np.arange(252) % 6, np.arange(252)] = sums
    arrays = jax.device_put({"w": jnp.ones(252, layout.leaves[0].dtype)}, layout.param_shardings)
    _, grads = jzero.value_and_grad(loss, layout)(arrays, layout.put_batch(batch))
    assert grads["w"].dtype == jnp.bfloat16
    found = np.asarray(grads["w"])
    once = (sums / 7).astype(np.float32).astype(found.dtype)
    twice = ((sums / 6).astype(np.float32).astype(found.dtype).astype(np.float32) * 6 / 7).astype(found.dtype)
    assert (once != twice).sum() > 20, "or it would test nothing"
    np.testing.assert_array_equal(found, once)


def largest_difference(tree, other):
    """Over the largest gradient of all."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(jax.device_get(other)), strict=True))
    return max(np.abs(np.asarray(x) - y).max() for x, y in pairs) / max(np.abs(y).max() for _, y in pairs)


@pytest.mark.parametrize(
    ("stage", "precision", "tolerance"), [pytest.param(3, "fp32", 1e-6, marks=pytest.mark.slow), (1, "bf16", 1e-2)]
)
def test_the_gradient_does_not_depend_on_the_number_of_microbatches(stage, precision, tolerance):
    layout = make_layout(stage, precision)
    params = jzero.init(init_params, optax.sgd(0.1), layout).params
    batch = layout.put_batch(precision_model.make_batch(96))
    one, many = (
        jzero.value_and_grad(precision_model.loss_fn, layout, microbatches=m)(params, batch)[1] for m in (1, 12)
    )
    assert 0 < largest_difference(many, one) < tolerance


# The batch.


def floats(params, batch):
    return jnp.mean(params["w"][0, 0] * batch["x"].mean() + batch["deep"]["y"].mean() + batch["i"].mean())


GIVEN = {"x": "float32", "deep": {"y": "float16"}, "i": "int32"}


def dtypes_seen(precision, given=GIVEN):
    seen = {}
    layout = make_layout(2, precision, params=W)
    batch = jax.tree.map(lambda dtype: jax.ShapeDtypeStruct((8,), dtype), given)

    def loss(params, batch):
        seen.update(jax.tree.map(lambda x: str(x.dtype), batch))
        return floats(params, batch).astype(jnp.float32)

    params = {"w": layout.leaves[0].placed("replicated")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(jzero.value_and_grad(loss, layout), params, batch)
    return seen, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize(
    "precision", ["bf16", "fp16", "bf16-pure", Precision(reduce="bfloat16", accumulate=None, exempt=("w",))], ids=str
)
def test_one_warning_names_all_wide_leaves_of_the_batch_and_the_precision_that_casts_them(precision):
    given = {"x": "float32", "deep": {"y": "float32", "half": "float16"}, "i": "int32"}
    seen, messages = dtypes_seen(precision, given)
    assert seen == given
    (message,) = messages
    assert "batch['deep']['y'] (float32), batch['x'] (float32): wider than the params in" in message
    assert "half" not in message, "which is no wider than the params"
    (call,) = re.findall(r"precision=(jzero\.Precision\(.*?\)\))", message)
    wanted = dataclasses.replace(as_precision(precision), cast_batch=("deep/y", "x"))
    assert eval(call, {"jzero": jzero}) == wanted


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        (Precision(cast_batch=()), GIVEN),
        (Precision(cast_batch=("x",)), GIVEN | {"x": "bfloat16"}),
        (Precision(cast_batch=["deep/*"]), GIVEN | {"deep": {"y": "bfloat16"}}),
        (Precision(cast_batch=("*",)), {"x": "bfloat16", "deep": {"y": "bfloat16"}, "i": "int32"}),
        ("fp32", GIVEN),
        (None, GIVEN),
    ],
    ids=["none", "x", "deep", "all", "fp32", "as it is"],
)
def test_patterns_say_which_leaves_of_the_batch_are_cast_and_then_none_warns(precision, wanted):
    assert dtypes_seen(precision) == (wanted, [])


def test_a_training_step_warns_of_its_batch_once_and_not_at_every_step():
    layout = make_layout(3, "bf16", params=W)
    state = jzero.init(lambda: {"w": jnp.ones((16, 8))}, tx := optax.sgd(0.1), layout)
    step = jzero.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx, layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            state, _ = step(state, layout.put_batch(np.ones((8, 16), np.float32)))
    assert len({str(w.message) for w in caught if "cast_batch" in str(w.message)}) == 1
