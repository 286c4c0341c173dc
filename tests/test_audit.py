"""`jzero.audit`: what it counts is what other tests count by hand, and what is broken on purpose it names."""

import dataclasses
import functools
import io
import json
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from rich.console import Console

import jzero
from jzero import Precision, collectives, run
from jzero.audit_tables import tables
from jzero.loss_scale import as_loss_scale
from jzero.partitioner import of_partitioner
from jzero.plain import plain
from jzero.program import Collective, Origin, collectives_by_origin
from jzero.promise import broken_in, compare
from jzero.state import compile_init, state_shardings
from jzero.targets import target_mesh
from tests import gpus, models
from tests.models import STAGES, L
from tests.precision_model import elements_per_model_shard
from tests.precision_model import init_params as precise_params
from tests.precision_model import loss_fn as precise_loss
from tests.precision_model import make_layout as precise_layout
from tests.test_communication import (
    AGAIN,
    CUT,
    OPTIMIZERS,
    TABLE,
    WHOLE,
    M,
    init_params,
    make_layout,
    mean_loss,
)

BATCH = jax.ShapeDtypeStruct((64, 16), jnp.float32)
MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"replica": 2, "data": 4}]


def abstract_state(layout, tx, make=init_params):
    return jax.eval_shape(compile_init(make, tx, layout))


def audit(layout, loss_fn: Any = mean_loss, batch: Any = BATCH, make=init_params, tx=OPTIMIZERS["adamw"], **options):
    step = jzero.train_step(loss_fn, tx, layout, **options)
    return jzero.audit(step, abstract_state(layout, tx, make), batch)


def bytes_of(report, *whats, axes=None):
    """Bytes of whole arrays in the program by kind, of what moves for one of these."""
    found = Counter()
    for one in report.moved:
        if one.what in whats and axes in (None, one.axes):
            found[one.kind] += one.bytes
    return +found


@pytest.mark.parametrize(
    ("stage", "axes"),
    [*((stage, MESHES[0]) for stage in STAGES), *((stage, MESHES[2]) for stage in ("0", "1", "2", "3"))],
    ids=lambda x: "-".join(x),
)
def test_counts_are_those_made_by_hand(stage, axes):
    """Of `test_communication`: leaf by leaf, and in wire bytes per axis."""
    m, layout = 4, make_layout(stage, **axes)
    report, times = audit(layout, microbatches=m, clip_norm=1.0), TABLE[stage](m)
    report.check()
    data, everywhere = axes["data"], math.prod(axes.values())
    whole = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for dtype, shape in WHOLE)
    assert bytes_of(report, "reduce")["reduce-scatter"] == times.get("reduce-scatter", 0) * M
    forward, backward, update = (
        bytes_of(report, f"gather, {phase}")["all-gather"] for phase in ("forward", "backward", "update")
    )
    if layout.stage.params == "sharded":
        assert (forward, backward, update) == (times["all-gather"] * M, times["again"] * AGAIN, 0)
        (a,) = [one for one in report.moved if one.what == "gather, backward" and one.leaf == "a"]
        assert (a.promised, a.bytes, a.reason) == (m * 16 * 8 * 4, 0, "the backward pass does not need its value")
    else:
        assert (forward, backward, update) == (0, 0, times.get("all-gather", 0) * M)
    shards = times.get("reduce-scatter", 0) * M // data if "replica" in axes else 0
    assert bytes_of(report, "reduce")["all-reduce"] == times.get("all-reduce", 0) * M + times["whole"] * whole + shards

    # On the wire: (n - 1)/n of a gather or scatter, twice that of an all-reduce.
    summed = 2 * (times.get("all-reduce", 0) * M + times["whole"] * whole + 4) * (everywhere - 1) / everywhere
    over_data = (forward + backward + update + times.get("reduce-scatter", 0) * M) * (data - 1) / data
    assert report.sent("data") == pytest.approx(summed + over_data, rel=1e-12)
    assert report.sent() == pytest.approx(summed + over_data + 2 * shards / 2, rel=1e-12)
    not_needed = times.get("again", 0) * (M - AGAIN) * (data - 1) / data
    loss = 2 * 4 * (everywhere - 1) / everywhere
    assert report.sent("data", promised=True) == pytest.approx(summed - loss + over_data + not_needed, rel=1e-12)

    # What the partitioner adds is the norm: a scalar for each leaf that is cut, over the data axis alone.
    added = Counter()
    for row in report.partitioner:
        added[row.kind, row.shape, row.axes] += row.count
    assert added == Counter({("all-reduce", (), ("data",)): len(CUT)} if layout.stage.grads == "sharded" else {})


def gpt(stage, axes, **options):
    """The audit of the GPT of `tests.models`, in which each gradient that counts is known by hand."""
    axes = dict(axes)
    mesh = jzero.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    params = jax.eval_shape(models.init_params, jax.random.key(0))
    used = {key: params[key] for key in ("table", "blocks", "attention")}
    layout_options = {name: options.pop(name) for name in ("ahead", "precision", "regather") if name in options}
    layout = jzero.zero(
        used,
        stage=stage,
        mesh=mesh,
        replica_axes=tuple(axis for axis in axes if axis == "replica"),
        min_shard_size=30,
        rules=[rule for rule in models.RULES if rule[0].split("/")[0] in used] if "model" in axes else (),
        **layout_options,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((48, 8), "int32")}
    tx = optax.adam(1e-3)
    make = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), used)  # noqa: E731
    return layout, audit(layout, models.loss("gpt"), batch, make, tx, **options)


@pytest.mark.parametrize(
    ("stage", "axes", "ahead"), [*((stage, MESHES[1], False) for stage in range(4)), (3, MESHES[2], True)], ids=str
)
def test_a_scanned_model_keeps_every_promise(stage, axes, ahead):
    """2M; M + M; mM + M; 2mM + mM, of one model shard; its backward pass needs the value of every leaf."""
    m, layout = 2, precise_layout(stage, "fp32", axes, ahead=ahead)
    batch = {name: jax.ShapeDtypeStruct((48, 4), "int32") for name in ("tokens", "next")}
    report = audit(layout, precise_loss, batch, precise_params, microbatches=m)
    report.check()
    P = 4 * elements_per_model_shard(axes)
    by_hand = {
        0: {"all-reduce": P},
        1: {"reduce-scatter": P, "all-gather": P},
        2: {"reduce-scatter": m * P, "all-gather": P},
        3: {"reduce-scatter": m * P, "all-gather": 2 * m * P},
    }[stage]
    of_leaves = [one.what for one in report.moved if one.what not in ("sum", "lookup")]
    assert bytes_of(report, *of_leaves, axes=("data",)) == by_hand
    assert all(one.bytes == one.promised for one in report.moved if one.what in of_leaves)
    across = bytes_of(report, "reduce", axes=("replica",))["all-reduce"]
    assert across == (m * P // axes["data"] if "replica" in axes else 0)
    # The sum of a lookup in a table that is cut over the model axis, in each microbatch.
    lookups = [(one.kind, one.axes, one.count) for one in report.moved if one.what == "lookup"]
    assert lookups == ([("all-reduce", ("model",), m)] if "model" in axes else [])
    over = {row.axes for row in report.partitioner if math.prod(row.shape) > 1}
    assert over == ({("model",)} if "model" in axes else set()), "activations"
    stored = jzero.memory.stored_bytes(layout, OPTIMIZERS["adamw"])
    held = {one.what: (one.promised, one.compiled) for one in report.held}
    assert held["params"] == (stored.params,) * 2 and held["optimizer state"] == (stored.opt_state,) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "axes", "ahead"),
    [
        *((stage, axes, False) for stage in range(4) for axes in MESHES),
        *((stage, axes, True) for stage in (2, 3) for axes in MESHES),
    ],
    ids=str,
)
def test_a_scanned_gpt_keeps_every_promise(stage, axes, ahead):
    """The same with attention: here the value of the bias is not needed."""
    m = 2
    layout, report = gpt(stage, tuple(axes.items()), ahead=ahead, microbatches=m)
    report.check()
    shard = {leaf.path: jzero.memory.leaf_bytes(layout, leaf, "replicated") for leaf in layout.leaves}
    P = sum(shard.values())
    again = P - shard["blocks/bias"]
    by_hand = {
        0: {"all-reduce": P},
        1: {"reduce-scatter": P, "all-gather": P},
        2: {"reduce-scatter": m * P, "all-gather": P},
        3: {"reduce-scatter": m * P, "all-gather": m * (P + again)},
    }[stage]
    over = ("replica", "data") if "replica" in axes and stage == 0 else ("data",)
    assert bytes_of(report, "gather, forward", "gather, backward", "gather, update", "reduce", axes=over) == by_hand
    across = bytes_of(report, "reduce", axes=("replica",))["all-reduce"]
    assert across == (by_hand.get("reduce-scatter", 0) // axes["data"] if "replica" in axes else 0)
    apart = {one.leaf: one.reason for one in report.moved if one.what in ("gather, backward",) and one.reason}
    assert apart == ({"blocks/bias": "the backward pass does not need its value"} if stage == 3 else {})


def moved(layout, loss_fn: Any = mean_loss, batch: Any = BATCH, tx=OPTIMIZERS["adamw"], make=init_params, **options):
    """What moves, without compiling."""
    step = jzero.train_step(loss_fn, tx, layout, **options)
    state = jax.eval_shape(compile_init(make, tx, layout), loss_scale=_scale(options.get("loss_scale")))
    rows = collectives_by_origin(step.lower(state, batch), layout.mesh)
    return compare(layout, step.account(state, batch), rows, microbatches=options.get("microbatches", 1))


def _scale(loss_scale):
    return None if loss_scale is None else as_loss_scale(loss_scale).init()


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(axes))
@pytest.mark.parametrize(
    ("stage", "precision", "options"),
    [
        (3, "bf16", {}),
        (1, "bf16", {"microbatches": 3}),
        (3, Precision(reduce="bfloat16"), {"microbatches": 3}),
        (3, Precision(reduce=None), {}),
        (2, "bf16-pure", {"microbatches": 3}),
        (2, "fp16", {"loss_scale": jzero.DynamicLossScale()}),
        (0, "fp32", {}),
    ],
    ids=str,
)
def test_precisions(stage, precision, options, axes):
    """In lowered programs: gathers in the compute dtype, reductions as asked, and as many bytes as the ledger has."""
    for ahead in (False, True):
        layout = precise_layout(stage, precision, axes, ahead=ahead)
        batch = {name: jax.ShapeDtypeStruct((24, 4), "int32") for name in ("tokens", "next")}
        lines = moved(layout, precise_loss, batch, make=precise_params, **options)
        assert not broken_in(lines)
        gathers = {dtype for one in lines if one.what.startswith("gather") for dtype in one.dtypes}
        assert gathers == ({str(layout.precision.compute)} if stage else set())
        reduced = {dtype for one in lines if one.what == "reduce" for dtype in one.dtypes}
        assert reduced == {str(layout.precision.reduce or layout.precision.compute)}
        # Its table is tied and its blocks are recomputed: there is no difference.
        assert all(one.bytes == one.promised for one in lines if one.what not in ("sum", "lookup"))
        assert sum(one.bytes for one in lines if one.what == "reduce")


def test_what_a_loss_does_not_use_or_casts_itself():
    layout = make_layout("3", data=8)

    def loss_fn(params, x):
        h = x.astype(jnp.bfloat16) @ params["a"].astype(jnp.bfloat16)
        return jnp.mean(h**2).astype(jnp.float32) + (params["odd"] ** 2).sum()

    found = {(one.what, one.leaf): (one.bytes, one.promised, one.reason) for one in moved(layout, loss_fn)}
    narrow = 16 * 8 * 2
    assert found["gather, forward", "a"] == (narrow, 2 * narrow, "in bfloat16: the loss casts it before it uses it")
    assert found["gather, backward", "a"] == (0, 2 * narrow, "the backward pass does not need its value")
    assert found["reduce", "a"] == (narrow, 2 * narrow, "in bfloat16: its gradient is born so")
    for what in ("gather, forward", "gather, backward", "reduce"):
        assert found[what, "b"] == (0, 8 * 24 * 2, "the loss does not use it")
    assert found["reduce", "scale"] == (0, 4, "the loss does not use it")
    assert found["reduce", "odd"][0] == 28 and "fewer than min_shard_size=16" in found["reduce", "odd"][2]


@pytest.mark.parametrize("name", ["jitted", "unrolled", "fori", "nested", "cond", "experts", "scanned_first", "padded"])
def test_other_losses(name):
    """The program holds what the engine says that it does, whatever the loss; what is less has its reason."""
    params = jax.eval_shape(models.init_params, jax.random.key(0))
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=30)
    batch = {"tokens": jax.ShapeDtypeStruct((48, 8), "int32")}
    make = functools.partial(models.init_params, jax.random.key(0))
    lines = moved(layout, models.loss(name), batch, make=make)
    over = {one.leaf: one for one in lines if one.broken}
    if name == "nested":  # its inner loop runs once more in the recomputation, and gathers once more
        assert set(over) == {"nested"} and over["nested"].bytes == 2 * over["nested"].promised
        assert "the stage promises" in over["nested"].broken
        return
    assert not over
    assert all(one.reason for one in lines if one.bytes < one.promised)
    parts = {one.leaf: one.bytes / one.promised for one in lines if one.reason == "the loss uses only parts of it"}
    assert all(share == pytest.approx(1 / L) for share in parts.values()) and bool(parts) == (name == "jitted")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(models.BODIES))
def test_the_engine_accounts_for_every_byte(name):
    """On all meshes and schedules the program holds exactly what the engine says, whatever the loss."""
    params = jax.eval_shape(models.init_params, jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((48, 8), "int32")}
    make = functools.partial(models.init_params, jax.random.key(0))
    for axes in (*MESHES, {"data": 3}, {"replica": 4, "data": 1}, {"replica": 2, "data": 2, "model": 2}):
        for stage, ahead, regather in ((1, False, True), (2, True, True), (3, False, True), (3, True, False)):
            layout = jzero.zero(
                params,
                stage=stage,
                mesh=jzero.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes),
                replica_axes=tuple(axis for axis in axes if axis == "replica"),
                min_shard_size=30,
                rules=models.RULES if "model" in axes else (),
                ahead=ahead,
                regather=regather,
            )
            lines = moved(layout, models.loss(name), batch, make=make, microbatches=2)
            for one in lines:
                assert "jzero's own account" not in one.broken, (axes, stage, ahead, one)
                assert one.exact and (not one.broken or "the stage promises" in one.broken), one
                assert one.bytes == one.promised or one.reason, one


def broken_by(layout, **options):
    return {one.subject: one.message for one in broken_in(moved(layout, **options))}


def test_a_gradient_that_the_loss_sums_once_more():
    @jax.custom_vjp
    def again(w):
        return w

    again.defvjp(lambda w: (w, None), lambda _, grad: (lax.psum(grad, "data"),))

    def loss_fn(params, x):
        return mean_loss(params | {"a": again(params["a"])}, x)

    report = audit(make_layout("2", data=8), loss_fn)
    with pytest.raises(jzero.BrokenPromise, match="the loss itself runs all-reduces of 512 bytes of float32 over"):
        report.check()
    report.check(allow=["loss"])
    with pytest.raises(TypeError, match="wanted a list of patterns"):
        report.check(allow="loss")
    report.check(allow=["loss", "donation", "b*", "state.step"])  # these are kept, and may be named
    with pytest.raises(ValueError, match=r"allow has a pattern 'partitoner' that matches nothing; .* 'loss', 'partiti"):
        report.check(allow=["loss", "partitoner"])


def test_a_leaf_that_lives_whole():
    layout, tx = make_layout("3", data=8), OPTIMIZERS["sgd"]
    state = jzero.init(init_params, tx, layout)
    step = jzero.train_step(mean_loss, tx, layout)
    batch = layout.put_batch(np.ones((64, 16), np.float32))
    report = jzero.audit(step, state, batch)
    report.check()
    assert {one.what: (one.promised, one.compiled, one.live) for one in report.held if one.what != "batch"} == {
        "params": (M // 8 + 32, M // 8 + 32, M // 8 + 32),
        "optimizer state": (M // 8 + 32, M // 8 + 32, M // 8 + 32),
        "rest of the state": (16, 16, 16),
    }
    assert {one.what: one.reason for one in report.held}["params"] == "whole: odd, scale"
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch))), "nothing was run"
    assert int(state.step) == 0
    whole = jax.device_put(state.params["a"], layout.sharding(jax.sharding.PartitionSpec()))
    there = jzero.audit(step, dataclasses.replace(state, params=state.params | {"a": whole}), batch)
    with pytest.raises(jzero.BrokenPromise, match=r"a: state.params\['a'\] takes 512 bytes on a device, where .* 64"):
        there.check()
    step(state, batch)
    with pytest.raises(ValueError, match=r"state.params\['a'\] was deleted: this state was given to a step before"):
        jzero.audit(step, state, batch)


def test_a_donation_that_is_lost():
    layout, tx = make_layout("1", data=8), OPTIMIZERS["sgd"]
    step = jzero.train_step(mean_loss, tx, layout)
    shardings = state_shardings(tx, layout)
    step.jitted = jax.jit(
        step.jitted.__wrapped__,
        in_shardings=(shardings, layout.sharding(layout.batch_spec)),
        out_shardings=(shardings, layout.sharding(jax.sharding.PartitionSpec()), None),
    )
    report = jzero.audit(step, abstract_state(layout, tx), BATCH)
    assert report.memory and report.memory.donated == 0
    with pytest.raises(jzero.BrokenPromise, match=r"donation: state.params\['a'\], state.params\['b'\]"):
        report.check()


def test_a_wider_dtype(monkeypatch):
    monkeypatch.setattr(collectives, "_to_wire", lambda layout, grad, share, born: grad.astype("float32"))
    precision = Precision(master=None, compute=None, reduce="bfloat16", accumulate=None)
    layout = jzero.zero(
        jax.eval_shape(init_params), stage=2, mesh=jzero.make_mesh(data=8), min_shard_size=16, precision=precision
    )
    messages = broken_by(layout)
    assert set(messages) == {"a", "b", "odd", "scale"}
    assert "reduce of 'a' over data: the program has reduce-scatters of 512 bytes of float32" in messages["a"]
    assert "256 bytes of bfloat16" in messages["a"]


def test_an_engine_that_forgets_or_repeats(monkeypatch):
    layout = make_layout("3", replica=2, data=4)
    monkeypatch.setattr(run, "sum_over_replicas", lambda layout, shard, cut, share: shard * share)
    messages = broken_by(layout)
    assert set(messages) == {"a", "b"}
    assert "reduce of 'a' over replica: the program has all-reduces of none" in messages["a"]
    monkeypatch.undo()
    assert not broken_by(layout)
    once = run.gather

    def twice(layout, shard, cut, phase):
        return once(layout, once(layout, shard, cut, phase)[:, : shard.shape[1]], cut, phase)

    monkeypatch.setattr(run, "gather", twice)
    assert "gather, forward of 'a' over data: the program has all-gathers of 1,024 bytes" in broken_by(layout)["a"]


def test_params_that_are_one_array():
    layout = jzero.zero(jnp.ones((16, 8)), stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=16)
    lines = moved(layout, lambda w, x: jnp.mean(x @ w), make=lambda: jnp.ones((16, 8)))
    assert not broken_in(lines)
    found = {one.what: (one.leaf, one.bytes) for one in lines}
    assert found["gather, forward"] == found["reduce"] == ("", 512) and found["sum"] == ("", 4)


def test_a_leaf_that_is_taken_again_in_a_loop():
    params = {"w": jax.ShapeDtypeStruct((2, 16, 16), "float32")}
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=16)

    def loss_fn(params, x):
        return jnp.mean(lax.fori_loop(0, 6, lambda i, x: jnp.tanh(x @ params["w"][i % 2]), x))

    make = lambda: {"w": jnp.ones((2, 16, 16))}  # noqa: E731
    lines = moved(layout, loss_fn, make=make)
    (forward,) = [one for one in lines if one.what == "gather, forward"]
    assert (forward.promised, forward.bytes, forward.count) == (2048, 3 * 2048, 6)
    assert "it is taken more than once, in" in forward.broken and "loss_fn" in forward.broken


def test_a_loop_of_unknown_length():
    def loss_fn(params, x):
        def body(state):
            return state[0] + 1, lax.psum(state[1], "data")

        total = lax.while_loop(lambda state: state[1].sum() < 1e3, body, (0, jnp.ones(3)))[1]
        return mean_loss(params, x) + lax.stop_gradient(total.sum())

    report = audit(make_layout("1", data=8), loss_fn)
    (own,) = [one for one in report.moved if one.what == "loss"]
    assert not own.exact and own.bytes == 12 and "whose trip count the program does not tell" in own.reason
    assert "1 or more" in str(report)


def test_what_the_optimizer_computes_over_whole_leaves():
    def centred(updates, params):
        return jax.tree.map(lambda g: g - g.mean(-1, keepdims=True) if g.ndim else g, updates)

    layout = make_layout("2", data=8)
    report = audit(layout, tx=optax.chain(optax.stateless(centred), optax.sgd(0.1)))
    with pytest.raises(jzero.BrokenPromise, match=r"partitioner: the partitioner has put 1 all-reduce of float32"):
        report.check()
    report.check(allow=["part*"])


def test_arrays_that_xla_has_packed_under_no_name():
    """All that jzero wrote down may be in them, and single numbers; not more."""
    layout = make_layout("0", data=8)
    reduce, unnamed = (Origin(purpose) for purpose in ("reduce", "unnamed"))

    def packed(elements):
        rows = [(reduce, Collective("all-reduce", "float32", (60,), ("data",), 8))]
        return [*rows, (unnamed, Collective("all-reduce", "float32", (elements,), ("data",), 8))]

    written = [(reduce, Collective("all-reduce", "float32", (size,), ("data",), 8)) for size in (60, 40)]
    numbers = 8 * len(layout.leaves)
    assert not [*of_partitioner(packed(40 + numbers), written, layout)]
    (broken,) = of_partitioner(packed(41 + numbers), written, layout)
    assert broken.subject == "partitioner" and f"with {1 + numbers} elements more than jzero" in broken.message


@pytest.mark.slow
@gpus.compiles
@pytest.mark.parametrize(
    ("stage", "axes"), [(0, MESHES[1]), (1, MESHES[2]), (2, MESHES[2]), (3, MESHES[0]), (3, MESHES[1])], ids=str
)
def test_the_program_of_a_gpu(stage, axes):
    """Nothing is named wrongly there: what XLA combines, packs into one array and runs asynchronously."""
    mesh = target_mesh("h200x8", **axes)
    layout = dataclasses.replace(precise_layout(stage, "bf16", axes), mesh=mesh, ahead=stage > 1)
    batch = {name: jax.ShapeDtypeStruct((48, 4), "int32") for name in ("tokens", "next")}
    report = audit(layout, precise_loss, batch, precise_params, microbatches=2, clip_norm=1.0)
    report.check()
    found = {origin.purpose for origin, _ in report.compiled}
    assert stage == 0 or "scatter" in found  # at stage 0 all goes in one array, which has no name
    assert report.memory and report.memory.donated >= sum(one.compiled for one in report.held if one.what != "batch")


def test_how_it_prints():
    report = audit(make_layout("3", replica=2, data=4), microbatches=2)
    found = json.loads(json.dumps(report.as_dict()))
    assert found["stage"] == 3 and found["axes"] == {"replica": 2, "data": 4} and found["broken"] == []
    assert found["sent"]["data"]["program"] == report.sent("data")
    text = str(report)
    assert "A step at stage 3 on replica 2 x data 4, 2 microbatches" in text and "Every promise is kept." in text
    assert "the backward pass does not need its value (a)" in text
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    assert "Every promise is kept." in console.export_text()
    assert max(map(len, text.splitlines())) <= 120
    with pytest.raises(ValueError, match="no axis 'model'; the mesh has replica, data"):
        report.sent("model")


@pytest.mark.parametrize("stage", ["1", "3"])
def test_no_word_is_broken_at_80_columns(stage):
    report = audit(make_layout(stage, replica=2, data=2, model=2), microbatches=2, tx=optax.adafactor(1e-3))
    narrow, wide = (plain(tables(report), width) for width in (80, 400))
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    words = [[word for word in text.split() if set(word) != {"─"}] for text in (narrow, wide)]
    assert Counter(words[0]) == Counter(words[1])


def test_names_with_brackets_are_printed_as_they_are():
    def loss_fn(params, x):
        with jax.named_scope("layer[attn]"):
            total = lax.psum(x[0, :3], "data")
        return mean_loss(params, x) + lax.stop_gradient(total.sum())

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(audit(make_layout("0", data=8), loss_fn))
    assert "the loss itself: jvp(layer[attn])/psum  " in console.export_text()


def test_a_step_of_ones_own():
    with pytest.raises(TypeError, match=r"step is a function; wanted what jzero\.train_step returns"):
        jzero.audit(lambda state, batch: state, {}, {})  # pyright: ignore[reportArgumentType]
