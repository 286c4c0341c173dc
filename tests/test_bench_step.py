"""The benchmark of the step: that it compares like with like, and says what it found. Nothing here is timed."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from experiments.bench_step import compare as bench
from experiments.bench_step.cli import COMPARISON, MATMULS, main
from experiments.bench_step.measure import Ratio, error, interleaved, ratio_of_medians
from experiments.bench_step.model import Size, mean_loss
from experiments.bench_step.programs import TX, WAYS, Programs, make_arguments, make_inputs, make_layout

SIZE = Size(layers=2, width=64, heads=2, vocabulary=64, context=8, batch_size=8)
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--vocabulary", "16", "--context", "8", "--rounds", "2"]


@pytest.fixture(autouse=True)
def started():
    """JAX has started with the tests' devices, before a command can ask for fewer."""
    assert len(jax.devices()) == 8


def mesh_of(devices):
    return jzero.make_mesh(devices=jax.devices()[:devices], data=devices)


# --- programs


@functools.cache
def one_device():
    params, tokens = make_inputs(SIZE)
    return params, *jax.jit(jax.value_and_grad(functools.partial(mean_loss, SIZE)))(params, tokens)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2)), 1, 3])
def test_the_three_ways_compute_the_same_as_one_device(stage):
    layout = make_layout(SIZE, mesh_of(4), stage)
    assert {leaf.dim is None for leaf in layout.leaves} == {True, False}, "both kinds of leaves"
    args = make_arguments(SIZE, layout)
    params, loss, grads = one_device()
    changes = {}
    for way, make in WAYS.items():
        new, opt_state, found = make(SIZE, layout).step(*jax.tree.map(jnp.copy, args.of("step")))
        assert error(found, loss) < 1e-5, way
        assert error(opt_state[0].mu, jax.tree.map(lambda grad: 0.1 * grad, grads)) < 1e-5, way
        changes[way] = jax.tree.map(lambda x, old: np.asarray(x) - np.asarray(old), new, params)
    updates, _ = TX.update(grads, TX.init(params), params)
    for way in WAYS:
        assert error(changes[way], updates) < 2e-3, way


@pytest.mark.parametrize("stage", range(4))
def test_by_hand_has_the_collectives_of_jzero(stage):
    """Else it would be no yardstick. The tied embedding is gathered once: kept, where jzero gathers it again."""
    layout = make_layout(SIZE, mesh_of(4), stage)
    args = make_arguments(SIZE, layout).of("gradient")
    found = {}
    for way in ("jzero", "by hand"):
        rows = jzero.program.collectives(WAYS[way](SIZE, layout).gradient.lower(*args), layout.mesh)
        sizes = {}
        for row in rows:
            sizes[row.kind] = sizes.get(row.kind, 0) + row.bytes
        found[way] = sizes
    if stage == 3:
        found["by hand"]["all-gather"] += 4 * SIZE.vocabulary * SIZE.width
    assert found["jzero"] == found["by hand"]


# --- measuring


def test_interval_on_known_data():
    constant = ratio_of_medians(np.full(50, 3.0), np.full(50, 2.0))
    assert constant == Ratio(1.5, 1.5, 1.5) and constant.width == 0
    rng = np.random.default_rng(1)
    some, others = rng.normal(1.1, 0.05, 400), rng.normal(1.0, 0.05, 400)
    ratio = ratio_of_medians(some, others)
    # A median of n normal numbers has a standard error of 1.2533 sigma / sqrt(n).
    expected = 2 * 1.96 * 1.2533 * 0.05 / 400**0.5 * 1.1 * (1 + 1 / 1.1**2) ** 0.5
    assert ratio.low < 1.1 < ratio.high and ratio.value == np.median(some) / np.median(others)
    assert ratio.width == pytest.approx(expected, rel=0.25)


def test_interval_draws_whole_rounds():
    """What slows all of a round says nothing of the ratio."""
    round_is_slow = np.random.default_rng(0).lognormal(0, 1, 60)
    ratio = ratio_of_medians(2 * round_is_slow, round_is_slow)
    assert (ratio.low, ratio.high) == pytest.approx((2, 2))


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    ratios = [ratio_of_medians(*rng.normal(1, 0.03, (2, 50))) for _ in range(50)]
    assert sum(ratio.low <= 1 <= ratio.high for ratio in ratios) >= 43


def test_ratio_wants_pairs():
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        ratio_of_medians(np.ones(3), np.ones(2))


def test_interleaved_runs_each_once_a_round_in_changing_order():
    ran, ticks = [], iter(range(1000))
    calls = {name: functools.partial(ran.append, name) for name in "abc"}
    rounds = list(interleaved(calls, 30, clock=lambda: next(ticks)))
    assert rounds == [{"a": 1, "b": 1, "c": 1}] * 30
    orders = [tuple(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert len(orders) == 32 and all(set(order) == set("abc") for order in orders) and len(set(orders)) == 6


def test_error_is_that_of_the_worst_leaf():
    wanted = {"large": np.full(4, 100.0), "small": np.full(4, 1.0)}
    assert error(wanted, wanted) == 0
    assert error(wanted | {"small": np.full(4, 1.1)}, wanted) == pytest.approx(0.1)
    assert error(wanted | {"small": np.full(4, np.nan)}, wanted) == float("inf")


# --- targets


def timed(program, hand, plain, temp, pairs=50):
    return bench.Timed(program, pairs, {}, {"by hand": hand, "plain jit": plain}, {}, {"jzero": temp, "by hand": 1000})


@pytest.mark.parametrize(
    ("hand", "plain", "temp", "pairs", "met"),
    [
        (Ratio(1.0, 0.98, 1.02), Ratio(0.9, 0.88, 0.92), 1020, 50, [True, True, True]),
        (Ratio(0.9, 0.89, 0.91), Ratio(1.0, 0.98, 1.01), 1021, 50, [False, True, False]),
        (Ratio(1.02, 1.01, 1.03), Ratio(0.9, 0.88, 0.92), 900, 50, [True, False, True]),
        (Ratio(1.0, 0.97, 1.03), Ratio(0.9, 0.88, 0.92), 900, 50, [True, False, True]),
        (Ratio(1.0, 0.98, 1.02), Ratio(0.9, 0.88, 0.92), 900, 49, [True, False, False]),
    ],
)
def test_time_and_memory_targets(hand, plain, temp, pairs, met):
    found = timed("step", hand, plain, temp, pairs)
    assert [target.met for target in bench.time_targets(3, found)] == met
    assert [target.met for target in bench.time_targets(2, found)] == met[:2], "plain jit is to be beaten at stage 3"


def test_compile_targets():
    def at(layers, jzero_seconds, plain_seconds):
        trace = {"jzero": 0.5, "plain jit": 0.5}
        return bench.Compiled(layers, trace, {"jzero": jzero_seconds - 0.5, "plain jit": plain_seconds - 0.5})

    assert [target.met for target in bench.compile_targets(at(4, 1.3, 1), at(12, 1.42, 1))] == [True, False, True]
    assert [target.met for target in bench.compile_targets(at(4, 1.3, 1), at(12, 1.44, 1.2))] == [True, True, False]


# --- the command


def test_json_holds_what_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "TRIES", 1)
    path = tmp_path / "out.json"
    assert main([*TINY, "--stages", "3", "--batch-size", "4", "--json", str(path)]) == 0
    printed, held = capsys.readouterr().out, json.loads(path.read_text())
    assert held["rounds"] == 2 and held["devices"] == 4 and held["size"]["batch_size"] == 4
    (result,) = held["results"]
    words = " ".join(re.sub(r"[^\S ]|[─]", " ", printed).split())
    assert result["stage"] == 3 and "Stage 3" in words
    for found in result["timed"]:
        for way in WAYS:
            assert f"{found['temp_bytes'][way]:,}" in words and f"{found['seconds'][way]:.4f}" in words
    for compiled in result["compiled"]:
        assert {f"{x:.3f}" for kind in ("trace", "compile") for x in compiled[kind].values()} <= set(words.split())
    assert len(result["targets"]) == 9
    assert printed.count("met") == 9 and printed.count("not met") == sum(not t["met"] for t in result["targets"])


def test_json_alone_is_all_that_is_printed(capsys):
    assert main([*TINY, "--cpu-time", "--stages", "1", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    (result,) = held["results"]
    assert held["cpu_time"] and [found["program"] for found in result["timed"]] == ["gradient", "step"]
    assert set(result["timed"][0]["seconds"]) == {"jzero", "one device"} and len(result["targets"]) == 1


def test_nothing_is_timed_that_does_not_agree(monkeypatch, capsys):
    plain = WAYS["plain jit"]

    def wrong(size, layout):
        right = plain(size, layout)
        return Programs(jax.jit(lambda *args: jax.tree.map(lambda x: 1.01 * x, right.gradient(*args))), right.step)

    monkeypatch.setitem(WAYS, "by hand", wrong)
    monkeypatch.setattr(bench, "interleaved", lambda *args: pytest.fail("timed"))
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, "--batch-size", "4"])
    assert stopped.value.code == 1
    assert "stage 3, forward and backward: by hand and jzero differ by 1.0e-02" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "4"], "invalid choice: 4"),
        (["--rounds", "0"], "--rounds 0: wanted 1 or more"),
        (["--devices", "1"], "--devices 1: wanted 2 or more"),
        (["--devices", "9", "--batch-size", "9"], "--devices 9: this machine has 8"),
        (["--batch-size", "6"], "--batch-size 6 does not divide over --devices 4. Use a multiple of 4"),
        (["--layers", "0"], "--layers 0: wanted 1 or more"),
        (["--width", "30", "--heads", "4"], "--width 30 --heads 4: wanted a width that the heads divide evenly"),
        (["--json", "/nowhere/out.json"], "No such file or directory: '/nowhere/out.json'"),
    ],
)
def test_bad_options_are_refused_before_any_work(options, message, monkeypatch, capsys):
    monkeypatch.setattr(bench, "make_layout", lambda *args: pytest.fail("worked"))
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


def test_help_shows_the_defaults_and_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and "examples:" in out
    assert f"(default: {COMPARISON.width}; {MATMULS.width} with --cpu-time)" in " ".join(out.split())
