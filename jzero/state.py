"""The training state: born sharded by `init`, moved on by `apply_gradients`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.check import check_tree
from jzero.collectives import gather_params
from jzero.layout import Layout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a training run holds between steps.

    Attributes:
        params: The params, placed as `layout.param_specs`.
        opt_state: The state of `tx`, placed as `layout.opt_specs(tx)`.
        step: int32 scalar; the number of updates made.
    """

    params: Any
    opt_state: Any
    step: Any


def state_shardings(tx: optax.GradientTransformation, layout: Layout) -> TrainState:
    """NamedShardings of a whole `TrainState`, in its structure."""
    return TrainState(layout.param_shardings, layout.opt_shardings(tx), layout.sharding(P()))


def check_state(state: TrainState, tx: optax.GradientTransformation, layout: Layout) -> None:
    """Raises unless the state has the structure, shapes and placements of this layout and `tx`, and still lives."""
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}; wanted the TrainState that jzero.init returns.")
    check_tree("state.params", state.params, layout, layout.treedef, layout.leaves, layout.stage.params)
    check_tree("state.opt_state", state.opt_state, layout, *layout.opt_leaves(tx), layout.stage.opt_state)


def init(init_params: Callable[..., Any], tx: optax.GradientTransformation, layout: Layout, *args: Any) -> TrainState:
    """Makes the first `TrainState`, born sharded: no device ever holds more of it than it keeps.

    `init_params(*args)` and `tx.init` are compiled as one program whose outputs have the layout's placements; each
    device computes its own shards. No collective runs, except for what an initialiser itself needs: one that
    decomposes a matrix (orthogonal and its kind) builds it whole on every device.

    Args:
        init_params: Makes the params from `args`; it is traced. To start from params that exist, pass them as an
            argument: `init(lambda p: p, tx, layout, params)`; they are copied, and yours stay valid.
        tx: An optax optimizer.
        layout: The placements, from `zero` on params of the same shapes.
        *args: Arguments of `init_params`, usually a random key.

    Returns:
        A `TrainState` with step 0, placed as `state_shardings(tx, layout)`.

    Raises:
        ValueError: `init_params` makes another structure or other shapes than the layout was made for.

    Example:
        >>> init_params = lambda key: {"w": jax.random.normal(key, (64, 8))}
        >>> params = jax.eval_shape(init_params, jax.random.key(0))
        >>> layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> state = init(init_params, optax.adam(1e-3), layout, jax.random.key(0))
        >>> state.params["w"].sharding.spec, state.params["w"].addressable_shards[0].data.shape
        (P(None, 'data'), (64, 1))
    """
    return compile_init(init_params, tx, layout)(*args)


def compile_init(init_params, tx, layout):
    """The jitted function behind `init`, for those who want to look at its program."""

    def born(*args):
        params = init_params(*args)
        check_tree("init_params(...)", params, layout, layout.treedef, layout.leaves, layout.stage.params)
        return TrainState(layout.stored(params), tx.init(params), jnp.zeros((), jnp.int32))

    return jax.jit(born, out_shardings=state_shardings(tx, layout))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _update(state, grads, tx, layout):
    def place(tree, specs):
        return jax.tree.map(lambda x, spec: lax.with_sharding_constraint(x, layout.sharding(spec)), tree, specs)

    # Gradients and params go to where the optimizer state lives before the update, so that each device updates its own
    # part; from whole params and whole gradients this is a local slice.
    side = layout.treedef.unflatten([layout.spec(leaf, layout.stage.opt_state) for leaf in layout.leaves])
    params = layout.logical(place(state.params, side))
    grads = layout.logical(place(grads, side))
    updates, opt_state = tx.update(grads, state.opt_state, params)
    params = place(layout.stored(optax.apply_updates(params, updates)), side)
    if layout.stage.params == "replicated" and layout.stage.opt_state == "sharded":
        params = layout.treedef.unflatten(gather_params(layout, jax.tree.leaves(params)))
    params = place(params, layout.param_specs)
    opt_state = place(opt_state, layout.opt_specs(tx))
    return replace(state, params=params, opt_state=opt_state, step=state.step + 1)


def apply_gradients(state: TrainState, grads: Any, tx: optax.GradientTransformation, layout: Layout) -> TrainState:
    """One optimizer update, in the global view, so that norms and means inside of `tx` are those of the whole leaves.

    Runs outside of any shard_map: `tx` sees global arrays, and each device updates the part whose optimizer state it
    holds. At stages 1 and 2 the new params are then gathered explicitly: all-gather, M elements for M params that
    are cut. Reductions inside of `tx` (a norm, Adafactor's means) are added by the partitioner. Works inside and
    outside of `jax.jit`; nothing is donated.

    Args:
        state: The state before, placed as by `init`.
        grads: From `value_and_grad`, placed as `layout.grad_specs`.
        tx: The optax optimizer that `state` was made with.
        layout: The layout that `state` was made with.

    Returns:
        The next state, with the same placements and `step` one higher.

    Raises:
        ValueError: `state` or `grads` have another structure, shape or placement than the layout's.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=2, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> state = init(lambda: {"w": jnp.ones(8)}, tx := optax.sgd(0.5), layout)
        >>> apply_gradients(state, {"w": jnp.ones(8)}, tx, layout).params["w"][0]
        Array(0.5, dtype=float32)
    """
    check_state(state, tx, layout)
    check_tree("grads", grads, layout, layout.treedef, layout.leaves, layout.stage.grads)
    return _update(state, grads, tx, layout)
