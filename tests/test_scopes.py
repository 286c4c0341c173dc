"""The names by which a trace reads: they are in the program, and change nothing else in it."""

import contextlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero import hlo, scopes
from jzero.state import compile_init
from jzero.targets import target_mesh
from tests import gpus, models

GATHERED = {"blocks/up", "blocks/down", "blocks/bias", "table"}
PHASES = {"jzero.forward", "jzero.backward", "jzero.norm", "jzero.update"}


def lower(stage, mesh, **options):
    params = jax.eval_shape(models.init_params, jax.random.key(0))
    used = {key: params[key] for key in ("table", "blocks")}
    replica_axes = ("replica",) if "replica" in mesh.axis_names else ()
    layout = jzero.zero(used, stage=stage, mesh=mesh, min_shard_size=30, replica_axes=replica_axes, **options)
    tx = optax.adam(1e-3)
    state = jax.eval_shape(compile_init(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), used), tx, layout))
    step = jzero.train_step(models.loss("remat"), tx, layout, clip_norm=1.0)
    return step.lower(state, {"tokens": jax.ShapeDtypeStruct((48, 8), "int32")})


def names_in(text):
    """Every scope of jzero's in a program's text."""
    return set(re.findall(r"jzero\.[a-z.]+(?:\[[^\]]*\])?", text))


def expected(stage):
    def of(name, leaves=GATHERED):
        return {f"jzero.{name}[{leaf}]" for leaf in leaves}

    if stage == 0:
        return PHASES | of("reduce") | {"jzero.sum[]"}
    if stage < 3:
        return PHASES | of("scatter") | of("gather.update") | {"jzero.sum[]"}
    again = GATHERED - {"blocks/bias"}
    return PHASES | of("scatter") | of("gather.forward") | of("gather.backward", again) | {"jzero.sum[]"}


@pytest.mark.parametrize(("stage", "ahead"), [(0, False), (1, False), (2, True), (3, False), (3, True)])
def test_names_are_in_the_lowered_program_and_change_nothing_else(stage, ahead, monkeypatch):
    mesh = jzero.make_mesh(replica=2, data=4)
    lowered = lower(stage, mesh, ahead=ahead)
    assert names_in(lowered.as_text(debug_info=True)) == expected(stage)
    assert "jzero." not in lowered.as_text()
    for scope in ("phase", "collective"):
        monkeypatch.setattr(scopes, scope, lambda *_: contextlib.nullcontext())
    jax.clear_caches()
    plain = lower(stage, mesh, ahead=ahead)
    left = names_in(plain.as_text(debug_info=True))
    assert left <= {"jzero.update"}, "a decorator, which is there before the patch"
    assert plain.as_text() == lowered.as_text()


@pytest.mark.parametrize("stage", [1, 3])
def test_names_are_in_the_compiled_program(stage):
    text = lower(stage, jzero.make_mesh(data=8)).compile().as_text() or ""
    found = names_in(text)
    # XLA:CPU makes one gather of the two of the table.
    assert found <= expected(stage) and expected(stage) - found <= {"jzero.gather.backward[table]"}
    # What is computed in a phase is in it, and a collective is in the phase whose work it is.
    phases = re.findall(r'op_name="[^"]*?(jzero\.\w+)/[^"]*/dot_general"', text)
    assert set(phases) == {"jzero.forward", "jzero.backward"}
    for name in ("gather.forward", "gather.backward"):
        around = re.findall(rf'op_name="[^"]*?(jzero\.\w+)/[^"]*jzero\.{name}\[', text)
        assert set(around) == ({"jzero." + name.partition(".")[2]} if stage == 3 else set())


@pytest.mark.slow
@gpus.compiles
@pytest.mark.parametrize("stage", [1, 3])
def test_names_are_in_the_program_of_a_gpu(stage):
    program = hlo.parse(lower(stage, target_mesh("h200x8", data=8)).compile().as_text() or "")
    lines = [line for computation in program.computations.values() for line in computation]
    found = names_in("\n".join(name for line in lines for name in line.op_names))
    assert found == expected(stage)


def test_reading_a_name():
    assert scopes.read("a/jzero.gather.backward[blocks/0/w]/all_gather") == ("backward", "blocks/0/w")
    assert scopes.read("jzero.scatter[list[0]]/shard_map/psum") == ("scatter", "list[0]")
    assert scopes.read("jzero.reduce[]/psum") == ("reduce", "")
    for other in ("jzero.forward/dot_general", "jzero.update/add", "psum", ""):
        assert scopes.read(other) is None
