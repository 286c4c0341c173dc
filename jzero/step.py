"""`train_step`: gradient, clip, update, as one compiled program."""

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jzero import scopes
from jzero.arguments import check_arguments
from jzero.check import check_batch
from jzero.grad import gradient_program
from jzero.guard import Guard
from jzero.layout import Layout
from jzero.loss_scale import DynamicLossScale, as_loss_scale
from jzero.mesh import platform_of
from jzero.metrics import global_norm, learning_rates, matching
from jzero.model_state import warn_differing
from jzero.options import compiler_options as options_for
from jzero.padding import is_concrete
from jzero.run import Account
from jzero.state import TrainState, check_state, state_shardings
from jzero.update import apply_gradients


class TrainStep:
    """A compiled training step, made by `train_step`: call it as `step(state, batch)`.

    Attributes:
        layout: The placements that it was made for.
        tx: Its optimizer.
        microbatches: Into how many parts each device's batch is split.
        jitted: The `jax.jit`ted function `(state, batch) -> (state, metrics, notes)` that it runs, donating `state`;
            `notes` are for the host: which leaves of the model state were not the same on all batch shards, and whether
            the loss scale is at its end.
        wait: Whether each call waits until its loss is there.
        options: Every argument of the `train_step` that made it, by name.
    """

    def __init__(
        self,
        jitted: Callable,
        trace: Callable,
        check_state: Callable,
        check_batch: Callable,
        *,
        guard: Guard,
        wait: bool,
        options: Mapping[str, Any],
    ):
        self.jitted, self.wait, self.options = jitted, wait, options
        self.layout, self.tx, self.microbatches = (options[name] for name in ("layout", "tx", "microbatches"))
        self._trace = trace
        self._check_state, self._check_batch, self._guard = check_state, check_batch, guard
        self._returned = self._found = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step and returns the new state and the metrics; `state` is donated and must not be used again."""
        # The state that this step returned fits, and looking at each of its arrays again would cost every step.
        if self._returned is None or self._returned() is not state or state.step.is_deleted():
            self._check_state(state)
        self._check_batch(batch)
        before = self._found
        state, metrics, (differ, exhausted) = self.jitted(state, batch)
        self._returned = weakref.ref(state)
        self._found = metrics, exhausted, state.model_state, differ
        if self.wait:
            jax.block_until_ready(metrics["loss"])
            before = self._found
        self._report(before, state)
        return state, metrics

    def on(self, layout: Layout) -> "TrainStep":
        """The same step for another layout of the same params, such as `step.layout.on(mesh)`.

        Example:
            >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))
            >>> step = train_step(lambda params, x: (x * params["w"]).sum(), optax.sgd(0.1), layout, microbatches=2)
            >>> step.on(layout.on(jzero.make_mesh(replica=2, data=4))).layout.shards
            4
        """
        return train_step(**{**self.options, "layout": layout})

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments (arrays or ShapeDtypeStructs), to look at its program."""
        self._check_state(state)
        self._check_batch(batch)
        return self.jitted.lower(state, batch)

    def account(self, state: Any, batch: Any) -> Account:
        """Traces the gradient anew, for arguments as `lower` takes them, and says what it gathers and reduces."""
        self._check_state(state)
        self._check_batch(batch)
        return self._trace(state, batch)

    def _report(self, found: Any, state: TrainState) -> None:
        """Warns or raises because of what a step has found; one step late where steps are not waited for."""
        if found is not None:
            metrics, exhausted, model_state, differ = found
            self._guard.report(metrics, exhausted, state)
            if differ is not None:
                warn_differing(model_state, differ)


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    microbatches: int = 1,
    clip_norm: float | None = None,
    loss_scale: float | DynamicLossScale | None = None,
    nonfinite: Literal["skip", "raise", "keep"] | None = None,
    spike: float | None = None,
    norm_groups: Mapping[str, str] | None = None,
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
            is the global L2 norm over all params, each counted once, of the whole batch. None: no clipping.
        loss_scale: A number or a `DynamicLossScale` that the loss is multiplied by for its gradient, and the gradient
            divided by, so that small ones do not vanish in float16; the same as for `init`. None: no loss scale.
        nonfinite: What becomes of a step whose gradients are not finite, on any device and in any microbatch: "skip"
            leaves params, optimizer state, model state and `step` as they were, bit for bit, and says so in the
            metrics, with a warning when many are skipped in a row; "raise" does so and raises; "keep" takes it. None:
            "skip" with a loss scale or `spike`, else "keep".
        spike: Also skip a step whose gradient norm is more than this many times its running mean; the loss scale counts
            it as clean. None: never.
        norm_groups: Names and shell patterns on paths: `metrics["grad_norms"]` has the norm over the leaves that each
            matches, before clipping.
        has_aux: As for `value_and_grad`.
        with_key: As for `value_and_grad`; the key is `fold_in(state.key, state.step)`, from `init(..., key=)`.
        with_model_state: As for `value_and_grad`; the model state is `state.model_state`, from
            `init(..., model_state=)`.
        wait: Whether each call waits for its loss. None: on CPU only, where simulated devices that run ahead can
            time out in a collective. Where steps can be skipped, a call that does not wait for its own step still waits
            for the one before, to report it.
        compiler_options: XLA's options for the step. None: `jzero.compiler_options(layout)`; {}: XLA's defaults, which
            `jitted` needs to be called inside of another `jax.jit`, where JAX takes no options.

    Returns:
        `step(state, batch) -> (state, metrics)`, a `TrainStep`. `metrics` holds scalars, whole on every device: `loss`;
        `grad_norm`, float32 or wider, before clipping, and `clipped_norm` after it; `clipped`, bool; `loss_scale` that
        this step used, 1 if none; `skipped`, bool, and `skipped_in_a_row`; `step`, the number of updates after this
        one; `learning_rate` where `tx` keeps it in its state (`optax.inject_hyperparams`), a dict by path if it keeps
        several; with `has_aux` also `aux`.

    Raises:
        ValueError: A `clip_norm` that is not positive, an unknown `nonfinite`, a `spike` of 1 or less, a pattern that
            matches no trainable leaf; from the step, before any work: whatever `value_and_grad` and `apply_gradients`
            refuse, a state that an earlier call has donated, and one with a loss scale of another kind or number.
        jzero.guard.Nonfinite: From the step: gradients that are not finite under `nonfinite="raise"`, or an overflow
            with the loss scale at its minimum. Where steps are not waited for it comes from the call after, and of the
            last one only `metrics` tell. Its `state` is the one to go on from.

    Warns:
        UserWarning: Params in float16 without a loss scale.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> state = jzero.init(lambda: {"w": jnp.ones(8)}, tx := optax.sgd(0.01), layout)
        >>> step = train_step(loss_fn, tx, layout, clip_norm=1.0)
        >>> state, metrics = step(state, layout.put_batch(jnp.ones((16, 8))))
        >>> float(metrics["loss"]), bool(metrics["clipped"]), int(state.step)
        (64.0, True, 1)
    """
    asked = dict(locals())  # every option, for `TrainStep.on`
    check_arguments("train_step(loss_fn, tx, layout)", layout=layout, tx=tx)
    is_number = isinstance(clip_norm, Real) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise ValueError(f"clip_norm={clip_norm!r}; wanted a positive number, or None for no clipping.")
    scaling = None if loss_scale is None else as_loss_scale(loss_scale)
    if scaling is not None and nonfinite == "keep":
        raise ValueError(
            "nonfinite='keep' with a loss scale: gradients that overflow at a scale that is too large would be taken. "
            "Leave it out, or choose 'skip' or 'raise'."
        )
    guard = Guard(nonfinite or ("keep" if scaling is None and spike is None else "skip"), spike)
    groups = matching(norm_groups or {}, layout)
    if scaling is None and any(leaf.dtypes.compute == jnp.float16 for leaf in layout.trainable):
        warnings.warn(
            "train_step: params are used in float16 without a loss scale, so that gradients under 6e-8 become zero. "
            "Pass loss_scale=jzero.DynamicLossScale() to init and train_step, or use bfloat16.",
            stacklevel=2,
        )
    make_program = functools.partial(
        gradient_program,
        loss_fn,
        layout,
        microbatches=microbatches,
        has_aux=has_aux,
        with_key=with_key,
        with_model_state=with_model_state,
    )
    program = make_program()
    waits = platform_of(layout.mesh) == "cpu" if wait is None else wait

    def arguments(state: TrainState, batch: Any):
        """What the gradient program is given."""
        key = jax.random.fold_in(state.key, state.step) if with_key and state.key is not None else None
        before = state.model_state if with_model_state else None
        return state.params, batch, key, before, None if scaling is None else state.loss_scale.scale

    def trace(state: TrainState, batch: Any) -> Account:
        found = list[Account]()
        jax.eval_shape(lambda *given: make_program(found=found)(*arguments(*given)), state, batch)
        return found[0]

    def update(state: TrainState, batch: Any):
        given = arguments(state, batch)
        (loss, model_state, aux), grads, differ = program(*given)
        *_, before, scale = given

        with scopes.phase("norm"):
            logical = layout.logical(grads)
            norm = global_norm(logical)
            norms = {name: global_norm([jax.tree.leaves(logical)[i] for i in group]) for name, group in groups.items()}
            factor = jnp.ones_like(norm) if clip_norm is None else jnp.minimum(1, clip_norm / (norm + 1e-6))
            if clip_norm is not None:
                grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)

        take = exhausted = None
        if not guard.is_off:
            take, skipped = guard.judge(norm, state.skipped)
            state = replace(state, skipped=skipped)
        if scaling is not None:
            finite = jnp.isfinite(norm)
            exhausted = scaling.is_exhausted(state.loss_scale, finite)
            state = replace(state, loss_scale=scaling.update(state.loss_scale, finite))
        if with_model_state:
            if take is not None:
                model_state = jax.tree.map(lambda new, old: jnp.where(take, new, old), model_state, before)
            state = replace(state, model_state=model_state)
        state = apply_gradients(state, grads, tx, layout, when=take)

        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "clipped_norm": norm * factor,
            "clipped": factor < 1,
            "loss_scale": jnp.float32(1) if scale is None else scale,
            "skipped": jnp.zeros((), bool) if take is None else ~take,
            "skipped_in_a_row": jnp.int32(0) if take is None else state.skipped.in_a_row,
            "step": state.step,
        }
        metrics |= learning_rates(state.opt_state) | ({"aux": aux} if has_aux else {})
        metrics |= {"grad_norms": norms} if norms else {}
        return state, metrics, (differ if differ.size else None, exhausted)

    def check(state):
        check_state(state, tx=tx, layout=layout)
        if state.skipped is None and not guard.is_off:
            raise ValueError("state.skipped is None, where skipped steps are counted; make the state with jzero.init.")
        if (scaling is None) != (state.loss_scale is None):
            have, want = ("none", "one") if state.loss_scale is None else ("one", "none")
            raise ValueError(
                f"state.loss_scale: the state has {have}, and train_step was given {want}. Pass the same loss_scale= "
                f"to jzero.init and jzero.train_step."
            )
        if scaling is not None and is_concrete(state.loss_scale.scale) and not scaling.fits(state.loss_scale):
            raise ValueError(
                f"state.loss_scale: the state stands at {float(state.loss_scale.scale):g}, made by another loss scale "
                f"than the {loss_scale} of train_step. Pass the same loss_scale= to jzero.init and jzero.train_step."
            )

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
        trace,
        check,
        functools.partial(check_batch, layout=layout, microbatches=microbatches),
        guard=guard,
        wait=waits,
        options=asked,
    )
