"""Blocks gathered ahead and reduced behind: the same numbers, the same collectives, and nothing waits for a block."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jzero
from jzero.jaxprs import inner_jaxpr
from tests import models
from tests.models import D, F, L
from tests.test_stream import MESHES, check, layout_of, placed

SCANNED = [
    "gpt",
    "nested",
    "padded",
    "remat",
    "remat_saving_all",
    "remat_saving_dots",
    "scan",
    "scanned_first",
    "mapped",
]
CASES = [
    (name, MESHES[(0, 1, 3, 4, 5)[i % 5]], 3 - i % 2 if i != 3 else 3, 1 + i % 2, i % 3 != 2)
    for i, name in enumerate(SCANNED)
]


@pytest.mark.parametrize(("name", "axes", "stage", "microbatches", "regather"), CASES)
def test_gradients_are_those_of_one_device(x64, name, axes, stage, microbatches, regather):
    check(name, axes, stage, microbatches, regather=regather, ahead=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(models.BODIES))
@pytest.mark.parametrize("axes", [MESHES[0], MESHES[1], MESHES[4]])
def test_gradients_are_those_of_one_device_everywhere(x64, name, axes):
    for stage, microbatches, regather in ((1, 1, True), (2, 2, True), (3, 1, True), (3, 2, False)):
        check(name, axes, stage, microbatches, regather=regather, ahead=True)


def deeper(params):
    """Params of two more layers: where gradients are also summed over replicas, three would leave none in the loop."""

    def more(w, dim):
        return jnp.concatenate([w, lax.slice_in_dim(w, 0, 2, axis=dim)], dim)

    stacks = jax.tree.map(lambda w: more(w, 0), {name: params[name] for name in ("blocks", "attention")})
    return params | stacks | {"nested": more(params["nested"], 1)}


@pytest.mark.parametrize(
    ("name", "axes", "stage"),
    [
        pytest.param("gpt", {"replica": 2, "data": 2, "model": 2}, 3, marks=pytest.mark.slow),
        ("nested", {"replica": 2, "data": 4}, 2),
        ("remat", {"replica": 2, "data": 4}, 3),
        ("scan", {"replica": 4, "data": 1}, 3),
    ],
)
def test_gradients_that_are_summed_over_replicas_too(x64, name, axes, stage):
    params = deeper(models.init_params(jax.random.key(0)))
    equal_to_one_device(models.loss(name), params, models.batch(), layout_of(params, axes, stage, ahead=True))


def programs(loss_fn, axes, stage, params=None, **options):
    """The layouts and gradient programs without and with `ahead`."""
    for ahead in (False, True):
        params = models.init_params(jax.random.key(0)) if params is None else params
        layout = layout_of(params, axes, stage, ahead=ahead, **options)
        abstract = [leaf.placed(layout.stage.params) for leaf in layout.leaves]
        yield layout, jax.jit(jzero.value_and_grad(loss_fn, layout)), layout.treedef.unflatten(abstract)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage == 3 - turn % 2 else pytest.mark.slow)
        for turn, name in enumerate(["gpt", "nested", "remat", "scan"])
        for stage in (2, 3)
    ],
)
def test_the_collectives_are_the_same(name, stage):
    rows, explained, axes = [], [], {"replica": 2, "data": 2, "model": 2}
    deep = deeper(models.init_params(jax.random.key(0)))
    for layout, program, params in programs(models.loss(name), axes, stage, deep):
        counts = collections.Counter()
        for row in jzero.program.collectives(program.lower(params, models.batch()), layout.mesh):
            assert row.exact
            counts[row.kind, row.dtype, tuple(n for n in row.shape if n > 1), row.axes] += row.count
        rows.append(counts)
        explained.append([str(row.gathers) for row in jzero.explain(layout, models.loss(name), models.batch())])
    assert rows[0] == rows[1]
    assert explained[0] == explained[1]


def loops_with(jaxpr, name, found=()):
    """The scans whose bodies do this themselves, and not in a loop inside."""
    for eqn in jaxpr.eqns:
        if not {"jaxpr", "call_jaxpr"} & set(eqn.params):
            continue
        inner, _ = inner_jaxpr(eqn)
        if eqn.primitive.name == "scan" and any(name in primitives(e) for e in inner.eqns):
            found = (*found, eqn)
        else:
            found = loops_with(inner, name, found)
    return found


def primitives(eqn):
    """The names of an equation and of those within it, but for loops."""
    if eqn.primitive.name == "scan":
        return set()
    inner = [value for value in eqn.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
    return {eqn.primitive.name}.union(*(primitives(e) for j in inner for e in getattr(j, "jaxpr", j).eqns))


def waits(loop, late, early):
    """Whether, within one pass of the loop's body, something by the name `late` needs the result of one by `early`."""
    body, _ = inner_jaxpr(loop)
    after = set()
    for eqn in body.eqns:
        needs = any(v in after for v in eqn.invars if not hasattr(v, "val"))
        if (needs and late in primitives(eqn)) or {late, early} <= primitives(eqn):
            return True
        if needs or early in primitives(eqn):
            after.update(eqn.outvars)
    return False


@pytest.mark.parametrize("name", ["remat", "scan", "gpt"])
def test_no_block_waits_for_its_gathers_and_no_scatter_for_the_block(name):
    """On the traced program: what a scheduler is free to do, on any hardware."""
    for layout, program, params in programs(models.loss(name), {"data": 8}, 3):
        jaxpr = jax.make_jaxpr(program)(params, models.batch()).jaxpr
        gathering, scattering = loops_with(jaxpr, "all_gather"), loops_with(jaxpr, "reduce_scatter")
        assert len(gathering) == 2  # forward and backward
        assert len(scattering) == 1
        waiting = [waits(loop, "dot_general", "all_gather") for loop in gathering]
        assert waiting == [not layout.ahead] * 2
        assert waits(scattering[0], "reduce_scatter", "dot_general") is not layout.ahead


def test_no_sum_over_replicas_waits_for_the_scatter_in_front_of_it():
    """Each has a step of its own, so that both can run beside the matmuls of a block."""
    deep = deeper(models.init_params(jax.random.key(0)))
    for layout, program, params in programs(models.loss("remat"), {"replica": 2, "data": 4}, 3, deep):
        jaxpr = jax.make_jaxpr(program)(params, models.batch()).jaxpr
        (loop,) = list(loops_with(jaxpr, "reduce_scatter"))
        assert "psum" in {name for eqn in inner_jaxpr(loop)[0].eqns for name in primitives(eqn)}
        assert waits(loop, "psum", "reduce_scatter") is not layout.ahead
        assert waits(loop, "psum", "dot_general") is not layout.ahead


@pytest.mark.parametrize("name", ["gpt_unrolled", "unrolled", "unrolled_remat"])
def test_blocks_that_are_written_out_are_gathered_one_ahead_and_no_earlier(x64, name):
    """Each gather but the first ones waits for the use of a leaf before it, and in the backward pass for the loss."""
    check(name, {"data": 8}, 3, ahead=True)
    for layout, program, params in programs(models.loss(name), {"data": 8}, 3):
        (region,) = [e for e in walk(jax.make_jaxpr(program)(params, models.batch()).jaxpr) if "mesh" in e.params]
        jaxpr, _ = inner_jaxpr(region)
        makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        waiting = [
            sum("dot_general" in primitives(e) for e in ancestors(eqn, makers))
            for eqn in jaxpr.eqns
            if "all_gather" in primitives(eqn)
        ]
        gathers = len(waiting)
        rows = jzero.explain(layout, models.loss(name), models.batch())
        assert gathers == sum(gathering.times for row in rows for gathering in row.gathers or ())
        forward, backward = waiting[: gathers // 2], waiting[-L:]
        assert min(backward) > max(forward)  # the loss comes after all matmuls of the forward pass
        assert (len(set(forward)) >= L) is layout.ahead  # one after the other; left alone they wait for nothing


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        if {"jaxpr", "call_jaxpr"} & set(eqn.params):
            yield from walk(inner_jaxpr(eqn)[0])


def ancestors(eqn, makers):
    """The equations that one waits for."""
    found, todo = {}, [eqn]
    while todo:
        for v in todo.pop().invars:
            maker = None if hasattr(v, "val") else makers.get(v)
            if maker is not None and id(maker) not in found:
                found[id(maker)] = maker
                todo.append(maker)
    return found.values()


def test_the_first_gathers_of_the_backward_pass_wait_for_the_loss():
    """Also those of leaves outside of the loop, which a forward pass in a loop says nothing about."""

    def loss_fn(params, batch):
        body = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        x, _ = lax.scan(body, params["table"][batch["tokens"]], params["nested"][0])
        return jnp.mean(jax.nn.logsumexp(x @ params["blocks"]["up"][0], -1))

    for layout, program, params in programs(loss_fn, {"data": 8}, 3):
        text = program.lower(params, models.batch()).as_text()
        assert text.count("optimization_barrier") >= (3 if layout.ahead else 1)
        (region,) = [e for e in walk(jax.make_jaxpr(program)(params, models.batch()).jaxpr) if "mesh" in e.params]
        jaxpr, _ = inner_jaxpr(region)
        makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        loss = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "log")
        gathers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "all_gather"]
        after = [any(maker is loss for maker in ancestors(eqn, makers)) for eqn in gathers]
        # Forward: table, head, and gathering ahead the first block. Backward: head, and the first two blocks, of which
        # the second is gathered while the first one computes.
        assert after == [False] * (3 if layout.ahead else 2) + [True] * (3 if layout.ahead else 1)


@pytest.mark.parametrize(
    ("length", "reverse", "axes"),
    [
        # Each length in both directions, and with one mesh or the other.
        pytest.param(length, reverse, axes, marks=() if replicas == (length + reverse) % 2 else pytest.mark.slow)
        for length in (1, 2, 3, 4)
        for reverse in (False, True)
        for replicas, axes in enumerate([{"data": 8}, {"replica": 2, "data": 4}])
    ],
    ids=str,
)
def test_loops_of_any_length_and_both_directions(x64, length, reverse, axes):
    """With other scanned inputs and outputs beside the leaves."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(length, 16, 16))), "b": jnp.asarray(rng.normal(size=(length, 16)))}
    batch = rng.normal(size=(16, 16))

    def loss_fn(params, x):
        @jax.checkpoint
        def body(x, each):
            w, scale = each
            y = jnp.tanh(x @ w["w"].T + w["b"]) * scale
            return x + y, (y.mean(), w["b"] * 2)

        x, (means, doubled) = lax.scan(body, x, (params, jnp.arange(1.0, 1 + length)), reverse=reverse)
        return jnp.mean(x**2) + means.sum() * 1e-2 + jnp.sum(jnp.arange(length)[:, None] * doubled) * 1e-2

    texts, layouts = [], []
    for layout, program, _ in programs(loss_fn, axes, 3, params, min_shard_size=0):
        texts.append(program.lower(params, batch).as_text().count("dot_general"))
        layouts.append(layout)
    equal_to_one_device(loss_fn, params, batch, *layouts)
    assert (texts[0] < texts[1]) is (length > 2)  # shorter loops have nothing to gain


def equal_to_one_device(loss_fn, params, batch, *layouts):
    wanted = jax.device_get(jax.jit(jax.grad(loss_fn))(params, batch))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    for layout in layouts:
        _, grads = jzero.value_and_grad(loss_fn, layout)(placed(params, layout), batch)
        grads = layout.logical(grads, replicate=True)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
            assert np.abs(np.asarray(a) - b).max() <= 1e-12 * largest


def inner_loop_then_one(x, w):
    x, _ = lax.scan(lambda x, u: (jnp.tanh(x @ u), None), x, w[:3])
    return jnp.tanh(x @ w[3]), None


def one_then_inner_loop(x, w):
    x, _ = lax.scan(lambda x, u: (jnp.tanh(x @ u), None), jnp.tanh(x @ w[0]), w[1:])
    return x, None


@pytest.mark.parametrize("body", [inner_loop_then_one, one_then_inner_loop])
@pytest.mark.parametrize(
    ("remat", "stage", "devices"),
    [
        (False, 2, 8),
        (True, 3, 8),
        (False, 3, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, 2, 8), (False, 3, 8), (True, 3, 1)]),
    ],
)
def test_a_gradient_of_which_a_part_is_reduced_and_a_part_is_not_yet(x64, body, remat, stage, devices):
    rng = np.random.default_rng(0)
    params, batch = jnp.asarray(rng.normal(size=(3, 4, 16, 16)) / 4), rng.normal(size=(16, 16))

    def loss_fn(params, batch):
        return jnp.mean(lax.scan(jax.checkpoint(body) if remat else body, batch, params)[0] ** 2)

    equal_to_one_device(loss_fn, params, batch, layout_of(params, {"data": devices}, stage, ahead=True))


def stacked_recurrent(params, batch):
    x, first = jnp.swapaxes(batch, 0, 1), batch[:, 0] * 0
    for w in params["layers"]:

        def cell(h, x, w=w):
            h = jnp.tanh(x @ w + h @ w.T)
            return h, h

        x = lax.scan(cell, first, x)[1]
    return jnp.mean(x**2)


def marked_heads(params, batch):
    x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ params["shared"]), None), batch[:, 0], None, length=3)
    for w in map(jzero.gather, params["layers"]):
        x = x @ w
    return jnp.mean(x**2)


@pytest.mark.parametrize("loss_fn", [stacked_recurrent, marked_heads])
def test_leaves_gathered_between_loops(x64, loss_fn):
    """What a gather waits for is never a value of the loop before."""
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(16, 16)) / 4) for _ in range(5)]
    params = {"layers": weights[1:], "shared": weights[0]}
    equal_to_one_device(loss_fn, params, rng.normal(size=(8, 5, 16)), layout_of(params, {"data": 8}, 3, ahead=True))


def test_one_device_has_nothing_to_wait_for():
    texts = []
    for _, program, params in programs(models.loss("remat"), {"data": 1}, 3):
        texts.append(program.lower(params, models.batch()).as_text())
    assert texts[0] == texts[1]


def test_a_gradient_that_is_summed_in_the_body_and_cast_after_is_reduced_once_and_narrow():
    """A fused weight used twice in bfloat16: what is put off is the sum, before the cast."""

    def loss_fn(params, batch):
        def body(x, w):
            w = w.astype(jnp.bfloat16)
            return x + jnp.tanh(x @ w) @ w[:, :D].T @ w[:D, :D], None

        x, _ = lax.scan(jax.checkpoint(body), jnp.ones((4, D), jnp.bfloat16) * batch.sum(), params)
        return jnp.mean(x.astype(jnp.float32))

    for layout, program, params in programs(loss_fn, {"data": 8}, 3, jnp.ones((L, D, D))):
        rows = jzero.program.collectives(program.lower(params, np.ones((8, 2), np.float32)), layout.mesh)
        scatters = [(row.dtype, row.count) for row in rows if row.kind == "reduce-scatter"]
        assert scatters == [("bfloat16", L)]


def test_it_is_off_on_cpu_unless_asked_for():
    params = {"w": jax.ShapeDtypeStruct((L, D, F), "float32")}
    assert layout_of(params, {"data": 8}, 3).ahead is False
    assert layout_of(params, {"data": 8}, 3, ahead=True).ahead is True
    with pytest.raises(TypeError, match="ahead='yes'; wanted True, False or None"):
        layout_of(params, {"data": 8}, 3, ahead="yes")
