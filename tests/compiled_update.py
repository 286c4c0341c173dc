"""`apply_gradients` with a donated state, compiled from shapes alone."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from jzero.state import compile_init, state_shardings

Options = dict[str, str | bool]

# By default XLA:CPU orders a program so that its cores have most to do at once. This orders it for memory, as XLA does
# on accelerators.
FOR_MEMORY: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

# XLA:CPU drops optimization barriers before it orders the program. XLA on accelerators keeps them until after that.
WITH_BARRIERS: Options = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def lower_update(tx: optax.GradientTransformation, layout: jzero.Layout, **extra: Any) -> jax.stages.Lowered:
    """Lowers the update. Of `extra`, functions are called and the rest are shapes; `grad` is the gradient itself."""
    params = layout.treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtypes.given) for leaf in layout.leaves])
    state = jax.eval_shape(compile_init(lambda p: p, tx, layout), params)
    state = jax.tree.map(placed, state, spread(state_shardings(tx, layout), state))
    grads = layout.treedef.unflatten(
        [leaf.placed(layout.stage.grads).update(dtype=leaf.dtypes.grad) for leaf in layout.leaves]
    )
    grads = jax.tree.map(placed, grads, layout.grad_shardings)
    functions = {name: x for name, x in extra.items() if callable(x)}
    values = {name: x for name, x in extra.items() if name not in functions and name != "grad"}

    def update(state, grads, values):
        own = {"grad": grads} if "grad" in extra else {}
        return jzero.apply_gradients(state, grads, tx, layout, **functions, **values, **own)

    return jax.jit(update, donate_argnums=0).lower(state, grads, values)


def temp_bytes(lowered: jax.stages.Lowered, options: Options) -> int:
    """Bytes that the program takes beside its inputs and outputs."""
    analysis: Any = lowered.compile(options).memory_analysis()
    return analysis.temp_size_in_bytes


def spread(shardings, tree):
    """One sharding for each leaf, from a prefix of the tree."""
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), shardings, tree)


def placed(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def scalar():
    return jax.ShapeDtypeStruct((), jnp.float32)
