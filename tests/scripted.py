"""A small model whose gradients overflow where a script says so: in one example, on one device, in one microbatch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jzero
from tests import reference

EXAMPLES, IN, HIDDEN, OUT = 32, 8, 16, 8
MESHES = {
    "8": {"data": 8},
    "2x4": {"replica": 2, "data": 4},
    "4 model 2": {"data": 4, "model": 2},
    "2x2 model 2": {"replica": 2, "data": 2, "model": 2},
    "3": {"data": 3},
    "1": {"data": 1},
}
RULES = [("up", P(None, "model")), ("down", P("model"))]
FP16 = jzero.Precision(compute="float16", cast_batch=("x",))
BF16 = jzero.Precision(cast_batch=("x",))


def make_tx():
    """Momentum and a schedule: both must stand still where a step is skipped."""
    return optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(optax.linear_schedule(0.02, 0.0, 100)))


TX = make_tx()


@functools.cache
def make_mesh(name):
    axes = MESHES[name]
    return jzero.make_mesh(devices=jax.devices()[: int(np.prod(list(axes.values())))], **axes)


def make_params():
    """A leaf that is stored padded ("odd"), one that stays whole ("gain"), and some that are cut."""
    rng = np.random.default_rng(0)
    shapes = {"up": (IN, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, OUT), "odd": (9, 5), "gain": ()}
    return {path: np.asarray(rng.normal(size=shape) / 3, np.float32) for path, shape in shapes.items()}


@functools.cache
def make_layout(stage=3, mesh="8", precision=None):
    axes = MESHES[mesh]
    return jzero.zero(
        make_params(),
        stage=stage,
        mesh=make_mesh(mesh),
        replica_axes=("replica",) if "replica" in axes else (),
        rules=RULES if "model" in axes else (),
        min_shard_size=2,
        precision=precision,
    )


@functools.cache
def first_state(layout, loss_scale, tx, stateful):
    model_state = {"calls": jnp.int32(0), "running": jnp.float32(0)} if stateful else None
    return jzero.init(lambda p: p, tx, layout, make_params(), loss_scale=loss_scale, model_state=model_state)


def make_state(layout, loss_scale=None, tx=TX, *, stateful=False):
    """A state of one's own, which a step may donate."""
    return jax.tree.map(jnp.copy, first_state(layout, loss_scale, tx, stateful))


def example_losses(params, batch):
    h = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    y = h @ params["down"] * (1 + params["gain"] + params["odd"].mean())
    return batch["spoil"] * (y.astype(jnp.promote_types(y.dtype, jnp.float32)) ** 2).mean(-1)


def loss_fn(params, batch):
    return example_losses(params, batch).mean()


def stateful_loss_fn(params, batch, *, model_state):
    """It counts its calls, and keeps a running mean of the losses, which a bad one spoils."""
    losses = example_losses(params, batch)
    running = 0.9 * model_state["running"] + 0.1 * losses.mean()
    return losses.mean(), {"calls": model_state["calls"] + 1, "running": running.astype(jnp.float32)}


def make_batch(number=0, spoil=1.0, example=0):
    """The losses of one example are multiplied by `spoil`, of the others by 1."""
    x = np.random.default_rng(number).normal(size=(EXAMPLES, IN)).astype(np.float32)
    factors = np.ones(EXAMPLES, np.float32)
    factors[example] = spoil
    return {"x": x, "spoil": factors}


def run_rule(loss_scale, overflows):
    """What the metrics of each step are to be by the reference's rule, while it does not give up."""
    rule = reference.DynamicLossScale(**vars(loss_scale))
    row, steps, log = 0, 0, []
    for overflow in overflows:
        scale = rule.scale
        rule.update(overflow)
        row, steps = (row + 1, steps) if overflow else (0, steps + 1)
        log.append((scale, overflow, row, steps))
    return log


def logged(metrics):
    scale, skipped, row, step = (metrics[name] for name in ("loss_scale", "skipped", "skipped_in_a_row", "step"))
    return float(scale), bool(skipped), int(row), int(step)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
