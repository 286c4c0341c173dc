"""The pass that moves each gather to where its leaf is used, and each reduction to where its gradient is born.

It works on the jaxpr of the whole gradient, forward and backward pass in one, which JAX's own differentiation has made
from the unmodified loss. There a leaf that a scan takes layer by layer is an input of the forward and of the backward
loop, and its gradient is an output of the backward loop; a rematerialised block is a block of the backward pass. The
pass evaluates that jaxpr with shards in place of whole leaves, so that nothing needs a rule for differentiation.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero import scopes
from jzero.collectives import reduce
from jzero.jaxprs import are_zeros, bind, has_jaxpr, inner_jaxpr, is_placed_by_hand, is_var
from jzero.layout import Layout
from jzero.mark import MARK
from jzero.pin import pinned
from jzero.plan import LOOPS_AND_BLOCKS, plan
from jzero.rules import Leaf
from jzero.run import BACKWARD, FORWARD, KEPT, Account, Run
from jzero.scan import scan
from jzero.views import SLICES, STRUCTURAL, Pending, Reduced, Shards, View
from jzero.vocabulary import added_up, looked_up

REMAT = {"checkpoint", "remat", "remat2"}


def reduces_in_backward(layout: Layout, leaf: Leaf) -> bool:
    """Whether a leaf's gradient is reduced in each backward pass.

    A leaf that stays whole beside others that are cut is accumulated and reduced once: its bytes are few.
    """
    return layout.stage.reduce == "block" and (layout.stage.grads == "replicated" or leaf.dim is not None)


def stream(
    layout: Layout, share: float, objective: Callable[..., Any], leaves: Sequence[jax.Array], *args: Any
) -> tuple[list[jax.Array], Any, Account]:
    """Value and gradient of an objective, gathering and reducing as the stage asks, inside of the data axes' shard_map.

    Args:
        layout: The stage, and the placement of each leaf.
        share: What gradients are multiplied by when they are reduced.
        objective: `objective(leaves, *args) -> (scalar, more)`, of whole leaves.
        leaves: What this device holds of each of the params.
        *args: Trees of arrays.

    Returns:
        The gradients of the trainable leaves, reduced where `reduces_in_backward` says so, else whole and this device's
        own; what the objective returned beside its scalar; where leaves were gathered and which gradients reduced.
    """
    whole = [leaf.placed("replicated") for leaf in layout.leaves]
    trained = [index for index, leaf in enumerate(layout.leaves) if leaf.trainable]
    flat, treedef = jax.tree.flatten(args)

    def value_and_grad(leaves, *flat):
        def of_trained(variables):
            params = dict(enumerate(leaves)) | dict(zip(trained, variables, strict=True))
            return objective(list(params.values()), *treedef.unflatten(flat))

        (value, more), grads = jax.value_and_grad(of_trained, has_aux=True)([leaves[index] for index in trained])
        return value, grads, more

    closed, out = jax.make_jaxpr(value_and_grad, return_shape=True)(whole, *flat)
    run = Run(layout, share)
    cuts = [leaf.cut if layout.stage.params == "sharded" and leaf.cut else leaf.model_cut for leaf in layout.leaves]
    ins = [
        x if cut is None else View(Shards(x, cut, leaf, FORWARD), x.dtype)
        for x, cut, leaf in zip(leaves, cuts, layout.leaves, strict=True)
    ]
    scattered = layout.stage.reduce == "block" and layout.stage.grads == "sharded"
    unused = run.account.unused = are_zeros(closed.jaxpr, closed.jaxpr.outvars[1 : 1 + len(trained)])
    wants = [
        None if zero else leaf.cut if scattered and leaf.cut else leaf.model_cut
        for leaf, zero in zip(layout.trainable, unused, strict=True)
    ]
    wants = [None, *wants, *[None] * (len(closed.jaxpr.outvars) - 1 - len(wants))]
    outs = evaluate(run, closed.jaxpr, closed.consts, [*ins, *flat], wants, loss=closed.jaxpr.outvars[0])
    outs = [x.value if isinstance(x, Reduced) else run.whole(x, None) for x in outs]
    _, grads, more = jax.tree.unflatten(jax.tree.structure(out), outs)
    for index, leaf in enumerate(layout.trainable):
        if unused[index]:
            grads[index] = jnp.zeros(leaf.local(layout.stage.grads, layout.shards), leaf.dtypes.grad)
        elif layout.stage.reduce == "block" and not scattered:
            grads[index] = reduce(layout, leaf, grads[index], share)
    return grads, more, run.account


def evaluate(run: Run, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], wants: Any, loss: Any = None):
    """Evaluates a jaxpr on arrays and views. Each output with a `Cut` in `wants` comes back `Reduced`, or `Pending`."""
    want = plan(jaxpr, wants)
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    backward = next((index + 1 for index, eqn in enumerate(jaxpr.eqns) if loss in eqn.outvars), 0)
    uses = Counter(v for eqn in jaxpr.eqns[backward:] for v in eqn.invars if is_var(v))
    for eqn in jaxpr.eqns:
        ins = [env[v] if is_var(v) else v.val for v in eqn.invars]
        if eqn.primitive.name in REMAT:
            # What the backward pass needs inside of a block and elsewhere is gathered once, outside.
            ins = [run.early(x, eqn) if is_var(v) and uses[v] > 1 else x for x, v in zip(ins, eqn.invars, strict=True)]
        with contextlib.nullcontext() if loss is None else scopes.phase(run.phase):
            outs = _equation(run, eqn, ins, [want.get(v) for v in eqn.outvars])
        env.update(zip(eqn.outvars, outs, strict=True))
        if loss is not None and loss in eqn.outvars:
            run.phase, run.loss = BACKWARD, env[loss]
    outs = [env[v] if is_var(v) else v.val for v in jaxpr.outvars]
    return [run.reduced(x, want) for x, want in zip(outs, wants, strict=True)]


def _equation(run, eqn, ins, wants):
    name, first = eqn.primitive.name, ins[0] if ins else None
    if name in RULES and not is_placed_by_hand(eqn) and (any(isinstance(x, View) for x in ins) or any(wants)):
        run.calls.append(eqn)
        outs = RULES[name](run, eqn, ins, wants)
        run.calls.pop()
        return outs
    if any(isinstance(x, Pending) for x in ins) and not (isinstance(first, Pending) and first.can(eqn, ins[1:])):
        ins = [run.due(x) if isinstance(x, Pending) else x for x in ins]
        first = ins[0]
    if isinstance(first, Reduced | Pending):
        return [first.through(eqn, ins[1:])]
    if isinstance(first, View):
        if name in STRUCTURAL:
            return [first.then(eqn)]
        if name in SLICES and (view := first.slice(eqn, ins[1:], run.phase)) is not None:
            return [view]
        if name == "name":
            if eqn.params["name"] == MARK:
                run.whole(first, eqn)
            return ins
    early = name if name in SLICES or has_jaxpr(eqn) else ""
    beside = next((x for x in ins if isinstance(x, jax.Array) and x.ndim), None)
    wholes = [run.whole(x, eqn, early, beside) for x in ins]
    outs = _tensor_parallel(run, eqn, ins, wholes, wants) or bind(eqn, wholes)
    return [run.reduced(x, want) for x, want in zip(outs, wants, strict=True)]


def _tensor_parallel(run, eqn, ins, wholes, wants):
    """The results of what is done to weights that are cut over model axes in a way of its own; None for the rest."""
    models = [x.model if isinstance(x, View) else None for x in ins]
    out = None
    match eqn.primitive.name:
        case "dot_general":
            return bind(eqn, pinned(run.layout, eqn, wholes, models))
        case "gather" if models[0]:
            out = looked_up(run.layout, eqn, wholes[0], wholes[1], models[0])
        case "scatter-add" if wants[0] and any(wants[0].model):
            out = added_up(run.layout, eqn, wholes, wants[0].model)
    return None if out is None else [out]


def _jit(run, eqn, ins, wants):
    return evaluate(run, *inner_jaxpr(eqn), ins, wants)


def _remat(run, eqn, ins, wants):
    prevent_cse = eqn.params["prevent_cse"]  # in jax 0.12 perhaps one for each argument
    if eqn.params["differentiated"] and (any(prevent_cse) if isinstance(prevent_cse, tuple) else prevent_cse):
        # What the lowering of remat does as well: without it XLA would find the forward pass in the recomputation.
        # Gathering ahead, leaves do not wait here for what else the block needs; `Run` says what they wait for.
        free = run.ahead and not run.inside
        plain = [
            (None if free and x.shards.cut.dim is not None else x.shards.value) if isinstance(x, View) else x
            for x in ins
        ]
        plain = lax.optimization_barrier(plain)
        ins = [
            x if value is None else _again(x, value, run.phase) if isinstance(x, View) else value
            for x, value in zip(ins, plain, strict=True)
        ]
    return evaluate(run, *inner_jaxpr(eqn), ins, wants)


def _again(view, value, phase):
    """The view of another copy of its shard. What is gathered of one is not for the other, but for what is kept."""
    new, old = view.on(value, phase), view.shards
    kept = {key: whole for key, whole in old.gathered.items() if key[0] == KEPT or key in old.ahead}
    new.shards.gathered.update(kept)
    new.shards.ahead, new.shards.gathers = old.ahead, old.gathers
    return new


def _scan(run, eqn, ins, wants):
    return scan(run, eqn, ins, wants, evaluate)


RULES: dict[str, Callable[..., list[Any]]] = (
    dict.fromkeys(LOOPS_AND_BLOCKS, _jit) | {"scan": _scan} | dict.fromkeys(REMAT, _remat)
)
