"""Norms of gradients: each trained leaf counts once, whatever is cut, padded, repeated or frozen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from tests.refusals import refuses
from tests.scripted import MESHES, make_mesh

SHAPES = {
    "embed": {"table": (24, 8)},
    "blocks": {"up": (3, 8, 16), "down": (3, 16, 8), "norm": (3, 8)},
    "odd": [(7, 5), (11,)],  # stored padded
    "frozen": (16, 8),
    "log_scale": (),
    "small": (4,),  # below the size that is cut
}
RULES = [("embed/table", P("model")), ("blocks/up", P(None, None, "model")), ("blocks/down", P(None, "model"))]
GROUPS = {"embed": "embed/*", "blocks": "blocks/*", "odd": "odd/*", "rest": "[ls]*"}
CASES = [
    # stage, mesh, microbatches
    (0, "4 model 2", 1),
    (1, "2x2 model 2", 2),
    (2, "3", 1),
    (3, "2x4", 4),
]
MORE = [(stage, mesh, 2) for stage in range(4) for mesh in MESHES if (stage, mesh, 2) not in CASES]
SCALES = np.linspace(0.5, 2.0, 96)  # one for each example
ALL_CASES = pytest.mark.parametrize(
    ("stage", "mesh", "microbatches"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
)


def shaped(make):
    return jax.tree.map(make, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def directions():
    """For each leaf a constant; the sizes of leaves differ, so that one that is counted twice or never shows."""
    rng = np.random.default_rng(0)
    return shaped(lambda shape: rng.uniform(0.5, 2.0) * rng.normal(size=shape))


def loss_fn(params, batch):
    """Its gradient is `directions()` times the mean of the batch."""
    products = jax.tree.map(lambda w, d: (w * d).sum(), params, directions())
    return batch.mean() * sum(jax.tree.leaves(products))


def norm(*arrays):
    return np.sqrt(sum((np.asarray(x) ** 2).sum() for x in arrays))


def wanted_norms():
    grads = jax.tree.map(lambda d: d * SCALES.mean(), directions())
    groups = {
        "embed": [grads["embed"]["table"]],
        "blocks": list(grads["blocks"].values()),
        "odd": grads["odd"],
        "rest": [grads["log_scale"], grads["small"]],
    }
    return norm(*(x for group in groups.values() for x in group)), {n: norm(*group) for n, group in groups.items()}


@functools.cache
def make_layout(stage, mesh):
    axes = MESHES[mesh]
    return jzero.zero(
        shaped(lambda shape: jax.ShapeDtypeStruct(shape, "float64")),
        stage=stage,
        mesh=make_mesh(mesh),
        replica_axes=("replica",) if "replica" in axes else (),
        rules=RULES if "model" in axes else (),
        min_shard_size=5,
        trainable=lambda path, leaf: path != "frozen",
    )


def one_step(stage, mesh, microbatches, *, loss_scale=None, **options):
    layout, tx = make_layout(stage, mesh), optax.sgd(1.0)
    step = jzero.train_step(loss_fn, tx, layout, microbatches=microbatches, loss_scale=loss_scale, **options)
    state = jzero.init(lambda: shaped(lambda shape: jnp.zeros(shape)), tx, layout, loss_scale=loss_scale)
    state, metrics = step(state, layout.put_batch(SCALES))
    return jax.tree.leaves(layout.logical(state.params, replicate=True)), metrics


@ALL_CASES
def test_each_trained_leaf_counts_once_and_groups_add_up(x64, stage, mesh, microbatches):
    whole, groups = wanted_norms()
    clip = 0.25 * whole
    moved, metrics = one_step(stage, mesh, microbatches, norm_groups=GROUPS, clip_norm=clip, loss_scale=1000.0)
    assert metrics["grad_norms"].keys() == groups.keys()
    for name, wanted in groups.items():
        np.testing.assert_allclose(metrics["grad_norms"][name], wanted, rtol=1e-12)
    np.testing.assert_allclose(metrics["grad_norm"], whole, rtol=1e-12)
    np.testing.assert_allclose(norm(*metrics["grad_norms"].values()), whole, rtol=1e-12)
    # What is taken has the norm that is reported: from zero, by plain descent at a rate of 1.
    np.testing.assert_allclose(metrics["clipped_norm"], clip * whole / (whole + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(norm(*moved), metrics["clipped_norm"], rtol=1e-12)
    assert metrics["clipped"]


def test_a_norm_below_the_limit_is_left_alone(x64):
    whole, _ = wanted_norms()
    moved, metrics = one_step(2, "8", 1, clip_norm=1.01 * whole)
    np.testing.assert_allclose([metrics["clipped_norm"], norm(*moved)], whole, rtol=1e-12)
    assert not metrics["clipped"]
    assert "grad_norms" not in metrics


def test_groups_may_overlap_and_leave_leaves_out(x64):
    groups = {"all": "*", "ups": "*/up", "one": "odd/1"}
    _, metrics = one_step(1, "8", 1, norm_groups=groups)
    grads = jax.tree.map(lambda d: d * SCALES.mean(), directions())
    found = {name: float(x) for name, x in metrics["grad_norms"].items()}
    wanted = {"all": wanted_norms()[0], "ups": norm(grads["blocks"]["up"]), "one": norm(grads["odd"][1])}
    assert found == pytest.approx(wanted, rel=1e-12)


def test_half_precision_gradients_are_squared_in_float32():
    """Squares of 300 overflow in float16, and those of 1e-4 vanish."""
    params, tx = {"w": jnp.ones(16)}, optax.sgd(0.0)
    with pytest.warns(UserWarning, match="16 bits"):
        precision = jzero.Precision(master=None, compute="float16", accumulate="float16")
    layout = jzero.zero(params, stage=3, mesh=make_mesh("8"), min_shard_size=0, precision=precision)

    def loss_fn(params, batch):
        return params["w"].sum() * batch["size"].mean()

    with pytest.warns(UserWarning, match="float16 without a loss scale"):
        step = jzero.train_step(loss_fn, tx, layout)
    state = jzero.init(lambda: params, tx, layout)
    for size in (300.0, 1e-4):
        state, metrics = step(state, layout.put_batch({"size": np.full(8, size, np.float16)}))
        np.testing.assert_allclose(metrics["grad_norm"], 4 * size, rtol=1e-2)


@pytest.mark.parametrize("pattern", ["frozen", "blocks", "nothing/*"])
def test_a_pattern_that_matches_no_trained_leaf_is_refused(pattern):
    groups, parts = {"all": "*", "mine": pattern}, ["'mine'", repr(pattern), "none of the 8 trainable paths", "'small'"]
    refuses(lambda: jzero.train_step(loss_fn, optax.sgd(1.0), make_layout(1, "8"), norm_groups=groups), *parts)
