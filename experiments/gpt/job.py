"""Model, loss, optimizer and layout of one run, put together."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import jzero
from experiments.gpt.config import Config
from experiments.gpt.model import GPT, loss_per_byte, mean_loss, next_byte_logits
from experiments.gpt.rules import RULES


@dataclass(frozen=True)
class Job:
    """What a training step is made of.

    Attributes:
        init_params: Makes the params from a random key.
        loss_fn: `(params, windows) -> loss`, the mean over the windows.
        loss_per_byte: `(params, windows) -> losses`, in nats.
        apply: `(params, bytes) -> logits` of the next bytes.
        tx: The optimizer.
        schedule: Learning rate by step.
        layout: Where everything lives.
        loss_scale: The loss scale, if there is one.
        step: The training step, `(state, windows) -> (state, metrics)`.
    """

    init_params: Callable[[jax.Array], Any]
    loss_fn: Callable[[Any, jax.Array], jax.Array]
    loss_per_byte: Callable[[Any, jax.Array], jax.Array]
    apply: Callable[[Any, jax.Array], jax.Array]
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    layout: jzero.Layout
    loss_scale: float | jzero.DynamicLossScale | None
    step: jzero.TrainStep

    def init(self, seed: int) -> jzero.TrainState:
        """The first state."""
        key = jax.random.key(seed)
        return jzero.init(self.init_params, self.tx, self.layout, key, loss_scale=self.loss_scale)

    @property
    def n_params(self) -> int:
        """Number of elements of the params."""
        return sum(math.prod(leaf.shape) for leaf in self.layout.leaves)


def build(config: Config, mesh: Mesh) -> Job:
    """Puts a run together, from shapes alone: nothing is computed.

    Raises:
        ValueError: The batch does not divide over the devices and microbatches.
    """
    model = GPT(config.layers, config.width, config.heads, config.remat)

    def init_params(key):
        return model.init(key, jnp.zeros((1, config.context), jnp.int32))["params"]

    params = jax.eval_shape(init_params, jax.random.key(config.seed))
    layout = jzero.zero(
        params,
        stage=config.stage,
        mesh=mesh,
        replica_axes=config.replica_axes,
        min_shard_size=config.min_shard_size,
        rules=RULES if "model" in mesh.axis_names else (),
        precision=config.precision,
    )
    parts = layout.batch_shards * config.microbatches
    if config.batch_size % parts:
        raise ValueError(
            f"--batch-size {config.batch_size} does not divide into {parts} equal parts = {layout.batch_shards} "
            f"devices x --microbatches {config.microbatches}. Use a multiple of {parts}, for example --batch-size "
            f"{-(-config.batch_size // parts) * parts}."
        )
    schedule = learning_rate(config)
    tx = optimizer(config, schedule)
    loss_fn = functools.partial(mean_loss, model)
    return Job(
        init_params=init_params,
        loss_fn=loss_fn,
        loss_per_byte=functools.partial(loss_per_byte, model),
        apply=functools.partial(next_byte_logits, model),
        tx=tx,
        schedule=schedule,
        layout=layout,
        loss_scale=config.scaling,
        step=jzero.train_step(
            loss_fn,
            tx,
            layout,
            microbatches=config.microbatches,
            clip_norm=config.clip or None,
            loss_scale=config.scaling,
        ),
    )


def learning_rate(config: Config) -> optax.Schedule:
    """Linear warmup from the first step on, then a cosine down to a tenth of the peak at the last step."""
    warmup = max(1, round(config.warmup * config.steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.lr / warmup,
        peak_value=config.lr,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.lr / 10,
    )


def optimizer(config: Config, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optax optimizer that the options name."""
    match config.optimizer:
        case "adamw":
            return optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay)
        case "sgd":
            return optax.sgd(schedule, momentum=0.9)
        case "lamb":
            return optax.lamb(schedule, weight_decay=config.weight_decay)
        case "adafactor":
            return optax.adafactor(schedule)
