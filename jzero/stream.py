"""The pass that moves each gather to where its leaf is used, and each reduction to where its gradient is born.

It works on the jaxpr of the whole gradient, forward and backward pass in one, which JAX's own differentiation has made
from the unmodified loss. There a leaf that a scan takes layer by layer is an input of the forward and of the backward
loop, and its gradient is an output of the backward loop; a rematerialised block is a block of the backward pass. The
pass evaluates that jaxpr with shards in place of whole leaves, so that nothing needs a rule for differentiation.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.collectives import all_reduce, gather, scatter
from jzero.jaxprs import are_zeros, bind, has_jaxpr, inner_jaxpr, is_placed_by_hand, is_var, source_of, split_scan
from jzero.layout import Layout
from jzero.mark import MARK
from jzero.pin import pinned
from jzero.plan import LOOPS_AND_BLOCKS, plan
from jzero.rules import Cut, Leaf
from jzero.shapes import moved
from jzero.views import SLICES, STRUCTURAL, Reduced, Shards, View
from jzero.vocabulary import added_up, looked_up

FORWARD, BACKWARD, KEPT = "forward", "backward", "kept"
REMAT = {"checkpoint", "remat", "remat2"}


@dataclass(frozen=True)
class Gathering:
    """One place where a leaf is gathered.

    Attributes:
        path: Path of the leaf.
        where: Function and line of the use, as the user wrote it.
        phase: "forward" or "backward".
        dtype: Dtype on the wire.
        bytes: Bytes of the gathered array, or of each model shard of it, without padding.
        times: How often it runs in one microbatch.
        early: The primitive that the gather could not be moved into or behind; empty at a first real use.
    """

    path: str
    where: str
    phase: str
    dtype: str
    bytes: int
    times: int
    early: str

    def __str__(self) -> str:
        """One line, as in "forward: 3 x 1,024 bytes of bfloat16 in block (model.py:31)"."""
        early = f", early because of {self.early}" if self.early else ""
        return f"{self.phase}: {self.times} x {self.bytes:,} bytes of {self.dtype} in {self.where}{early}"


@dataclass
class Run:
    """One evaluation of the pass: what it has gathered, and where it stands."""

    layout: Layout
    gatherings: list[Gathering] = field(default_factory=list)
    times: int = 1
    phase: str = FORWARD
    loss: Any = None


def reduces_in_backward(layout: Layout, leaf: Leaf) -> bool:
    """Whether a leaf's gradient is reduced in each backward pass.

    A leaf that stays whole beside others that are cut is accumulated and reduced once: its bytes are few.
    """
    return layout.stage.reduce == "block" and (layout.stage.grads == "replicated" or leaf.dim is not None)


def stream(
    layout: Layout, objective: Callable[..., Any], leaves: Sequence[jax.Array], *args: Any
) -> tuple[list[jax.Array], Any, list[bool], list[Gathering]]:
    """Value and gradient of an objective, gathering and reducing as the stage asks, inside of the data axes' shard_map.

    Args:
        layout: The stage, and the placement of each leaf.
        objective: `objective(leaves, *args) -> (scalar, more)`, of whole leaves.
        leaves: What this device holds of each of the params.
        *args: Trees of arrays.

    Returns:
        The gradients of the trainable leaves, reduced where `reduces_in_backward` says so, else whole and this device's
        own; what the objective returned beside its scalar; which leaves it does not use, whose gradients are zeros that
        need no reduction; where leaves were gathered.
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
    run = Run(layout)
    cuts = [leaf.cut if layout.stage.params == "sharded" and leaf.cut else leaf.model_cut for leaf in layout.leaves]
    ins = [
        x if cut is None else View(Shards(x, cut, leaf, FORWARD), x.dtype)
        for x, cut, leaf in zip(leaves, cuts, layout.leaves, strict=True)
    ]
    scattered = layout.stage.reduce == "block" and layout.stage.grads == "sharded"
    unused = are_zeros(closed.jaxpr, closed.jaxpr.outvars[1 : 1 + len(trained)])
    wants = [
        None if zero else leaf.cut if scattered and leaf.cut else leaf.model_cut
        for leaf, zero in zip(layout.trainable, unused, strict=True)
    ]
    wants = [None, *wants, *[None] * (len(closed.jaxpr.outvars) - 1 - len(wants))]
    outs = _evaluate(run, closed.jaxpr, closed.consts, [*ins, *flat], wants, loss=closed.jaxpr.outvars[0])
    outs = [x.value if isinstance(x, Reduced) else _whole(run, x, None) for x in outs]
    _, grads, more = jax.tree.unflatten(jax.tree.structure(out), outs)
    for index, leaf in enumerate(layout.trainable):
        if unused[index]:
            grads[index] = jnp.zeros(leaf.local(layout.stage.grads, layout.shards), leaf.dtype)
        elif layout.stage.reduce == "block" and not scattered:
            grads[index] = all_reduce(layout, grads[index], leaf.model)
    return grads, more, unused, run.gatherings


def _evaluate(run: Run, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], wants: Any, loss: Any = None):
    """Evaluates a jaxpr on arrays and views. Each output with a `Cut` in `wants` comes back `Reduced`."""
    want = plan(jaxpr, wants)
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    backward = next((index + 1 for index, eqn in enumerate(jaxpr.eqns) if loss in eqn.outvars), 0)
    uses = Counter(v for eqn in jaxpr.eqns[backward:] for v in eqn.invars if is_var(v))
    for eqn in jaxpr.eqns:
        ins = [env[v] if is_var(v) else v.val for v in eqn.invars]
        if eqn.primitive.name in REMAT:
            # What the backward pass needs inside of a block and elsewhere is gathered once, outside.
            ins = [
                _ahead(run, x, eqn) if is_var(v) and uses[v] > 1 else x for x, v in zip(ins, eqn.invars, strict=True)
            ]
        outs = _equation(run, eqn, ins, [want.get(v) for v in eqn.outvars])
        env.update(zip(eqn.outvars, outs, strict=True))
        if loss is not None and loss in eqn.outvars:
            run.phase, run.loss = BACKWARD, env[loss]
    outs = [env[v] if is_var(v) else v.val for v in jaxpr.outvars]
    return [_reduced(run, x, want) for x, want in zip(outs, wants, strict=True)]


def _equation(run, eqn, ins, wants):
    name, first = eqn.primitive.name, ins[0] if ins else None
    if name in RULES and not is_placed_by_hand(eqn) and (any(isinstance(x, View) for x in ins) or any(wants)):
        return RULES[name](run, eqn, ins, wants)
    if isinstance(first, Reduced):
        return [first.through(eqn, ins[1:])]
    if isinstance(first, View):
        if name in STRUCTURAL:
            return [first.then(eqn)]
        if name in SLICES and (view := first.slice(eqn, ins[1:], run.phase)) is not None:
            return [view]
        if name == "name":
            if eqn.params["name"] == MARK:
                _whole(run, first, eqn)
            return ins
    early = name if name in SLICES or has_jaxpr(eqn) else ""
    wholes = [_whole(run, x, eqn, early) for x in ins]
    outs = _tensor_parallel(run, eqn, ins, wholes, wants) or bind(eqn, wholes)
    return [_reduced(run, x, want) for x, want in zip(outs, wants, strict=True)]


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


def _reduced(run, x, want):
    """What is wanted of a gradient: reduced here, if it was not before, and is to be now."""
    if want is None or want.dim is None or isinstance(x, Reduced):
        return x
    return Reduced(scatter(run.layout, _whole(run, x, None), want), want)


def _whole(run: Run, x: Any, eqn: Any, early: str = "") -> Any:
    """The whole array behind a view: gathered at its first use in this phase. Other values come back as they are."""
    if not isinstance(x, View):
        return x
    held, time = x.shards.gathered, _time(run, x.shards)
    key, widest = (time, str(x.dtype)), (time, str(x.shards.value.dtype))
    if key not in held:
        held[key] = held[widest].astype(x.dtype) if widest in held else _gather(run, x, eqn, early)
    value = held[key]
    for later in x.after:
        (value,) = bind(later, [value])
    return value


def _ahead(run, x, eqn, early=""):
    """Gathers before the use. What is cut over model axes is still followed to there."""
    if not isinstance(x, View) or x.shards.cut.dim is None:
        return x
    whole, model = _whole(run, x, eqn, early), x.model
    return (
        whole if model is None else View(Shards(whole, Cut(None, 0, 0, model), x.shards.leaf, run.phase), whole.dtype)
    )


def _time(run, shards):
    """Until when a gathered leaf is kept: to the end of the phase, or of both."""
    return run.phase if shards.leaf.regather else KEPT


def _gather(run, view, eqn, early):
    shards, value = view.shards, view.shards.value.astype(view.dtype)
    if shards.cut.dim is None:
        return value
    if run.phase == BACKWARD and shards.phase == FORWARD:
        # Not before the loss is there, and not the same as the gather of the forward pass.
        value, _ = lax.optimization_barrier((value, run.loss))
    whole = gather(run.layout, value, shards.cut)
    where = source_of(eqn)
    size = whole.size * whole.dtype.itemsize // run.layout.size([axis for axes in shards.cut.model for axis in axes])
    run.gatherings.append(Gathering(shards.leaf.path, where, run.phase, str(view.dtype), size, run.times, early))
    return whole


def _jit(run, eqn, ins, wants):
    return _evaluate(run, *inner_jaxpr(eqn), ins, wants)


def _remat(run, eqn, ins, wants):
    prevent_cse = eqn.params["prevent_cse"]  # in jax 0.12 perhaps one for each argument
    if eqn.params["differentiated"] and (any(prevent_cse) if isinstance(prevent_cse, tuple) else prevent_cse):
        # What the lowering of remat does as well: without it XLA would find the forward pass in the recomputation.
        plain = lax.optimization_barrier([x.shards.value if isinstance(x, View) else x for x in ins])
        ins = [
            _again(x, value, run.phase) if isinstance(x, View) else value for x, value in zip(ins, plain, strict=True)
        ]
    return _evaluate(run, *inner_jaxpr(eqn), ins, wants)


def _again(view, value, phase):
    new = view.on(value, phase)
    new.shards.gathered.update({key: whole for key, whole in view.shards.gathered.items() if key[0] == KEPT})
    return new


def _scan(run, eqn, ins, wants):
    """A loop with leaves among its scanned inputs, or gradients among its stacked outputs.

    Leaves are handed to the body as shards. A leaf that is cut along the scanned dim is gathered before the loop; one
    that the body closes over as well, unless the body only takes slices of it.
    """
    params, (jaxpr, closed) = eqn.params, inner_jaxpr(eqn)
    consts, carry, xs = split_scan(eqn, ins)
    consts = [_closed_over(run, x, eqn, jaxpr, v) for x, v in zip(consts, jaxpr.invars, strict=False)]
    carry, first = [_whole(run, x, eqn) for x in carry], len(carry)
    xs = [_scannable(run, x, eqn) for x in xs]
    inside = [None if want is None or want.first else want.inside() for want in wants[first:]]
    kept = [
        {key: whole for key, whole in x.shards.gathered.items() if key[0] == KEPT} if isinstance(x, View) else {}
        for x in xs
    ]
    ends: list[Any] = []

    def body(carry, values):
        inner = [
            x.on(v, run.phase, x.shards.cut.inside()) if isinstance(x, View) else v
            for x, v in zip(xs, values[0], strict=True)
        ]
        for x, wholes in zip(inner, values[1], strict=True):
            if wholes:
                x.shards.gathered.update(wholes)
        outer, run.times = run.times, run.times * params["length"]
        own = [x.on(x.shards.value, run.phase) if isinstance(x, View) else x for x in consts]
        outs = _evaluate(run, jaxpr, closed, [*own, *carry, *inner], [None] * first + inside)
        carry, ys = [_whole(run, x, eqn) for x in outs[:first]], [_stackable(run, y, eqn) for y in outs[first:]]
        run.times = outer
        # A stacked output that is a scanned leaf itself (what the backward pass needs of it) is not stacked again.
        sources = [
            next(
                (
                    k
                    for k, x in enumerate(inner)
                    if isinstance(x, View) and isinstance(y, View) and y.shards is x.shards
                ),
                None,
            )
            for y in ys
        ]
        ends[:] = zip(ys, sources, strict=True)
        plain = [None if k is not None else _plain(y) for y, k in ends]
        new = [
            {key: whole for key, whole in x.shards.gathered.items() if key[0] == KEPT and key not in held}
            if isinstance(x, View)
            else {}
            for x, held in zip(inner, kept, strict=True)
        ]
        return carry, (plain, new)

    values = [_plain(x) for x in xs], kept
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (stacked, new) = lax.scan(body, carry, values, **options)
    for x, wholes in zip(xs, new, strict=True):
        if wholes:
            x.shards.gathered.update(wholes)

    def outside(end, value):
        y, source = end
        if source is not None:
            return View(xs[source].shards, y.dtype, y.after)
        if isinstance(y, View):
            return y.on(value, run.phase, y.shards.cut.outside())
        return Reduced(value, y.cut.outside()) if isinstance(y, Reduced) else value

    ys = [outside(end, value) for end, value in zip(ends, stacked, strict=True)]
    return [*carry, *(_reduced(run, y, want) for y, want in zip(ys, wants[first:], strict=True))]


def _closed_over(run, x, eqn, jaxpr, var):
    """A leaf that a body closes over: whole, or a view if the body only takes slices that keep the shards intact."""
    view = x.settle() if isinstance(x, View) else None
    if view is not None and var not in jaxpr.outvars:
        users = [user for user in jaxpr.eqns if var in user.invars]
        if all(user.primitive.name in SLICES and moved(user, view.shards.cut) is not None for user in users):
            return view
    return _ahead(run, x, eqn)


def _scannable(run, x, eqn):
    """A scanned input: a view that keeps its shards when it is taken apart along the first dim, or a whole array."""
    if not isinstance(x, View):
        return x
    view = x.settle()
    if view is None or view.shards.cut.first or (_time(run, x.shards) != KEPT and _held(run, x)):
        x = _ahead(run, x, eqn, early="" if _held(run, x) else "scan")
        view = x.settle() if isinstance(x, View) else None
        return _whole(run, x, eqn) if view is None or view.shards.cut.first else view
    return view


def _held(run, x):
    return any(key[0] == _time(run, x.shards) for key in x.shards.gathered)


def _stackable(run, y, eqn):
    if isinstance(y, View):
        view = y.settle()
        return _whole(run, y, eqn, early="scan") if view is None else view
    return y


def _plain(x):
    return x.shards.value if isinstance(x, View) else x.value if isinstance(x, Reduced) else x


RULES: dict[str, Callable[..., list[Any]]] = (
    dict.fromkeys(LOOPS_AND_BLOCKS, _jit) | {"scan": _scan} | dict.fromkeys(REMAT, _remat)
)
