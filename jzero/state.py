"""The training state: born sharded by `init`, moved on by `apply_gradients`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.arguments import check_arguments
from jzero.check import check_tree, warn_shared
from jzero.dtypes import Dtypes
from jzero.guard import Skipped
from jzero.layout import Layout
from jzero.loss_scale import DynamicLossScale, as_loss_scale
from jzero.mesh import platform_of
from jzero.padding import is_concrete, pad, unpad
from jzero.partition import combine, partition
from jzero.rounding import cast
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
        master: Master copies of the trainable params, placed as `layout.master_specs`, padded where the layout says so;
            None at each leaf, or at all, that has no copy of its own: the optimizer then moves on the param itself.
        loss_scale: State of the loss scale; None if there is none.
        skipped: How many steps were skipped.
    """

    params: Any
    opt_state: Any
    step: Any
    key: Any = None
    model_state: Any = None
    master: Any = None
    loss_scale: Any = None
    skipped: Any = None


def state_shardings(tx: optax.GradientTransformation, layout: Layout) -> TrainState:
    """NamedShardings of a whole `TrainState`, in its structure; one stands for all of what is whole on every device."""
    whole = layout.sharding(P())
    return TrainState(
        params=layout.param_shardings,
        opt_state=layout.opt_shardings(tx),
        step=whole,
        key=whole,
        model_state=whole,
        master=layout.master_shardings,
        loss_scale=whole,
        skipped=whole,
    )


def check_state(state: TrainState, tx: optax.GradientTransformation, layout: Layout) -> None:
    """Raises unless the state has the structure, shapes and placements of this layout and `tx`, and still lives."""
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}; wanted the TrainState that jzero.init returns.")
    check_tree("state.params", state.params, layout, layout.treedef, layout.leaves, layout.stage.params)
    step = Leaf("step", (), jnp.dtype("int32"), None, (), Dtypes.of(jnp.dtype("int32")))
    check_tree("state.step", state.step, layout, jax.tree.structure(0), (step,), "replicated")
    check_tree("state.opt_state", state.opt_state, layout, *layout.opt_leaves(tx), layout.stage.opt_state)
    check_tree("state.master", state.master, layout, *layout.masters, layout.stage.opt_state)


def owned(state: TrainState, layout: Layout) -> list[Any]:
    """What the optimizer moves on, for each trainable param: its master copy, or the param itself."""
    params, masters = jax.tree.leaves(partition(state.params, layout)[0]), iter(jax.tree.leaves(state.master))
    return [next(masters) if leaf.has_master else x for leaf, x in zip(layout.trainable, params, strict=True)]


def masters_of(layout: Layout, copies: Sequence[jax.Array]) -> Any:
    """The tree of `TrainState.master`, inside of jit, from master copies in logical shapes."""
    treedef, leaves = layout.masters
    shapes = [leaf.placed(layout.stage.opt_state).shape for leaf in leaves]
    return treedef.unflatten([pad(x, shape) for x, shape in zip(copies, shapes, strict=True)])


def master_params(state: TrainState, layout: Layout, *, replicate: bool = False) -> Any:
    """The weights that the optimizer moves on, as precise as they are, at any stage: what to export.

    `state.params` is what the next step starts from: with `precision="bf16"` the bfloat16 copy at stages 0 to 2, the
    float32 weights at stage 3.

    Args:
        state: The state.
        layout: The layout that it was made with.
        replicate: Outside of jit, make padded leaves whole on every device, as for `Layout.logical`.

    Returns:
        A tree like the params, with logical shapes. Trainable leaves come in the precision's `master` dtype, or as they
        are stored if it has none; the others in the dtype that they were made in, of which narrower storage may have
        cost bits.
        Placed as the optimizer state where there is a copy, else as the params. No collective runs, but for
        `replicate`.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=2, mesh=jzero.make_mesh(data=-1), precision="bf16")
        >>> state = jzero.init(lambda: {"w": jnp.full(8, 1.001)}, optax.sgd(0.5), layout)
        >>> state.params["w"][0], master_params(state, layout)["w"][0]
        (Array(1, dtype=bfloat16), Array(1.001, dtype=float32))
    """
    check_tree("state.params", state.params, layout, layout.treedef, layout.leaves, layout.stage.params)
    check_tree("state.master", state.master, layout, *layout.masters, layout.stage.opt_state)
    tree = combine(layout.trainable_treedef.unflatten(owned(state, layout)), partition(state.params, layout)[1])
    logical = jax.tree.leaves(layout.logical(tree, replicate=replicate))
    dtypes = [leaf.dtypes.master if leaf.trainable else leaf.dtypes.given for leaf in layout.leaves]
    return layout.treedef.unflatten([cast(x, dtype) for x, dtype in zip(logical, dtypes, strict=True)])


def init(
    init_params: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *args: Any,
    key: Any = None,
    model_state: Any = None,
    loss_scale: float | DynamicLossScale | None = None,
) -> TrainState:
    """Makes the first `TrainState`, born sharded: no device ever holds more of it than it keeps.

    `jax.eval_shape(functools.partial(init, init_params, tx, layout), key)` gives its shapes, and makes nothing.

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
        loss_scale: The loss scale that the training step will be given as well: a number, or a `DynamicLossScale`.

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
    check_arguments("init(init_params, tx, layout)", layout=layout, tx=tx)
    if not callable(init_params):
        raise TypeError(
            f"init: init_params is a {type(init_params).__name__}; wanted a function that makes the params. For params "
            f"that exist: jzero.init(lambda p: p, tx, layout, params)."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
        raise TypeError("init: its arguments hold ShapeDtypeStructs, which are shapes only; pass arrays.")
    if key is not None and not np.shape(key) and not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
        raise TypeError(f"init: key={key!r}; wanted a random key, such as jax.random.key(0).")
    scale = None if loss_scale is None else as_loss_scale(loss_scale).init()
    model_state = jax.tree.map(jnp.asarray, model_state)
    return compile_init(init_params, tx, layout)(*args, key=key, model_state=model_state, loss_scale=scale)


def compile_init(init_params: Callable[..., Any], tx: optax.GradientTransformation, layout: Layout) -> Any:
    """The jitted function behind `init`, for those who want to look at its program."""

    def cut(leaf, x):
        sharding = layout.sharding(layout.spec(leaf, "sharded"))
        return unpad(lax.with_sharding_constraint(pad(x, leaf.stored), sharding), x.shape)

    given = [replace(leaf, dtype=leaf.dtypes.given) for leaf in layout.leaves]

    def born(*args, key=None, model_state=None, loss_scale=None):
        params = init_params(*args)
        check_tree("init_params(...)", params, layout, layout.treedef, given, "replicated")
        warn_shared("init_params(...)", params)
        # Random bits take several times the memory of the numbers made of them: each device makes its own part only.
        params = list(map(cut, given, jax.tree.leaves(params)))
        # What is a copy is made from its master at once, as it will be from the first update on.
        params = [cast(x, leaf.dtypes.master) for leaf, x in zip(layout.leaves, params, strict=True)]
        pairs = list(zip(layout.leaves, params, strict=True))
        trained = [x for leaf, x in pairs if leaf.trainable]
        seen = [cast(x, leaf.dtypes.update) for leaf, x in zip(layout.trainable, trained, strict=True)]
        opt_state = tx.init(layout.trainable_treedef.unflatten(seen))
        treedef, leaves = layout.opt_leaves(tx)
        opt_state = [cast(x, leaf.dtype) for leaf, x in zip(leaves, jax.tree.leaves(opt_state), strict=True)]
        copies = [x for leaf, x in zip(layout.trainable, trained, strict=True) if leaf.has_master]
        state = TrainState(
            params=layout.stored(layout.treedef.unflatten([cast(x, leaf.dtype) for leaf, x in pairs])),
            opt_state=layout.stored(treedef.unflatten(opt_state), tx=tx),
            step=jnp.zeros((), jnp.int32),
            key=key,
            model_state=model_state,
            master=masters_of(layout, copies),
            loss_scale=loss_scale,
            skipped=Skipped.none(),
        )
        return jax.tree.map(_strong, state)

    # XLA's default for CPUs runs as much at once as it can, all leaves' random bits together. Under another trace, as
    # in `jax.eval_shape(init, ...)`, JAX takes no options, and nothing is run.
    on_cpu, runs = platform_of(layout.mesh) == "cpu", is_concrete(jnp.zeros(()))
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if on_cpu and runs else None
    return jax.jit(born, out_shardings=state_shardings(tx, layout), compiler_options=options)


def _strong(x):
    """Without the weak type of a Python number, which the first step would change, and so compile a second time."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return x if is_key else lax.convert_element_type(x, x.dtype)
