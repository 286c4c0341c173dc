"""The reference in numpy is right: by finite differences, its twin in jax, optax, and scales worked out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.reference import (
    DynamicLossScale,
    Trainer,
    decay_mask,
    flatten,
    gradients,
    init_params,
    make_batches,
    map_tree,
    predict,
)
from tests.reference_model import loss_fn

BATCH = make_batches(1)[0]


def largest(tree):
    return max(np.abs(np.asarray(leaf, np.float64)).max() for leaf in flatten(tree).values())


def error(tree, wanted):
    """Largest difference, against the largest absolute value of what is wanted."""
    assert flatten(tree).keys() == flatten(wanted).keys()
    differences = map_tree(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), tree, wanted)
    return largest(differences) / largest(wanted)


def in_jax(params, dtype=np.float64):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


def bits(tree):
    return {path: leaf.tobytes() for path, leaf in flatten(tree).items()}


@pytest.mark.parametrize("path", flatten(init_params()))
def test_the_gradient_is_the_slope_that_finite_differences_see(path):
    """Along a random direction, which has a part in every element of the leaf."""
    params = init_params()
    leaf = flatten(params)[path]
    grad = flatten(gradients(params, BATCH)[1])[path]
    direction = np.random.default_rng(2).normal(size=leaf.shape)
    direction /= np.linalg.norm(direction)
    step, start, losses = 1e-4, leaf.copy(), []
    for distance in (step, -step):
        leaf[...] = start + distance * direction
        losses.append(gradients(params, BATCH)[0])
    slope = (losses[0] - losses[1]) / (2 * step)
    assert abs((grad * direction).sum() - slope) < 1e-8 * np.linalg.norm(grad)


def test_no_position_sees_the_tokens_after_it():
    tokens = BATCH["tokens"][:, :-1]
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = (predict(init_params(), t)[0] for t in (tokens, changed))
    np.testing.assert_allclose(after[:, :9], before[:, :9], rtol=1e-13)
    assert (np.abs(after - before)[:, 9:].max(-1) > 1e-5).all(), "each later position sees it"


def test_a_model_that_knows_nothing_has_the_loss_of_a_guess():
    params = {**init_params(), "norm": np.zeros(32)}
    assert abs(gradients(params, BATCH)[0] - math.log(64)) < 1e-13


def test_the_jax_twin_has_the_same_loss_and_gradients_in_float64(x64):
    params = init_params()
    loss, grads = gradients(params, BATCH)
    twin_loss, twin_grads = jax.jit(jax.value_and_grad(loss_fn))(in_jax(params), BATCH)
    assert {leaf.dtype for leaf in jax.tree.leaves((twin_loss, twin_grads))} == {np.dtype("float64")}
    assert abs(twin_loss - loss) < 1e-10
    assert error(twin_grads, grads) < 1e-10


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_jax_twin_multiplies_in_the_dtype_of_its_params(dtype):
    """Gradients too, and norms of float32 beside them change no matmul."""
    params = in_jax(init_params(), dtype)
    params["norm"] = params["norm"].astype(jnp.float32)
    blocks = params["blocks"]
    blocks.update({name: blocks[name].astype(jnp.float32) for name in ("attention_norm", "mlp_norm")})
    lowered = jax.jit(jax.value_and_grad(loss_fn)).lower(params, BATCH).as_text()
    matmuls = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(matmuls) > 20
    assert not [line for line in matmuls if "f32" in line.split(" : ", 1)[1]]
    assert jax.eval_shape(loss_fn, params, BATCH).dtype == jnp.float32


def test_the_loss_scale_multiplies_gradients_alone():
    loss, grads = gradients(init_params(), BATCH)
    scaled_loss, scaled = gradients(init_params(), BATCH, loss_scale=3.0)
    assert scaled_loss == loss
    assert error(scaled, map_tree(lambda g: 3 * g, grads)) < 1e-14


def test_weights_decay_in_the_matrices_of_the_blocks_alone():
    decayed = {path for path, decays in flatten(decay_mask(init_params())).items() if decays}
    assert decayed == {"blocks/qkv", "blocks/out", "blocks/up", "blocks/down"}


CLIP = 1.2  # of the norms of these ten steps some are below
# A warm-up and a decay, as a table: optax's own schedules compute in float32.
LEARNING_RATES = [0.0, 1e-3, 2e-3, 3e-3, 3e-3, 2.5e-3, 2e-3, 1.5e-3, 1e-3, 5e-4]


def clip_by_global_norm(clip):
    """As optax has it but for the 1e-6, which DeepSpeed and torch add."""

    def update(updates, params):
        factor = jnp.minimum(1, clip / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor, updates)

    return optax.stateless(update)


def test_ten_steps_of_the_trainer_are_those_of_optax(x64):
    tx = optax.chain(
        clip_by_global_norm(CLIP),
        optax.adamw(lambda count: jnp.asarray(LEARNING_RATES)[count], b2=0.95, weight_decay=0.1, mask=decay_mask),
    )
    numpy_trainer = Trainer(
        init_params(),
        learning_rate=LEARNING_RATES.__getitem__,
        b2=0.95,
        weight_decay=0.1,
        clip=CLIP,
        microbatches=4,
        loss_scale=2.0**10,
    )
    params = in_jax(init_params())
    opt_state, log = tx.init(params), []

    @jax.jit
    def optax_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, optax.tree.norm(grads))

    for batch in make_batches(10):
        params, opt_state, numbers = optax_step(params, opt_state, batch)
        metrics = numpy_trainer.step(batch)
        log.append(metrics)
        np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], numbers, rtol=1e-10)
    assert error(numpy_trainer.params, params) < 1e-10
    clipped = [metrics["clipped_norm"] < metrics["grad_norm"] for metrics in log]
    assert any(clipped)
    assert not all(clipped)
    assert error(numpy_trainer.params, init_params()) > 1e-2, "params that hardly move would hide a wrong update"


def test_fifty_steps_learn():
    trainer = Trainer(init_params(), learning_rate=1e-2, weight_decay=0.1, clip=1.0)
    losses = [trainer.step(batch)["loss"] for batch in make_batches(50, examples=16)]
    assert losses[0] > 4
    assert losses[-1] < 3


def scales(loss_scale, overflows):
    """The scale that each step uses: "o" for a step that overflows, "." for a clean one."""
    used = []
    for step in overflows:
        used.append(loss_scale.scale)
        loss_scale.update(overflow=step == "o")
    return used


def test_the_loss_scale_falls_when_the_hysteresis_is_used_up_and_grows_after_clean_steps():
    loss_scale = DynamicLossScale(initial=16, growth_interval=3, hysteresis=2, minimum=4)
    # The overflow uses up the hysteresis; 3 clean steps: doubled, and the hysteresis given back; 3 more: doubled.
    assert scales(loss_scale, "o......") == [16, 16, 16, 16, 32, 32, 32]
    # An overflow after 2 clean steps, which uses up the hysteresis, and one after 2 more, which halves.
    assert scales(loss_scale, "..o..o") == [64, 64, 64, 64, 64, 64]
    # Each overflow halves, since clean steps give nothing back; 3 clean steps in a row: doubled, and given back.
    assert scales(loss_scale, "o.oo...") == [32, 16, 16, 8, 4, 4, 4]
    assert scales(loss_scale, "oo") == [8, 8]
    assert loss_scale.scale == 4


def test_consecutive_hysteresis_is_given_back_by_each_clean_step():
    loss_scale = DynamicLossScale(initial=16, growth_interval=3, hysteresis=2, minimum=4, consecutive_hysteresis=True)
    assert scales(loss_scale, "o......") == [16, 16, 16, 16, 32, 32, 32]
    # No two overflows in a row: none halves. Of two in a row the second does.
    assert scales(loss_scale, "..o..o") == [64, 64, 64, 64, 64, 64]
    assert scales(loss_scale, "o.oo...") == [64, 32, 32, 32, 16, 16, 16]
    assert scales(loss_scale, "oo") == [32, 32]
    assert loss_scale.scale == 16


def test_the_loss_scale_stops_at_its_minimum_and_the_next_overflow_gives_up():
    loss_scale = DynamicLossScale(initial=16, hysteresis=1, minimum=3)
    assert scales(loss_scale, "ooo") == [16, 8, 4]
    assert loss_scale.scale == 3
    with pytest.raises(FloatingPointError, match="minimum"):
        loss_scale.update(overflow=True)


def test_hysteresis_is_used_up_at_the_minimum_before_giving_up():
    loss_scale = DynamicLossScale(initial=4, growth_interval=2, factor=4, hysteresis=3, minimum=4)
    assert scales(loss_scale, "oo..ooo") == [4, 4, 4, 4, 16, 16, 16]
    assert scales(loss_scale, "..oo") == [4, 4, 16, 16]
    loss_scale = DynamicLossScale(initial=4, hysteresis=3, minimum=4)
    assert scales(loss_scale, "oo") == [4, 4]
    with pytest.raises(FloatingPointError, match="minimum"):
        loss_scale.update(overflow=True)


def test_a_step_that_overflows_in_one_microbatch_changes_nothing_but_the_scale():
    first, lost, second = make_batches(3)
    dynamic = DynamicLossScale(initial=2.0**16, hysteresis=1)
    trainer, untroubled = (
        Trainer(init_params(), weight_decay=0.1, clip=1.0, microbatches=4, loss_scale=scale)
        for scale in (dynamic, 2.0**16)
    )
    trainer.step(first)
    before = bits(trainer.params), bits(trainer.mu), bits(trainer.nu), trainer.count
    skipped = [trainer.step(lost, overflow_in=2), trainer.step(lost, overflow_in=0)]
    assert (bits(trainer.params), bits(trainer.mu), bits(trainer.nu), trainer.count) == before
    clean = trainer.step(second)
    untroubled.step(first)
    untroubled.step(second)
    assert bits(trainer.params) == bits(untroubled.params)
    assert trainer.count == 2
    seen = [(m["loss_scale"], m["skipped"], m["skipped_in_a_row"]) for m in (*skipped, clean)]
    assert seen == [(2.0**16, True, 1), (2.0**15, True, 2), (2.0**14, False, 0)]


def test_the_number_of_microbatches_changes_rounding_alone():
    whole, parts = (
        Trainer(init_params(), clip=0.5, microbatches=microbatches, loss_scale=1000.0) for microbatches in (1, 8)
    )
    for batch in make_batches(3):
        np.testing.assert_allclose(whole.step(batch)["clipped_norm"], parts.step(batch)["clipped_norm"], rtol=1e-12)
    assert error(parts.params, whole.params) < 1e-12
