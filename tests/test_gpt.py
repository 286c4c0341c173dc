import dataclasses
import functools
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import jzero
from experiments.gpt import data, devices, ngram
from experiments.gpt.cli import main
from experiments.gpt.config import Config, parse_mesh
from experiments.gpt.evaluate import make_evaluate
from experiments.gpt.job import build, learning_rate
from experiments.gpt.model import GPT, Block, mean_loss, next_byte_logits, rotate
from experiments.gpt.report import show_placements
from experiments.gpt.sample import generate, printable

ROOT = Path(__file__).parent.parent
SMALL = Config(layers=2, width=16, heads=2, context=16)
TINY = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16"]


@pytest.fixture
def folder(tmp_path):
    """A folder of small files with text that can be learnt."""
    root = tmp_path / "text"
    (root / "deep").mkdir(parents=True)
    for i in range(30):
        line = f"The {i}th line of many lines that are much alike.\n"
        (root / "deep" / f"file{i:02}.txt").write_text(line * (1 + i % 4))
    return root


def rows_of(out, kind):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


# --- data


def test_split_sets_whole_files_apart_the_same_way_each_time():
    sizes = {f"{i}.py": 10 + i for i in range(200)}
    train, held_out = data.split(sizes)
    assert not set(train) & set(held_out) and set(train) | set(held_out) == set(sizes)
    assert 0.04 * sum(sizes.values()) < sum(sizes[name] for name in held_out) <= 0.05 * sum(sizes.values())
    assert data.split(dict(reversed(sizes.items()))) == (train, held_out)
    assert held_out != tuple(sorted(sizes))[: len(held_out)], "not simply the first files"


def test_split_holds_the_smallest_file_out_where_none_fits():
    assert data.split({"a": 50, "b": 40}) == (("a",), ("b",))


def test_default_text_is_the_standard_library():
    text = data.load(None)
    assert "argparse.py" in text.train_files + text.held_out_files
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in text.train_files)
    assert len(text.train) > 20 * len(text.held_out) * 0.9 and len(text.held_out) > 100_000
    again = data.load(None)
    assert again.held_out_files == text.held_out_files and np.array_equal(again.train, text.train)


def test_folder_is_read_in_order_without_hidden_and_binary_files(folder):
    (folder / ".hidden").write_text("secret" * 100)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret" * 100)
    (folder / "image.png").write_bytes(b"\x89\0\1" * 100)
    text = data.load(str(folder))
    names = text.train_files + text.held_out_files
    assert sorted(names) == [f"deep/file{i:02}.txt" for i in range(30)]
    assert text.train.tobytes() == b"".join((folder / name).read_bytes() for name in text.train_files)
    assert text.held_out.tobytes() == b"".join((folder / name).read_bytes() for name in text.held_out_files)


def test_a_single_file_is_cut_at_its_tail(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 201)))
    for source in (path, tmp_path):
        text = data.load(str(source))
        assert text.train.tolist() == list(range(1, 191)) and text.held_out.tolist() == list(range(191, 201))


def test_batches_are_a_pure_function_of_seed_and_step():
    text = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8)

    def batch(seed, step):
        return data.sample_batch(text, batch_size=64, context=10, seed=seed, step=step)

    assert batch(3, 7).shape == (64, 11) and batch(3, 7).dtype == np.int32
    assert np.array_equal(batch(3, 7), batch(3, 7))
    assert not np.array_equal(batch(3, 7), batch(3, 8)) and not np.array_equal(batch(3, 7), batch(4, 7))
    assert all(row.astype(np.uint8).tobytes() in text.tobytes() for row in batch(3, 7))
    shortest = data.sample_batch(text[:11], batch_size=4, context=10, seed=0, step=0)
    assert np.array_equal(shortest, np.tile(text[:11], (4, 1)))


def test_windows_predict_each_byte_once():
    text = np.arange(103, dtype=np.uint8)
    found = data.windows(text, 10)
    assert found.shape == (10, 11)
    assert found[:, 1:].ravel().tolist() == list(range(1, 101))
    assert found[:, :-1].ravel().tolist() == list(range(100))


# --- yardstick


def test_yardstick_against_a_hand_computation():
    text = np.frombuffer(b"abcabd", np.uint8)  # trigrams: abc, bca, cab, abd
    p_c = (1 + Fraction(1, 256)) / (4 + 1)
    p_c_after_b = (1 + p_c) / (2 + 1)
    p_c_after_ab = (1 + p_c_after_b) / (2 + 1)
    p_z = Fraction(1, 256) / (4 + 1)
    model = ngram.ByteTrigrams(text, strength=1)
    assert model.probabilities(np.frombuffer(b"abc", np.uint8))[0] == pytest.approx(float(p_c_after_ab), rel=1e-12)
    assert model.probabilities(np.frombuffer(b"xyz", np.uint8))[0] == pytest.approx(float(p_z), rel=1e-12)
    both = np.frombuffer(b"abc", np.uint8), np.frombuffer(b"xyz", np.uint8)
    assert [model.bits_per_byte(x) for x in both] == pytest.approx([-math.log2(p_c_after_ab), -math.log2(p_z)])


def test_yardstick_probabilities_sum_to_one():
    model = ngram.ByteTrigrams(np.frombuffer(b"some text, and more of it", np.uint8))
    for context in (b"te", b"qq", b"\xff "):
        texts = [np.frombuffer(context + bytes([byte]), np.uint8) for byte in range(256)]
        assert sum(model.probabilities(text)[0] for text in texts) == pytest.approx(1)


def test_yardstick_counts_across_chunks(monkeypatch):
    text = np.random.default_rng(0).integers(0, 4, 101).astype(np.uint8)
    counts = ngram.ByteTrigrams(text).counts
    assert counts.sum() == 99
    monkeypatch.setattr(ngram, "CHUNK", 7)
    assert np.array_equal(ngram.ByteTrigrams(text).counts, counts)


# --- model


def tiny_model(remat=True):
    model = GPT(layers=2, width=16, heads=2, remat=remat)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return model, params


def test_model_starts_at_the_loss_of_a_guess_and_learns_on_plain_arrays():
    model, params = tiny_model()
    windows = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 9)))
    value_and_grad = jax.jit(jax.value_and_grad(functools.partial(mean_loss, model)))
    loss, grads = value_and_grad(params, windows)
    assert loss == pytest.approx(math.log(256), abs=0.1)
    assert all(np.any(g) for g in jax.tree.leaves(jax.device_get(grads)))
    better = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert value_and_grad(better, windows)[0] < loss


def test_model_does_not_look_ahead():
    model, params = tiny_model()
    windows = np.tile(np.arange(12), (2, 1))
    windows[1, 7] = 99
    one, other = jax.jit(functools.partial(next_byte_logits, model))(params, windows)
    assert np.array_equal(one[:7], other[:7])
    assert all(not np.allclose(a, b) for a, b in zip(one[7:], other[7:], strict=True))


def test_remat_changes_no_gradient():
    windows = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 9)))
    grads = []
    for remat in (False, True):
        model, params = tiny_model(remat=remat)
        grads.append(jax.jit(jax.grad(functools.partial(mean_loss, model)))(params, windows))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *grads)


def test_rotary_positions_are_relative():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    q, k = (rotate(jnp.broadcast_to(x, (1, 20, 1, 8)))[0, :, 0] for x in (q, k))
    scores = q @ k.T
    np.testing.assert_allclose(np.diagonal(scores, 3), scores[3, 6] * np.ones(17), rtol=1e-4)
    assert abs(float(scores[0, 0] - scores[0, 5])) > 1e-3


def test_block_branches_start_small():
    x = jax.random.normal(jax.random.key(0), (2, 8, 64))
    block = Block(width=64, heads=4, depth=8)
    y, _ = jax.jit(lambda key, x: block.apply(block.init(key, x, None), x, None))(jax.random.key(1), x)
    assert 0 < float(jnp.var(y - x)) < 0.5


# --- evaluation and sample


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_is_the_mean_over_all_windows(stage):
    config = dataclasses.replace(SMALL, batch_size=8, stage=stage, min_shard_size=0)
    job = build(config, jzero.make_mesh(data=-1))
    windows = np.random.default_rng(0).integers(0, 256, (21, config.context + 1)).astype(np.int32)
    state = job.init(0)
    whole = jax.device_get(state.params)
    wanted = float(jax.jit(job.loss_fn)(whole, jnp.asarray(windows))) / math.log(2)
    assert make_evaluate(job, config.batch_size)(state.params, windows) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("prompt", [b"x", b"a prompt that is longer than the context"])
def test_sample_is_deterministic_and_takes_the_likeliest_at_temperature_zero(prompt):
    model, params = tiny_model()
    apply = functools.partial(next_byte_logits, model)

    def draw(seed, temperature):
        return generate(apply, params, prompt, count=20, context=8, temperature=temperature, seed=seed)

    assert draw(0, 1.0) == draw(0, 1.0) != draw(1, 1.0)
    text, logits = list(prompt), jax.jit(apply)
    for _ in range(20):
        seen = text[-8:]
        window = jnp.asarray([seen + [0] * (8 - len(seen))])
        text.append(int(logits(params, window)[0, len(seen) - 1].argmax()))
    assert draw(0, 0.0) == draw(1, 0.0) == bytes(text[len(prompt) :])


def test_printable_hides_what_is_no_text():
    assert printable("é\tx\n".encode() + b"\x1b[31m\xff") == "é\tx\n\ufffd[31m\ufffd"


# --- options


def test_parse_mesh():
    assert parse_mesh("replica=2, data=-1") == (("replica", 2), ("data", -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stage", "4"], "invalid choice"),
        (["--steps", "0"], "--steps 0: wanted 1 or more"),
        (["--eval-every", "-1"], "--eval-every -1: wanted 0 or more"),
        (["--lr", "0"], "--lr 0.0: wanted a positive number"),
        (["--lr", "nan"], "--lr nan: wanted a positive number"),
        (["--warmup", "1"], "--warmup 1.0"),
        (["--width", "20", "--heads", "4"], "multiple of 2 x 4 = 8"),
        (["--mesh", "data"], "'data' is not a name and a positive size (or -1)"),
        (["--mesh", "data=x"], "'data=x' is not a name and a positive size"),
        (["--mesh", "data=0"], "'data=0' is not a name and a positive size"),
        (["--mesh", "data=2,data=4"], "axis 'data' is named twice"),
        (["--mesh", "tensor=2,data=4"], "no axis 'tensor' here"),
        (["--mesh", "replica=2"], "no data axis"),
        (["--mesh", "replica=-1,data=-1"], "only one axis"),
        (["--mesh", "replica=3,data=-1"], "3 does not divide 8 devices"),
        (["--mesh", "replica=2,data=2", "--devices", "8"], "replica 2 x data 2 = 4, but there are 8 devices"),
        (["--devices", "9"], "--devices 9: this machine has 8"),
        (["--mesh", "data=16"], "--mesh data=16 needs 16 devices: this machine has 8"),
        (["--devices", "0"], "--devices 0: wanted 1 or more"),
        (["--batch-size", "12"], "--batch-size 16"),
        (["--batch-size", "16", "--microbatches", "4"], "32 equal parts = 8 devices x --microbatches 4"),
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--context", "200"], "fewer than one window of --context 200"),
        (["--prompt", ""], "--prompt is empty"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_bad_options_are_refused_before_any_work(options, message, folder, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, "--data", str(folder), "--out", str(out), *options])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_an_empty_folder_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path)])
    assert "no text in this folder" in capsys.readouterr().err


def test_config_of_a_mesh_takes_the_devices_that_it_needs():
    mesh = devices.make_mesh(Config(mesh=(("replica", 2), ("data", 3))))
    assert dict(mesh.shape) == {"replica": 2, "data": 3} and mesh.size == 6
    assert "6 devices are simulated" in devices.describe(mesh)


@pytest.mark.parametrize("steps", [1, 2, 5, 100])
def test_learning_rate_rises_then_falls(steps):
    schedule = learning_rate(Config(steps=steps, lr=1.0, warmup=0.1))
    rates = [float(jnp.asarray(schedule(step))) for step in range(steps)]
    assert rates[0] > 0 and max(rates) == pytest.approx(1)
    if steps == 100:
        assert rates[:11] == pytest.approx([(0.1 + 0.09 * i) for i in range(11)])
        assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] < 0.11


# --- runs


def test_a_run_leaves_config_metrics_and_plot(folder, tmp_path, capsys):
    out = tmp_path / "run"
    options = [*TINY, "--data", str(folder), "--steps", "3", "--eval-every", "2", "--batch-size", "8", "--sample", "9"]
    assert main([*options, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for words in (
        "8 devices are simulated",
        "Mesh: data 8",
        "embedding/embedding",
        "order-2 byte model",
        "12P/N",
        "A sample at temperature 0.8",
        "Held-out text:",
    ):
        assert words in said
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((out / "config.json").read_text())
    assert config["steps"] == 3 and config["mesh"] == [["data", 8]] and config["devices"] == 8
    train = rows_of(out, "train")
    assert [row["step"] for row in train] == [1, 2, 3]
    for row in train:
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2)) and row["grad_norm"] > 0
    assert [row["step"] for row in rows_of(out, "validation")] == [2, 3]
    (summary,) = rows_of(out, "summary")
    assert summary["status"] == "finished"
    assert summary["bits_per_byte"] == rows_of(out, "validation")[-1]["bits_per_byte"]
    text = data.load(str(folder))
    assert summary["yardstick"] == ngram.ByteTrigrams(text.train).bits_per_byte(text.held_out)

    with pytest.raises(SystemExit):
        main([*options, "--out", str(out)])
    assert "holds a run already" in capsys.readouterr().err
    assert rows_of(out, "train") == train, "a refused run must leave the old one alone"

    assert main([*options, "--out", str(out), "--overwrite", "--audit"]) == 0
    assert [row["loss"] for row in rows_of(out, "train")] == [row["loss"] for row in train]
    said = capsys.readouterr().out
    assert said.index("made the first step") < said.index("A step at stage 3 on data 8") < said.index("Held-out text:")
    assert "Every promise is kept." in said
    (found,) = rows_of(out, "audit")
    assert found["broken"] == [] and found["sent"]["data"]["program"] > 0
    assert {line["what"]: line["live"] for line in found["held"]}["params"] > 0


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}])
def test_placements_break_no_word_at_80_columns(mesh):
    job = build(Config(mesh=tuple(mesh.items()), min_shard_size=0), jzero.make_mesh(**mesh))
    words = []
    for width in (80, 200):
        show_placements(Console(width=width, file=(out := io.StringIO())), job)
        text = out.getvalue()
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        words.append(sorted(word for word in text.split() if set(word) != {"─"}))
    assert words[0] == words[1] and "blocks/attn_norm/scale" in words[0]


def test_a_plan_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--plan", "--mesh", "data=4,model=2", "--min-shard-size", "0", "--data", "/not/needed"]
    assert main([*TINY, *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "MB on each device B/param stage 0 stage 1 stage 2 stage 3" in said
    assert "Placements at stage 3" in said and "Losses" not in said
    assert "blocks/up/kernel: forward: 2 x 2,048 bytes of float32 in" in said
    assert not list(tmp_path.iterdir())


def test_a_run_that_diverges_says_so(folder, tmp_path, capsys):
    options = ["--data", str(folder), "--optimizer", "sgd", "--lr", "1e30", "--clip", "0", "--batch-size", "8"]
    assert main([*TINY, *options, "--steps", "9", "--out", str(tmp_path / "run")]) == 1
    assert "try a lower --lr" in " ".join(capsys.readouterr().out.split())
    (summary,) = rows_of(tmp_path / "run", "summary")
    assert summary["status"] == "diverged" and summary["steps"] < 9


def test_interrupting_a_run_keeps_metrics_and_plot(folder, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "experiments.gpt", *TINY, "--data", str(folder), "--out", str(out)]
    options = ["--devices", "2", "--batch-size", "8", "--steps", "100000", "--eval-every", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.Popen(
        [*command, *options], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, said
    assert "2 devices are simulated" in " ".join(said.split()) and "Interrupted" in said and "Traceback" not in said
    assert (out / "loss.png").exists()
    (summary,) = rows_of(out, "summary")
    assert summary["status"] == "interrupted" and summary["steps"] == len(rows_of(out, "train")) >= 3


RESUMED = ["--steps", "5", "--batch-size", "8", "--sample", "0", "--eval-every", "2", "--save-every", "2"]
RESUMED += ["--min-shard-size", "64", "--devices", "2"]


def resumed(folder, out, *more):
    assert len(jax.devices()) == 8  # a run that is the first to start JAX would simulate no more than it needs
    return main([*TINY, *RESUMED, "--data", str(folder), *more, "--out", str(out)])


def losses(out):
    rows = rows_of(out, "train")
    assert [row["step"] for row in rows] == list(range(1, 6))
    return [(row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def stop(folder, out, monkeypatch, *more):
    """A run that gets a signal in its third step."""
    draw = data.sample_batch

    def stopped(text, *, step, **more):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(text, step=step, **more)

    monkeypatch.setattr("experiments.gpt.train.sample_batch", stopped)
    assert resumed(folder, out, *more) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert len(rows_of(out, "train")) == 3


def test_a_run_that_a_signal_stops_goes_on_bit_for_bit(folder, tmp_path, capsys, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    assert resumed(folder, whole) == 0
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["4", "5"]
    stop(folder, out, monkeypatch)
    assert "Interrupted after step 3. Saved; go on with --out" in capsys.readouterr().out
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["2", "3"]

    for more, words in [
        (["--lr", "1"], "was started with --lr 0.003 (now 1.0). Use the same."),
        (["--overwrite"], "leave --overwrite and --compare-stages out"),
    ]:
        with pytest.raises(SystemExit):
            resumed(folder, out, "--resume", *more)
        assert words in capsys.readouterr().err
    (folder / "more.txt").write_text("another text" * 100)
    with pytest.raises(SystemExit):
        resumed(folder, out, "--resume")
    assert "was trained on another text" in capsys.readouterr().err
    (folder / "more.txt").unlink()

    assert resumed(folder, out, "--resume") == 0
    assert "Goes on after step 3" in capsys.readouterr().out
    assert losses(out) == losses(whole)
    assert rows_of(out, "validation") == rows_of(whole, "validation") and len(rows_of(out, "validation")) == 3
    assert [row["status"] for row in rows_of(out, "summary")] == ["finished"]
    assert resumed(folder, out, "--resume") == 0
    said = capsys.readouterr().out
    assert "All 5 steps are made" in said and "nan" not in said and "Held-out text: " in said


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_a_run_goes_on_at_another_stage_and_mesh(folder, tmp_path, monkeypatch, precision):
    whole, out, more = tmp_path / "whole", tmp_path / "moved", ["--precision", precision]
    assert resumed(folder, whole, *more) == 0
    stop(folder, out, monkeypatch, *more)
    shutil.copytree(out, tmp_path / "same")
    assert resumed(folder, out, *more, "--resume", "--devices", "4", "--mesh", "data=2,model=2", "--stage", "1") == 0
    np.testing.assert_allclose(losses(out), losses(whole), rtol=1e-4 if precision == "fp32" else 3e-2)
    assert losses(out)[:3] == losses(whole)[:3]
    assert resumed(folder, tmp_path / "same", *more, "--resume") == 0
    assert losses(tmp_path / "same") == losses(whole)


def test_compare_stages_against_one_device(folder, tmp_path, capsys):
    out = tmp_path / "compared"
    mesh = ["--mesh", "replica=2,data=4", "--microbatches", "2", "--batch-size", "16", "--min-shard-size", "0"]
    options = [*TINY, "--data", str(folder), "--steps", "3", "--clip", "0", *mesh]
    assert main([*options, "--compare-stages", "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Losses agree to 6 digits" in said and "reduce-scatter" in said and "4P + 8P/N" in said

    stages = rows_of(out, "stage")
    assert [row["stage"] for row in stages] == [0, 1, 2, 3]
    config = dataclasses.replace(SMALL, steps=3, batch_size=16, clip=0)
    job, text = build(config, jzero.make_mesh(devices=jax.devices()[:1], data=1)), data.load(str(folder))
    params = jax.jit(job.init_params)(jax.random.key(0))
    opt_state, losses = job.tx.init(params), []
    value_and_grad, update = jax.jit(jax.value_and_grad(job.loss_fn)), jax.jit(job.tx.update)
    for step in range(3):
        batch = data.sample_batch(text.train, batch_size=16, context=config.context, seed=0, step=step)
        loss, grads = value_and_grad(params, jnp.asarray(batch))
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    for row in stages:
        np.testing.assert_allclose(row["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(row["losses"], stages[0]["losses"], rtol=1e-6)

    model = 4 * job.n_params
    both = [row["params_bytes"] + row["opt_bytes"] for row in stages]
    scalars = both[0] - 3 * model
    assert 0 <= scalars <= 16
    assert both == [3 * model + scalars, *[model + 2 * model // 4 + scalars] * 2, 3 * model // 4 + scalars]
    sizes = [
        {kind: sum(c["bytes"] for c in row["lowered"] if c["kind"] == kind and "data" in c["axes"]) for kind in kinds}
        for row in stages
        for kinds in [("all-gather", "reduce-scatter")]
    ]
    wanted = [(0, 0), (1, 1), (1, 2), (4, 2)]  # of 2 microbatches; at stage 3 gathered forward and backward
    assert sizes == [{"all-gather": gather * model, "reduce-scatter": scatter * model} for gather, scatter in wanted]


@pytest.mark.slow
def test_the_default_run_ends_under_3_2_bits_per_byte(tmp_path):
    out = tmp_path / "run"
    subprocess.run([sys.executable, "-m", "experiments.gpt", "--out", str(out)], cwd=ROOT, check=True)
    (summary,) = rows_of(out, "summary")
    assert summary["bits_per_byte"] < 3.2
