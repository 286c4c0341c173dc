"""The gradient and the training step of the GPT: by jzero, and in the two ways that one has without it.

All take and return the same, placed as the layout says: `gradient(params, tokens) -> (loss, grads)`, and
`step(params, opt_state, tokens) -> (params, opt_state, loss)`, which gives its params and optimizer state away. On a
mesh of one device, that of plain jit is what one device runs without any of this.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jzero
from experiments.bench_step.by_hand import local_gradient, local_step
from experiments.bench_step.model import Size, init_params, make_tokens, mean_loss

TX = optax.adamw(1e-3)


class Programs(NamedTuple):
    """The two programs of one way, jitted and not yet traced."""

    gradient: Any
    step: Any


class Arguments(NamedTuple):
    """What they are called with, placed by a layout."""

    params: Any
    opt_state: Any
    tokens: Any

    def of(self, program: str) -> tuple:
        """Those of one program, by its name."""
        return (self.params, self.tokens) if program == "gradient" else tuple(self)


def jzero_programs(size: Size, layout: jzero.Layout) -> Programs:
    """An unmodified loss under `jzero.value_and_grad`; its step is what `jzero.train_step` does, without the norm."""
    gradient = jzero.value_and_grad(functools.partial(mean_loss, size), layout)

    def step(params, opt_state, tokens):
        loss, grads = gradient(params, tokens)
        state = jzero.TrainState(params, opt_state, jnp.zeros((), jnp.int32))
        state = jzero.apply_gradients(state, grads, TX, layout)
        return state.params, state.opt_state, loss

    return _jitted(layout, gradient, step)


def plain_programs(size: Size, layout: jzero.Layout) -> Programs:
    """An unmodified loss under `jax.jit`, told where arguments and results live; the partitioner does the rest."""
    gradient = jax.value_and_grad(functools.partial(mean_loss, size))

    def step(params, opt_state, tokens):
        loss, grads = gradient(params, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return _jitted(layout, gradient, step)


def hand_written_programs(size: Size, layout: jzero.Layout) -> Programs:
    """Collectives written into this model for this stage: see `by_hand`."""
    params, grads, opt_state = layout.param_specs, layout.grad_specs, layout.opt_specs(TX)
    shard_map = functools.partial(jax.shard_map, mesh=layout.mesh, check_vma=False)
    ins = (params, opt_state, layout.batch_spec)
    return _jitted(
        layout,
        shard_map(local_gradient(size, layout), in_specs=(params, layout.batch_spec), out_specs=(P(), grads)),
        shard_map(local_step(size, layout, TX), in_specs=ins, out_specs=(params, opt_state, P())),
    )


WAYS = {"jzero": jzero_programs, "by hand": hand_written_programs, "plain jit": plain_programs}


def make_layout(size: Size, mesh: Mesh, stage: int) -> jzero.Layout:
    """Where everything lives."""
    params, _ = jax.eval_shape(functools.partial(make_inputs, size))
    return jzero.zero(params, stage=stage, mesh=mesh)


def make_inputs(size: Size) -> tuple[Any, jax.Array]:
    """Params and a batch, of the same numbers under each layout."""
    return init_params(size, jax.random.key(0)), make_tokens(size, jax.random.key(1))


def make_arguments(size: Size, layout: jzero.Layout) -> Arguments:
    """The same arrays for all programs of a layout; `step` must be given a copy."""
    params, tokens = make_inputs(size)
    state = jzero.init(lambda params: params, TX, layout, params)
    return Arguments(state.params, state.opt_state, layout.put_batch(tokens))


def _jitted(layout, gradient, step):
    params, opt_state, whole = layout.param_shardings, layout.opt_shardings(TX), layout.sharding(P())
    batch = layout.sharding(layout.batch_spec)
    return Programs(
        jax.jit(gradient, in_shardings=(params, batch), out_shardings=(whole, layout.grad_shardings)),
        jax.jit(
            step,
            in_shardings=(params, opt_state, batch),
            out_shardings=(params, opt_state, whole),
            donate_argnums=(0, 1),
        ),
    )
