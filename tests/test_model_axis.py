"""Rules for a model axis: placements, what travels where, training, and what is refused.

That gradients are those of one device is tested in tests/test_stream.py, loss by loss, on meshes with a model axis too.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import models
from tests.conftest import FUSION_EMITTERS
from tests.models import D, F, L
from tests.test_stream import layout_of, placed

MESH = {"data": 4, "model": 2}
USED = ("table", "attention", "blocks")  # what the loss "gpt" uses


def params_of_gpt():
    return {name: tree for name, tree in models.init_params(jax.random.key(0)).items() if name in USED}


def gpt_layout(stage, axes=MESH, without="-", **options):
    rules = [rule for rule in models.RULES if rule[0].startswith(USED) and rule[0] != without]
    return layout_of(params_of_gpt(), axes, stage, rules=rules, **options)


def abstract(layout):
    def one(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.placed(layout.stage.params).shape, leaf.dtype, sharding=sharding)

    leaves = map(one, layout.leaves, jax.tree.leaves(layout.param_shardings))
    return layout.treedef.unflatten(leaves)


def abstract_batch(layout):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding(layout.batch_spec)), models.batch()
    )


def lower_gradient(layout, loss_fn=None, **options):
    """Lowers the gradient of the loss "gpt"; no array is needed for that."""
    program = jax.jit(jzero.value_and_grad(loss_fn or models.loss("gpt"), layout, **options))
    return program.lower(abstract(layout), abstract_batch(layout))


SPECS = {  # at stage 3
    "table": P("model", "data"),
    "attention/norm": P(None, "data"),
    "attention/qkv": P(None, "data", "model"),
    "attention/out": P(None, "model", "data"),
    "blocks/up": P(None, "data", "model"),
    "blocks/down": P(None, "model", "data"),
    "blocks/bias": P(None, ("model", "data")),  # its other dim, that of the layers, does not divide
}


def test_data_axes_take_another_dim_or_the_same_if_no_other_divides():
    layout = gpt_layout(3)
    assert {leaf.path: layout.spec(leaf, "sharded") for leaf in layout.leaves} == SPECS
    assert layout.param_specs["blocks"]["bias"] == layout.grad_specs["blocks"]["bias"] == P(None, ("model", "data"))
    of_rules = dict(models.RULES) | {"attention/norm": P()}
    for stage in (0, 1, 2):
        layout = gpt_layout(stage)
        assert all(layout.spec(leaf, layout.stage.params) == of_rules[leaf.path] for leaf in layout.leaves)


def test_a_leaf_that_the_data_axes_cannot_cut_beside_its_rule_says_so():
    params = {"bias": jnp.ones(6), "odd": jnp.ones((3, 6))}
    layout = layout_of(params, MESH, 3, rules=[("bias", P("model")), ("odd", P(None, "model"))], min_shard_size=0)
    assert layout.param_specs == {"bias": P("model"), "odd": P("data", "model")}  # 6 / 2 does not divide by 4; padded
    assert layout.leaves[1].stored == (4, 6)
    rows = jzero.explain(layout)
    assert rows[0].reason == "whole on every data shard: no dim of (6,) divides by 4 beside its rule"
    assert rows[1].reason == "no dim of (3, 6) divides by 4: stored padded to (4, 6)"


def test_an_axis_of_size_1_cuts_nothing():
    layout = gpt_layout(3, {"data": 4, "model": 1})
    assert layout.model_axes == ()
    assert layout.param_specs == layout_of(params_of_gpt(), {"data": 4}, 3).param_specs


def test_stored_bytes_are_those_of_the_live_arrays():
    layout, tx = gpt_layout(3), optax.adamw(1e-3)
    state = jzero.init(lambda p: p, tx, layout, params_of_gpt())
    planned = jzero.memory.stored_bytes(layout, tx)
    assert set(jzero.memory.live_bytes(state.params).values()) == {planned.params}
    assert set(jzero.memory.live_bytes(state.opt_state).values()) == {planned.opt_state}
    repeated = L * D  # the norms are cut over the data axis alone
    assert planned.params == 4 * (
        (sum(leaf.size for leaf in jax.tree.leaves(params_of_gpt())) - repeated) / 8 + repeated / 4
    )


@pytest.mark.parametrize("wrap", [optax.identity, lambda: optax.masked(optax.scale_by_adam(), True)])
def test_optimizer_state_follows_the_param_on_whose_path_it_lies(wrap):
    """Two weights of one shape, one cut by columns and one by rows: shapes alone do not tell them apart."""
    params = {"layers": [{"in": jnp.ones((16, 16)), "out": jnp.ones((16, 16))} for _ in range(2)]}
    rules = [("layers/*/in", P(None, "model")), ("layers/*/out", P("model"))]
    layout, tx = layout_of(params, MESH, 3, rules=rules, min_shard_size=0), optax.chain(optax.scale_by_adam(), wrap())
    specs = layout.opt_specs(tx)
    found = [spec for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)) if spec]
    assert len(found) >= 8
    assert specs[0].mu == specs[0].nu == layout.param_specs
    assert collections.Counter(found)[P("data", "model")] == len(found) / 2


def test_of_several_paths_that_end_alike_the_longest_counts():
    params = {"w": jnp.ones((16, 16)), "a": {"w": jnp.ones((16, 16))}, "b": {"a": {"w": jnp.ones((16, 16))}}}
    rules = [("w", P("model")), ("a/w", P(None, "model"))]
    layout, tx = layout_of(params, MESH, 3, rules=rules, min_shard_size=0), optax.scale_by_adam()
    assert len(set(jax.tree.leaves(layout.param_specs, is_leaf=lambda x: isinstance(x, P)))) == 3
    specs = layout.opt_specs(tx)
    assert specs.mu == specs.nu == layout.param_specs


def test_an_update_of_sgd_and_adam_exchanges_nothing_over_the_model_axis():
    for stage in (1, 3):
        layout, tx = gpt_layout(stage), optax.adamw(1e-3)
        state = jzero.init(lambda p: p, tx, layout, params_of_gpt())
        grads = jax.tree.map(lambda g, s: jax.device_put(jnp.ones(g.shape), s), state.params, layout.grad_shardings)
        update = jax.jit(lambda state, grads, tx=tx, layout=layout: jzero.apply_gradients(state, grads, tx, layout))
        rows = jzero.program.compiled_collectives(update.lower(state, grads).compile(), layout.mesh)
        assert {row.axes for row in rows} <= {("data",)}
        if stage == 3:
            assert not rows
        else:  # only model shards are gathered
            whole = sum(jzero.memory.leaf_bytes(layout, leaf, "replicated") for leaf in layout.leaves)
            assert sum(row.bytes for row in rows if row.kind == "all-gather") == whole


EXAMPLES, TIME = models.batch()["tokens"].shape
ACTIVATION = (EXAMPLES // MESH["data"], TIME, D)
LOOKUP = ("all-reduce", ACTIVATION, ("model",), 1)


def data_bytes(rows):
    """Bytes over the data axis by kind, without the loss. Over the model axis there is only the lookup in the table."""
    assert all(row.exact for row in rows)
    assert [(row.kind, row.shape, row.axes, row.count) for row in rows if "model" in row.axes] in ([LOOKUP], [])
    sizes = collections.Counter()
    for row in rows:
        if row.axes == ("data",) and row.shape:
            sizes[row.kind] += row.bytes
    return sizes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_model_shards_travel_over_the_data_axis(stage):
    """In the lowered program, where jzero's own collectives are: 2M; M; mM; 2mM + mM, of one model shard."""
    m, layout = 2, gpt_layout(stage)
    shard = {leaf.path: jzero.memory.leaf_bytes(layout, leaf, "replicated") for leaf in layout.leaves}
    M = sum(shard.values())
    again = M - shard["blocks/bias"]  # the backward pass does not need the value of a bias
    expected = {
        0: {"all-reduce": M},
        1: {"reduce-scatter": M},
        2: {"reduce-scatter": m * M},
        3: {"reduce-scatter": m * M, "all-gather": m * (M + again)},
    }[stage]
    rows = jzero.program.collectives(lower_gradient(layout, microbatches=m), layout.mesh)
    lookups = [row for row in rows if "model" in row.axes]
    assert [(row.kind, row.count) for row in lookups] == [("all-reduce", m)]
    assert data_bytes([row for row in rows if row not in lookups]) == expected
    kept = gpt_layout(stage, regather=False)
    rows = jzero.program.collectives(lower_gradient(kept), layout.mesh)
    one = {kind: size / (1 if stage < 2 else m) for kind, size in expected.items()}
    assert data_bytes(rows) == (one | {"all-gather": M} if stage == 3 else one)


def test_hybrid_beside_a_model_axis():
    layout = gpt_layout(3, {"replica": 2, "data": 2, "model": 2})
    rows = jzero.program.collectives(lower_gradient(layout), layout.mesh)
    M = sum(jzero.memory.leaf_bytes(layout, leaf, "replicated") for leaf in layout.leaves)
    assert sum(row.bytes for row in rows if row.kind == "reduce-scatter" and row.axes == ("data",)) == M
    assert sum(row.bytes for row in rows if row.kind == "all-reduce" and row.axes == ("replica",)) == M / 2


def test_a_bf16_model_gathers_and_reduces_bf16_model_shards():
    def loss_fn(params, batch):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        return models.loss("gpt")(half, batch).astype(jnp.float32)

    layout = gpt_layout(3)
    rows = jzero.program.collectives(lower_gradient(layout, loss_fn), layout.mesh)
    assert {row.dtype for row in rows if row.shape} == {"bfloat16"}
    assert data_bytes(rows)["all-gather"] > 0


@pytest.mark.parametrize(("stage", "times"), [(1, 1), (3, 1), (3, 64)])
def test_no_weight_and_no_logits_travel_over_the_model_axis(stage, times):
    """In the compiled program, where the partitioner has put in what the model shards exchange.

    Left alone it gathers weights where they are smaller than the activations of a long batch; here both are tried.
    """
    layout = gpt_layout(stage, without="blocks/bias")
    batch = {"tokens": np.zeros((times * EXAMPLES, TIME), int)}
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding(layout.batch_spec)), batch
    )
    lowered = jax.jit(jzero.value_and_grad(models.loss("gpt"), layout)).lower(abstract(layout), shapes)
    counts = collections.Counter()
    for row in jzero.program.compiled_collectives(lowered.compile(), layout.mesh):
        if row.axes == ("model",):
            shape = tuple(n for n in row.shape if n > 1)
            counts[row.kind, tuple("batch" if n == times * ACTIVATION[0] else n for n in shape)] += row.count
    activation = ("batch", TIME, D)
    most = {
        # Sequence parallelism: a block gathers its input in front of qkv and of up, in the forward pass and when it is
        # recomputed, and its cotangent behind out and down; the head gathers its input, the table its cotangent.
        ("all-gather", activation): 6 * L + 2,
        # What is summed behind rows, and the cotangents behind columns. On GPU these are reduce-scatters.
        ("all-reduce", activation): 5 * L + 2,
        ("all-reduce", ("batch", TIME)): 4,  # of the loss: largest logit, sum, and the logit that is asked for
        # Gradients of the norm and of the bias, which see parts of the sequence: Megatron-LM sums them by hand.
        ("all-reduce", (D,)): 2 * L,
    }
    assert counts.keys() == most.keys()
    # From jax 0.12 on XLA gathers one cotangent of a block less, by summing the bias's gradient later.
    less = {
        kind: n - (L if kind in (("all-gather", activation), ("all-reduce", (D,))) else 0) for kind, n in most.items()
    }
    assert counts in (most, less)


def three_steps_on_one_device(tx):
    """The params after them, and loss and norm of each."""

    @jax.jit
    def update(params, opt_state, batch):
        loss, grads = jax.value_and_grad(models.loss("gpt"))(params, batch)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.4 / (norm + 1e-6)), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, norm)

    params, log = params_of_gpt(), []
    opt_state = tx.init(params)
    for _ in range(3):
        params, opt_state, numbers = update(params, opt_state, models.batch())
        log.append(numbers)
    return params, log


@pytest.mark.parametrize(
    ("stage", "axes"), [pytest.param(1, MESH, marks=pytest.mark.slow), (3, MESH), (2, {"data": 2, "model": 4})]
)
def test_training_is_that_of_one_device(x64, stage, axes):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9))
    layout = gpt_layout(stage, axes)
    state = jzero.init(lambda p: p, tx, layout, params_of_gpt())
    step = jzero.train_step(models.loss("gpt"), tx, layout, microbatches=2, clip_norm=0.4)
    params, log = three_steps_on_one_device(tx)
    for numbers in log:
        state, metrics = step(state, layout.put_batch(models.batch()))
        np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], numbers, rtol=1e-10)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), state.params, params)
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)), state.params, layout.param_shardings
    )


def test_explanation_counts_the_bytes_of_a_model_shard():
    layout = gpt_layout(3)
    rows = {row.path: row for row in jzero.explain(layout, models.loss("gpt"), models.batch())}
    sizes = {path: [gathering.bytes for gathering in row.gathers or ()] for path, row in rows.items()}
    assert sizes["blocks/up"] == [4 * D * F // 2] * 2
    assert sizes["blocks/bias"] == [4 * D // 2]
    assert sizes["attention/norm"] == [4 * D] * 2
    assert rows["attention/norm"].reason == "repeated along mesh axis 'model': no rule cuts it there"
    assert rows["blocks/up"].reason == ""
    assert rows["blocks/up"].bytes_per_device == 4 * L * D * F / 8


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ([("blocks/wrong", P("model"))], ValueError, r"rules has a pattern 'blocks/wrong' that matches none of the 7"),
        (
            [("blocks/*", P(None, "model")), ("*/up", P(None, None, "model"))],
            ValueError,
            r"params\['blocks'\]\['up'\] is matched by 2 rules, 'blocks/\*' and '\*/up'",
        ),
        (
            [("blocks/up", P("model"))],
            ValueError,
            r"params\['blocks'\]\['up'\] \(3, 24, 48\): dim 0 of size 3 does not divide by 2 \(mesh axes 'model'\), as "
            r"the rule \('blocks/up', P\('model',\)\) wants",
        ),
        ([("table", P("data"))], ValueError, r"names 'data', which is one of data_axes or replica_axes"),
        ([("table", P("tensor"))], ValueError, r"names 'tensor', but the mesh has axes \('data', 'model'\)"),
        ([("table", P(None, None, "model"))], ValueError, r"params\['table'\] \(64, 24\) has 2 dims, but .* names 3"),
        ([("table", P("model", "model"))], ValueError, r"names 'model' twice"),
        ([("table", "model")], TypeError, r"wanted a list of \(path pattern, PartitionSpec of axis names and None\)"),
        ({"table": P("model")}, TypeError, r"wanted a list of \(path pattern, PartitionSpec of axis names and None\)"),
    ],
)
def test_rules_that_cannot_be(rules, error, words):
    with pytest.raises(error, match=words):
        layout_of(params_of_gpt(), MESH, 3, rules=rules)


def test_a_hint_is_the_identity_where_no_mesh_has_its_axis(x64):
    x = jnp.arange(12.0).reshape(2, 6)
    assert jzero.hint(x, P(None, "model")) is x

    def loss_fn(params, x):
        return jnp.sum(jzero.hint(x, P(None, "model")) @ params)

    layout = layout_of(jnp.ones((6, 8)), {"data": 2}, 3)
    assert float(jzero.value_and_grad(loss_fn, layout)(placed(jnp.ones((6, 8)), layout), x)[0]) == 8 * 66 / 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P("data"), r"names 'data', but here each device has its own part of the batch over that axis already"),
        (P(None, None, "model"), r"names 3 dims, but the array has shape \(2, 7\)"),
        (P(None, "model"), r"dim 1 of \(2, 7\) does not divide by 2, the size of model"),
    ],
)
def test_hints_that_cannot_be(spec, words):
    layout = layout_of(jnp.ones((7, 8)), MESH, 3, rules=())

    with pytest.raises(ValueError, match=words):
        jzero.value_and_grad(lambda w, x: jnp.sum(jzero.hint(x, spec) @ w), layout)(
            placed(jnp.ones((7, 8)), layout), jnp.ones((8, 7))
        )


@pytest.mark.parametrize("spec", ["model", None, ("model",), P(P.UNCONSTRAINED, "model")])
def test_hints_of_another_type(spec):
    with pytest.raises(TypeError, match="wanted a PartitionSpec of axis names and None"):
        jzero.hint(jnp.ones((2, 8)), spec)


def test_a_hint_does_not_make_a_batch_whole():
    """In a jitted function of one's own, and where the spec names an axis that the mesh does not have."""
    mesh, x = jzero.make_mesh(data=4, model=2), jnp.ones((8, 8))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        assert jax.jit(lambda x: jzero.hint(x, P(None, "model")))(x).sharding.spec == P("data")
    layout = layout_of(jnp.ones((8, 8)), MESH, 3, rules=())

    def loss_fn(w, x):
        assert jzero.hint(x, P(None, "modle")) is x
        return jnp.sum(x @ w)

    jzero.value_and_grad(loss_fn, layout)(placed(jnp.ones((8, 8)), layout), x)


LOOKUPS = {
    "plain": lambda t, i: t[i],
    "fill": lambda t, i: t.at[i].get(mode="fill", fill_value=3.0),
    "nan": lambda t, i: jnp.nan_to_num(jnp.take(t, i, axis=0), nan=0.5),
    "clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "vmapped": lambda t, i: jax.vmap(lambda one: t[one])(i),
    "one": lambda t, i: t[i[0, 0] % 512] * i[..., None],
    "second dim": lambda t, i: jnp.take(t, i % 9, axis=1),
    "remat": lambda t, i: jax.checkpoint(lambda t: t[i])(t),
    "scanned": lambda t, i: lax.scan(lambda c, one: (c, jnp.sin(t[one])), 0, i)[1],
}


WAYS = [P("model"), P(None, "model"), P(("model", "expert")), P("model", "expert")]


# Each lookup in tables cut along the first dim and along one more way, which take turns.
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(name, spec, marks=() if i == 0 or i == 1 + turn % 3 else pytest.mark.slow)
        for turn, name in enumerate(LOOKUPS)
        for i, spec in enumerate(WAYS)
    ],
    ids=str,
)
def test_lookups_in_tables_that_are_cut(x64, name, spec):
    """Indices below zero and beyond the end too, and in a dtype that the vocabulary does not fit."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(512, 8)))
    wide = rng.integers(-40, 600, (16, 5))
    axes = {"data": 2, "model": 2, "expert": 2}
    layout = layout_of(table, axes, 2, rules=[("", spec)], min_shard_size=0)
    # JAX itself refuses the others; and without fusion emitters (see conftest) XLA writes out of bounds.
    narrow = [(wide % 100).astype(np.int8)] if name in ("nan", "clip") and FUSION_EMITTERS else []
    for indices in [wide, *narrow]:

        def loss_fn(table, indices):
            rows = LOOKUPS[name](table, indices)
            return jnp.mean(jnp.cos(rows) * (1 + jnp.arange(rows.size).reshape(rows.shape) % 7))

        halves = np.split(indices, 2)
        of_halves = jax.value_and_grad(lambda t, halves=halves: sum(loss_fn(t, half) for half in halves) / 2)
        wanted = jax.jit(of_halves)(table)
        got = jzero.value_and_grad(loss_fn, layout)(placed(table, layout), layout.put_batch(indices))
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-13)


def test_a_gradient_that_is_made_from_nothing(x64):
    """The backward pass of a custom_vjp may begin with an equation without operands."""

    @jax.custom_vjp
    def strange(w):
        return jnp.sum(w)

    strange.defvjp(lambda w: (jnp.sum(w), None), lambda _, g: (lax.broadcasted_iota(float, (8, 16), 1),))
    layout = layout_of(jnp.ones((8, 16)), MESH, 2, rules=[("", P(None, "model"))], min_shard_size=0)
    _, grads = jzero.value_and_grad(lambda w, x: strange(w) * x.mean(), layout)(jnp.ones((8, 16)), jnp.ones((8, 1)))
    np.testing.assert_allclose(grads, np.tile(np.arange(16.0), (8, 1)))
