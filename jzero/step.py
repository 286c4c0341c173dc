"""`train_step`: gradient, clip, update, as one compiled program."""

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jzero.check import check_batch
from jzero.grad import gradient_program
from jzero.layout import Layout
from jzero.mesh import platform_of
from jzero.model_state import warn_differing
from jzero.options import compiler_options as options_for
from jzero.state import TrainState, check_state, state_shardings
from jzero.update import apply_gradients


class TrainStep:
    """A compiled training step, made by `train_step`: call it as `step(state, batch)`.

    Attributes:
        jitted: The `jax.jit`ted function `(state, batch) -> (state, metrics, differ)` that it runs, donating `state`;
            `differ` says which leaves of the model state were not the same on all batch shards, None if all are
        averaged. wait: Whether each call waits until its loss is there.
    """

    def __init__(self, jitted: Callable, check_state: Callable, check_batch: Callable, wait: bool):
        self.jitted, self.wait = jitted, wait
        self._check_state, self._check_batch = check_state, check_batch
        self._returned = self._pending = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step and returns the new state and the metrics; `state` is donated and must not be used again."""
        # The state that this step returned fits, and looking at each of its arrays again would cost every step.
        if self._returned is None or self._returned() is not state or state.step.is_deleted():
            self._check_state(state)
        self._check_batch(batch)
        self._report()
        state, metrics, differ = self.jitted(state, batch)
        self._returned = weakref.ref(state)
        self._pending = None if differ is None else (state.model_state, differ)
        if self.wait:
            jax.block_until_ready(metrics["loss"])
            self._report()
        return state, metrics

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments (arrays or ShapeDtypeStructs), to look at its program."""
        self._check_state(state)
        self._check_batch(batch)
        return self.jitted.lower(state, batch)

    def _report(self):
        """Warns of what the last step found in its model state; one step late where steps are not waited for."""
        if self._pending is not None:
            warn_differing(*self._pending)
            self._pending = None


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    has_aux: bool = False,
    with_key: bool = False,
    with_model_state: bool = False,
    wait: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Makes the training step: `value_and_grad`, clipping, `apply_gradients`, jitted, donating the state.

    Its collectives are those of `value_and_grad` and `apply_gradients`, and those of the norm: one scalar
    for each leaf that is cut, which XLA joins to one all-reduce.

    Args:
        loss_fn: As for `value_and_grad`.
        tx: An optax optimizer.
        layout: The placements; `state` must come from `init` with the same `tx` and layout.
        microbatches: As for `value_and_grad`.
        clip_norm: Multiplies the gradients by min(1, clip_norm / (norm + 1e-6)), as PyTorch and DeepSpeed do; `norm`
            is the global L2 norm over all params, each counted once. None: no clipping.
        has_aux: As for `value_and_grad`.
        with_key: As for `value_and_grad`; the key is `fold_in(state.key, state.step)`, from `init(..., key=)`.
        with_model_state: As for `value_and_grad`; the model state is `state.model_state`, from
            `init(..., model_state=)`.
        wait: Whether each call waits for its loss. None: on CPU only, where simulated devices that run ahead can
            time out in a collective.
        compiler_options: XLA's options for the step. None: `jzero.compiler_options(layout)`; {}: XLA's defaults, which
            `jitted` needs to be called inside of another `jax.jit`, where JAX takes no options.

    Returns:
        `step(state, batch) -> (state, metrics)`, a `TrainStep`. `metrics` holds scalars, whole on every device: `loss`;
        `grad_norm`, float32 or wider, before clipping; `clipped`, bool; `step`, the number of updates after this one;
        with `has_aux` also `aux`.

    Raises:
        ValueError: A `clip_norm` that is not positive; from the step, before any work: whatever `value_and_grad` and
            `apply_gradients` refuse, and a state that an earlier call has donated.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> state = jzero.init(lambda: {"w": jnp.ones(8)}, tx := optax.sgd(0.01), layout)
        >>> step = train_step(loss_fn, tx, layout, clip_norm=1.0)
        >>> state, metrics = step(state, layout.put_batch(jnp.ones((16, 8))))
        >>> float(metrics["loss"]), bool(metrics["clipped"]), int(state.step)
        (64.0, True, 1)
    """
    is_number = isinstance(clip_norm, Real) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise ValueError(f"clip_norm={clip_norm!r}; wanted a positive number, or None for no clipping.")
    program = gradient_program(
        loss_fn,
        layout,
        microbatches=microbatches,
        has_aux=has_aux,
        with_key=with_key,
        with_model_state=with_model_state,
    )
    waits = platform_of(layout.mesh) == "cpu" if wait is None else wait

    def update(state: TrainState, batch: Any):
        key = jax.random.fold_in(state.key, state.step) if with_key and state.key is not None else None
        before = state.model_state if with_model_state else None
        (loss, model_state, aux), grads, differ = program(state.params, batch, key, before)
        norm = global_norm(layout.logical(grads))
        factor = jnp.ones_like(norm) if clip_norm is None else jnp.minimum(1, clip_norm / (norm + 1e-6))
        if clip_norm is not None:
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        if with_model_state:
            state = replace(state, model_state=model_state)
        state = apply_gradients(state, grads, tx, layout)
        metrics = {"loss": loss, "grad_norm": norm, "clipped": factor < 1, "step": state.step}
        return state, metrics | ({"aux": aux} if has_aux else {}), differ if differ.size else None

    shardings = state_shardings(tx, layout)
    jitted = jax.jit(
        update,
        donate_argnums=0,
        in_shardings=(shardings, layout.sharding(layout.batch_spec)),
        out_shardings=(shardings, layout.sharding(P()), layout.sharding(P())),
        compiler_options=dict(options_for(layout) if compiler_options is None else compiler_options) or None,
    )

    return TrainStep(
        jitted,
        functools.partial(check_state, tx=tx, layout=layout),
        functools.partial(check_batch, layout=layout, microbatches=microbatches),
        waits,
    )


def global_norm(grads: Any) -> jax.Array:
    """L2 norm over all leaves, in float32 or wider: low-precision squares would overflow or vanish."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))
