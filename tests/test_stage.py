"""A stage is three placements and a time to reduce: the table, the combinations, and that each one trains right."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import STAGES, Stage

R, S = "replicated", "sharded"
SENSIBLE = {
    (R, R, R, "end"),
    (R, R, R, "block"),
    (R, R, S, "end"),
    (R, R, S, "block"),
    (R, S, S, "end"),
    (R, S, S, "block"),
    (S, S, S, "end"),
    (S, S, S, "block"),
}


def test_the_table():
    rows = [(stage.params, stage.grads, stage.opt_state, stage.reduce) for stage in STAGES]
    assert rows == [(R, R, R, "end"), (R, S, S, "end"), (R, S, S, "block"), (S, S, S, "block")]


@pytest.mark.parametrize("row", list(itertools.product((R, S), (R, S), (R, S), ("end", "block"))))
def test_combinations(row):
    params, _, opt_state, _ = row
    if row in SENSIBLE:
        stage = Stage(*row)
        assert (stage.params, stage.grads, stage.opt_state, stage.reduce) == row
        return
    with pytest.raises(ValueError, match="sharded while") as caught:
        Stage(*row)
    culprit, whole = ("params", "opt_state") if params == S else ("grads", "opt_state")
    if opt_state == S:
        culprit, whole = "params", "grads"
    assert f"{culprit} are sharded while {whole}" in str(caught.value)
    assert f"Shard {whole} as well" in str(caught.value)


@pytest.mark.parametrize("field", ["params", "grads", "opt_state", "reduce"])
def test_unknown_values_are_named(field):
    good: dict[str, Any] = {"params": R, "grads": R, "opt_state": R, "reduce": "end"}
    choices = ("end", "block") if field == "reduce" else (R, S)
    with pytest.raises(ValueError) as caught:
        Stage(**{**good, field: "whole"})
    for part in (f"{field}='whole'", *map(repr, choices)):
        assert part in str(caught.value)


def test_a_stage_cannot_be_changed():
    with pytest.raises(AttributeError):
        STAGES[0].params = S  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("row", sorted(SENSIBLE - {(s.params, s.grads, s.opt_state, s.reduce) for s in STAGES}))
def test_stages_of_ones_own_live_where_they_say(row, x64):
    """One step at the combinations that make sense and are not in the table: right values in the right places."""
    stage = Stage(*row)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 16)), "b": rng.normal(size=3)}
    batch = rng.normal(size=(16, 8))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)

    tx = optax.sgd(0.1, momentum=0.9)
    layout = jzero.zero(params, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    state = jzero.init(lambda p: p, tx, layout, params)
    _, grads = jzero.value_and_grad(loss_fn, layout, microbatches=2)(state.params, layout.put_batch(batch))
    state = jzero.apply_gradients(state, grads, tx, layout)

    wanted = jax.jit(jax.grad(loss_fn))(params, batch)
    updates, opt_state = tx.update(wanted, tx.init(params), params)
    logical = functools.partial(layout.logical, replicate=True)
    pairs = [
        (logical(grads), wanted),
        (logical(state.params), optax.apply_updates(params, updates)),
        (logical(state.opt_state, tx=tx), opt_state),
    ]
    for got, right in pairs:
        assert jax.tree.structure(got) == jax.tree.structure(right)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), got, right)

    part = {R: {"w": (8, 16), "b": (3,)}, S: {"w": (8, 2), "b": (1,)}}  # 3 is stored padded to 8
    for placement, tree in zip(row[:3], (state.params, grads, state.opt_state[0].trace), strict=True):
        for name, shape in part[placement].items():
            assert {shard.data.shape for shard in tree[name].addressable_shards} == {shape}
