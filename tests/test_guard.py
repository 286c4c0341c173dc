"""Steps that are not taken: when the user is told, and how; and what is refused before any step."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.guard import Guard, Nonfinite, Skipped
from tests.refusals import refuses
from tests.scripted import BF16, FP16, TX, bits, loss_fn, make_batch, make_layout, make_state

PRECISIONS = {"fp32": None, "bf16": BF16}


@functools.cache
def make_step(precision=None, wait=None, rule=None, nonfinite=None):
    """A step that is compiled once for all tests which ask for it, and its layout."""
    layout = make_layout(3, "8", precision)
    return layout, jzero.train_step(loss_fn, TX, layout, wait=wait, loss_scale=rule, nonfinite=nonfinite)


def run(step, layout, state, script):
    """Runs a step for each letter, "o" for one that overflows; gives the state, and what each call warned of."""
    heard = []
    for number, kind in enumerate(script):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = step(state, layout.put_batch(make_batch(number, np.inf if kind == "o" else 1.0, number)))
        heard.append([str(w.message) for w in caught])
        assert all(w.filename == __file__ for w in caught), "a warning points at the caller's line"
    return state, heard


# Warnings


def test_a_warning_comes_at_five_skipped_steps_in_a_row_and_at_each_doubling():
    layout, step = make_step(nonfinite="skip")
    state, heard = run(step, layout, make_state(layout), "oooo." + "o" * 21 + "." + "o" * 5)
    told = {number: messages for number, messages in enumerate(heard, 1) if messages}
    assert list(told) == [5 + 5, 5 + 10, 5 + 20, 27 + 5]
    for count, (message,) in zip((5, 10, 20, 5), told.values(), strict=True):
        assert message.startswith(f"{count} steps in a row were skipped")
        assert "loss scale of 1" in message
    assert (int(state.step), int(state.skipped.total), int(state.skipped.in_a_row)) == (2, 30, 5)


def test_without_waiting_the_warning_comes_one_step_late():
    layout, step = make_step(nonfinite="skip", wait=False)
    _, heard = run(step, layout, make_state(layout), "oooooo.")
    assert [bool(messages) for messages in heard] == [False] * 5 + [True, False]


def test_inside_of_another_jit_it_skips_and_can_say_nothing():
    layout = make_layout(3, "8")
    step = jzero.train_step(loss_fn, TX, layout, nonfinite="raise", compiler_options={})
    state, metrics = jax.jit(step)(make_state(layout), layout.put_batch(make_batch(0, np.inf)))
    assert metrics["skipped"]
    assert int(state.step) == 0
    # What was traced is not taken for a step that was run.
    _, heard = run(step, layout, state, ".")
    assert heard == [[]]


# Raising


FLOOR = jzero.DynamicLossScale(initial=4.0, minimum=2.0, hysteresis=2)
TO_THE_END = ".ooo"  # the hysteresis, the last halving, the end


def test_at_the_floor_with_the_hysteresis_used_up_it_raises_and_the_state_goes_on():
    layout, step = make_step(FP16, rule=FLOOR)
    state, heard = run(step, layout, make_state(layout, FLOOR), TO_THE_END[:-1])
    assert not any(heard)
    before = bits((state.params, state.master, state.opt_state, state.step))
    with pytest.raises(Nonfinite, match=r"at a loss scale of 2, its minimum.*lower DynamicLossScale") as caught:
        step(state, layout.put_batch(make_batch(7, np.nan)))
    left = caught.value.state
    assert bits((left.params, left.master, left.opt_state, left.step)) == before
    assert (float(left.loss_scale.scale), int(left.skipped.in_a_row)) == (2, 3)
    state, heard = run(step, layout, left, "..")
    assert int(state.step) == 3
    with pytest.raises(Nonfinite):  # clean steps that are too few to grow give nothing back
        step(state, layout.put_batch(make_batch(7, np.nan)))


def test_without_waiting_it_raises_one_step_late_and_the_state_is_that_of_the_later_step():
    layout, step = make_step(FP16, rule=FLOOR, wait=False)
    state, _ = run(step, layout, make_state(layout, FLOOR), TO_THE_END)
    with pytest.raises(Nonfinite, match="after step 1 overflowed") as caught:
        step(state, layout.put_batch(make_batch(5)))
    assert int(caught.value.state.step) == 2, "the step in between was clean, and is taken"
    state, _ = run(step, layout, caught.value.state, "..")
    assert int(state.step) == 4


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_raise_says_what_came_and_leaves_the_state_as_it_was(precision):
    layout, step = make_step(PRECISIONS[precision], nonfinite="raise")
    state, _ = run(step, layout, make_state(layout), "..")
    before = bits((state.params, state.master, state.opt_state, state.step))
    with pytest.raises(Nonfinite, match=r"after step 2 are not finite \(norm nan, loss inf\)") as caught:
        step(state, layout.put_batch(make_batch(2, np.inf, 31)))
    left = caught.value.state
    assert bits((left.params, left.master, left.opt_state, left.step)) == before
    state, _ = run(step, layout, left, ".")
    assert int(state.step) == 3


@pytest.mark.parametrize(("precision", "keep"), [("fp32", None), ("bf16", "keep")])
def test_skip_leaves_params_as_they_were_and_keep_which_is_the_default_takes_what_comes(precision, keep):
    found = []
    for nonfinite in ("skip", keep):
        layout, step = make_step(PRECISIONS[precision], nonfinite=nonfinite)
        state, _ = run(step, layout, make_state(layout), ".")
        before = bits((state.params, state.master, state.opt_state))
        state, metrics = step(state, layout.put_batch(make_batch(1, np.nan, 17)))
        unchanged = bits((state.params, state.master, state.opt_state)) == before
        finite = all(jnp.isfinite(x).all() for x in jax.tree.leaves(jzero.master_params(state, layout, replicate=True)))
        found.append((bool(metrics["skipped"]), int(state.step), unchanged, finite))
    assert found == [(True, 1, True, True), (False, 2, False, False)]


# Spikes


def running_mean(norms, spike, nonfinite="skip"):
    """Which steps are taken and the mean after each, in plain Python."""
    mean, log = 0.0, []
    for norm in norms:
        finite, is_spike = np.isfinite(norm), mean > 0 and norm > spike * mean
        if finite:
            mean = 0.99 * mean + 0.01 * min(norm, spike * mean) if mean else norm
        log.append(((finite or nonfinite == "keep") and not is_spike, mean))
    return log


NORMS = [np.nan, 1.0, 1.5, 0.25, 4.0, 1.0, np.inf, 1.99, 2.05, 0.01, 1e6, 1.2]


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_norm_far_above_its_running_mean_is_skipped(stage):
    """And one that is no number, though nothing but the spike was asked for."""
    layout = jzero.zero({"w": jnp.ones(16)}, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    # The gradient is the mean of the batch in each of 16 places, so its norm is 4 times that.
    step = jzero.train_step(lambda params, batch: batch.mean() * params["w"].sum(), optax.sgd(0.1), layout, spike=2.0)
    state = jzero.init(lambda: {"w": jnp.ones(16)}, optax.sgd(0.1), layout)
    log = []
    for norm in NORMS:
        before = bits(state.params)
        state, metrics = step(state, layout.put_batch(np.full(8, norm / 4, np.float32)))
        taken = not metrics["skipped"]
        assert (bits(state.params) != before) == taken
        log.append((taken, float(state.skipped.mean_norm)))
    wanted = running_mean(NORMS, 2.0)
    assert [taken for taken, _ in log] == [taken for taken, _ in wanted]
    assert [taken for taken, _ in wanted] == [False, True, True, True, False, True, False, *[True, False] * 2, True]
    np.testing.assert_allclose([mean for _, mean in log], [mean for _, mean in wanted], rtol=1e-6)


def test_a_run_whose_norms_stay_larger_goes_on_in_the_end():
    guard, norms = Guard("skip", 2.0), np.array([1.0] * 3 + [8.0] * 200, np.float32)

    def judge(skipped, norm):
        take, skipped = guard.judge(norm, skipped)
        return skipped, (take, skipped.mean_norm)

    _, (takes, means) = jax.jit(lambda norms: jax.lax.scan(judge, Skipped.none(), norms))(norms)
    wanted = running_mean(norms.astype(float), 2.0)
    assert list(np.asarray(takes)) == [taken for taken, _ in wanted]
    np.testing.assert_allclose(means, [mean for _, mean in wanted], rtol=1e-5)
    assert takes[:3].all()
    assert not takes[3:140].any()
    assert takes[150:].all()


# Refused


def test_a_loss_scale_given_to_one_of_init_and_train_step_alone_is_refused():
    layout, scale = make_layout(1), jzero.DynamicLossScale()
    batch = layout.put_batch(make_batch())
    with_scale, without = (jzero.train_step(loss_fn, TX, layout, loss_scale=s) for s in (scale, None))
    refuses(lambda: with_scale(make_state(layout), batch), "the state has none", "train_step was given one", "init")
    refuses(lambda: without(make_state(layout, scale), batch), "the state has one", "train_step was given none")


@pytest.mark.parametrize(
    ("made", "given"), [(128.0, 64.0), (128.0, jzero.DynamicLossScale()), (jzero.DynamicLossScale(initial=64.0), 64.0)]
)
def test_a_state_of_another_loss_scale_is_refused(made, given):
    layout = make_layout(1)
    step = jzero.train_step(loss_fn, TX, layout, loss_scale=given)
    call = lambda: step(make_state(layout, made), layout.put_batch(make_batch()))  # noqa: E731
    at = "128" if made == 128 else "64"
    refuses(call, f"the state stands at {at}, made by another loss scale than the {given}", "jzero.init")


def test_float16_without_a_loss_scale_warns():
    layout = make_layout(1, precision="fp16")
    with pytest.warns(UserWarning, match="float16 without a loss scale.*DynamicLossScale") as caught:
        jzero.train_step(loss_fn, TX, layout)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jzero.train_step(loss_fn, TX, layout, loss_scale=128.0)
        jzero.train_step(loss_fn, TX, make_layout(1, precision="bf16"))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"loss_scale": 128.0, "nonfinite": "keep"}, ["nonfinite='keep'", "loss scale", "'skip'"]),
        ({"nonfinite": "ignore"}, ["nonfinite='ignore'", "'skip', 'raise' or 'keep'"]),
        ({"spike": 1}, ["spike=1", "above 1"]),
        ({"spike": True}, ["spike=True"]),
        ({"spike": "2"}, ["spike='2'"]),
        ({"spike": float("nan")}, ["spike=nan"]),
        *(
            ({"loss_scale": x}, [f"loss_scale={x!r}", "positive", "DynamicLossScale"])
            for x in (0, -2.0, True, "2", 1e39)
        ),
        ({"clip_norm": 0.0}, ["clip_norm=0.0", "positive"]),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, parts):
    layout = make_layout(1)
    refuses(lambda: jzero.train_step(loss_fn, TX, layout, **options), *parts)
    if "loss_scale" in options and "nonfinite" not in options:
        refuses(lambda: make_state(layout, options["loss_scale"]), *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"initial": 0.5}, ["initial=0.5", "minimum=1.0", "floor"]),
        *(
            ({"initial": x}, [f"initial={x!r}", "above 0"])
            for x in (0, -1.0, float("inf"), 1e39, float("nan"), "2", True)
        ),
        *(({"minimum": x}, [f"minimum={x!r}", "above 0"]) for x in (0, -1.0, 1e-60, None)),
        *(({"factor": x}, [f"factor={x!r}", "above 1"]) for x in (1, 0.5, "2")),
        *(({"growth_interval": x}, [f"growth_interval={x!r}", "1 or more"]) for x in (0, 2.0, True)),
        *(({"hysteresis": x}, [f"hysteresis={x!r}", "1 or more"]) for x in (0, -1, 1.5)),
    ],
    ids=str,
)
def test_a_dynamic_loss_scale_that_makes_no_sense_is_refused(options, parts):
    refuses(lambda: jzero.DynamicLossScale(**options), *parts)
