"""Gathers at their use and reductions at their birth: right numbers, exact counts, little memory."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jzero
from tests import models
from tests.models import D, F, L, V

MESHES = [
    {"data": 8},
    {"replica": 2, "data": 4},
    {"data": 3},
    {"data": 4, "model": 2},
    {"replica": 2, "data": 2, "model": 2},
    {"data": 2, "model": 4},
    {"data": 1},
]
KEEP = 30  # every leaf of tests.models is larger


def layout_of(params, axes, stage, **options):
    mesh = jzero.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    replica = tuple(axis for axis in axes if axis == "replica")
    more: dict[str, Any] = {"min_shard_size": KEEP, "rules": models.RULES if "model" in axes else ()} | options
    return jzero.zero(params, stage=stage, mesh=mesh, replica_axes=replica, **more)


def placed(params, layout):
    return jax.device_put(layout.stored(params), layout.param_shardings)


@functools.cache
def reference(name):
    params = models.init_params(jax.random.key(0))
    loss_fn = models.conv_loss() if name == "conv" else models.loss(name)
    return params, jax.device_get(jax.jit(jax.value_and_grad(loss_fn))(params, models.batch()))


def check(name, axes, stage, microbatches=1, **options):
    params, (loss0, grads0) = reference(name)
    layout = layout_of(params, axes, stage, **options)
    loss_fn = models.conv_loss(layout.batch_axes) if name == "conv" else models.loss(name)
    program = jzero.value_and_grad(loss_fn, layout, microbatches=microbatches)
    loss, grads = program(placed(params, layout), models.batch())
    assert all(
        jax.tree.leaves(jax.tree.map(lambda g, s: g.sharding.is_equivalent_to(s, g.ndim), grads, layout.grad_shardings))
    )
    grads = layout.logical(grads, replicate=True)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(grads0))
    errors = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max() / scale, grads, grads0)
    assert max(jax.tree.leaves(errors)) < 1e-12, errors
    assert abs(float(loss - loss0)) < 1e-12


NAMES = [*sorted(models.BODIES), "conv"]  # the batch norm of "conv" couples the batch: one microbatch
# Each loss once, and each mesh with each stage, microbatches and regather.
COVER = [
    (name, MESHES[i % 6], (3, 2, 3, 1, 0)[i // 6], 1 + i % 2 if name != "conv" else 1, i % 4 != 1)
    for i, name in enumerate(NAMES)
]


@pytest.mark.parametrize(("name", "axes", "stage", "microbatches", "regather"), COVER)
def test_gradients_are_those_of_one_device(x64, name, axes, stage, microbatches, regather):
    check(name, axes, stage, microbatches, regather=regather)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_device_everywhere(x64, name):
    for axes, stage, microbatches, regather in itertools.product(MESHES, range(4), (1, 2), (True, False)):
        if (stage == 3 or regather) and (name != "conv" or microbatches == 1):
            check(name, axes, stage, microbatches, regather=regather)


def counts(name, stage, **options):
    """Counts by shape (dims of 1 left out) in the lowered program."""
    params = models.init_params(jax.random.key(0))
    layout = layout_of(params, {"data": 8}, stage, **options)
    program = jax.jit(jzero.value_and_grad(models.loss(name), layout))
    abstract = [leaf.placed(layout.stage.params) for leaf in layout.leaves]
    rows = jzero.program.collectives(program.lower(layout.treedef.unflatten(abstract), models.batch()), layout.mesh)
    assert all(row.exact for row in rows)
    kinds = {"all-gather": {}, "reduce-scatter": {}, "all-reduce": {}}
    for row in rows:
        kinds[row.kind][tuple(size for size in row.shape if size > 1)] = row.count
    return kinds["all-gather"], kinds["reduce-scatter"], kinds["all-reduce"]


UP, DOWN, BIAS = (D, F), (F, D), (D,)


@pytest.mark.parametrize("name", ["scan", "remat", "remat_saving_dots", "remat_saving_all"])
def test_scanned_blocks_are_gathered_one_by_one(name):
    gathers, scatters, reduces = counts(name, 3)
    # The backward pass does not need the value of a bias, and takes the tied table once more.
    assert gathers == {UP: 2 * L, DOWN: 2 * L, BIAS: L, (V, D): 2}
    assert {shape: scatters[shape] for shape in gathers} == {UP: L, DOWN: L, BIAS: L, (V, D): 1}
    assert reduces == {(): 1}


@pytest.mark.parametrize("name", ["unrolled", "unrolled_remat"])
def test_unrolled_blocks_are_gathered_one_by_one(name):
    gathers, scatters, _ = counts(name, 3)
    assert gathers == {UP: 2 * L, DOWN: 2 * L, BIAS: L, (V, D): 2}
    assert {shape: scatters[shape] for shape in (UP, DOWN, BIAS)} == {UP: L, DOWN: L, BIAS: L}


@pytest.mark.parametrize("name", ["scan", "remat", "unrolled", "unrolled_remat"])
def test_kept_leaves_are_gathered_once(name):
    gathers, _, _ = counts(name, 3, regather=False)
    assert gathers == {UP: L, DOWN: L, BIAS: L, (V, D): 1}
    gathers, _, _ = counts(name, 3, regather=[("*/up", False), ("blocks/*", True)])
    assert gathers == {UP: L, DOWN: 2 * L, BIAS: L, (V, D): 2}


@pytest.mark.parametrize("name", ["scan", "remat", "unrolled", "unrolled_remat"])
def test_stage_2_reduces_each_block_where_it_is_born(name):
    gathers, scatters, _ = counts(name, 2)
    assert not gathers
    assert {shape: scatters[shape] for shape in (UP, DOWN, BIAS, (V, D))} == {UP: L, DOWN: L, BIAS: L, (V, D): 1}


def test_stage_1_reduces_whole_leaves_at_the_end():
    _, scatters, _ = counts("remat", 1)
    assert scatters[L, D, F] == scatters[L, F, D] == scatters[L, D] == 1


def test_shared_weight_is_gathered_once_a_pass_and_reduced_once():
    gathers, scatters, _ = counts("shared", 3)
    assert gathers == {(D, D): 2, (V, D): 2}
    assert scatters[D, D] == 1


def test_nested_scans():
    gathers, scatters, _ = counts("nested", 3)
    # Forward, recomputation, backward: the inner loop is not rematerialised by itself.
    assert gathers == {(D, D): 3 * 2 * L, (V, D): 2}
    assert scatters[D, D] == 2 * L


def casted(params, batch):
    def block(x, w):
        return x + jax.nn.gelu(x @ w["up"].astype(jnp.bfloat16)) @ w["down"].astype(jnp.bfloat16), None

    x = params["table"].astype(jnp.bfloat16)[batch["tokens"]]
    x, _ = lax.scan(jax.checkpoint(block), x, {name: params["blocks"][name] for name in ("up", "down")})
    return jnp.mean((x @ params["square"].T.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


def test_a_cast_moves_in_front_of_the_gather_and_behind_the_reduction():
    params = models.init_params(jax.random.key(0))
    layout = layout_of(params, {"data": 8}, 3)
    program = jax.jit(jzero.value_and_grad(casted, layout))
    rows = jzero.program.collectives(program.lower(placed(params, layout), models.batch()), layout.mesh)
    used = {UP, DOWN, (V, D), (D, D)}
    assert {row.dtype for row in rows if row.shape in used} == {"bfloat16"}
    assert {row.shape: row.count for row in rows if row.kind == "all-gather"} == {
        UP: 2 * L,
        DOWN: 2 * L,
        (V, D): 1,
        (D, D): 2,
    }


def explained(name):
    params = models.init_params(jax.random.key(0))
    return jzero.explain(layout_of(params, {"data": 8}, 3), models.loss(name), models.batch())


def gathers_of(rows, path):
    (row,) = (row for row in rows if row.path == path)
    return row.gathers or ()


def test_what_is_gathered_early_is_said():
    def early(name):
        return {row.path: {gathering.early for gathering in row.gathers} for row in explained(name) if row.gathers}

    assert early("remat") == {"blocks/up": {""}, "blocks/down": {""}, "blocks/bias": {""}, "table": {""}}
    assert early("cond")["square"] == {"cond"}
    assert early("while")["square"] == {"while"}
    assert early("scanned_first")["first"] == {"scan"}


def test_explanation_names_the_line_of_the_use():
    rows = explained("remat")
    up = gathers_of(rows, "blocks/up")
    assert [(g.phase, g.times, g.bytes, g.dtype) for g in up] == [
        ("forward", L, 4 * D * F, "float32"),
        ("backward", L, 4 * D * F, "float32"),
    ]
    assert all(g.where.startswith("block (models.py:") for g in up)
    assert "forward: 3 x 4,608 bytes of float32 in block (models.py:" in str(rows)


def test_marked_leaves_are_gathered_at_the_mark():
    up = gathers_of(explained("marked"), "blocks/up")
    assert [g.where.split(" ")[0] for g in up] == ["_marked", "block"]
    square = models.init_params(jax.random.key(0))["square"]
    np.testing.assert_array_equal(jzero.gather(square), square)


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_grows_by_activations_only(stage):
    """24 blocks against 12: what a block adds is its input, and in no case its weights or its gradient."""
    d, f, tokens, examples = 64, 256, 32, 2

    def loss_fn(params, batch):
        def block(x, w):
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        x, _ = lax.scan(jax.checkpoint(block), params["table"][batch], params["blocks"])
        return jnp.mean(jax.nn.logsumexp(x @ params["table"].T, axis=-1))

    def temp(depth):
        shapes = {"table": (128, d), "blocks": {"up": (depth, d, f), "down": (depth, f, d)}}
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, "float32"), shapes, is_leaf=lambda x: isinstance(x, tuple)
        )
        layout = layout_of(params, {"data": 8}, stage)
        program = jax.jit(jzero.value_and_grad(loss_fn, layout), out_shardings=(None, layout.grad_shardings))
        params = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, layout.param_shardings
        )
        batch = jax.ShapeDtypeStruct((8 * examples, tokens), "int32", sharding=layout.sharding(layout.batch_spec))
        analysis: Any = program.lower(params, batch).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    activations, weights = 4 * examples * tokens * d, 4 * 2 * d * f
    assert temp(24) - temp(12) <= 12 * activations * 1.01
    # Not more than two whole blocks, and what the loss itself needs, on top of the activations.
    loss_and_block = 4 * examples * tokens * (3 * 128 + 6 * f) + 4 * 3 * 128 * d
    assert temp(12) <= 12 * activations + 2 * weights + loss_and_block


def test_patterns_that_match_nothing():
    params = models.init_params(jax.random.key(0))
    with pytest.raises(ValueError, match=r"pattern 'block/\*' that matches none of the 12 paths .* 'attention/norm'"):
        layout_of(params, {"data": 8}, 3, regather=[("block/*", False)])


def gradient(loss_fn, params, stage, x):
    layout = layout_of(params, {"data": 8}, stage, min_shard_size=0)
    _, grads = jzero.value_and_grad(loss_fn, layout)(placed(params, layout), x)
    return layout.logical(grads, replicate=True)


def alike(loss_fn, params, x):
    """The gradients at stages 1 to 3 are those of one device."""
    wanted = jax.device_get(jax.jit(jax.grad(loss_fn))(params, x))
    scale = max(np.abs(g).max() for g in jax.tree.leaves(wanted))
    for stage in (1, 2, 3):
        for a, b in zip(jax.tree.leaves(gradient(loss_fn, params, stage, x)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * scale)


def square(seed=0, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape or (16, 16)) * 3)


def test_casts_that_lose_something_are_not_undone(x64):
    x = square(1, 8, 16)

    def quantised(params, x):
        w = params["w"]
        return jnp.mean((x @ (w + lax.stop_gradient(w.astype("int32").astype("float64") - w))) ** 2)

    def there_and_back(params, x):
        w = params["w"]
        rounded = w.astype("bfloat16").astype("float16").astype("bfloat16").astype("float64")
        return jnp.mean((x @ (w + lax.stop_gradient(rounded - w))) ** 2)

    alike(quantised, {"w": square()}, x)
    alike(there_and_back, {"w": square() * 1e-6}, x)


def test_slices_along_the_cut_dim_inside_and_outside_of_a_loop(x64):
    def loss_fn(params, x):
        column = lambda x, i: (x + lax.dynamic_slice_in_dim(params["w"], i, 1, 1).T, None)  # noqa: E731
        row = lambda x, i: (x + lax.dynamic_slice_in_dim(params["w"].T, i, 1, 1).T, None)  # noqa: E731
        x, _ = lax.scan(column, x, jnp.arange(16))
        x, _ = lax.scan(row, x, jnp.arange(16))
        return jnp.mean((x @ params["w"]) ** 2)

    alike(loss_fn, {"w": square()}, square(1, 8, 16))


@jax.custom_vjp
def odd_backward(w):
    return jnp.sum(w)


odd_backward.defvjp(
    lambda w: (jnp.sum(w), w),
    lambda w, g: (lax.pad(w[:, 1:] * g, jnp.float64(1), ((0, 0, 0), (1, 0, 0))) + (w > 0).astype("float64"),),
)


def test_what_is_not_linear_is_not_moved(x64):
    """Each device adds its own, also where a backward pass pads with ones and casts from bool."""
    params, x = {"w": square()}, jnp.ones((8, 1))

    def loss_fn(params, x):
        return odd_backward(params["w"]) * jnp.mean(x)

    one, two, three = (gradient(loss_fn, params, stage, x)["w"] for stage in (1, 2, 3))
    np.testing.assert_allclose(two, one, rtol=1e-13)
    np.testing.assert_allclose(three, one, rtol=1e-13)


def test_a_fused_weight_is_reduced_once():
    def loss_fn(params, x):
        w = params["w"]
        return jnp.mean((x @ w[:, :16]) * (x @ w[:, 16:32]) * (x @ w[:, 32:]))

    layout = layout_of({"w": square(0, 16, 48)}, {"data": 8}, 3, min_shard_size=0)
    lowered = jax.jit(jzero.value_and_grad(loss_fn, layout)).lower({"w": square(0, 16, 48)}, square(1, 8, 16))
    rows = jzero.program.collectives(lowered, layout.mesh)
    assert [(row.shape, row.count) for row in rows if row.kind == "reduce-scatter"] == [((16, 48), 1)]


def test_long_sums_of_rows_and_leaves_that_are_not_used():
    def loss_fn(params, x):
        for index in range(700):
            x = x + params["rows"][index]
        return jnp.mean(x**2)

    params = {"rows": square(0, 700, 8), "complex": jnp.ones((8, 8), "complex64"), "unused": square()}
    layout = layout_of(params, {"data": 8}, 3, min_shard_size=0)
    lowered = jax.jit(jzero.value_and_grad(loss_fn, layout)).lower(placed(params, layout), square(1, 8, 8))
    rows = jzero.program.collectives(lowered, layout.mesh)
    assert {row.shape[-1]: row.count for row in rows if row.kind == "reduce-scatter"} == {8: 700}
    grads = gradient(lambda params, x: jnp.mean((x @ params["unused"]) ** 2), params, 1, square(1, 8, 16))
    assert not jnp.any(grads["complex"]) and not jnp.any(grads["rows"]) and jnp.any(grads["unused"])
