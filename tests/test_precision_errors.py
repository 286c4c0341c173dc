"""Precisions that cannot be: errors that name the option, say what came and what was wanted."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import Precision
from tests.refusals import SGD, loss_fn, make_batch, make_layout, make_params, make_state, refuses

FIELDS = ["master", "compute", "reduce", "accumulate", "moments"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["bf16", "float8_e4m3fn", "int32", "complex64", 7, object, ""])
def test_a_dtype_that_nothing_trains_in(field, value):
    wanted = "wanted one of float16, bfloat16, float32, float64"
    refuses(lambda: Precision(**{field: value}), f"{field}={value!r}", wanted)


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_a_short_name_of_a_dtype_is_told_the_long_one(short, name):
    refuses(lambda: Precision(compute=short), f"compute={short!r}", f"Did you mean {name!r}?")
    assert "Did you mean" not in refuses(lambda: Precision(compute="int8"), "int8")


def test_dtypes_come_as_names_or_as_dtypes():
    names = Precision(master="float32", compute="float16", reduce="bfloat16")
    types = Precision(master=jnp.float32, compute=jnp.dtype("float16"), reduce=jnp.bfloat16)
    assert names == types
    assert names != Precision()


@pytest.mark.parametrize("name", ["fp8", "bfloat16", "BF16", "", 16, ("bf16",)])
def test_an_unknown_name(name):
    refuses(lambda: make_layout(precision=name), f"precision={name!r}", "fp32, bf16, fp16, bf16-pure", "Precision")
    refuses(lambda: jzero.memory.formula(3, params=8, shards=1, precision=name), f"precision={name!r}")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("bfloat16", "bf16"),
        (jnp.bfloat16, "bf16"),
        (jnp.dtype("bfloat16"), "bf16"),
        ("BF16", "bf16"),
        ("mixed", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        (np.float32, "fp32"),
    ],
)
def test_a_name_that_others_have_is_told_the_name_here(said, meant):
    message = refuses(lambda: make_layout(precision=said), "wanted one of fp32, bf16", f"Did you mean {meant!r}?")
    assert ("'bf16' as well computes in 16 bits, and needs no loss scale" in message) == (meant == "fp16")
    assert "Did you mean" not in refuses(lambda: make_layout(precision="fp8"), "precision='fp8'")


@pytest.mark.parametrize("field", FIELDS)
def test_float64_wants_x64(field):
    options: dict[str, Any] = {"master": None, "compute": None, field: "float64"}
    refuses(lambda: Precision(**options), f"{field}=float64", "jax_enable_x64")
    with jax.enable_x64(True):
        assert getattr(Precision(**options), field) == "float64"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"master": "bfloat16", "compute": "float32"}, ["compute=float32 is wider than master=bfloat16"]),
        ({"moments": "float32", "master": "bfloat16"}, ["moments=float32 is wider than master=bfloat16", "narrower"]),
        ({"moments": "float32", "master": None}, ["moments=float32 is wider than compute=bfloat16"]),
    ],
)
def test_what_is_made_from_the_weights_is_no_wider_than_they_are(options, parts):
    refuses(lambda: Precision(**options), *parts)


def test_float64_moments_of_float32_weights_are_too_wide(x64):
    refuses(lambda: Precision(moments="float64"), "moments=float64 is wider than master=float32")
    refuses(lambda: Precision(compute="float64"), "compute=float64 is wider than master=float32")


@pytest.mark.parametrize(
    "options",
    [{}, {"master": None, "compute": "float32"}, {"compute": "float16", "moments": "float16"}],
    ids=["bf16", "fp32", "fp16"],
)
@pytest.mark.filterwarnings("ignore:Precision. moments=float16 keeps")
def test_stochastic_rounding_wants_something_in_bfloat16(options):
    refuses(lambda: Precision(stochastic_rounding=True, **options), "stochastic_rounding=True", "is bfloat16")
    assert Precision(stochastic_rounding=True, **options | {"moments": "bfloat16"}).stochastic_rounding


@pytest.mark.parametrize("value", [1, "yes", None])
def test_stochastic_rounding_is_a_bool(value):
    call = lambda: Precision(master=None, stochastic_rounding=value)  # noqa: E731
    refuses(call, f"stochastic_rounding={value!r}", "True or False", error=TypeError)


@pytest.mark.parametrize("value", ["always", True, 1])
def test_division_is_before_or_after(value):
    refuses(lambda: Precision(divide=value), f"divide={value!r}", "'before', 'after' or None")


@pytest.mark.parametrize("field", ["exempt", "cast_batch"])
@pytest.mark.parametrize("value", ["*norm*", 3, [3], {"*": True}])
def test_patterns_are_a_list_of_strings(field, value):
    refuses(lambda: Precision(**{field: value}), f"{field}={value!r}", "list of path patterns", error=TypeError)


def test_exempt_may_not_be_none_and_a_list_becomes_a_tuple():
    refuses(lambda: Precision(exempt=None), "exempt=None", error=TypeError)  # type: ignore
    assert Precision(exempt=["a", "b"]).exempt == ("a", "b")
    assert hash(Precision(exempt=["a"], cast_batch=["b"])) == hash(Precision(exempt=("a",), cast_batch=("b",)))


def test_a_pattern_that_exempts_nothing():
    precision = Precision(exempt=["body/*", "*router*"])
    refuses(lambda: make_layout(precision=precision), "exempt", "'*router*'", "none of the 3 paths", "'body/b'")


def test_a_pattern_that_casts_nothing_of_the_batch():
    layout = make_layout(stage=2, precision=Precision(cast_batch=["x", "*image*"]))
    gradient = jzero.value_and_grad(loss_fn, layout)
    params = layout.treedef.unflatten([leaf.placed("replicated") for leaf in layout.leaves])
    call = lambda: jax.eval_shape(gradient, params, make_batch())  # noqa: E731
    refuses(call, "cast_batch", "'*image*'", "none of the paths of the batch, 'x'")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"master": None}, ["compute=bfloat16", "pass stochastic_rounding=True"]),
        ({"master": "bfloat16"}, ["master=bfloat16", "pass stochastic_rounding=True"]),
        ({"moments": "bfloat16"}, ["moments=bfloat16", "pass stochastic_rounding=True"]),
        ({"moments": "float16"}, ["moments=float16", "use bfloat16 with rounding"]),
        ({"moments": "float16", "master": None, "stochastic_rounding": True}, ["moments=float16", "use bfloat16"]),
    ],
    ids=str,
)
def test_state_of_16_bits_that_is_rounded_to_nearest_warns(options, parts):
    with pytest.warns(UserWarning, match="16 bits, rounded to nearest") as caught:
        Precision(**options)
    (warning,) = caught
    assert all(part in str(warning.message) for part in parts)
    assert warning.filename == __file__


def test_wider_state_and_state_that_is_rounded_at_random_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Precision()
        Precision(master=None, compute="float32")
        Precision(master=None, moments="bfloat16", stochastic_rounding=True)
        Precision(master="bfloat16", stochastic_rounding=True)


def test_a_loss_scale_is_a_scalar():
    layout = make_layout(stage=2)
    gradient = jzero.value_and_grad(loss_fn, layout)
    for value in (jzero.DynamicLossScale(), np.ones(2)):
        call = functools.partial(gradient, make_params(), make_batch(), loss_scale=value)
        refuses(call, "loss_scale=", "wanted a scalar, such as state.loss_scale.scale", error=TypeError)


@pytest.mark.parametrize("when", [1, 0.0, np.ones(1, bool), jnp.int32(1)], ids=repr)
def test_when_is_a_bool_scalar(when):
    layout = make_layout(stage=2)
    grads = jax.device_put(make_params(), layout.grad_shardings)
    call = lambda: jzero.apply_gradients(make_state(layout), grads, SGD, layout, when=when)  # noqa: E731
    refuses(call, "when is", "wanted a bool scalar", error=TypeError)


@pytest.mark.parametrize("groups", [["*"], "*", {"all": 3}, {"all": ["*"]}, 5], ids=repr)
def test_norm_groups_are_a_dict_of_patterns(groups):
    call = lambda: jzero.train_step(loss_fn, SGD, make_layout(stage=2), norm_groups=groups)  # noqa: E731
    refuses(call, f"norm_groups={groups!r}", "dict of names and path patterns", error=TypeError)


def test_params_and_gradients_in_another_dtype_than_the_precision_says():
    layout = make_layout(stage=2, precision="bf16")
    batch, params = {"x": jax.ShapeDtypeStruct((8, 8), "bfloat16")}, jax.eval_shape(make_params)
    gradient = jzero.value_and_grad(lambda params, batch: jnp.float32(0), layout)
    refuses(lambda: jax.eval_shape(gradient, params, batch), "params['body']['b']", "float32", "bfloat16")
    tx = optax.sgd(0.1)
    state = jzero.init(make_params, tx, layout)
    grads = jax.tree.map(lambda x: x.astype("bfloat16"), make_params())
    grads = jax.device_put(grads, layout.grad_shardings)
    refuses(lambda: jzero.apply_gradients(state, grads, tx, layout), "grads['body']['b']", "bfloat16", "float32")


def test_a_state_that_was_made_with_another_precision():
    tx = optax.sgd(0.1)
    state = jzero.init(make_params, tx, make_layout(stage=2, precision="bf16"))
    other = make_layout(stage=2, precision="fp32")
    grads = jax.device_put(make_params(), other.grad_shardings)
    refuses(lambda: jzero.apply_gradients(state, grads, tx, other), "state.params['body']['b']", "bfloat16", "float32")
    refuses(lambda: jzero.master_params(state, other), "state.params['body']['b']", "bfloat16", "float32")
