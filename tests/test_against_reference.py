"""Fifty steps of a small GPT on 8 devices are those of the fp64 reference in numpy.

float32 is held to 1e-5 in the loss of each step. In bfloat16 and float16 the yardstick is how far the same training
strays in that dtype on one device, written in plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import reference
from tests.reference import Trainer, decay_mask, flatten, init_params, make_batches, map_tree
from tests.reference_model import loss_fn

STEPS, EXAMPLES = 50, 32
MESHES = {"8": {"data": 8}, "2x4": {"replica": 2, "data": 4}}
CLIP = 0.6  # of the norms of these steps some are below
RATES = np.concatenate([np.linspace(1e-3, 1e-2, 10), np.linspace(1e-2, 1e-3, STEPS - 10)])
RULE = jzero.DynamicLossScale(initial=2.0**10, growth_interval=10, hysteresis=2)
OVERFLOWS = {3: 9, 4: 31, 20: 0, 21: 12, 22: 17}  # steps, and the one example that goes bad in each
SCALES = {"none": None, "static": 1000.0, "dynamic": RULE}
# Within how many times the error of one device: the noise of another order of sums, not of another rounding.
FACTOR = 2.0


def spoiled_loss_fn(params, batch):
    return loss_fn(params, batch) * batch["spoil"].max()


@functools.cache
def batches():
    return make_batches(STEPS, EXAMPLES)


def spoil(number, scale):
    """1 for each example; with a scale that moves, infinity for one of them where a step is to overflow."""
    factors = np.ones(EXAMPLES, np.float32)
    if scale == "dynamic" and number in OVERFLOWS:
        factors[OVERFLOWS[number]] = np.inf
    return {"spoil": factors}


@functools.cache
def of_reference(microbatches, scale):
    """Metrics of each step, and the params at the end."""
    loss_scale = SCALES[scale]
    if loss_scale is None or isinstance(loss_scale, jzero.DynamicLossScale):
        loss_scale = 1.0 if loss_scale is None else reference.DynamicLossScale(**vars(loss_scale))
    trainer = Trainer(
        init_params(),
        learning_rate=RATES.__getitem__,
        b2=0.95,
        weight_decay=0.1,
        clip=CLIP,
        microbatches=microbatches,
        loss_scale=loss_scale,
    )
    log = [
        trainer.step(batch, overflow_in=0 if scale == "dynamic" and number in OVERFLOWS else None)
        for number, batch in enumerate(batches())
    ]
    return log, trainer.params


def adamw():
    return optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
        learning_rate=lambda count: jnp.asarray(RATES, jnp.float32)[count], b2=0.95, weight_decay=0.1, mask=decay_mask
    )


def in_float32():
    return map_tree(np.float32, init_params())


def over_mesh(stage, mesh, microbatches, precision, scale):
    """Metrics of each step, and the float32 params at the end, by jzero on 8 devices."""
    axes, tx = MESHES[mesh], adamw()
    layout = jzero.zero(
        in_float32(),
        stage=stage,
        mesh=jzero.make_mesh(devices=jax.devices(), **axes),
        replica_axes=("replica",) if "replica" in axes else (),
        min_shard_size=0,
        precision=precision,
    )
    step = jzero.train_step(
        spoiled_loss_fn, tx, layout, microbatches=microbatches, clip_norm=CLIP, loss_scale=SCALES[scale]
    )
    state, log = jzero.init(lambda params: params, tx, layout, in_float32(), loss_scale=SCALES[scale]), []
    for number, batch in enumerate(batches()):
        state, metrics = step(state, layout.put_batch(batch | spoil(number, scale)))
        log.append(jax.device_get(metrics))
    return log, jzero.master_params(state, layout, replicate=True)


@functools.cache
def on_one_device(dtype, scale):
    """Metrics of each step in plain JAX: a cast of float32 weights, a loss scale, a clip, and optax."""
    tx, params = adamw(), in_float32()
    opt_state, log = tx.init(params), []
    rule = reference.DynamicLossScale(**vars(SCALES[scale])) if scale == "dynamic" else None

    @jax.jit
    def step(params, opt_state, batch, scale):
        cast = jax.tree.map(lambda w: w.astype(dtype), params)
        loss, grads = jax.value_and_grad(lambda cast: spoiled_loss_fn(cast, batch) * scale)(cast)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        norm = optax.tree.norm(grads)
        updates, after = tx.update(jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads), opt_state, params)
        return (optax.apply_updates(params, updates), after), loss / scale, norm

    for number, batch in enumerate(batches()):
        after, loss, norm = step(params, opt_state, batch | spoil(number, scale), rule.scale if rule else 1.0)
        finite = bool(np.isfinite(norm))
        params, opt_state = after if finite else (params, opt_state)
        log.append({"loss": float(loss), "skipped": not finite})
        if rule:
            rule.update(not finite)
    return log


def losses(log, wanted):
    """The losses of the steps that were taken."""
    return np.array(
        [entry["loss"] for entry, of_reference in zip(log, wanted, strict=True) if not of_reference["skipped"]]
    )


def check_decisions(log, wanted):
    """Each step used the scale, was skipped or taken, and had the learning rate that the reference has."""
    names = ("loss_scale", "skipped", "skipped_in_a_row")
    assert [[entry[name] for name in names] for entry in log] == [[entry[name] for name in names] for entry in wanted]
    rates = [[entry["learning_rate"] for entry in entries if not entry["skipped"]] for entries in (log, wanted)]
    np.testing.assert_allclose(*rates, rtol=1e-6)


def check_float32(stage, mesh, microbatches, scale):
    log, params = over_mesh(stage, mesh, microbatches, "fp32", scale)
    wanted, wanted_params = of_reference(microbatches, scale)
    check_decisions(log, wanted)
    np.testing.assert_allclose(losses(log, wanted), losses(wanted, wanted), rtol=1e-5)
    taken = [(entry, other) for entry, other in zip(log, wanted, strict=True) if not other["skipped"]]
    for name in ("grad_norm", "clipped_norm"):
        np.testing.assert_allclose([e[name] for e, _ in taken], [o[name] for _, o in taken], rtol=1e-4)
    assert len({bool(entry["clipped"]) for entry, _ in taken}) == 2, "some steps are clipped, and some are not"
    moved = flatten(map_tree(lambda after, before: np.abs(after - before).max(), wanted_params, init_params()))
    for path, leaf in flatten(wanted_params).items():
        assert np.abs(np.asarray(flatten(params)[path], np.float64) - leaf).max() < 1e-3 * moved[path]


@pytest.mark.parametrize(
    ("stage", "mesh", "microbatches", "scale"),
    [pytest.param(1, "2x4", 4, "static", marks=pytest.mark.slow), (3, "2x4", 2, "dynamic")],
)
def test_in_float32_each_step_is_that_of_the_reference(stage, mesh, microbatches, scale):
    check_float32(stage, mesh, microbatches, scale)


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_float32_each_step_is_that_of_the_reference_at_every_stage(stage, microbatches, scale):
    check_float32(stage, "8", microbatches, scale)


def check_low_precision(stage, mesh, microbatches, precision):
    scale = "dynamic" if precision == "fp16" else "none"
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    log, _ = over_mesh(stage, mesh, microbatches, jzero.Precision(compute=dtype, cast_batch=()), scale)
    wanted, _ = of_reference(1, scale)
    check_decisions(log, wanted)
    on_one = on_one_device(dtype, scale)
    assert [entry["skipped"] for entry in on_one] == [entry["skipped"] for entry in wanted]
    exact = losses(wanted, wanted)
    error, yardstick = (np.abs(losses(entries, wanted) / exact - 1) for entries in (log, on_one))
    assert error.max() <= FACTOR * yardstick.max()
    assert error.mean() <= FACTOR * yardstick.mean()
    assert error.max() > 1e-6, "so near to fp64 it was not computed in 16 bits"


@pytest.mark.parametrize(
    ("stage", "mesh", "microbatches", "precision"),
    [(2, "8", 1, "fp16"), pytest.param(3, "2x4", 4, "bf16", marks=pytest.mark.slow)],
)
def test_in_16_bits_it_is_as_near_to_the_reference_as_one_device(stage, mesh, microbatches, precision):
    check_low_precision(stage, mesh, microbatches, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_16_bits_every_stage_is_as_near_to_the_reference_as_one_device(stage, microbatches, precision):
    check_low_precision(stage, "8", microbatches, precision)
