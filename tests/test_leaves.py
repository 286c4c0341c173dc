"""Leaves of every kind: trained as on one device, or kept bit for bit; and what is not trained costs nothing."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from jzero.program import collectives

TRAINED = {"w", "scalar", "empty", "unused", "bias"}


def make_mesh(n=8):
    return jzero.make_mesh(devices=jax.devices()[:n], data=n)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def bits(x):
    """An array on the host, random keys as what they are made of."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_same_bits(got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    np.testing.assert_array_equal(bits(got), bits(wanted))


def put(layout, params):
    return jax.device_put(layout.stored(params), layout.param_shardings)


def every_kind():
    """Params of which five can be trained. "table" and "allowed" are large enough to be cut, "odd" to be padded."""
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(16, 8)),
        "scalar": np.float64(0.7),
        "empty": np.zeros((0, 8)),
        "unused": rng.normal(size=(24,)),
        "bias": rng.normal(size=(3, 5)),
        "table": rng.integers(0, 16, size=(8, 3)),
        "odd": rng.integers(-9, 9, size=(11,), dtype=np.int8),
        "allowed": rng.integers(0, 2, size=(16,)).astype(bool),
        "steps": jnp.int32(2**31 - 1),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 16),
        "raw": jax.random.PRNGKey(5),
    }


def loss_of_every_kind(params, x):
    noise = jax.random.normal(params["key"], (8,)) + jax.random.normal(params["keys"][9], (8,))
    noise += jax.random.normal(params["raw"], (8,)) + params["odd"][:8]
    rows = jnp.where(params["allowed"][:, None], params["w"], params["w"] ** 2)[params["table"]]  # (8, 3, 8)
    out = jnp.tanh(jnp.einsum("bi,ijk->bjk", x, rows) + noise) * params["scalar"]
    return jnp.mean(out**2) + params["empty"].sum() + jnp.mean((out.sum((1, 2))[:, None, None] + params["bias"]) ** 2)


@pytest.mark.parametrize("stage", range(4))
def test_every_kind_of_leaf_is_trained_or_kept(stage, x64):
    params, batch, tx = every_kind(), normal(16, 8, seed=1), optax.sgd(0.01, momentum=0.9)
    layout = jzero.zero(params, stage=stage, mesh=make_mesh(), min_shard_size=8)
    state = jzero.init(lambda params: params, tx, layout, params)

    rest = {path: x for path, x in params.items() if path not in TRAINED}
    trained = {path: params[path] for path in TRAINED}
    opt_state = tx.init(trained)
    loss_and_grad = jax.jit(jax.value_and_grad(lambda trained: loss_of_every_kind(trained | rest, batch)))
    loss, right = loss_and_grad(trained)

    value, grads = jzero.value_and_grad(loss_of_every_kind, layout)(state.params, batch)
    np.testing.assert_allclose(value, loss, rtol=1e-12)
    assert {path for path, grad in grads.items() if grad is None} == set(rest)
    logical = layout.logical(grads, replicate=True)
    for path in TRAINED:
        assert (logical[path].shape, logical[path].dtype) == (right[path].shape, right[path].dtype)
        np.testing.assert_allclose(logical[path], right[path], rtol=0, atol=1e-12)
    assert not np.any(grads["unused"])

    step = jzero.train_step(loss_of_every_kind, tx, layout)
    for _ in range(3):
        updates, opt_state = tx.update(loss_and_grad(trained)[1], opt_state)
        trained = jax.tree.map(jnp.add, trained, updates)
        state, _ = step(state, batch)
    got = layout.logical(state.params, replicate=True)
    for path in TRAINED:
        np.testing.assert_allclose(got[path], trained[path], rtol=0, atol=1e-12)
    for path in rest:
        assert_same_bits(got[path], jnp.asarray(params[path]))
    assert {path for path, x in state.opt_state[0].trace.items() if x is not None} == TRAINED
    if stage == 3:
        sizes = {
            path: state.params[path].addressable_shards[0].data.size for path in ("table", "allowed", "odd", "unused")
        }
        assert sizes == {"table": 3, "allowed": 2, "odd": 2, "unused": 3}


def test_explain_says_why_a_leaf_is_not_cut_and_not_trained(x64):
    layout = jzero.zero(every_kind(), stage=3, mesh=make_mesh(), min_shard_size=8)
    rows = {row.path: row for row in jzero.explain(layout)}
    assert list(rows) == sorted(every_kind())
    assert "scalar" in rows["scalar"].reason and "no elements" in rows["empty"].reason
    for path in ("key", "keys"):
        assert "key<fry> has no elements that could be cut" in rows[path].reason
    for path, row in rows.items():
        assert ("not trained: no gradient and no optimizer state" in row.reason) == (path not in TRAINED)
        assert (row.grads is None) == (row.opt_state is None) == (path not in TRAINED)


MASKS = {
    "mask": {"blocks": [{"kernel": True, "bias": False}, {"kernel": False, "bias": True}], "embed": False},
    "predicate": lambda path, leaf: path in ("blocks/0/kernel", "blocks/1/bias") and leaf.dtype == "float64",
}


def blocks():
    return {
        "blocks": [{"kernel": normal(8, 16, seed=i), "bias": normal(16, seed=i + 2)} for i in range(2)],
        "embed": normal(16, 8, seed=5),
    }


def loss_of_blocks(params, tokens):
    x = params["embed"][tokens]
    for block in params["blocks"]:
        x = jnp.tanh(x @ block["kernel"] + block["bias"]) @ params["embed"]
    return jnp.mean(x**2)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", MASKS)
def test_frozen_leaves_have_no_gradient_and_no_optimizer_state(how, stage, x64):
    params, tokens, tx = blocks(), np.random.default_rng(0).integers(16, size=16), optax.adam(0.01)
    layout = jzero.zero(params, stage=stage, mesh=make_mesh(), min_shard_size=0, trainable=MASKS[how])
    state = jzero.init(lambda params: params, tx, layout, params)
    # Two moments of a kernel (8, 16) and of a bias (16,), cut into 8, and the count.
    assert set(jzero.memory.live_bytes(state.opt_state).values()) == {2 * (8 * 16 + 16) * 8 // 8 + 4}
    shards = 8 if stage == 3 else 1
    for leaf in jax.tree.leaves(state.params):  # frozen or not
        assert leaf.addressable_shards[0].data.size * shards == leaf.size
    _, grads = jzero.value_and_grad(loss_of_blocks, layout)(state.params, tokens)
    right = jax.jit(jax.grad(loss_of_blocks))(params, tokens)
    kernel, bias = ("blocks", 0, "kernel"), ("blocks", 1, "bias")
    assert (grads["embed"], grads["blocks"][0]["bias"], grads["blocks"][1]["kernel"]) == (None, None, None)
    for a, b, c in (kernel, bias):
        np.testing.assert_allclose(grads[a][b][c], right[a][b][c], rtol=0, atol=1e-13)
    state, metrics = jzero.train_step(loss_of_blocks, tx, layout)(state, tokens)
    norm = np.sqrt(sum(np.sum(np.asarray(right[a][b][c]) ** 2) for a, b, c in (kernel, bias)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
    for (path, x), before in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(params), strict=True):
        frozen = tuple(key.idx if hasattr(key, "idx") else key.key for key in path) not in (kernel, bias)
        assert np.array_equal(x, before) == frozen


def test_a_predicate_sees_each_path_and_leaf():
    seen = {}

    def predicate(path, leaf):
        seen[path] = leaf.shape
        return True

    jzero.zero(blocks(), stage=3, mesh=make_mesh(), trainable=predicate)
    assert seen == {
        **{f"blocks/{i}/{name}": shape for i in range(2) for name, shape in (("kernel", (8, 16)), ("bias", (16,)))},
        "embed": (16, 8),
    }


@pytest.mark.parametrize("stage, gathers", [(1, 0), (2, 0), (3, 5 + 2)])
def test_frozen_leaves_are_gathered_but_not_reduced(stage, gathers, x64):
    layout = jzero.zero(blocks(), stage=stage, mesh=make_mesh(), min_shard_size=0, trainable=MASKS["mask"])
    params, tokens = put(layout, blocks()), np.zeros(16, int)
    rows = collectives(jax.jit(jzero.value_and_grad(loss_of_blocks, layout)).lower(params, tokens), layout.mesh)
    count = {kind: sum(row.count for row in rows if row.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    assert count == {"all-gather": gathers, "reduce-scatter": 2}
    assert sorted(row.shape for row in rows if row.kind == "reduce-scatter") == [(8, 16), (16,)]
    assert [row.shape for row in rows if row.kind == "all-reduce"] == [()]  # the loss


@pytest.mark.parametrize("stage", [2, 3])
def test_a_leaf_used_twice_is_reduced_once(stage, x64):
    """Real tying: the gradient is the sum of both uses, and crosses the links once."""
    params, tokens = {"embed": normal(16, 8)}, np.random.default_rng(0).integers(16, size=(16, 5))

    def loss_fn(params, tokens):
        logits = params["embed"][tokens[:, :-1]] @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    layout = jzero.zero(params, stage=stage, mesh=make_mesh(), min_shard_size=0)
    lowered = jax.jit(jzero.value_and_grad(loss_fn, layout)).lower(put(layout, params), tokens)
    counts = [(row.kind, row.shape, row.count) for row in collectives(lowered, layout.mesh)]
    gather = [("all-gather", (16, 8), 2)] if stage == 3 else []  # once in the forward pass, once in the backward pass
    assert counts == [*gather, ("reduce-scatter", (16, 8), 1), ("all-reduce", (), 1)]
    _, grads = lowered.compile()(put(layout, params), tokens)
    np.testing.assert_allclose(grads["embed"], jax.jit(jax.grad(loss_fn))(params, tokens)["embed"], rtol=0, atol=1e-13)


DTYPES = {"float16": 5e-3, "bfloat16": 4e-2, "float32": 1e-5, "float64": 1e-12}


def loss_of_dtypes(params, x):
    """Every leaf has a term of its own, computed in its own dtype."""
    terms = [jnp.mean((x.astype(w.dtype) @ w) ** 2) for w in params.values()]
    return sum(term.astype(jnp.float64) for term in terms)


@pytest.mark.parametrize("n, stage", [(8, 1), (8, 3), (3, 3)])
@pytest.mark.filterwarnings("ignore:train_step. params are used in float16")
def test_mixed_dtypes_are_kept(n, stage, x64):
    """Each leaf has gradients and moments in its own dtype, and as exact as that is: none is dragged down."""
    params = {dtype: jnp.asarray(normal(8, 16) / 4, dtype) for dtype in DTYPES}
    batch, tx = normal(24, 8, seed=1), optax.sgd(0.5, momentum=0.9)
    layout = jzero.zero(params, stage=stage, mesh=make_mesh(n), min_shard_size=0)
    state = jzero.init(lambda params: params, tx, layout, params)
    _, grads = jzero.value_and_grad(loss_of_dtypes, layout)(state.params, batch)
    right = jax.jit(jax.grad(loss_of_dtypes))(params, batch)
    wanted = jax.tree.map(lambda x, g: x - jnp.asarray(0.5, x.dtype) * g, params, right)  # the first step of momentum
    state, metrics = jzero.train_step(loss_of_dtypes, tx, layout)(state, batch)
    trace = layout.logical(state.opt_state, tx=tx, replicate=True)[0].trace
    for tree, other in ((grads, right), (state.params, wanted)):
        tree = layout.logical(tree, replicate=True)
        for dtype, tolerance in DTYPES.items():
            assert tree[dtype].dtype == trace[dtype].dtype == dtype
            np.testing.assert_allclose(*(np.asarray(t[dtype], float) for t in (tree, other)), rtol=0, atol=tolerance)
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float64


def loss_of_complex(params, x):
    z = x @ params["kernel"] + params["bias"] * params["phase"]
    return jnp.mean(jnp.abs(z) ** 2) + jnp.mean(jnp.real(z**3)) + jnp.mean(jnp.imag(z) * params["gain"])


@pytest.mark.parametrize("n, stage", [(8, 0), (8, 1), (8, 2), (3, 3)])
def test_complex_leaves_are_those_of_one_device(n, stage, x64):
    """JAX's gradient of a real loss by a complex param, its norm, clipping and Adam; on 3 devices padded."""
    params = {
        "kernel": normal(8, 16) / 4 + 1j * normal(8, 16, seed=1) / 4,
        "bias": normal(16, seed=2) * 1j,
        "phase": np.complex128(0.3 - 0.4j),
        "gain": normal(16, seed=3),
    }
    batch = normal(24, 8, seed=4)
    layout = jzero.zero(params, stage=stage, mesh=make_mesh(n), min_shard_size=16)
    tx = optax.adam(0.01)
    state = jzero.init(lambda params: params, tx, layout, params)
    loss, right = jax.jit(jax.value_and_grad(loss_of_complex))(params, batch)
    norm = np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in right.values()))
    clipped = jax.tree.map(lambda g: g * min(1, 0.1 / (norm + 1e-6)), right)
    updates, opt_state = jax.jit(tx.update)(clipped, jax.jit(tx.init)(params))
    wanted = jax.tree.map(jnp.add, params, updates)

    value, grads = jzero.value_and_grad(loss_of_complex, layout)(state.params, batch)
    state, metrics = jzero.train_step(loss_of_complex, tx, layout, clip_norm=0.1)(state, batch)
    np.testing.assert_allclose([value, metrics["loss"]], [loss, loss], rtol=1e-12)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
    for got, other in ((grads, right), (state.params, wanted)):
        got = layout.logical(got, replicate=True)
        for path, x in params.items():
            assert got[path].dtype == x.dtype
            np.testing.assert_allclose(got[path], other[path], rtol=0, atol=1e-12)
    got, right = layout.logical(state.opt_state, tx=tx, replicate=True)[0], opt_state[0]
    for path in params:
        np.testing.assert_allclose(got.nu[path], right.nu[path], rtol=0, atol=1e-12)


def test_partition_and_combine_are_inverse(x64):
    params = every_kind()
    layout = jzero.zero(params, stage=3, mesh=make_mesh(), min_shard_size=8, trainable=lambda path, _: path == "w")
    trainable, rest = jzero.partition(params, layout)
    assert {path for path, x in trainable.items() if x is not None} == {"w"} and trainable["w"] is params["w"]
    assert {path for path, x in rest.items() if x is not None} == set(params) - {"w"}
    for back in (jzero.combine(trainable, rest), jzero.combine(rest, trainable)):
        assert set(back) == set(params) and all(back[path] is x for path, x in params.items())
    assert jax.tree.structure(trainable) == jax.tree.structure(layout.grad_specs)


def test_partition_and_combine_refuse_what_does_not_fit():
    params = blocks()
    layout = jzero.zero(params, stage=3, mesh=make_mesh(), trainable=MASKS["mask"])
    with pytest.raises(ValueError, match=r"params has another structure.*missing \['embed'\]"):
        jzero.partition({"blocks": params["blocks"]}, layout)
    trainable, rest = jzero.partition(params, layout)
    with pytest.raises(ValueError, match=r"both trees have a leaf at \['blocks'\]\[0\]\['bias'\]"):
        jzero.combine(params, rest)
    with pytest.raises(ValueError):
        jzero.combine(trainable, {"embed": rest["embed"]})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_none_of_the_users_own_stays_a_none(stage):
    """As in a module without a bias: to JAX it is a container without leaves."""
    params, batch = {"w": jnp.ones((8, 16)), "bias": None, "inner": (None, jnp.arange(16))}, jnp.ones((16, 8))
    layout, tx = jzero.zero(params, stage=stage, mesh=make_mesh(), min_shard_size=0), optax.sgd(0.1)
    trainable, rest = jzero.partition(params, layout)
    assert jax.tree.structure(jzero.combine(trainable, rest)) == jax.tree.structure(params)
    state = jzero.init(lambda params: params, tx, layout, params)
    state, _ = jzero.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx, layout)(state, batch)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    # d(mean of 16 x 16 squares of 8) / dw is 2 * 8 / 16 for each of the 16 columns.
    np.testing.assert_allclose(state.params["w"], 1 - 0.1, rtol=1e-6)


def two_uses(params, x):
    return jnp.mean((x @ params["a"]) ** 2) + jnp.mean(jnp.abs(x @ params["b"]) ** 3)


def shared_warnings(record):
    return [warning for warning in record if "is the same array as" in str(warning.message)]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["zero", "init_params"])
def test_one_array_at_two_paths_is_two_params_and_one_warning(where, stage, x64):
    """They drift apart, both are donated, and the caller's array outlives it."""
    w, batch = normal(8, 16), normal(16, 8, seed=1)
    abstract = dict.fromkeys("ab", jax.ShapeDtypeStruct(w.shape, w.dtype))
    given = jnp.asarray(w)
    params = {"a": given, "b": given}
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        layout = jzero.zero(params if where == "zero" else abstract, stage=stage, mesh=make_mesh(), min_shard_size=0)
        if where == "zero":
            (warning,) = shared_warnings(record)
            assert warning.filename == __file__
            state = jzero.init(lambda params: params, tx := optax.sgd(0.1, momentum=0.9), layout, params)
        else:
            assert not shared_warnings(record)  # shapes alone say nothing about arrays
            state = jzero.init(lambda w: {"a": w, "b": w}, tx := optax.sgd(0.1, momentum=0.9), layout, given)
        step = jzero.train_step(two_uses, tx, layout)
        for _ in range(2):
            state, _ = step(state, batch)
    (warning,) = shared_warnings(record)
    for part in ("['b'] is the same array as", "['a']", "drift apart", "keep one leaf and use it twice"):
        assert part in str(warning.message)
    np.testing.assert_array_equal(given, w)
    grad = jax.jit(jax.grad(two_uses))
    wanted, opt_state = {"a": w, "b": w}, tx.init({"a": w, "b": w})
    for _ in range(2):
        updates, opt_state = tx.update(grad(wanted, batch), opt_state)
        wanted = jax.tree.map(jnp.add, wanted, updates)
    for path in "ab":
        np.testing.assert_allclose(state.params[path], wanted[path], rtol=0, atol=1e-12)
    assert np.abs(np.asarray(state.params["a"] - state.params["b"])).max() > 1e-3


def test_one_array_at_many_paths_warns_once():
    w = np.ones((4, 4))
    with pytest.warns(UserWarning, match="same array") as record:
        jzero.zero({"a": w, "b": [w, w], "c": w}, stage=3, mesh=make_mesh())
    assert len(shared_warnings(record)) == 1


def test_equal_scalars_are_not_taken_for_one_array():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jzero.zero({"a": jnp.ones(()), "b": jnp.ones(()), "c": np.float32(1)}, stage=3, mesh=make_mesh())


def test_leaves_that_are_whole_cost_no_more_than_they_weigh():
    """A zero-size leaf, a scalar and a key stay whole at stage 3, on every device."""
    params = {"empty": jnp.zeros((0, 8)), "scalar": jnp.float32(1), "key": jax.random.key(0), "w": jnp.ones((8, 8))}
    layout = jzero.zero(params, stage=3, mesh=make_mesh(), min_shard_size=0)
    assert [layout.param_specs[path] for path in ("empty", "key", "scalar")] == [P()] * 3
    state = jzero.init(lambda params: params, optax.sgd(0.1), layout, params)
    assert jzero.memory.stored_bytes(layout, optax.sgd(0.1)).params == 4 + 8 + math.prod((8, 8)) * 4 // 8
    assert set(jzero.memory.live_bytes(state.params).values()) == {4 + 8 + 8 * 4}
