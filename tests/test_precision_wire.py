"""Dtypes and bytes on the wire, in the lowered program: narrow gathers everywhere, reductions as asked.

The model's table is tied and its blocks are rematerialised, so that at stage 3 every leaf is gathered twice for each
microbatch. All is counted in elements: P of the params (of a model shard, where there is a model axis).
"""

import math
from collections import Counter
from typing import Any

import jax
import optax
import pytest

import jzero
from jzero import Precision, Stage
from jzero.program import collectives
from jzero.state import compile_init
from tests.precision_model import ELEMENTS, MESHES, SIZES, elements_per_model_shard, init_params, loss_fn, make_layout

TX = optax.adam(1e-3)
EIGHT, REPLICAS, MODEL = MESHES
GATHERS, SCATTERS, SUMS = "all-gather", "reduce-scatter", "all-reduce"
F32, BF16, F16 = "float32", "bfloat16", "float16"


def lowered(layout, microbatches=1):
    """Lowers a whole training step, from shapes alone."""
    state = jax.eval_shape(compile_init(init_params, TX, layout))
    batch = {name: jax.ShapeDtypeStruct((24, 4), "int32") for name in ("tokens", "next")}
    return jzero.train_step(loss_fn, TX, layout, microbatches=microbatches).lower(state, batch)


def moved(layout, microbatches=1):
    """Elements that cross the data and replica axes, by kind, dtype and axes. The loss's scalar is left out."""
    found: Counter[Any] = Counter()
    for row in collectives(lowered(layout, microbatches), layout.mesh):
        assert row.exact
        if row.shape and row.axes != ("model",):  # activations travel over the model axis
            found[row.kind, row.dtype, row.axes] += math.prod(row.shape) * row.count
    return found


def expected(stage, wire, m, axes, gather=BF16, gathers=2):
    """By the table of stages. `gathers` is how often stage 3 gathers."""
    P, data, all_axes = elements_per_model_shard(axes), ("data",), tuple(x for x in axes if x != "model")
    if stage == 0:
        return Counter({(SUMS, wire, all_axes): P})
    table = {
        1: {GATHERS: P, SCATTERS: P},
        2: {GATHERS: P, SCATTERS: m * P},
        3: {GATHERS: gathers * m * P, SCATTERS: m * P},
    }
    found = Counter({(GATHERS, gather, data): table[stage][GATHERS], (SCATTERS, wire, data): table[stage][SCATTERS]})
    if "replica" in axes:
        found[SUMS, wire, ("replica",)] = table[stage][SCATTERS] // axes["data"]
    return found


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("precision", "gather", "wire"),
    [
        ("bf16", BF16, F32),
        (Precision(reduce=BF16), BF16, BF16),
    ],
    ids=["bf16", "reduce in bfloat16"],
)
def test_every_gather_is_narrow_and_every_reduction_as_asked(precision, gather, wire, stage, microbatches):
    """At stages 1 and 2 that is the gather of the update, at 3 those of the forward and of the backward pass."""
    found = moved(make_layout(stage, precision, EIGHT), microbatches)
    assert found == expected(stage, wire, microbatches, EIGHT, gather)


@pytest.mark.parametrize(
    ("precision", "gather", "wire"),
    [
        ("fp32", F32, F32),
        ("fp16", F16, F32),
        ("bf16-pure", BF16, F32),
        (Precision(compute=F16, reduce=F16), F16, F16),
        (Precision(compute=F16, reduce=BF16), F16, BF16),
        (Precision(compute=F32, reduce=BF16), F32, BF16),
        (Precision(reduce=None), BF16, BF16),
        (None, F32, F32),
    ],
    ids=["fp32", "fp16", "bf16-pure", "all float16", "both", "narrow sums alone", "as it is born", "none"],
)
@pytest.mark.filterwarnings("ignore:train_step. params are used in float16")
def test_other_precisions_at_stage_three(precision, gather, wire):
    assert moved(make_layout(3, precision, EIGHT)) == expected(3, wire, 1, EIGHT, gather)


@pytest.mark.parametrize(
    ("stage", "axes", "options", "gathers"),
    [
        (3, EIGHT, {"regather": False}, 1),
        (3, EIGHT, {"ahead": True}, 2),
        (2, EIGHT, {"ahead": True}, 0),
        (3, EIGHT, {"regather": False, "ahead": True}, 1),
        (1, REPLICAS, {}, 0),
        (3, REPLICAS, {}, 2),
        (0, MODEL, {}, 0),
        (1, MODEL, {}, 0),
        (2, MODEL, {}, 0),
        (3, MODEL, {}, 2),
        (3, MODEL, {"ahead": True}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("wire", [F32, BF16])
def test_so_it_is_with_other_schedules_and_meshes(wire, stage, axes, options, gathers):
    layout = make_layout(stage, Precision(reduce=wire), axes, **options)
    assert moved(layout, 3 if wire == F32 else 1) == expected(
        stage, wire, 3 if wire == F32 else 1, axes, gathers=gathers
    )


def test_bytes_are_halved_where_the_dtype_is():
    """At stage 3, as `jzero.program` counts: 2 x 2P of gathers for 2 x 4P, and 2P of scatters for 4P."""
    found = {}
    for name, precision in {"wide": "fp32", "narrow": Precision(reduce=BF16)}.items():
        layout = make_layout(3, precision, EIGHT)
        for row in collectives(lowered(layout), layout.mesh):
            found[name, row.kind] = found.get((name, row.kind), 0) + row.bytes
    assert (found["wide", GATHERS], found["narrow", GATHERS]) == (8 * ELEMENTS, 4 * ELEMENTS)
    assert (found["wide", SCATTERS], found["narrow", SCATTERS]) == (4 * ELEMENTS, 2 * ELEMENTS)
    assert found["wide", SUMS] == found["narrow", SUMS] == 4, "the loss, in float32"


@pytest.mark.parametrize("stage", [1, 3])
def test_only_what_is_exempt_is_gathered_wide(stage):
    layout = make_layout(stage, Precision(exempt=["*norm*"]), EIGHT)
    norm, times = SIZES["blocks/norm"], 2 if stage == 3 else 1
    assert moved(layout) == {
        (GATHERS, F32, ("data",)): times * norm,
        (GATHERS, BF16, ("data",)): times * (ELEMENTS - norm),
        (SCATTERS, F32, ("data",)): ELEMENTS,
    }


@pytest.mark.parametrize("stage", [3, Stage("sharded", "sharded", "sharded", "end")], ids=["3", "end"])
def test_leaves_that_stay_whole_are_summed_in_the_dtype_where_they_are_born(stage):
    """Also where they are stored in float32, and were summed in it over microbatches."""
    layout = make_layout(stage, Precision(reduce=None), EIGHT, min_shard_size=SIZES["blocks/norm"] + 1)
    norm, times = SIZES["blocks/norm"], 3 if stage == 3 else 1
    assert moved(layout, 3) == {
        (GATHERS, BF16, ("data",)): 2 * 3 * (ELEMENTS - norm),
        (SCATTERS, BF16, ("data",)): times * (ELEMENTS - norm),
        (SUMS, BF16, ("data",)): norm,
    }


def test_explain_names_the_narrow_gathers():
    layout = make_layout(3, "bf16", EIGHT)
    batch = {name: jax.ShapeDtypeStruct((24, 4), "int32") for name in ("tokens", "next")}
    text = str(jzero.explain(layout, loss_fn, batch))
    assert "2 x 1,024 bytes of bfloat16 in block" in text
    assert "of float32 in" not in text
