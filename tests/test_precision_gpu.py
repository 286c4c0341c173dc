"""Mixed precision in the programs that H200s run: what XLA has left of the dtypes on the wire.

No GPU is needed, but what compiles for them: pip install -e ".[preflight]", and JAX_PLATFORMS=cpu.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero import Precision
from jzero.program import compiled_collectives
from jzero.schedule import windows
from jzero.state import compile_init
from jzero.targets import target_mesh
from tests import gpus, reference
from tests.compiled_update import lower_update
from tests.reference_model import loss_fn

pytestmark = [pytest.mark.slow, gpus.compiles]
LAYERS, WIDTH, LENGTH, VOCABULARY = 4, 512, 256, 1024
SMALL = 2**16  # bytes; all that stays whole, norms and scalars, is less together, and XLA reduces it as one array


@functools.cache
def compiled_windows(precision, stage, mesh=(("data", 8),)):
    """The collectives of a whole training step of a GPT that says nothing of dtypes itself."""
    params = reference.init_params(layers=LAYERS, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), params)
    layout = jzero.zero(params, stage=stage, mesh=target_mesh("h200x8", **dict(mesh)), precision=precision)
    tx = optax.adamw(1e-3)
    state = jax.eval_shape(compile_init(lambda params: params, tx, layout), params)
    batch = {"tokens": jax.ShapeDtypeStruct((8 * 4, LENGTH + 1), jnp.int32)}
    compiled = jzero.train_step(loss_fn, tx, layout).lower(state, batch).compile()
    large = [w for w in windows(compiled, layout=layout) if w.bytes > SMALL]
    assert {w.axes for w in large} == {("data",)}
    return large


def dtypes(found):
    return {piece.dtype for window in found for piece in window.pieces}


def leaves(found):
    return {name for window in found for piece in window.pieces for name in piece.leaf.split(" + ")}


LARGE = {"embedding", "position", "blocks/qkv", "blocks/out", "blocks/up", "blocks/down"}


@pytest.mark.parametrize(
    ("precision", "wire"),
    [("bf16", "float32"), (Precision(reduce="bfloat16"), "bfloat16")],
    ids=["bf16", "narrow sums"],
)
def test_at_stage_three_weights_travel_in_bfloat16_and_gradients_as_asked(precision, wire):
    found = compiled_windows(precision, 3)
    gathers = [window for window in found if window.kind == "all-gather"]
    scatters = [window for window in found if window.kind == "reduce-scatter"]
    assert len(gathers) + len(scatters) == len(found), "nothing else that is large"
    assert dtypes(gathers) == {"bfloat16"}
    assert dtypes(scatters) == {wire}
    assert {window.purpose for window in gathers} == {"forward", "backward"}
    assert leaves(gathers) >= LARGE and leaves(scatters) >= LARGE
    assert all(window.asynchronous for window in gathers)


@pytest.mark.parametrize("stage", [1, 2])
def test_updated_params_are_gathered_in_bfloat16(stage):
    found = compiled_windows("bf16", stage)
    gathers = [window for window in found if window.kind == "all-gather"]
    assert dtypes(gathers) == {"bfloat16"}
    assert {window.purpose for window in gathers} == {"update"}
    assert leaves(gathers) >= LARGE
    assert {(w.kind, *dtypes([w])) for w in found if w.kind != "all-gather"} == {("reduce-scatter", "float32")}


def test_random_bits_take_no_memory_that_counts():
    """At stage 3, beside an update that rounds to the nearest: less than a shard of one leaf in bfloat16."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((2048, 4096), "float32") for i in range(4)}
    mesh, temp = target_mesh("h200x8", data=8), {}
    with pytest.warns(UserWarning, match="16 bits"):
        nearest = Precision(master=None, moments="bfloat16")
    for name, precision in {"nearest": nearest, "random": "bf16-pure"}.items():
        layout = jzero.zero(shapes, stage=3, mesh=mesh, precision=precision)
        compiled = lower_update(optax.adamw(1e-3), layout).compile()
        assert compiled_collectives(compiled) == ()
        analysis: Any = compiled.memory_analysis()
        temp[name] = analysis.temp_size_in_bytes
    assert temp["random"] - temp["nearest"] < 2 * 2048 * 4096 // 8
