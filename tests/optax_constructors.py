"""Every constructor of a gradient transformation in optax and optax.contrib, with arguments that make sense for it.

A name here is a name there: "adam" is `optax.adam`, "contrib.muon" is `optax.contrib.muon`; what stands after a space
tells two uses of one constructor apart.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=2, decay_steps=10)


def objective(params):
    """For optimizers that evaluate the loss themselves: smooth, convex, with a Hessian that is not constant."""
    return sum(jnp.sum(jnp.cosh(p / 2)) for p in jax.tree.leaves(params))


def gradient_of_objective(params, _):
    return jax.grad(objective)(params)


def matrices(params: Any) -> Any:
    """A mask: true for what has two dims or more."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


MATRICES: Any = matrices  # optax annotates some masks as trees, and takes functions too


def shrink_by_size_of_param(grad: Any, param: Any) -> Any:
    return grad / (1 + jnp.abs(param).mean())


def every_second_step(step, *_, **__):
    return step % 2 == 0


def on_fast_params(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optax.lookahead` wants the gradient of its fast params only; a layout wants one for each of the params."""

    def update(updates: Any, state: Any, params: Any = None):
        return tx.update(updates.fast, state, params)

    return optax.GradientTransformation(tx.init, update)


@dataclass(frozen=True)
class Case:
    """One constructor.

    Attributes:
      make: Calls it.
      extra: What `tx.update` needs beside gradients, state and params.
      scalars: Whether optax itself can update a scalar with it.
      how: How it is used, where that is not `apply_gradients(state, grads, tx, layout)` with these extra arguments.
    """

    make: Callable[[], Any]
    extra: tuple[str, ...] = ()
    scalars: bool = True
    how: str = ""


SEARCH = ("value", "grad", "value_fn")

CASES: dict[str, Case] = {
    # Optimizers.
    "adabelief": Case(lambda: optax.adabelief(1e-2)),
    "adadelta": Case(lambda: optax.adadelta(1e-1, weight_decay=0.1)),
    "adafactor": Case(lambda: optax.adafactor(SCHEDULE, min_dim_size_to_factor=8)),
    "adagrad": Case(lambda: optax.adagrad(1e-2)),
    "adam": Case(lambda: optax.adam(1e-2)),
    "adamax": Case(lambda: optax.adamax(1e-2)),
    "adamaxw": Case(lambda: optax.adamaxw(1e-2, weight_decay=0.1)),
    "adamw": Case(lambda: optax.adamw(SCHEDULE, weight_decay=0.1, mask=matrices)),
    "adan": Case(lambda: optax.adan(1e-2, weight_decay=0.1)),
    "amsgrad": Case(lambda: optax.amsgrad(1e-2)),
    "fromage": Case(lambda: optax.fromage(1e-2)),
    "lamb": Case(lambda: optax.lamb(1e-2, weight_decay=0.1)),
    "lars": Case(lambda: optax.lars(1e-1, weight_decay=0.1)),
    "lbfgs": Case(lambda: optax.lbfgs(memory_size=2), SEARCH),
    "lion": Case(lambda: optax.lion(1e-2)),
    "nadam": Case(lambda: optax.nadam(1e-2)),
    "nadamw": Case(lambda: optax.nadamw(1e-2)),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(1e-2, key=jax.random.key(1))),
    "novograd": Case(lambda: optax.novograd(1e-2, weight_decay=0.1)),
    "optimistic_adam": Case(lambda: optax.optimistic_adam(1e-2, optimism=1e-3)),
    "optimistic_adam_v2": Case(lambda: optax.optimistic_adam_v2(1e-2)),
    "optimistic_gradient_descent": Case(lambda: optax.optimistic_gradient_descent(1e-2)),
    "polyak_sgd": Case(lambda: optax.polyak_sgd(scaling=0.1), ("value",)),
    "radam": Case(lambda: optax.radam(1e-2)),
    "rmsprop": Case(lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9)),
    "rprop": Case(lambda: optax.rprop(1e-2)),
    "sgd": Case(lambda: optax.sgd(SCHEDULE)),
    "sgd momentum": Case(lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "sign_sgd": Case(lambda: optax.sign_sgd(1e-2)),
    "signum": Case(lambda: optax.signum(1e-2)),
    "sm3": Case(lambda: optax.sm3(1e-2), scalars=False),
    "yogi": Case(lambda: optax.yogi(1e-2)),
    "contrib.acprop": Case(lambda: contrib.acprop(1e-2)),
    "contrib.ademamix": Case(lambda: contrib.ademamix(1e-2)),
    "contrib.adopt": Case(lambda: contrib.adopt(1e-2)),
    "contrib.cocob": Case(lambda: contrib.cocob(weight_decay=0.1)),
    "contrib.dadapt_adamw": Case(lambda: contrib.dadapt_adamw()),
    "contrib.dog": Case(lambda: contrib.dog()),
    "contrib.dowg": Case(lambda: contrib.dowg()),
    "contrib.galore": Case(lambda: contrib.galore(1e-2, rank=4, update_proj_gap=3)),
    "contrib.madgrad": Case(lambda: contrib.madgrad(1e-2)),
    "contrib.momo": Case(lambda: contrib.momo(), ("value",)),
    "contrib.momo_adam": Case(lambda: contrib.momo_adam(), ("value",)),
    "contrib.muon": Case(lambda: contrib.muon(1e-2, weight_decay=0.1)),
    "contrib.prodigy": Case(lambda: contrib.prodigy()),
    "contrib.sam": Case(lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)))),
    "contrib.sam opaque_mode": Case(
        lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), opaque_mode=True),
        ("grad_fn",),
    ),
    "contrib.schedule_free_adamw": Case(lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=2)),
    "contrib.schedule_free_sgd": Case(lambda: contrib.schedule_free_sgd(1e-2)),
    "contrib.simplified_ademamix": Case(lambda: contrib.simplified_ademamix(1e-2)),
    "contrib.sophia": Case(lambda: contrib.sophia(1e-2, update_interval=2), ("obj_fn",)),
    # Parts of optimizers.
    "adaptive_grad_clip": Case(lambda: optax.adaptive_grad_clip(0.1)),
    "add_decayed_weights": Case(lambda: optax.add_decayed_weights(0.1, mask=matrices)),
    "add_noise": Case(lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(1))),
    "centralize": Case(optax.centralize),
    "clip": Case(lambda: optax.clip(0.5)),
    "clip_by_block_rms": Case(lambda: optax.clip_by_block_rms(0.5)),
    "clip_by_global_norm": Case(lambda: optax.clip_by_global_norm(0.5)),
    "ema": Case(lambda: optax.ema(0.9)),
    "identity": Case(optax.identity),
    "keep_params_nonnegative": Case(optax.keep_params_nonnegative),
    "normalize_by_update_norm": Case(optax.normalize_by_update_norm),
    "scale": Case(lambda: optax.scale(-0.1)),
    "scale_by_adadelta": Case(optax.scale_by_adadelta),
    "scale_by_adam": Case(lambda: optax.scale_by_adam(nesterov=True)),
    "scale_by_adamax": Case(optax.scale_by_adamax),
    "scale_by_adan": Case(optax.scale_by_adan),
    "scale_by_amsgrad": Case(optax.scale_by_amsgrad),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)), SEARCH
    ),
    "scale_by_belief": Case(optax.scale_by_belief),
    "scale_by_distance_over_gradients": Case(optax.scale_by_distance_over_gradients, scalars=False),
    "scale_by_factored_rms": Case(lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=8)),
    "scale_by_lbfgs": Case(lambda: optax.scale_by_lbfgs(memory_size=2)),
    "scale_by_learning_rate": Case(lambda: optax.scale_by_learning_rate(SCHEDULE)),
    "scale_by_lion": Case(optax.scale_by_lion),
    "scale_by_novograd": Case(optax.scale_by_novograd),
    "scale_by_optimistic_gradient": Case(optax.scale_by_optimistic_gradient),
    "scale_by_param_block_norm": Case(optax.scale_by_param_block_norm),
    "scale_by_param_block_rms": Case(optax.scale_by_param_block_rms),
    "scale_by_polyak": Case(optax.scale_by_polyak, ("value",)),
    "scale_by_radam": Case(lambda: optax.scale_by_radam(threshold=2.0)),
    "scale_by_rms": Case(optax.scale_by_rms),
    "scale_by_rprop": Case(lambda: optax.scale_by_rprop(1e-2)),
    "scale_by_rss": Case(optax.scale_by_rss),
    "scale_by_schedule": Case(lambda: optax.scale_by_schedule(SCHEDULE)),
    "scale_by_sign": Case(optax.scale_by_sign),
    "scale_by_sm3": Case(optax.scale_by_sm3, scalars=False),
    "scale_by_stddev": Case(optax.scale_by_stddev),
    "scale_by_trust_ratio": Case(optax.scale_by_trust_ratio),
    "scale_by_yogi": Case(optax.scale_by_yogi),
    "scale_by_zoom_linesearch": Case(lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)), SEARCH),
    "set_to_zero": Case(optax.set_to_zero),
    "snapshot": Case(lambda: optax.chain(optax.sgd(0.1, 0.9), optax.snapshot("norm", optax.tree.norm))),
    "stateless": Case(lambda: optax.stateless(lambda grads, params: jax.tree.map(lambda g: -0.1 * g, grads))),
    "stateless_with_tree_map": Case(lambda: optax.stateless_with_tree_map(shrink_by_size_of_param)),
    "trace": Case(lambda: optax.trace(0.9, nesterov=True)),
    "zero_nans": Case(optax.zero_nans),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        lambda: contrib.hutchinson_estimator_diag_hessian(jax.random.key(1)), ("obj_fn",)
    ),
    "contrib.normalize": Case(contrib.normalize),
    "contrib.reduce_on_plateau": Case(
        lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=2, rtol=0.5)), ("value",)
    ),
    "contrib.scale_by_acprop": Case(contrib.scale_by_acprop),
    "contrib.scale_by_ademamix": Case(contrib.scale_by_ademamix),
    "contrib.scale_by_adopt": Case(contrib.scale_by_adopt),
    "contrib.scale_by_cocob": Case(contrib.scale_by_cocob),
    "contrib.scale_by_galore": Case(lambda: contrib.scale_by_galore(rank=4)),
    "contrib.scale_by_madgrad": Case(lambda: contrib.scale_by_madgrad(1e-2)),
    "contrib.scale_by_muon": Case(
        lambda: optax.masked(
            contrib.scale_by_muon(
                weight_dimension_numbers=lambda params: jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)
            ),
            matrices,
        )
    ),
    "contrib.scale_by_simplified_ademamix": Case(contrib.scale_by_simplified_ademamix),
    # What goes around optimizers.
    "MultiSteps": Case(lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)),
    "apply_every": Case(lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(optax.adam(1e-2), 3)),
    "chain": Case(
        lambda: optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.scale_by_adam(),
            optax.masked(optax.add_decayed_weights(0.1), matrices),
            optax.scale_by_trust_ratio(),
            optax.scale_by_learning_rate(SCHEDULE),
            optax.ema(0.9),
        )
    ),
    "conditionally_mask": Case(lambda: optax.conditionally_mask(optax.adam(1e-2), every_second_step)),
    "conditionally_transform": Case(lambda: optax.conditionally_transform(optax.adam(1e-2), every_second_step)),
    "flatten": Case(lambda: optax.flatten(optax.adam(1e-2))),
    "freeze": Case(lambda: optax.chain(optax.freeze(MATRICES), optax.adam(1e-2))),
    "inject_hyperparams": Case(lambda: optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=0.1)),
    "inject_stateful_hyperparams": Case(lambda: optax.inject_stateful_hyperparams(optax.adam)(SCHEDULE)),
    "lookahead": Case(
        lambda: on_fast_params(optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)),
        how="params are `LookaheadParams`, and `tx` is told to take `grads.fast`",
    ),
    "masked": Case(lambda: optax.masked(optax.adam(1e-2), matrices)),
    "measure_with_ema": Case(lambda: optax.measure_with_ema(lambda grads: jax.tree.map(jnp.tanh, grads), 0.9)),
    "multi_transform": Case(
        lambda: optax.multi_transform(
            {True: optax.adafactor(1e-2, min_dim_size_to_factor=8), False: optax.adamw(1e-2)}, matrices
        )
    ),
    "named_chain": Case(
        lambda: optax.named_chain(("clip", optax.clip_by_global_norm(0.5)), ("adam", optax.scale_by_adam()))
    ),
    "partition": Case(lambda: optax.partition({True: contrib.muon(1e-2), False: optax.adamw(1e-2)}, matrices)),
    "selective_transform": Case(lambda: optax.selective_transform(optax.adam(1e-2), freeze_mask=MATRICES)),
    "with_extra_args_support": Case(lambda: optax.with_extra_args_support(optax.scale_by_adam())),
    "contrib.mechanize": Case(lambda: contrib.mechanize(optax.adam(1e-2))),
    "contrib.schedule_free": Case(lambda: contrib.schedule_free(optax.sgd(1e-2), 1e-2)),
    "contrib.split_real_and_imaginary": Case(lambda: contrib.split_real_and_imaginary(optax.adam(1e-2))),
}

PER_EXAMPLE = "it takes one gradient for each example, and gradients here are means over the batch"

REFUSED: dict[str, str] = {
    "monitor": "its state has another structure after the first update",
    "contrib.differentially_private_aggregate": PER_EXAMPLE,
    "contrib.dpsgd": PER_EXAMPLE,
}

# Modules of optax that hold other things, and what lies beside the transformations in the modules that hold those.
OTHER_MODULES = (
    "optax._src.linear_algebra",
    "optax._src.numerics",
    "optax._src.update",
    "optax._src.utils",
    "optax.losses",
    "optax.microbatching",
    "optax.schedules._join",
    "optax.schedules._schedule",
)
HELPERS = {
    "WrappedSchedule",
    "bias_correction",
    "init_empty_state",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
    "scale_gradient",
    "skip_large_updates",
    "skip_not_finite",
    "tree_map_params",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
    "value_and_grad_from_state",
    "contrib.schedule_free_eval_params",
}


def constructors() -> Iterator[str]:
    """The names of all that optax and optax.contrib offer, except for types, other modules and helpers."""
    for module, prefix in ((optax, ""), (contrib, "contrib.")):
        for name in dir(module):
            member = getattr(module, name)
            home = getattr(getattr(member, "func", member), "__module__", "")  # `nadam` is a partial of `adam`
            if name.startswith("_") or not callable(member) or not home.startswith("optax"):
                continue
            if inspect.isclass(member) and not (hasattr(member, "init") and hasattr(member, "update")):
                continue
            if member in (optax.GradientTransformation, optax.GradientTransformationExtraArgs):
                continue
            if not home.startswith(OTHER_MODULES) and prefix + name not in HELPERS:
                yield prefix + name
