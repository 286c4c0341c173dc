"""The training state: born sharded by `init`, moved on by `apply_gradients`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.check import check_tree, warn_shared
from jzero.layout import Layout
from jzero.mesh import platform_of
from jzero.padding import pad, unpad
from jzero.partition import partition
from jzero.rules import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a training run holds between steps.

    Attributes:
        params: All params, trained or not, placed as `layout.param_specs`, padded where the layout says so.
        opt_state: The state of `tx` for the trainable params, placed as `layout.opt_specs(tx)`.
        step: int32 scalar; the number of updates made.
        key: The training key, which `train_step` folds by step; None if there is none.
        model_state: What the loss changes without a gradient, whole on every device; None if there is none.
    """

    params: Any
    opt_state: Any
    step: Any
    key: Any = None
    model_state: Any = None


def state_shardings(tx: optax.GradientTransformation, layout: Layout) -> TrainState:
    """NamedShardings of a whole `TrainState`, in its structure; one stands for all of key and model state."""
    whole = layout.sharding(P())
    return TrainState(layout.param_shardings, layout.opt_shardings(tx), whole, whole, whole)


def check_state(state: TrainState, tx: optax.GradientTransformation, layout: Layout) -> None:
    """Raises unless the state has the structure, shapes and placements of this layout and `tx`, and still lives."""
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}; wanted the TrainState that jzero.init returns.")
    check_tree("state.params", state.params, layout, layout.treedef, layout.leaves, layout.stage.params)
    step = jax.tree.structure(0), (Leaf("step", (), jnp.dtype("int32"), None, ()),), "replicated"
    check_tree("state.step", state.step, layout, *step)
    check_tree("state.opt_state", state.opt_state, layout, *layout.opt_leaves(tx), layout.stage.opt_state)


def init(
    init_params: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *args: Any,
    key: Any = None,
    model_state: Any = None,
) -> TrainState:
    """Makes the first `TrainState`, born sharded: no device ever holds more of it than it keeps.

    `init_params(*args)` and `tx.init` are compiled as one program whose outputs have the layout's placements. Each
    device computes its own shards; at stages 0 to 2 the params are then gathered (M elements). An initialiser may need
    more: one that decomposes a matrix (orthogonal and its kind) builds it whole on every device. Beside its result a
    device needs at most twice the largest whole leaf, and three times on a mesh of one device with an optimizer that
    has no state.

    Args:
        init_params: Makes the params from `args`; it is traced. To start from params that exist, pass them as an
            argument: `init(lambda p: p, tx, layout, params)`; they are copied, and yours stay valid.
        tx: An optax optimizer. It sees the trainable params only, in their logical shapes.
        layout: The placements, from `zero` on params of the same shapes.
        *args: Arguments of `init_params`, usually a random key.
        key: A random key for training, kept in the state, for losses that take `key=`.
        model_state: Initial model state (batch statistics, counters), for losses that take `model_state=`. It is
            copied.

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
    if not callable(init_params):
        raise TypeError(
            f"init: init_params is a {type(init_params).__name__}; wanted a function that makes the params. For params "
            f"that exist: jzero.init(lambda p: p, tx, layout, params)."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
        raise TypeError("init: its arguments hold ShapeDtypeStructs, which are shapes only; pass arrays.")
    if key is not None and not np.shape(key) and not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
        raise TypeError(f"init: key={key!r}; wanted a random key, such as jax.random.key(0).")
    return compile_init(init_params, tx, layout)(*args, key=key, model_state=jax.tree.map(jnp.asarray, model_state))


def compile_init(init_params: Callable[..., Any], tx: optax.GradientTransformation, layout: Layout) -> Any:
    """The jitted function behind `init`, for those who want to look at its program."""

    def cut(leaf, x):
        sharding = layout.sharding(layout.spec(leaf, "sharded"))
        return unpad(lax.with_sharding_constraint(pad(x, leaf.stored), sharding), x.shape)

    def born(*args, key=None, model_state=None):
        params = init_params(*args)
        check_tree("init_params(...)", params, layout, layout.treedef, layout.leaves, "replicated")
        warn_shared("init_params(...)", params)
        # Random bits take several times the memory of the numbers made of them: each device makes its own part only.
        params = layout.treedef.unflatten(map(cut, layout.leaves, jax.tree.leaves(params)))
        opt_state = tx.init(partition(params, layout)[0])
        params, opt_state = layout.stored(params), layout.stored(opt_state, tx=tx)
        return jax.tree.map(_strong, TrainState(params, opt_state, jnp.zeros((), jnp.int32), key, model_state))

    # XLA's default for CPUs runs as much at once as it can, all leaves' random bits together.
    on_cpu = platform_of(layout.mesh) == "cpu"
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if on_cpu else None
    return jax.jit(born, out_shardings=state_shardings(tx, layout), compiler_options=options)


def _strong(x):
    """Without the weak type of a Python number, which the first step would change, and so compile a second time."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return x if is_key else lax.convert_element_type(x, x.dtype)
