"""Stochastic rounding: right on average, the same bits at every stage, and made shard by shard."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero import Precision
from jzero.program import compiled_collectives
from jzero.rounding import rounded
from tests.compiled_update import FOR_MEMORY, lower_update, temp_bytes
from tests.precision_model import MESHES, make_layout

with pytest.warns(UserWarning, match="16 bits"):
    NEAREST = Precision(master=None, moments="bfloat16")
BF16 = jnp.bfloat16
EIGHT, REPLICAS, MODEL = MESHES
EPSILON = 2**-7  # from 1 to the next bfloat16


def keys(n):
    return jax.random.split(jax.random.key(1), n)


# The rounding itself.


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.75])
@pytest.mark.parametrize("at", [1.0, -1.0, 3e-30, -1e-40, 1e30], ids=str)
def test_each_neighbour_comes_as_often_as_the_number_is_near_to_the_other(at, fraction):
    low, high = neighbours(at)
    x = jnp.float32(low + fraction * (high - low))
    n = 4096
    found = np.asarray(jax.vmap(lambda key: rounded(x, BF16, key))(keys(n)), np.float64)
    assert set(found) <= {low, high}
    fraction = (float(x) - low) / (high - low)  # of what float32 has made of it
    assert abs((found == high).mean() - fraction) < 5 * np.sqrt(fraction * (1 - fraction) / n)


def neighbours(at):
    """The bfloat16 nearest to a number, and the next one away from zero."""
    bits = np.asarray(at, BF16).view(np.uint16)
    return float(bits.view(BF16)), float((bits + np.uint16(1)).view(BF16))


def test_what_bfloat16_holds_is_kept():
    every = np.arange(2**16, dtype=np.uint16).view(BF16)
    found = np.asarray(jax.jit(lambda x: rounded(x, BF16, jax.random.key(0)))(every.astype(np.float32)))
    assert found.dtype == BF16
    nan, small = np.isnan(every.astype(np.float32)), (every.view(np.uint16) & 0x7FFF) < 0x80
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    # Infinities and both zeros too. Numbers below 2 ** -126 a CPU may take for zero.
    kept = ~nan & (~small | ((every.view(np.uint16) & 0x7FFF) == 0))
    np.testing.assert_array_equal(found[kept].view(np.uint16), every[kept].view(np.uint16))


def test_nan_stays_nan_whatever_its_bits_are():
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    found = rounded(jnp.asarray(bits.view(np.float32)), BF16, jax.random.key(0))
    assert np.isnan(np.asarray(found, np.float32)).all()


def test_only_bfloat16_is_rounded_at_random_and_only_with_a_key():
    x = jnp.float32(1 + EPSILON / 3)
    assert rounded(x, jnp.float16, jax.random.key(0)) == x.astype(jnp.float16)
    assert rounded(x, jnp.float32, jax.random.key(0)) == x
    assert set(jax.vmap(lambda key: rounded(x, BF16, key))(keys(64)).tolist()) == {1, 1 + EPSILON}


# Training.


def run(precision, steps, gradient, tx, stage=3, axes=EIGHT, shape=(64, 64), start=1.0):
    """The state after so many updates with one gradient everywhere."""
    layout = make_layout(stage, precision, axes, {"w": jax.ShapeDtypeStruct(shape, "float32")})
    state = jzero.init(lambda: {"w": jnp.full(shape, start)}, tx, layout)

    @jax.jit
    def many(state):
        grads = {"w": jnp.full(shape, gradient)}
        return lax.fori_loop(0, steps, lambda _, s: jzero.apply_gradients(s, grads, tx, layout), state)

    return many(state)


def mean(x):
    return np.asarray(x, np.float64).mean()


def test_small_updates_are_lost_to_nearest_rounding_and_kept_by_stochastic_rounding():
    """100 updates of 1e-4 where the bits of bfloat16 are 2 ** -8 apart: half of that is 20 updates."""
    tx = optax.sgd(1e-4)
    frozen, pure, wide = (run(p, 100, 1.0, tx).params["w"] for p in (NEAREST, "bf16-pure", "fp32"))
    assert (frozen.dtype, pure.dtype, wide.dtype) == (BF16, BF16, jnp.float32)
    np.testing.assert_array_equal(frozen, 1)
    np.testing.assert_allclose(wide, 0.99, rtol=1e-5)
    # A step of 2 ** -8 has a variance of at most its square times chance: over 4096 weights the mean is this near.
    assert mean(pure) == pytest.approx(mean(wide), abs=5 * np.sqrt(100 * 1e-4 * 2**-8 / 4096))
    assert len(set(np.asarray(pure, np.float32).ravel())) > 3, "each weight has bits of its own"


def test_second_moments_grow_on_as_they_do_in_float32():
    """With b2 = 0.999 nearest rounding stops where a step is half of the last bit: at a quarter of the end."""
    tx = optax.adam(0.0, b2=0.999)
    frozen, pure, wide = (
        mean(moment(run(p, 1000, 1.0, tx, axes={"data": 2}).opt_state)) for p in (NEAREST, "bf16-pure", "fp32")
    )
    assert wide == pytest.approx(1 - 0.999**1000, rel=1e-4)
    assert frozen == 0.25
    assert pure == pytest.approx(wide, rel=0.01)


def moment(opt_state):
    return optax.tree.get(opt_state, "nu")["w"]


def test_master_weights_in_float32_with_stochastic_moments():
    """The flag acts on what is stored in bfloat16, and on nothing else."""
    precision, tx = Precision(moments="bfloat16", stochastic_rounding=True), optax.adam(1e-4, b2=0.999)
    state = run(precision, 5, 0.3, tx, stage=2)
    assert state.master["w"].dtype == jnp.float32
    assert (state.params["w"].dtype, moment(state.opt_state).dtype) == (BF16, BF16)
    np.testing.assert_array_equal(state.params["w"], state.master["w"].astype(BF16))
    assert len(set(np.asarray(moment(state.opt_state), np.float32).ravel())) > 1


# The bits.


def bits(x):
    return np.asarray(x).view(np.uint16)


def test_the_same_bits_at_every_stage_on_every_mesh_and_in_every_run():
    tx = optax.adam(1e-3)
    shape = (64, 33)  # on 7 devices stored padded to 35
    places = [(0, {"data": 1}), (1, EIGHT), (2, REPLICAS), (3, {"data": 7}), (3, MODEL), (3, MODEL)]
    states = [run("bf16-pure", 4, 0.3, tx, stage, axes, shape) for stage, axes in places]
    first = states[0]
    assert len(set(np.asarray(first.params["w"], np.float32).ravel())) > 1
    for state in states[1:]:
        np.testing.assert_array_equal(bits(state.params["w"])[:64, :33], bits(first.params["w"]))
        np.testing.assert_array_equal(bits(moment(state.opt_state))[:64, :33], bits(moment(first.opt_state)))


def test_each_step_and_each_leaf_has_bits_of_its_own():
    layout = make_layout(3, "bf16-pure", params=dict.fromkeys("ab", jax.ShapeDtypeStruct((64, 64), "float32")))
    tx = optax.sgd(1.0)
    state = jzero.init(lambda: {x: jnp.ones((64, 64)) for x in "ab"}, tx, layout)
    grads = jax.device_put({x: jnp.full((64, 64), -EPSILON / 2) for x in "ab"}, layout.grad_shardings)
    after = jzero.apply_gradients(state, grads, tx, layout)
    again = jzero.apply_gradients(state, grads, tx, layout)
    later = jzero.apply_gradients(replace(state, step=state.step + 1), grads, tx, layout)
    up = [np.asarray(x, np.float32) > 1 for x in (after.params["a"], after.params["b"], later.params["a"])]
    np.testing.assert_array_equal(again.params["a"], after.params["a"])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert 0.45 < (up[one] == up[other]).mean() < 0.55


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_rounding_adds_no_collective_and_makes_its_bits_shard_by_shard(stage):
    """The compiled update on 8 devices: at stage 3 no array in it is larger than a shard."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((256, 512), "float32") for i in range(2)}
    layouts = [make_layout(stage, precision, params=shapes) for precision in (NEAREST, "bf16-pure")]
    programs = [lower_update(optax.adam(1e-3), layout) for layout in layouts]
    nearest, stochastic = (program.compile() for program in programs)
    assert compiled_collectives(stochastic) == compiled_collectives(nearest)
    assert "u16[256,64]" in text_of(stochastic), "the bits of a shard"
    assert "u16[256,64]" not in text_of(nearest)
    whole = 256 * 512
    if stage == 3:
        assert compiled_collectives(stochastic) == ()
        assert largest_array(stochastic) == whole // 8
    # A CPU makes bits in five arrays of 32-bit words, one leaf after another.
    more = temp_bytes(programs[1], FOR_MEMORY) - temp_bytes(programs[0], FOR_MEMORY)
    assert more <= 5 * 4 * whole // 8 + 2**14


def text_of(compiled) -> str:
    return compiled.as_text()


def largest_array(compiled):
    """Elements of the largest array that any instruction makes."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text_of(compiled))
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)
