"""Reports on steps that are compiled for GPUs which are not there, and the command line around them.

No GPU is needed, but for most of this what compiles for them: pip install -e ".[preflight]", and JAX_PLATFORMS=cpu.
"""

import functools
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jzero
from experiments.gpt import train_1b3
from jzero.cli import main
from jzero.compiling import Unsupported
from jzero.devices import DEVICES
from jzero.events import Piece, Window
from jzero.preflight_report import Line
from jzero.preflight_tables import groups, of_xla
from jzero.schedule_plot import block_schedule
from jzero.targets import has_pjrt, target_mesh
from jzero.timeline import Span
from tests import gpus


def for_gpus(test):
    return pytest.mark.slow(gpus.compiles(test))


LAYERS, WIDTH, TOKENS = 6, 256, 64
ONE = 2 * TOKENS * WIDTH**2  # FLOPs of one matmul of a shard's batch


def init_params(key):
    up, down, table = (jax.random.normal(k, (LAYERS, WIDTH, WIDTH)) for k in jax.random.split(key, 3))
    return {"up": up, "down": down, "table": table[0], "bias": jnp.zeros(WIDTH)}


def loss_fn(params, batch, **_):
    def block(x, weights):
        up, down = weights
        return x + jax.nn.relu(x @ up) @ down, None

    batch = batch.astype(params["table"].dtype)
    x, _ = lax.scan(jax.checkpoint(block), batch @ params["table"], (params["up"], params["down"]))
    return jnp.mean((x + params["bias"]) ** 2)


def made(mesh, *, stage=3, tx=None, loss=loss_fn, init=None, batch=None, layout=None, **options):
    """A step, the shapes of its state, and of its batch."""
    tx = optax.adam(1e-3) if tx is None else tx
    params = jax.eval_shape(init_params, jax.random.key(0))
    layout = jzero.zero(params, stage=stage, mesh=mesh, **(layout or {}))
    given = functools.partial(jzero.init, init_params, tx, layout, loss_scale=options.get("loss_scale"), **(init or {}))
    state = jax.eval_shape(given, jax.random.key(0))
    batch = batch or jax.ShapeDtypeStruct((TOKENS * layout.batch_shards, WIDTH), jnp.float32)
    return jzero.train_step(loss, tx, layout, **options), state, batch


@functools.cache
def report():
    return jzero.preflight(*made(target_mesh("h200x8", data=8), layout={"precision": "bf16"}), target="h200x8")


@for_gpus
def test_memory_and_buffers_of_a_step():
    found = report()
    held = {one.name: one for one in found.held}
    assert held["up"].shape == (LAYERS, WIDTH // 8, WIDTH) and held["up"].dtype == "float32"
    assert held["0/mu/up"].bytes == held["up"].bytes == LAYERS * WIDTH**2 * 4 // 8
    assert found.memory.arguments == sum(one.bytes for one in found.held)
    state = jzero.memory.stored_bytes(found_layout := made(jzero.make_mesh(data=8))[0].layout, optax.adam(1e-3))
    batch = TOKENS * WIDTH * 4
    assert found.memory.arguments - state.total - batch in range(16, 33), "step, and counts of skipped steps"
    assert found_layout.shards == 8
    assert found.fits and found.memory.peak >= found.memory.arguments + found.memory.temporaries
    assert found.temporaries and sum(one.bytes for one in found.temporaries) <= found.memory.temporaries
    assert any("block (test_preflight.py" in one.where for one in found.temporaries)
    assert any("jzero.gather" in one.name for one in found.temporaries)


@for_gpus
def test_flops_are_three_times_those_of_the_forward_pass():
    """Apart from what is recomputed: the first matmul of each block."""
    forward = (2 * LAYERS + 1) * ONE
    unneeded = ONE  # the gradient of the batch
    assert report().bound.model_flops == 3 * forward - unneeded
    assert report().bound.flops == 3 * forward - unneeded + LAYERS * ONE
    assert report().bound.peak == DEVICES["h200"].flops["bfloat16"]
    assert 0 < report().bound.mfu < 1
    assert report().bound.seconds >= report().bound.compute > 0


@for_gpus
def test_collectives_against_theory():
    found = report()
    assert not found.broken and not found.not_donated
    weights = (2 * LAYERS + 1) * WIDTH**2
    moved = {one.what: 0 for one in found.moved}
    for one in found.moved:
        moved[one.what] += one.bytes if one.kind != "all-reduce" else 0
    assert moved["gather, forward"] == 2 * weights and moved["reduce"] == 4 * weights
    assert moved["gather, backward"] == 2 * (weights - WIDTH**2), "the batch needs no gradient through the table"
    gathers = [one for one in found.sent if one.window.kind == "all-gather"]
    assert {one.window.axes for one in gathers} == {("data",)}
    assert {one.link.name for one in gathers} == {"within hosts"}
    assert sum(one.wire_bytes * one.window.passes for one in gathers) == (
        (moved["gather, forward"] + moved["gather, backward"]) * 7 / 8
    )
    for one in found.sent:
        assert one.seconds == one.wire_bytes / 450e9
    assert sum(one.waits for one in found.sent) == pytest.approx(found.bound.waiting)


@for_gpus
def test_text_json_and_picture():
    text = str(report())
    for line in (
        "Stage 3 on h200x8",
        "Donation: the new state",
        "Collectives in loop 1",
        "a model and not a measurement",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 120
    plain = json.loads(json.dumps(report().as_dict()))
    assert plain["fits"] and plain["memory"]["peak"] == report().memory.peak
    assert plain["bound"]["mfu"] == report().bound.mfu and "not a measurement" in plain["bound_is"]
    axes = block_schedule(report()).axes
    assert "forward pass" in axes[0].get_title(loc="left") + axes[1].get_title(loc="left")
    for panel in axes:
        assert [label.get_text() for label in panel.get_yticklabels()] == ["matmuls", "within hosts"]


@for_gpus
def test_a_step_of_another_mesh_is_the_step_made_there():
    here, there = jzero.make_mesh(replica=2, data=4), target_mesh("a100x2x4", replica=2, data=4)
    options = {"microbatches": 2, "clip_norm": 1.0, "layout": {"replica_axes": ("replica",)}}
    moved = jzero.preflight(*made(here, **options), target="a100x2x4")
    direct = jzero.preflight(*made(there, **options), target="a100x2x4")
    assert moved.as_dict() == direct.as_dict()
    assert {one.link.name for one in moved.sent if one.window.axes == ("replica",)} == {"between hosts"}
    assert any("ConnectX-6" in note for note in moved.notes)
    live = jzero.init(init_params, optax.adam(1e-3), made(here, **options)[0].layout, jax.random.key(0))
    step, _, batch = made(here, **options)
    links = {"replica": 1e9}
    slow = jzero.preflight(
        step, live, jnp.zeros(batch.shape), target="a100x2x4", mesh={"replica": 2, "data": 4}, links=links
    )
    assert slow.memory == moved.memory
    assert {one.link.bandwidth for one in slow.sent if one.window.axes == ("replica",)} == {1e9}
    assert slow.bound.seconds > moved.bound.seconds


@for_gpus
def test_whole_leaves_of_an_optimizer_are_noted():
    """Which `audit` takes for a broken promise, unless they are allowed."""

    def centred(updates, params):
        return jax.tree.map(lambda g: g - g.mean(-2, keepdims=True) if g.ndim > 1 else g, updates)

    tx = optax.chain(optax.stateless(centred), optax.sgd(0.1))
    step, state, batch = made(jzero.make_mesh(data=8), stage=2, tx=tx)
    assert {one.subject for one in jzero.audit(step, state, batch).broken} == {"partitioner"}
    found = jzero.preflight(step, state, batch)
    assert not found.broken and any("the partitioner has put" in note for note in found.notes)


@for_gpus
def test_two_axes_cannot_take_what_is_left():
    with pytest.raises(ValueError, match="-1"):
        target_mesh("h200x8", data=-1, model=-1)
    with pytest.raises(ValueError, match="multiply to 4"):
        target_mesh("h200x8", data=4)


RULES = [("up", P(None, None, "model")), ("down", P(None, "model"))]


def stateful(params, batch, model_state):
    return loss_fn(params, batch), {"mean": 0.9 * model_state["mean"] + 0.1 * batch.mean(0)}


CASES = {
    "stage 0": ({}, {"stage": 0}),
    "stage 1, several microbatches": ({}, {"stage": 1, "microbatches": 4}),
    "stage 2, fp16": ({}, {"stage": 2, "loss_scale": jzero.DynamicLossScale(), "layout": {"precision": "fp16"}}),
    "no optimizer state": ({}, {"tx": optax.sgd(0.1)}),
    "frozen": ({}, {"layout": {"trainable": lambda path, leaf: path != "table", "precision": "bf16"}}),
    "kept": ({}, {"layout": {"regather": False}}),
    "padded": ({"data": 7, "model": 1}, {}),
    "model axis": ({"data": 4, "model": 2}, {"stage": 1, "layout": {"rules": RULES, "precision": "bf16"}}),
    "model axis at stage 3": ({"data": 4, "model": 2}, {"layout": {"rules": RULES}}),
    "key": ({}, {"with_key": True, "init": {"key": jax.random.key(1)}}),
    "key that is not used": ({}, {"init": {"key": jax.random.key(1)}}),
    "model state": (
        {},
        {"loss": stateful, "with_model_state": True, "init": {"model_state": {"mean": jnp.zeros(WIDTH)}}},
    ),
    "spikes": ({}, {"spike": 10.0, "norm_groups": {"up": "up"}}),
}


@for_gpus
@pytest.mark.parametrize(("axes", "options"), CASES.values(), ids=CASES)
def test_no_promise_is_broken(axes, options):
    axes = axes or {"data": 8}
    target = f"h200x{axes['data'] * axes.get('model', 1)}"
    found = jzero.preflight(*made(target_mesh(target, **axes), **options), target=target)
    assert not found.broken and not any("partitioner" in note for note in found.notes)
    assert not found.not_donated
    assert found.memory.arguments == sum(one.bytes for one in found.held)
    assert str(found) and json.dumps(found.as_dict())


@for_gpus
def test_what_does_not_fit_and_is_not_donated_is_told(monkeypatch):
    monkeypatch.setitem(DEVICES, "h200", replace(DEVICES["h200"], memory=3_000_000))
    step, state, batch = made(target_mesh("h200x8", data=8), compiler_options={})
    donating = step.jitted
    step.jitted = jax.jit(lambda state, batch: donating(state, batch))
    found = jzero.preflight(step, state, batch)
    assert not found.fits and "up" in "".join(found.not_donated)
    assert {one.subject for one in found.broken} == {"memory", "donation"}
    assert "DOES NOT FIT" in str(found)


@for_gpus
def test_what_cannot_be_compiled_says_why_and_what_to_do():
    mesh = target_mesh("h200x8", data=8)

    def attends(params, batch):
        x = (batch @ params["table"]).astype(jnp.bfloat16).reshape(1, TOKENS, 4, -1)
        return jax.nn.dot_product_attention(x, x, x, implementation="cudnn").astype(jnp.float32).mean()

    def decomposes(params, batch):
        return jnp.linalg.qr(batch @ params["table"])[1].sum()

    with pytest.raises(Unsupported, match=r"cuDNN's attention.*implementation='xla'"):
        jzero.preflight(*made(mesh, loss=attends))
    with pytest.raises(Unsupported, match=r"cusolver_geqrf_ffi.*decompositions.*leave that part out"):
        jzero.preflight(*made(mesh, loss=decomposes))


@for_gpus
@pytest.mark.parametrize("target", ["h100x4", "b200x4", "l40sx4"])
def test_other_gpus(target):
    found = jzero.preflight(*made(jzero.make_mesh(devices=jax.devices()[:4], data=4)), target=target)
    assert found.fits and found.device is DEVICES[target[:-2]]


# What needs no compiler for GPUs.


def lines(*written_and_compiled):
    return [Line(what, "all-reduce", ("data",), 0.0, *sizes) for what, *sizes in written_and_compiled]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (lines(("reduce", 100.0, 100.0), ("sum", 7.0, 7.0)), ""),
        (lines(("reduce", 100.0, 107.0), ("sum", 7.0, 0.0)), "as much as written, but XLA has joined several"),
        (lines(("reduce", 100.0, 0.0), ("other", 0.0, 100.0)), "as much as written, but XLA has joined several"),
        (lines(("reduce", 100.0, 100.0), ("other", 0.0, 4.0)), "4 B more than written, by the partitioner"),
        (lines(("reduce", 100.0, 60.0), ("sum", 7.0, 7.0)), "40 B less than written: XLA has removed"),
    ],
)
def test_why_xla_sends_other_bytes(found, reason):
    norm = Window("all-reduce", (Piece("float32", (), "", ""),), ("data",), True, 0, group=8, where="jzero.norm/sum")
    sent: Any = SimpleNamespace(sent=[SimpleNamespace(window=norm)])
    said = of_xla(sent, found)
    assert reason in said and bool(said) == bool(reason)
    assert not said or "less" in said or said.endswith(": jzero.norm/sum")


@pytest.mark.parametrize(
    ("purposes", "title", "legend"),
    [
        (("forward",), "forward pass: loop 1, one of 4 passes", {"gather, forward"}),
        (("forward", "scatter"), "forward and backward pass: loop 1", {"gather, forward", "reduce gradients"}),
        (("lookup",), "a loop: loop 1", {"other"}),
    ],
)
def test_the_picture_names_every_colour_and_both_passes(purposes, title, legend):
    windows = [
        Window("all-gather", (Piece("int8", (9,), purpose, "w"),), ("data",), True, 0, (1,), 4) for purpose in purposes
    ]
    spans = [Span(window, "within hosts", at, at + 1.0) for at, window in enumerate(windows)]
    found: Any = SimpleNamespace(
        sent=[SimpleNamespace(window=window, wire_bytes=9.0) for window in windows],
        timeline=SimpleNamespace(spans={(1,): spans}),
        axes=(("data", 8),),
        target="h200x8",
    )
    figure = block_schedule(found)
    assert figure.axes[0].get_title(loc="left").startswith(title)
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown == legend | {"matmuls", "waiting for a collective"}


def test_lines_are_told_apart_by_kind_and_axes():
    found = [*lines(("reduce", 1.0, 1.0), ("sum", 1.0, 1.0)), Line("reduce", "all-reduce", ("replica",), 0, 0, 0)]
    assert groups(found) == [found[:2], found[2:]]


MODEL = """
import jax, jax.numpy as jnp, optax, jzero
from tests.test_preflight import made

def config(mesh):
    return made(mesh)

def takes_more(mesh, key):
    return made(mesh)

def takes_none():
    return made(None)

def returns_a_list(mesh):
    return list(made(mesh))

def returns_others(mesh):
    return made(mesh)[1:]

def fails(mesh):
    return {}["absent"]

def runs_out(mesh):
    raise MemoryError("no memory for 4 TB")

def too_large(mesh):
    jnp.ones((1 << 20, 1 << 24))

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mymodel.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    monkeypatch.setattr("jzero.cli.preflight.target_mesh", lambda target, **axes: jzero.make_mesh(**axes))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("mymodel:config --target h300x8", "wanted a GPU (a100, h100, h200, b200, l40s) and how many"),
        ("mymodel:config --target h200", "wanted a GPU"),
        ("mymodel:config --mesh data", "'data' is not a name and a positive size"),
        ("mymodel:config --mesh model=8", "data_axes names 'data', but the mesh has axes ('model',)"),
        ("mymodel:config --mesh data=4,target=2", "--mesh: no mesh axis can be named 'target'"),
        ("mymodel:config --link fast", "'fast'; wanted a speed, as 450GB/s, or 400Gb/s in bits"),
        ("mymodel:config --link data=450GB/s,replica", "wanted a speed, or axes and speeds: replica=40GB/s"),
        ("mymodel:config --plot block.xyz", "cannot write .xyz; "),
        ("mymodel:config --plot nowhere/block.png", "No such file or directory"),
        ("mymodel", "wanted module:name"),
        ("absent:config", "ModuleNotFoundError: No module named 'absent'"),
        ("broken:config", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("mymodel:absent", "has no 'absent'; it has config, takes_more, takes_none"),
        ("mymodel:number", "is a int; wanted a function of one argument, the mesh"),
        ("mymodel:takes_more", "takes arguments, (mesh, key); wanted a function of one argument, the mesh"),
        ("mymodel:takes_none", "takes arguments, (); wanted a function of one argument, the mesh"),
        ("mymodel:returns_a_list", "returned (list); wanted (step, state, batch)"),
        ("mymodel:returns_others", "returned (TrainState, ShapeDtypeStruct); wanted (step, state, batch)"),
        ("mymodel:fails", "failed with KeyError: 'absent' (mymodel.py:21)"),
        ("mymodel:runs_out", "failed with MemoryError: no memory for 4 TB (mymodel.py:24)"),
        ("mymodel:too_large", "failed with JaxRuntimeError: RESOURCE_EXHAUSTED"),
    ],
)
def test_bad_input(folder, capsys, options, message):
    assert main(["preflight", *options.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_wrong_arguments(monkeypatch):
    step, state, batch = made(mesh := jzero.make_mesh(data=8))
    with pytest.raises(TypeError, match=r"step is a function; wanted what jzero.train_step returns"):
        jzero.preflight(loss_fn, state, batch)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="target 'tpux8'; wanted a GPU"):
        jzero.preflight(step, state, batch, target="tpux8")
    with pytest.raises(
        ValueError, match=r"h200x2x8 has 16 GPUs, and the step's own mesh, \{'data': 8\}, 8 devices. Say"
    ):
        jzero.preflight(step, state, batch, target="h200x2x8")
    for name in ("target", "device_memory", "devices"):
        with pytest.raises(ValueError, match=f"preflight: no mesh axis can be named '{name}', an option"):
            jzero.preflight(step, state, batch, mesh={"data": 4, name: 2})
    monkeypatch.setattr(sys.modules["jzero.preflight"], "target_mesh", lambda target, **axes: mesh)
    with pytest.raises(ValueError, match="links names 'replica', but the mesh has axes"):
        jzero.preflight(step, state, batch, links={"replica": 1e9})
    with pytest.raises(ValueError, match=r"links\['data'\]=0; wanted bytes per second"):
        jzero.preflight(step, state, batch, links={"data": 0})
    with pytest.raises(TypeError, match="state is a dict; wanted the TrainState"):
        jzero.preflight(step, {}, batch)
    with pytest.raises(ValueError, match=r"state\.opt_state has another structure than wanted"):
        jzero.preflight(step, replace(state, opt_state=()), batch)
    odd = jax.ShapeDtypeStruct((12, WIDTH), jnp.float32)
    with pytest.raises(ValueError, match=r"12 examples do not divide into 8 equal parts.*Use a batch of 16"):
        jzero.preflight(step, state, odd)


def test_a_model_of_the_experiments_without_a_data_axis():
    with pytest.raises(ValueError, match=r"data_axes names 'data', but the mesh has axes \('model',\)"):
        train_1b3(jzero.make_mesh(model=8))


@pytest.mark.skipif(has_pjrt(), reason="there is one")
def test_without_a_compiler_for_gpus(folder, capsys, monkeypatch):
    monkeypatch.undo()
    assert main(["preflight", "experiments.gpt:train_config"]) == 2
    assert 'pip install "jzero[preflight]"' in capsys.readouterr().err


@for_gpus
def test_command_line(folder, capsys, monkeypatch):
    monkeypatch.setattr("jzero.cli.preflight.target_mesh", target_mesh)
    options = ["preflight", "mymodel:config", "--target", "h200x2x4", "--link", "90GB/s"]
    assert main([*options, "--json", "--plot", "block.pdf"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["link"]["bandwidth"] for one in found["collectives"]} == {90e9}
    assert (folder / "block.pdf").read_bytes()[:4] == b"%PDF"
    monkeypatch.setitem(DEVICES, "h200", replace(DEVICES["h200"], memory=1_000_000))
    assert main(options) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["preflight", "mymodel:config", "--target", "h200x2x4", "--mesh", "data=4"]) == 2
    assert "8 GPUs, but the axes multiply to 4" in capsys.readouterr().err


@for_gpus
@pytest.mark.parametrize(
    ("function", "target", "mesh", "params"),
    [
        ("experiments.gpt:train_config", "h200x8", {"data": 8}, 820_000),
        ("experiments.gpt:train_1b3", "h200x8", {"data": 8}, 1.3e9),
        ("experiments.llama:train_8b", "h200x2x8", {"data": 16}, 8.03e9),
        ("experiments.llama:train_8b", "h200x2x8", {"replica": 2, "data": 8}, 8.03e9),
    ],
)
def test_models_of_the_experiments(capsys, function, target, mesh, params):
    axes = ",".join(f"{name}={size}" for name, size in mesh.items())
    assert main(["preflight", function, "--target", target, "--mesh", axes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    weights = sum(one["bytes"] for one in found["held"] if one["kind"] == "params")
    assert weights * mesh["data"] / 4 == pytest.approx(params, rel=0.03)
    assert found["fits"] and not found["broken"] and not found["not_donated"]
