"""The loss scale: its rule is the reference's, and overflows of one example play it out over whole meshes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jzero
from tests import reference
from tests.scripted import (
    BF16,
    EXAMPLES,
    FP16,
    MESHES,
    TX,
    bits,
    logged,
    loss_fn,
    make_batch,
    make_layout,
    make_params,
    make_state,
    run_rule,
    stateful_loss_fn,
)

# The rule


@st.composite
def rules(draw):
    """Scales are powers of two, so that float32 and the reference's float64 must agree to the bit."""
    minimum = draw(st.integers(-3, 3))
    return jzero.DynamicLossScale(
        initial=2.0 ** draw(st.integers(minimum, minimum + 6)),
        growth_interval=draw(st.integers(1, 5)),
        factor=draw(st.sampled_from([2.0, 4.0])),
        hysteresis=draw(st.integers(1, 4)),
        minimum=2.0**minimum,
        consecutive_hysteresis=draw(st.booleans()),
    )


@jax.jit
def run_rule_in_jax(state, overflows, options):
    rule = object.__new__(jzero.DynamicLossScale)
    vars(rule).update(options)  # traced, so that one program serves all

    def step(state, overflow):
        return rule.update(state, ~overflow), (state.scale, rule.is_exhausted(state, ~overflow))

    return jax.lax.scan(step, state, overflows)[1]


def states_met(rule, overflows):
    """For each step the scale that it uses, and whether it finds the scale at its end."""
    state = jax.device_get(rule.init())
    scales, exhausted = jax.device_get(run_rule_in_jax(state, np.array(overflows), dataclasses.asdict(rule)))
    return scales.astype(np.float64), exhausted


LENGTH = 40


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rules(), st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH))
@example(jzero.DynamicLossScale(growth_interval=3, hysteresis=2), [i % 4 == 0 for i in range(LENGTH)])
@example(jzero.DynamicLossScale(initial=4.0, hysteresis=3, minimum=1.0), [True] * LENGTH)
def test_the_rule_is_that_of_the_reference_until_it_gives_up(rule, overflows):
    wanted = reference.DynamicLossScale(**dataclasses.asdict(rule))
    scales, exhausted = states_met(rule, overflows)
    for index, overflow in enumerate(overflows):
        assert scales[index] == wanted.scale
        try:
            wanted.update(overflow)
        except FloatingPointError:
            assert exhausted[index]
            break
        assert not exhausted[index]


def test_a_scale_that_a_float32_cannot_hold_does_not_grow_further():
    rule = jzero.DynamicLossScale(initial=2.0**126, growth_interval=1)
    scales, _ = states_met(rule, [False] * 4)
    assert list(scales) == [2.0**126, 2.0**127, 2.0**127, 2.0**127]


def test_the_scale_grows_after_exactly_as_many_clean_steps_as_the_interval_says():
    rule = jzero.DynamicLossScale(initial=4.0, growth_interval=3)
    assert list(states_met(rule, [False] * 8)[0]) == [4, 4, 4, 8, 8, 8, 16, 16]
    # An overflow begins the count again.
    assert list(states_met(rule, [False, False, True, False, False, False, False])[0]) == [4] * 6 + [8]


def test_a_run_that_goes_on_with_another_rule_grows_and_shrinks_by_that_rule():
    """A shorter interval than the clean steps there are, and a floor above the scale."""
    state = jzero.DynamicLossScale(initial=2.0, hysteresis=1).init()
    state = dataclasses.replace(state, clean=jnp.int32(7))
    rule = jzero.DynamicLossScale(initial=8.0, minimum=8.0, growth_interval=3, hysteresis=1)
    assert float(rule.update(state, jnp.bool(True)).scale) == 4
    assert float(rule.update(state, jnp.bool(False)).scale) == 2, "an overflow never raises the scale"
    assert rule.is_exhausted(state, jnp.bool(False))


# In the training step


SCRIPT = "o.o.oo....o..oo...o"  # halved and doubled, and down to the floor
RULE = jzero.DynamicLossScale(initial=2.0**6, growth_interval=3, hysteresis=2, minimum=2.0**2)
CASES = [
    # stage, mesh, microbatches, precision
    (0, "2x4", 4, "fp16"),
    (1, "4 model 2", 1, "fp16"),
    (2, "8", 4, "bf16"),
    (3, "2x4", 2, "fp16"),
]
PRECISIONS = {"fp16": FP16, "bf16": BF16, "fp32": "fp32", "none": None}


def run_script(stage, mesh, microbatches, precision):
    """The log of a run in which each "o" of the script is one example that goes bad, with a look at bits on the way."""
    layout = make_layout(stage, mesh, PRECISIONS[precision])
    step = jzero.train_step(
        stateful_loss_fn, TX, layout, microbatches=microbatches, loss_scale=RULE, clip_norm=1.0, with_model_state=True
    )
    state = make_state(layout, RULE, stateful=True)
    bad = itertools.cycle(itertools.product(np.random.default_rng(1).permutation(EXAMPLES), [np.inf, np.nan, 3e38]))
    log = []
    for number, kind in enumerate(SCRIPT):
        where, spoil = next(bad) if kind == "o" else (0, 1.0)
        before, last = held(state), state
        state, metrics = step(state, layout.put_batch(make_batch(number, spoil, where)))
        after = held(state)
        assert all(x.is_deleted() for x in jax.tree.leaves((last.params, last.opt_state, last.master)))
        assert (after == before) == (kind == "o")
        if kind == "o":
            assert not np.isfinite(metrics["grad_norm"])
        else:
            assert all(new != old for new, old in zip(after, before, strict=True))
        log.append(logged(metrics))
    return log


def held(state):
    """The bits of all that a skipped step leaves as it was: params, moments and count, master, model state, step."""
    parts = (state.params, state.opt_state, state.master, state.model_state, state.step)
    return bits(parts)


def check_script(stage, mesh, microbatches, precision):
    log = run_script(stage, mesh, microbatches, precision)
    assert log == run_rule(RULE, [kind == "o" for kind in SCRIPT])
    assert {scale for scale, *_ in log} == {4, 8, 16, 32, 64}, "a scale that does not move would test nothing"


@pytest.mark.parametrize(("stage", "mesh", "microbatches", "precision"), CASES)
def test_one_bad_example_anywhere_is_skipped_and_the_scale_follows_the_rule(stage, mesh, microbatches, precision):
    check_script(stage, mesh, microbatches, precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "mesh", "microbatches", "precision"),
    [case for case in itertools.product(range(4), list(MESHES)[:4], [1, 4], PRECISIONS) if case not in CASES],
)
def test_one_bad_example_is_skipped_at_every_stage_on_every_mesh(stage, mesh, microbatches, precision):
    check_script(stage, mesh, microbatches, precision)


# What the scale must not change, and what it is for


def weighted(params, batch):
    """Parts of the batch weigh what their inputs do."""
    weight = jnp.abs(batch["x"]).sum()
    return jzero.Weighted(loss_fn(params, batch) * weight, weight)


def three_steps(step, layout, state):
    """Params, and the metrics of each step, on batches one example of which weighs 50 times as much."""
    log = []
    for number in range(3):
        state, metrics = step(state, layout.put_batch(make_batch(number, 50.0)))
        log.append(metrics)
    return jzero.master_params(state, layout, replicate=True), log


@pytest.mark.parametrize(
    ("stage", "mesh", "microbatches", "loss"),
    [
        (3, "4 model 2", 2, weighted),
        pytest.param(0, "2x4", 4, loss_fn, marks=pytest.mark.slow),
        pytest.param(1, "8", 1, weighted, marks=pytest.mark.slow),
    ],
)
def test_a_power_of_two_changes_no_bit_of_the_loss_the_norms_or_the_clipped_steps(stage, mesh, microbatches, loss):
    layout = make_layout(stage, mesh, "fp32")
    rule = jzero.DynamicLossScale(growth_interval=1, minimum=2.0**-20)
    plain, scaling = (
        jzero.train_step(loss, TX, layout, loss_scale=scale, clip_norm=0.5, microbatches=microbatches)
        for scale in (None, rule)
    )
    params, log = three_steps(plain, layout, make_state(layout))
    assert all(metrics["clipped"] for metrics in log)
    assert [float(metrics["loss_scale"]) for metrics in log] == [1, 1, 1]
    for power in (-10, 9):
        state = dataclasses.replace(
            make_state(layout, rule), loss_scale=dataclasses.replace(rule, initial=2.0**power).init()
        )
        scaled_params, scaled_log = three_steps(scaling, layout, state)
        assert bits(scaled_params) == bits(params)
        for metrics, wanted in zip(scaled_log, log, strict=True):
            assert all(metrics[name] == wanted[name] for name in ("loss", "grad_norm", "clipped_norm"))
        assert [float(metrics["loss_scale"]) for metrics in scaled_log] == [2.0 ** (power + i) for i in range(3)]


def tiny_loss_fn(params, batch):
    return loss_fn(params, batch) * 1e-9


@pytest.mark.parametrize(("stage", "mesh"), [(3, "8"), pytest.param(1, "1", marks=pytest.mark.slow)])
def test_gradients_that_vanish_in_float16_are_there_with_a_loss_scale(stage, mesh):
    layout, tx = make_layout(stage, mesh, FP16), optax.sgd(1e7)

    def moved(layout, loss_scale):
        step = jzero.train_step(tiny_loss_fn, tx, layout, loss_scale=loss_scale)
        params, log = three_steps(step, layout, make_state(layout, loss_scale, tx))
        return {path: np.asarray(params[path]) - first for path, first in make_params().items()}, log

    with pytest.warns(UserWarning, match="float16 without a loss scale"):
        without, _ = moved(layout, None)
    rescued, log = moved(layout, 2.0**27)
    wanted, _ = moved(make_layout(stage, mesh, "fp32"), None)
    assert not any(metrics["skipped"] for metrics in log)
    for path, move in wanted.items():
        assert np.linalg.norm(without[path]) < 0.1 * np.linalg.norm(move)
        assert np.linalg.norm(rescued[path] - move) < 0.01 * np.linalg.norm(move)


def test_a_scale_too_large_for_float16_comes_down_by_itself():
    """Nothing is scripted here: the gradients are too large until the scale is not."""
    layout, rule = make_layout(2, "8", FP16), jzero.DynamicLossScale(initial=2.0**19, hysteresis=1)
    step, state, log = jzero.train_step(loss_fn, TX, layout, loss_scale=rule), make_state(layout, rule), []
    for _ in range(12):
        state, metrics = step(state, layout.put_batch(make_batch()))
        log.append((logged(metrics), float(metrics["loss"])))
    skips = [skipped for (_, skipped, *_), _ in log]
    first = skips.index(False)
    assert first > 2
    assert not any(skips[first:])
    assert [entry for entry, _ in log] == run_rule(rule, skips)
    assert log[-1][1] < 0.9 * log[0][1]


# The step written out


@pytest.mark.parametrize(
    ("stage", "mesh", "precision"), [(1, "2x4", "fp16"), pytest.param(3, "8", "fp32", marks=pytest.mark.slow)]
)
def test_the_step_written_out_is_the_step(stage, mesh, precision):
    layout = make_layout(stage, mesh, PRECISIONS[precision])
    gradient = jzero.value_and_grad(loss_fn, layout, microbatches=2)

    @jax.jit
    def written_out(state, batch):
        scale = state.loss_scale.scale
        loss, grads = gradient(state.params, batch, loss_scale=scale)
        norm = optax.tree.norm(layout.logical(grads))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.5 / (norm + 1e-6)), grads)
        finite = jnp.isfinite(norm)
        scaling = RULE.update(state.loss_scale, finite)
        state = jzero.apply_gradients(state, grads, TX, layout, when=finite)
        return dataclasses.replace(state, loss_scale=scaling), (loss, norm, scale)

    step = jzero.train_step(loss_fn, TX, layout, microbatches=2, loss_scale=RULE, clip_norm=0.5)
    by_hand, state = make_state(layout, RULE), make_state(layout, RULE)
    for number, spoil in enumerate([1.0, np.inf, 30.0, np.inf, np.nan, 1.0]):
        batch = layout.put_batch(make_batch(number, spoil, example=5 * number))
        by_hand, numbers = written_out(by_hand, batch)
        state, metrics = step(state, batch)
        np.testing.assert_allclose(numbers, [metrics[n] for n in ("loss", "grad_norm", "loss_scale")], rtol=1e-5)
    assert int(by_hand.step) == int(state.step) == 3
    assert bits(by_hand.loss_scale) == bits(state.loss_scale)
    assert float(state.loss_scale.scale) == RULE.initial / 4
    for mine, its in zip(*(jax.tree.leaves((s.params, s.opt_state, s.master)) for s in (by_hand, state)), strict=True):
        assert mine.sharding.is_equivalent_to(its.sharding, its.ndim)
        np.testing.assert_allclose(np.float64(mine), np.float64(its), rtol=1e-5, atol=1e-5)
