"""A leaf with no dim that divides is stored padded, and nothing but storage sees the padding.

The shapes are of primes, so that on 3, 5, 6, 7 and 8 devices no dim divides. In float64 what is right is exact.
"""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from jzero.program import compiled_collectives

SHAPES = {"embed": (11, 13), "cube": (2, 13, 11), "bias": (17,), "even": (840,), "frozen": (13, 19), "small": (16,)}
PADDED, CUT, TRAINED = ("embed", "cube", "bias", "frozen"), ("embed", "cube", "bias", "even"), set(SHAPES) - {"frozen"}
MIN_SHARD_SIZE = 17  # exactly the size of "bias", and one more than that of "small"
CLIP, TX = 0.05, optax.adamw(1e-2, weight_decay=0.1)

# How often the shards are repeated, into how many parts leaves are cut, and the stage.
CASES = [*((1, n, 3) for n in (3, 5, 6, 7, 8)), (2, 3, 3), (1, 8, 1), (1, 7, 2)]
all_cases = pytest.mark.parametrize("replicas, n, stage", CASES)


def make_mesh(n, replicas=1):
    return jzero.make_mesh(devices=jax.devices()[: replicas * n], replica=replicas, data=n)


def make_params():
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=shape) / 3 for path, shape in SHAPES.items()}


def make_layout(n, stage, replicas=1):
    return jzero.zero(
        {path: jax.ShapeDtypeStruct(shape, "float64") for path, shape in SHAPES.items()},
        stage=stage,
        mesh=make_mesh(n, replicas),
        replica_axes=("replica",),
        min_shard_size=MIN_SHARD_SIZE,
        trainable=lambda path, leaf: path != "frozen",
    )


def loss_fn(params, x):
    h = jnp.tanh(x @ params["embed"])
    h = jnp.tanh(jnp.einsum("bi,kij->bkj", h, params["cube"])).sum(1)
    out = h.sum(1) * params["bias"].sum() + (h @ params["frozen"][:11, :2]).sum(1) * params["small"].sum()
    return jnp.mean((out - params["even"].mean()) ** 2)


def make_batch():
    return np.random.default_rng(1).normal(size=(1680, 11))


@functools.cache
def one_device():
    """Gradients, their norm, and the params and moments after two clipped steps, in plain JAX and optax."""
    with jax.enable_x64(True):
        params, norms = make_params(), []
        frozen = params.pop("frozen")
        opt_state, first = TX.init(params), None
        grad = jax.jit(jax.grad(lambda params: loss_fn(params | {"frozen": frozen}, make_batch())))
        update = jax.jit(TX.update)
        for _ in range(2):
            grads = grad(params)
            first = first or grads
            norms.append(float(np.sqrt(sum(np.sum(np.asarray(g) ** 2) for g in grads.values()))))
            grads = {path: g * min(1, CLIP / (norms[-1] + 1e-6)) for path, g in grads.items()}
            updates, opt_state = update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return SimpleNamespace(grads=first, norms=norms, params=params, opt_state=opt_state, frozen=frozen)


@functools.cache
def run(replicas, n, stage):
    """The same by jzero: the first state and its gradients, and the state after two steps of two microbatches."""
    with jax.enable_x64(True):
        layout = make_layout(n, stage, replicas)
        first = jzero.init(lambda params: params, TX, layout, make_params())
        _, grads = jzero.value_and_grad(loss_fn, layout)(first.params, make_batch())
        before = jax.tree.map(np.asarray, first)
        step = jzero.train_step(loss_fn, TX, layout, microbatches=2, clip_norm=CLIP)
        state, metrics = first, []
        bytes_of = [jzero.memory.live_bytes(tree) for tree in (state.params, state.opt_state, grads)]
        for _ in range(2):
            state, more = step(state, make_batch())
            metrics.append(jax.device_get(more))
        return SimpleNamespace(layout=layout, before=before, grads=grads, state=state, metrics=metrics, bytes=bytes_of)


def logical(path, x):
    """What is left of a stored array without its padding, on the host."""
    return np.asarray(x)[tuple(slice(size) for size in SHAPES[path])]


def padding(path, x):
    """Elements of a stored array that the logical leaf does not have."""
    x, inside = np.asarray(x), np.zeros(np.shape(x), bool)
    inside[tuple(slice(size) for size in SHAPES[path])] = True
    return x[~inside]


@pytest.mark.parametrize(
    "n, shape, spec, stored",
    [
        (3, (4, 5), P(None, "data"), (4, 6)),  # 6/5 is less than 6/4
        (3, (5, 4), P("data"), (6, 4)),
        (3, (3, 5), P("data"), (3, 5)),  # what divides is not padded, even along the first dim
        (5, (7, 7), P(None, "data"), (7, 10)),  # as good as the first dim, which may be a stack of layers
        (6, (10, 7), P("data"), (12, 7)),
        (6, (20, 10, 20), P(None, None, "data"), (20, 10, 24)),  # of three equals the larger, and not the first
        (7, (8, 13), P(None, "data"), (8, 14)),
        (7, (2, 1, 50257), P(None, None, "data"), (2, 1, 50260)),
        (8, (5,), P("data"), (8,)),
        (8, (3, 17, 9), P(None, "data"), (3, 24, 9)),
        (8, (50257, 768), P(None, "data"), (50257, 768)),
        (1, (11, 13), P(None, "data"), (11, 13)),
    ],
)
def test_the_dim_that_needs_the_least_padding_is_padded(n, shape, spec, stored):
    abstract = {"w": jax.ShapeDtypeStruct(shape, "float32")}
    layout = jzero.zero(abstract, stage=3, mesh=make_mesh(n), min_shard_size=0)
    (row,) = jzero.explain(layout)
    assert (row.params, row.shape, row.stored_shape) == (spec, shape, stored)
    assert row.bytes_per_device * n == math.prod(stored) * 4
    assert row.reason == ("" if stored == shape else f"no dim of {shape} divides by {n}: stored padded to {stored}")


@pytest.mark.parametrize("n", [7, 8])
def test_min_shard_size_is_the_first_size_that_is_cut(n):
    sizes = {"below": (2, 17), "at": (5, 7), "above": (4, 9)}  # 34, 35 and 36 elements
    abstract = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in sizes.items()}
    rows = {row.path: row for row in jzero.explain(jzero.zero(abstract, stage=3, mesh=make_mesh(n), min_shard_size=35))}
    assert rows["below"].params == P() and rows["below"].stored_shape == (2, 17)
    assert rows["below"].reason == "whole on every device: 34 elements are fewer than min_shard_size=35"
    assert rows["at"].params != P() and rows["above"].params != P()
    assert rows["below"].bytes_per_device == 34 * 4


@all_cases
def test_live_arrays_take_the_padded_formula_to_the_byte(replicas, n, stage):
    result = run(replicas, n, stage)

    def cut(path):
        """Bytes on one device of a leaf that is cut as well as it can be."""
        shape = SHAPES[path]
        return min(-(-size // n) * math.prod(shape) // size for size in shape) * 8

    def whole(path):
        return math.prod(SHAPES[path]) * 8

    shards = sum(map(cut, CUT)) + whole("small")
    params = shards + cut("frozen") if stage == 3 else sum(map(whole, SHAPES))
    # Adam: two moments, and its count in int32.
    wanted = [params, 2 * shards + 4, shards]
    for found, size in zip(result.bytes, wanted, strict=True):
        assert set(found.values()) == {size} and len(found) == replicas * n
    with jax.enable_x64(True):
        stored = jzero.memory.stored_bytes(result.layout, TX)
    assert [stored.params, stored.opt_state] == wanted[:2]
    after = [jzero.memory.live_bytes(tree) for tree in (result.state.params, result.state.opt_state)]
    assert after == result.bytes[:2]


@all_cases
def test_training_is_that_of_the_logical_tree(replicas, n, stage):
    result, wanted = run(replicas, n, stage), one_device()
    # The frozen leaf has no gradient and no moments.
    assert result.grads["frozen"] is None
    assert {path for path, mu in result.state.opt_state[0].mu.items() if mu is not None} == TRAINED
    for path in TRAINED:
        np.testing.assert_allclose(logical(path, result.grads[path]), wanted.grads[path], rtol=0, atol=1e-12)
        np.testing.assert_allclose(logical(path, result.state.params[path]), wanted.params[path], rtol=0, atol=1e-12)
        for moment in ("mu", "nu"):
            got, right = (getattr(s[0], moment)[path] for s in (result.state.opt_state, wanted.opt_state))
            np.testing.assert_allclose(logical(path, got), right, rtol=0, atol=1e-14)
    # Norm and clipping, too, are those of the logical tree.
    np.testing.assert_allclose([m["grad_norm"] for m in result.metrics], wanted.norms, rtol=1e-12)
    assert all(m["clipped"] for m in result.metrics) and min(wanted.norms) > CLIP


@all_cases
def test_padding_is_zero_before_and_after_steps(replicas, n, stage):
    result = run(replicas, n, stage)
    for tree in (
        result.before.params,
        result.state.params,
        result.grads,
        *(s.opt_state[0].mu for s in (result.before, result.state)),
    ):
        for path, x in tree.items():
            assert x is None or not padding(path, x).any()
    padded = [path for path in PADDED if padding(path, result.state.params[path]).size]
    moments = [path for path in PADDED[:3] if padding(path, result.state.opt_state[0].nu[path]).size]
    assert (padded, moments) == (list(PADDED) if stage == 3 else [], list(PADDED[:3]))


@all_cases
def test_a_frozen_padded_leaf_is_cut_and_kept(replicas, n, stage):
    result = run(replicas, n, stage)
    kept = result.state.params["frozen"]
    np.testing.assert_array_equal(logical("frozen", kept), make_params()["frozen"])
    shards = {shard.data.size for shard in kept.addressable_shards}
    assert shards == {kept.size // n if stage == 3 else 13 * 19}


def test_the_optimizer_never_sees_padding(x64):
    """An update that is not zero where gradient and param are would fill it, were it to see stored shapes."""
    seen = []

    def plus_one(updates, params):
        seen.extend((g.shape, p.shape) for g, p in zip(*map(jax.tree.leaves, (updates, params)), strict=True))
        return jax.tree.map(lambda g, p: g + 1 + 0 * p, updates, params)

    tx, layout = optax.stateless(plus_one), make_layout(8, 3)
    state = jzero.init(lambda params: params, tx, layout, make_params())
    grads = {path: None if path == "frozen" else jnp.full(shape, 2.0) for path, shape in SHAPES.items()}
    state = jzero.apply_gradients(state, grads, tx, layout)  # gradients in logical shapes do as well
    assert set(seen) == {(SHAPES[path],) * 2 for path in TRAINED}
    for path, before in make_params().items():
        np.testing.assert_array_equal(logical(path, state.params[path]), before + (0 if path == "frozen" else 3))
        assert not padding(path, state.params[path]).any()


@pytest.mark.parametrize("n, stage", [(7, 3), (8, 3), (8, 1), (7, 2)])
def test_padding_adds_no_collective_to_the_update(n, stage, x64):
    """At stage 3 there is none; at stages 1 and 2 only the gathers of the new params, of their stored bytes."""
    result = run(1, n, stage)
    update = jax.jit(lambda state, grads: jzero.apply_gradients(state, grads, TX, result.layout))
    rows = compiled_collectives(update.lower(result.state, result.grads).compile(), result.layout.mesh)
    leaves = {leaf.path: leaf for leaf in result.layout.leaves}
    assert {row.kind for row in rows} == (set() if stage == 3 else {"all-gather"})
    assert sum(row.count for row in rows) == (0 if stage == 3 else len(CUT))
    assert sum(row.bytes for row in rows) == (0 if stage == 3 else sum(math.prod(leaves[p].stored) * 8 for p in CUT))


def test_logical_and_stored_cost_no_collective_inside_of_jit(x64):
    """There and back again over params, their trainable part and optimizer state is a local program."""
    result = run(1, 7, 3)
    layout, state = result.layout, result.state

    def there_and_back(params, opt_state, grads):
        trees = layout.logical(params), layout.logical(opt_state, tx=TX), layout.logical(grads)
        shapes.extend(jax.tree.map(jnp.shape, (trees[0], trees[2])))
        params, opt_state, grads = jax.tree.map(lambda x: x + 1, trees)
        return layout.stored(params), layout.stored(opt_state, tx=TX), layout.stored(grads)

    shapes = []
    args = (state.params, state.opt_state, result.grads)
    shardings = (layout.param_shardings, layout.opt_shardings(TX), layout.grad_shardings)
    compiled = jax.jit(there_and_back, out_shardings=shardings).lower(*args).compile()
    assert compiled_collectives(compiled) == ()
    assert shapes == [SHAPES, SHAPES | {"frozen": None}]
    # It computes on what is logical alone: the padding comes back as zeros.
    for path, x in compiled(*args)[0].items():
        np.testing.assert_array_equal(logical(path, x), logical(path, state.params[path]) + 1)
        assert not padding(path, x).any()


@pytest.mark.parametrize("n", [3, 8])
def test_logical_undoes_stored(n, x64):
    layout, params = make_layout(n, 3), make_params()
    opt_state = jax.tree.map(lambda x: np.asarray(x) + 1, TX.init(jzero.partition(params, layout)[0]))
    trees = [(params, None), (jzero.partition(params, layout)[0], None), (opt_state, TX)]
    for tree, tx in trees:
        stored = layout.stored(tree, tx=tx)
        back = layout.logical(stored, tx=tx, replicate=True)
        assert jax.tree.structure(stored) == jax.tree.structure(back) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, back, tree)
    # Arrays that have a placement get that of the layout.
    placed = layout.stored(jax.tree.map(jnp.asarray, params))
    for path in PADDED:
        assert placed[path].sharding.is_equivalent_to(layout.param_shardings[path], placed[path].ndim)
        assert not padding(path, placed[path]).any()
    jax.tree.map(np.testing.assert_array_equal, layout.logical(placed, replicate=True), params)


def test_outside_of_jit_logical_has_to_be_told_to_replicate(x64):
    result = run(1, 8, 3)
    layout, params = result.layout, result.state.params
    with pytest.raises(ValueError) as error:
        layout.logical(params)
    for part in ("['bias']", "(24,)", "(17,)", "8 devices", "inside of jax.jit", "replicate=True"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"\['bias'\].*replicate=True"):
        layout.logical(result.state.opt_state, tx=TX)
    whole = layout.logical(params, replicate=True)
    for path in SHAPES:
        np.testing.assert_array_equal(whole[path], logical(path, params[path]))
        assert whole[path].is_fully_replicated == (path != "even")
    # What is not padded comes back as it is, and where nothing is, nothing needs to be told.
    assert whole["even"] is params["even"] and whole["small"] is params["small"]
    replicated = run(1, 8, 1)
    back = replicated.layout.logical(replicated.state.params)
    assert all(back[path] is replicated.state.params[path] for path in SHAPES)


def test_shapes_that_are_neither_logical_nor_stored_are_refused(x64):
    layout, params = make_layout(8, 3), make_params()
    for method in (layout.logical, layout.stored):
        with pytest.raises(ValueError, match=r"\['bias'\] has shape \(18,\); wanted \(17,\), or stored \(24,\)"):
            method(params | {"bias": np.zeros(18)})
        with pytest.raises(ValueError, match=r"missing \['cube'\]"):
            method({path: x for path, x in params.items() if path != "cube"})
    with pytest.raises(ValueError, match=r"structure"):
        layout.logical(TX.init(params), tx=TX)  # the state of all params, where one is frozen


@pytest.mark.parametrize("stage", [1, 2])
def test_a_padded_tree_is_not_stored_again_where_params_are_whole(stage):
    layout = jzero.zero({"w": np.ones(9, np.float32)}, stage=stage, mesh=make_mesh(8), min_shard_size=0)
    with pytest.raises(ValueError, match=r"stored: \['w'\] has the padded shape \(16,\); wanted .* \(9,\)"):
        layout.stored({"w": np.ones(16, np.float32)})
