"""The loss scale, which keeps small gradients from vanishing in float16."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScaleState:
    """What a loss scale holds between steps; scalars, whole on every device.

    Attributes:
        scale: float32; what the next loss is multiplied by.
        clean: int32; steps without overflow since the last overflow or growth.
        hysteresis: int32; the scale is halved at the overflow that finds 1 here, and those before take one off.
    """

    scale: Any
    clean: Any
    hysteresis: Any


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows until gradients overflow, as DeepSpeed's (its `fp16` section) and Megatron-LM's do.

    A step whose gradients are not finite is skipped. The scale is divided by `factor`, but never below `minimum`, at
    the overflow that has used up the hysteresis; it is multiplied by `factor` after `growth_interval` clean steps in a
    row, counted from the last overflow or growth. (DeepSpeed's newest version counts one more step there.)

    Attributes:
        initial: The first scale.
        growth_interval: DeepSpeed's `loss_scale_window`.
        factor: By how much it grows and shrinks.
        hysteresis: At which overflow it shrinks; the first one at 1.
        minimum: The floor. An overflow there, with the hysteresis used up, ends the run.
        consecutive_hysteresis: Whether the hysteresis is given back at every clean step, and not only when the scale
            grows.

    Raises:
        ValueError: A scale that is not positive, or below its floor; a factor that is not above 1; an interval or a
            hysteresis under 1.

    Example:
        >>> DynamicLossScale(initial=2.0**15).init().scale
        Array(32768., dtype=float32)
    """

    initial: float = 2.0**16
    growth_interval: int = 1000
    factor: float = 2.0
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive_hysteresis: bool = False

    def __post_init__(self):
        for name, lowest in (("initial", 0), ("minimum", 0), ("factor", 1)):
            value = getattr(self, name)
            if not _is_between(lowest, value):
                raise ValueError(f"DynamicLossScale: {name}={value!r}; wanted a number above {lowest}, in float32.")
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DynamicLossScale: {name}={value!r}; wanted an int of 1 or more.")
        if self.initial < self.minimum:
            raise ValueError(
                f"DynamicLossScale: initial={self.initial} is below its floor, minimum={self.minimum}; start higher, "
                f"or lower the floor."
            )

    def init(self) -> LossScaleState:
        """The first state."""
        return LossScaleState(jnp.float32(self.initial), jnp.int32(0), jnp.int32(self.hysteresis))

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step whose gradients were finite, or not."""
        clean = jnp.where(finite, state.clean + 1, 0)
        grows = clean >= self.growth_interval
        shrinks = ~finite & (state.hysteresis <= 1)
        smaller = jnp.minimum(jnp.maximum(state.scale / self.factor, self.minimum), state.scale)
        # A float32 ends at 2 ** 128: what would be larger stays.
        larger = jnp.where(jnp.isfinite(state.scale * self.factor), state.scale * self.factor, state.scale)
        left = jnp.where(finite | shrinks, state.hysteresis, state.hysteresis - 1)
        return LossScaleState(
            scale=jnp.where(shrinks, smaller, jnp.where(grows, larger, state.scale)),
            clean=jnp.where(grows, 0, clean),
            hysteresis=jnp.where(grows | (finite & self.consecutive_hysteresis), self.hysteresis, left),
        )

    def fits(self, state: LossScaleState) -> bool:
        """Whether a state is one of a dynamic loss scale."""
        return int(state.hysteresis) > 0

    def is_exhausted(self, state: LossScaleState, finite: jax.Array) -> jax.Array:
        """Whether a step that found this state has overflowed where the scale can shrink no more."""
        return ~finite & (state.hysteresis <= 1) & (state.scale <= self.minimum)


@dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that stays. A step whose gradients are not finite is skipped.

    Attributes:
        scale: What the loss is multiplied by.
    """

    scale: float

    def __post_init__(self):
        if not _is_between(0, self.scale):
            raise ValueError(
                f"loss_scale={self.scale!r}; wanted a positive number, in float32, or a jzero.DynamicLossScale."
            )

    def init(self) -> LossScaleState:
        """The only state."""
        return LossScaleState(jnp.float32(self.scale), jnp.int32(0), jnp.int32(0))

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The same state."""
        return state

    def fits(self, state: LossScaleState) -> bool:
        """Whether a state is that of this loss scale."""
        return int(state.hysteresis) == 0 and float(state.scale) == float(self.init().scale)

    def is_exhausted(self, state: LossScaleState, finite: jax.Array) -> jax.Array:
        """Never: there is no floor."""
        return jnp.zeros((), bool)


def as_loss_scale(loss_scale: float | StaticLossScale | DynamicLossScale) -> StaticLossScale | DynamicLossScale:
    """A number as a `StaticLossScale`; the others as they are."""
    return loss_scale if isinstance(loss_scale, StaticLossScale | DynamicLossScale) else StaticLossScale(loss_scale)


def _is_between(lowest: float, value: Any) -> bool:
    """Whether it is a number above `lowest`, and finite, also as the float32 that it becomes."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    with np.errstate(over="ignore"):
        return bool(lowest < np.float32(float(value)) < np.inf)
