"""Which steps are taken: those whose gradients are numbers, and no larger than usual."""

import warnings
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jzero.padding import is_concrete

MANY = 5
"""Skipped steps in a row at which a warning reaches the user, and again at each doubling."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Skipped:
    """How many steps were skipped; scalars, whole on every device.

    Attributes:
        total: int32; all of them.
        in_a_row: int32; since the last one that was taken.
        mean_norm: float32; running mean of the gradient norm, 0 before the first. Kept where spikes are skipped.
    """

    total: Any
    in_a_row: Any
    mean_norm: Any

    @classmethod
    def none(cls) -> "Skipped":
        """Before the first step."""
        return cls(jnp.int32(0), jnp.int32(0), jnp.float32(0))


@dataclass(frozen=True)
class Guard:
    """What is done with a step whose gradients are not finite, or far larger than usual.

    Attributes:
        nonfinite: "skip", "raise" (skip, and then raise on the host) or "keep".
        spike: Skip where the norm is more than this many times its running mean; None: never.
    """

    nonfinite: Literal["skip", "raise", "keep"]
    spike: float | None

    def __post_init__(self):
        if self.nonfinite not in ("skip", "raise", "keep"):
            raise ValueError(f"nonfinite={self.nonfinite!r}; wanted 'skip', 'raise' or 'keep'.")
        is_number = isinstance(self.spike, Real) and not isinstance(self.spike, bool)
        if self.spike is not None and not (is_number and self.spike > 1):
            raise ValueError(f"spike={self.spike!r}; wanted a number above 1, or None.")

    @property
    def is_off(self) -> bool:
        """Whether every step is taken."""
        return self.nonfinite == "keep" and self.spike is None

    def judge(self, norm: jax.Array, skipped: Skipped) -> tuple[jax.Array, Skipped]:
        """Whether a step with this gradient norm is taken, and the count after it.

        The norm is finite if every gradient on every device is, and small enough to be clipped. A spike moves the mean
        by as much as the largest norm that is no spike, so that a run whose norms stay larger goes on in the end.
        """
        finite, mean = jnp.isfinite(norm), skipped.mean_norm
        take = finite if self.nonfinite != "keep" else jnp.ones((), bool)
        if self.spike is not None:
            limit = jnp.where(mean > 0, self.spike * mean, jnp.inf)
            take &= ~(norm > limit)
            moved = jnp.where(mean > 0, 0.99 * mean + 0.01 * jnp.minimum(norm, limit), norm)
            mean = jnp.where(finite, moved, mean).astype(jnp.float32)
        skips = 1 - take.astype(jnp.int32)
        return take, Skipped(skipped.total + skips, jnp.where(take, 0, skipped.in_a_row + 1), mean)

    def report(self, metrics: dict[str, Any], exhausted: Any, state: Any) -> None:
        """On the host: warns of many skipped steps in a row; raises where it is to, or the scale is at its end.

        Inside of another `jax.jit` it can do neither: tracers pass.

        Raises:
            Nonfinite: With `state`, which goes on from there.
        """
        if self.is_off or not is_concrete(metrics["skipped"]) or not bool(metrics["skipped"]):
            return
        in_a_row, scale = int(metrics["skipped_in_a_row"]), float(metrics["loss_scale"])
        if bool(exhausted):
            raise Nonfinite(
                f"The gradients of the step after step {int(metrics['step'])} overflowed at a loss scale of {scale:g}, "
                f"its minimum, with the hysteresis used up: no smaller scale is left to try. The loss or the params "
                f"may be too large for float16. Look for a learning rate that is too high or a loss that is summed and "
                f"not averaged, lower DynamicLossScale(minimum=...), or use bfloat16.",
                state,
            )
        if self.nonfinite == "raise" and not bool(jnp.isfinite(metrics["grad_norm"])):
            raise Nonfinite(
                f"The gradients of the step after step {int(metrics['step'])} are not finite (norm "
                f"{float(metrics['grad_norm'])}, loss {float(metrics['loss'])}). The step was not taken; "
                f"error.state holds the state to go on from.",
                state,
            )
        if in_a_row >= MANY and in_a_row % MANY == 0 and (in_a_row // MANY).bit_count() == 1:
            warnings.warn(
                f"{in_a_row} steps in a row were skipped after step {int(metrics['step'])}: the gradient norm is "
                f"{float(metrics['grad_norm']):g} at a loss scale of {scale:g}, the loss {float(metrics['loss']):g}. "
                f"Nothing is learned meanwhile.",
                stacklevel=4,
            )


class Nonfinite(FloatingPointError):
    """Gradients that are not finite.

    Attributes:
        state: The last `TrainState`, for saving or going on: the step in question was not taken.
    """

    def __init__(self, message: str, state: Any):
        super().__init__(message)
        self.state = state
