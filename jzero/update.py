"""`apply_gradients`: one optimizer update, in the global view."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import keystr

from jzero import scopes
from jzero.arguments import check_arguments
from jzero.check import check_structure, check_tree
from jzero.collectives import gather_params
from jzero.layout import Layout
from jzero.padding import pad, unpad
from jzero.partition import combine, partition
from jzero.rounding import cast, rounded
from jzero.state import TrainState, check_state, owned


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
@scopes.phase("update")
def _update(state, grads, tx, layout, functions, values, when):
    def place(tree, specs):
        return jax.tree.map(lambda x, spec: lax.with_sharding_constraint(x, layout.sharding(spec)), tree, specs)

    leaves, side = layout.trainable, layout.stage.opt_state
    specs = [layout.spec(leaf, side) for leaf in leaves]

    def to_shards(arrays):
        # Gradients and params go to where the optimizer state lives before the update, so that each device updates its
        # own part; from whole params and whole gradients this is a local slice. Only stored shapes can be placed.
        return place([pad(x, leaf.placed(side).shape) for x, leaf in zip(arrays, leaves, strict=True)], specs)

    def to_optimizer(shards):
        return layout.trainable_treedef.unflatten(
            [unpad(x, leaf.shape).astype(leaf.dtypes.update) for x, leaf in zip(shards, leaves, strict=True)]
        )

    treedef, opt_leaves = layout.opt_leaves(tx)
    before, opt_before = to_shards(owned(state, layout)), jax.tree.leaves(state.opt_state)
    trained = to_optimizer(before)
    if "grad" in values:
        values["grad"] = to_optimizer(to_shards(jax.tree.leaves(values["grad"])))
    opt_state = jax.tree.leaves(layout.logical(state.opt_state, tx=tx))
    opt_state = treedef.unflatten([cast(x, leaf.dtypes.update) for x, leaf in zip(opt_state, opt_leaves, strict=True)])
    try:
        updates, opt_state = optax.with_extra_args_support(tx).update(
            to_optimizer(to_shards(jax.tree.leaves(grads))), opt_state, trained, **dict(functions), **values
        )
    except Exception as error:
        error.add_note(
            "This comes from tx.update. An optimizer that needs more than gradients gets it from "
            "apply_gradients(state, grads, tx, layout, value=..., grad=..., value_fn=...)."
        )
        raise
    _check_update(updates, opt_state, tx, layout)
    after = jax.tree.leaves(optax.apply_updates(trained, updates))
    dtypes = [leaf.dtypes.master for leaf in leaves] + [leaf.dtype for leaf in opt_leaves]
    after = _rounded([*after, *jax.tree.leaves(opt_state)], dtypes, state.step, layout)
    after, opt_after = to_shards(after[: len(leaves)]), after[len(leaves) :]
    opt_after = jax.tree.leaves(layout.stored(treedef.unflatten(opt_after), tx=tx))
    if when is not None:
        after, opt_after = jax.tree.map(
            lambda new, old: jnp.where(when, new, old), (after, opt_after), (before, opt_before)
        )
    copies = [x for x, leaf in zip(after, leaves, strict=True) if leaf.has_master]
    trained = [x.astype(leaf.dtype) for x, leaf in zip(after, leaves, strict=True)]
    if layout.stage.params == "replicated" and side == "sharded":
        trained = gather_params(layout, trained)
    rest = partition(state.params, layout)[1]
    return replace(
        state,
        params=place(combine(layout.trainable_treedef.unflatten(trained), rest), layout.param_specs),
        opt_state=place(treedef.unflatten(opt_after), layout.opt_specs(tx)),
        master=place(layout.masters[0].unflatten(copies), layout.master_specs),
        step=state.step + (1 if when is None else when.astype(state.step.dtype)),
    )


def _rounded(arrays, dtypes, step, layout):
    """What the optimizer made, in the dtypes that are stored; the bits for rounding at random depend on the step."""
    if not layout.precision.stochastic_rounding:
        return [cast(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), step)
    return [
        rounded(x, dtype, jax.random.fold_in(key, index))
        for index, (x, dtype) in enumerate(zip(arrays, dtypes, strict=True))
    ]


def _check_update(updates, opt_state, tx, layout):
    """Raises if `tx` returned what cannot be an update of these params, or a state that the next step cannot take."""
    named = check_structure("The updates from tx.update", updates, layout.trainable_treedef)
    for (path, x), leaf in zip(named, layout.trainable, strict=True):
        if x.shape != leaf.shape:
            raise ValueError(
                f"tx.update made an update of shape {x.shape} for params{keystr(path)}, whose shape is {leaf.shape}. "
                f"An optimizer that wants one gradient for each example (dpsgd) cannot be used: jzero sums them."
            )
    came, (wanted, leaves) = jax.tree.structure(opt_state), layout.opt_leaves(tx)
    if came != wanted:
        raise ValueError(
            f"tx.update returned a state of another structure than tx.init ({came.num_leaves} leaves, not "
            f"{wanted.num_leaves}), so that the next step could not take it: optax.monitor does so. Leave it out, or "
            f"give tx an init that makes all of its state."
        )
    for x, leaf in zip(jax.tree.leaves(opt_state), leaves, strict=True):
        if (x.shape, x.dtype) != (leaf.shape, leaf.dtypes.update):
            raise ValueError(
                f"tx.update made {x.dtype}{x.shape} of the state leaf {leaf.path}, which tx.init made as "
                f"{leaf.dtypes.update}{leaf.shape}, so that the next step could not take it. Use params of another "
                f"dtype, or another optimizer."
            )


def apply_gradients(
    state: TrainState,
    grads: Any,
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    when: Any = None,
    **extra: Any,
) -> TrainState:
    """One optimizer update, in the global view, so that norms and means inside of `tx` are those of the whole leaves.

    Runs outside of any shard_map: `tx` sees global arrays with logical shapes, and each device updates the part whose
    optimizer state it holds. At stages 1 and 2 the new params are then gathered explicitly: all-gather, M elements
    for M params that are cut, in the dtype that they are stored in. Reductions inside of `tx` (a norm, Adafactor's
    means) are added by the partitioner. Works inside and outside of `jax.jit`; nothing is donated.

    With a `precision` the master copy is updated where there is one, and the param made from it; and `tx` sees params
    and moments in float32 or wider, whatever they are stored in.

    Args:
        state: The state before, placed as by `init`.
        grads: From `value_and_grad`, placed as `layout.grad_specs`; padded leaves may come in logical shapes too.
        tx: The optax optimizer that `state` was made with.
        layout: The layout that `state` was made with.
        when: A bool scalar, whether to update at all. Where it is False, the state comes back as it was, bit for bit,
            `step` included. None: always.
        **extra: What `tx.update` needs beside gradients: `value=`, `grad=` (the gradients once more), `value_fn=`. A
            function is compiled in: pass the same one in each step, not a new lambda.

    Returns:
        The next state, with the same placements and `step` one higher. Leaves that are not trained are kept.

    Raises:
        ValueError: `state` or `grads` have another structure, shape or placement than the layout's.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=2, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> state = jzero.init(lambda: {"w": jnp.ones(8)}, tx := optax.sgd(0.5), layout)
        >>> apply_gradients(state, {"w": jnp.ones(8)}, tx, layout).params["w"][0]
        Array(0.5, dtype=float32)
    """
    check_arguments("apply_gradients(state, grads, tx, layout)", layout=layout, tx=tx)
    check_state(state, tx, layout)
    if when is not None and (jnp.shape(when) or jnp.result_type(when) != jnp.dtype(bool)):
        raise TypeError(f"apply_gradients: when is {jnp.result_type(when)}{jnp.shape(when)}; wanted a bool scalar.")
    when = when if when is None else jnp.asarray(when)
    came = [x.dtype for x in jax.tree.leaves(grads) if hasattr(x, "dtype")]
    plain, unscaled = (
        tuple(replace(leaf, dtype=leaf.grad_dtype(scaled=scaled)) for leaf in layout.trainable)
        for scaled in (False, True)
    )
    leaves = unscaled if came == [leaf.dtype for leaf in unscaled] else plain
    check_tree("grads", grads, layout, layout.trainable_treedef, leaves, layout.stage.grads, logical=True)
    functions = tuple((name, x) for name, x in extra.items() if callable(x))
    values = {name: x for name, x in extra.items() if not callable(x)}
    return _update(state, grads, tx, layout, functions, values, when)
