"""The pass that moves each gather to where its leaf is used, and each reduction to where its gradient is born.

It works on the jaxpr of the whole gradient, forward and backward pass in one, which JAX's own differentiation has made
from the unmodified loss: there a leaf that a scan takes layer by layer is an input of the forward and of the backward loop,
and its gradient is an output of the backward loop. The pass evaluates that jaxpr with shards in place of the leaves.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from jzero.collectives import gather, scatter
from jzero.jaxprs import bind, is_var, open_jaxpr, source_of, split_scan
from jzero.layout import Layout
from jzero.rules import Leaf
from jzero.shapes import moved_dim, on_shard

FORWARD, BACKWARD = "forward", "backward"
STRUCTURAL = {"convert_element_type", "copy", "transpose", "squeeze", "reshape"}
SLICES = {"slice", "dynamic_slice"}
LINEAR = STRUCTURAL | {"broadcast_in_dim", "pad"}
REMAT = {"checkpoint", "remat", "remat2"}


@dataclass(frozen=True)
class Gathering:
    """One place where a leaf is gathered.

    Attributes:
        path: Path of the leaf.
        where: Function and line of the use, as the user wrote it.
        phase: "forward" or "backward".
        dtype: Dtype on the wire.
        bytes: Bytes of the gathered array.
        times: How often it runs in one microbatch.
        early: The primitive that the gather could not be moved behind; empty if it stands at its first real use.
    """

    path: str
    where: str
    phase: str
    dtype: str
    bytes: int
    times: int
    early: str


class Shards:
    """A leaf, or a slice of one, stored as this device's shard along `dim`; remembers what has been gathered of it."""

    def __init__(self, value: jax.Array, dim: int, leaf: Leaf, length: int, phase: str):
        self.value, self.dim, self.leaf, self.length, self.phase = value, dim, leaf, length, phase
        self.gathered: dict[tuple[str, Any], jax.Array] = {}


@dataclass(frozen=True)
class View:
    """Shards in the narrowest dtype that the model casts them to, and what the model does to the whole before using it."""

    shards: Shards
    dtype: Any
    after: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Demand:
    """Wanted of a gradient, or of a part of one: its sum over all devices, this device's shard along `dim`."""

    leaf: Leaf
    dim: int


@dataclass(frozen=True)
class Reduced:
    """A gradient that has been reduce-scattered: this device's shard along `dim`."""

    value: jax.Array
    dim: int


@dataclass
class Run:
    """One evaluation of the pass.

    Attributes:
        layout: Gives the axes and sizes of the collectives.
        gatherings: Where leaves were gathered.
        times: Trip count of the loops around the equation being evaluated.
        phase: Whether the loss is still to come.
        loss: Its value, once it is there.
    """

    layout: Layout
    gatherings: list[Gathering] = field(default_factory=list)
    times: int = 1
    phase: str = FORWARD
    loss: Any = None


def stream(
    layout: Layout, objective: Callable[..., Any], leaves: Sequence[jax.Array], *args: Any
) -> tuple[list[jax.Array], Any, list[Gathering]]:
    """Value and gradient of an objective, gathering and reducing as the stage asks, inside of the data axes' shard_map.

    Args:
        layout: The stage, and the placement of each leaf.
        objective: `objective(trainable leaves, other leaves, *args) -> (scalar, more)`, of whole leaves.
        leaves: What this device holds of each of the params.
        *args: Trees of arrays.

    Returns:
        The gradients of the trainable leaves, reduced where `reduces_in_backward` says so and else whole and this device's
        own; what the objective returned beside its scalar; where leaves were gathered.
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
    cut = layout.stage.params == "sharded"
    ins = [
        View(Shards(x, leaf.dim, leaf, leaf.shape[leaf.dim], FORWARD), x.dtype) if cut and leaf.dim is not None else x
        for x, leaf in zip(leaves, layout.leaves, strict=True)
    ]
    wants = [Demand(leaf, leaf.dim) if reduces_in_backward(layout, leaf) else None for leaf in layout.trainable]
    wants = [None, *wants, *[None] * (len(closed.jaxpr.outvars) - 1 - len(wants))]
    outs = _evaluate(run, closed.jaxpr, closed.consts, [*ins, *flat], wants, loss=closed.jaxpr.outvars[0])
    outs = [_settled(run, x, want) for x, want in zip(outs, wants, strict=True)]
    _, grads, more = jax.tree.unflatten(jax.tree.structure(out), outs)
    return grads, more, run.gatherings


def reduces_in_backward(layout: Layout, leaf: Leaf) -> bool:
    """Whether a leaf's gradient is reduced in each backward pass: if the stage says so and it ends as a shard."""
    return layout.stage.reduce == "block" and layout.stage.grads == "sharded" and leaf.dim is not None


def _settled(run, x, want):
    """A plain array of what the pass is to return: a shard where one is wanted."""
    if want is None:
        return _whole(run, x, None)
    return x.value if isinstance(x, Reduced) else scatter(run.layout, x, want.dim, want.leaf.stored[want.leaf.dim])


def _evaluate(run: Run, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], wants, loss: Any = None) -> list[Any]:
    """Evaluates a jaxpr on arrays and views; `wants` has a `Demand` or None for each output."""
    want = _pushed_back(jaxpr, wants)
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    rematted = Counter(v for eqn in jaxpr.eqns if eqn.primitive.name in REMAT for v in eqn.invars if is_var(v))
    for eqn in jaxpr.eqns:
        ins = [env[v] if is_var(v) else v.val for v in eqn.invars]
        shared = [is_var(v) and rematted[v] > 1 for v in eqn.invars]
        outs = _equation(run, eqn, ins, [want.get(v) for v in eqn.outvars], shared)
        env.update(zip(eqn.outvars, outs, strict=True))
        if loss is not None and loss in eqn.outvars:
            run.phase, run.loss = BACKWARD, env[loss]
    return [env[v] if is_var(v) else v.val for v in jaxpr.outvars]


def _pushed_back(jaxpr, wants):
    """From demands on outputs to demands on what they are made of, as far back as a reduction may be moved."""
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v))
    uses.update(v for v in jaxpr.outvars if is_var(v))
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    want = {}

    def small(atom):
        """Whether this is a part of a gradient put in its place among zeros, or a sum of such."""
        if not is_var(atom) or uses[atom] > 1 or atom not in maker:
            return False
        name, ins = maker[atom].primitive.name, maker[atom].invars
        return name == "pad" or (name == "add_any" and all(map(small, ins)))

    def push(atom, demand):
        if not is_var(atom) or uses[atom] > 1 or atom not in maker:
            return False
        eqn = maker[atom]
        want[atom] = demand
        if eqn.primitive.name == "add_any" and all(map(small, eqn.invars)):
            for operand in eqn.invars:
                push(operand, demand)
        elif eqn.primitive.name in LINEAR and _narrowing_back(eqn):
            dim = _dim_before(eqn, demand.dim)
            if dim is not None:
                push(eqn.invars[0], Demand(demand.leaf, dim))
        return True

    for atom, demand in zip(jaxpr.outvars, wants, strict=True):
        if demand is not None:
            push(atom, demand)
    return want


def _narrowing_back(eqn):
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return before.dtype.itemsize <= after.dtype.itemsize


def _dim_before(eqn, dim):
    """The dim of the operand that ends as `dim` of the result, if the shards stay intact."""
    return next((d for d in range(len(eqn.invars[0].aval.shape)) if moved_dim(eqn, d) == dim), None)


def _equation(run, eqn, ins, wants, shared):
    name = eqn.primitive.name
    views = [isinstance(x, View) for x in ins]
    if name in RULES and (any(views) or any(wants)):
        return RULES[name](run, eqn, ins, wants, shared)
    if isinstance(ins[0] if ins else None, Reduced):
        return [_linear(eqn, ins, wants[0])]
    if views and views[0] and name in STRUCTURAL:
        return [_later(eqn, ins[0])]
    if views and views[0] and name in SLICES and (view := _sliced(run, eqn, ins)) is not None:
        return [view]
    if any(views) and name == "name":
        if eqn.params["name"] == MARK:
            _whole(run, ins[0], eqn)
        return ins
    outs = bind(eqn, [_whole(run, x, eqn, early=name if name in BOUNDARIES else "") for x in ins])
    return [_reduced(run, x, want) for x, want in zip(outs, wants, strict=True)]


def _reduced(run, x, want):
    if want is None:
        return x
    return Reduced(scatter(run.layout, x, want.dim, want.leaf.stored[want.leaf.dim]), want.dim)


def _linear(eqn, ins, want):
    """A linear operation on reduced gradients."""
    if eqn.primitive.name == "add_any":
        return Reduced(lax.add(ins[0].value, ins[1].value), want.dim)
    return Reduced(on_shard(eqn, ins[0].value, ins[0].dim, *ins[1:]), want.dim)


def _later(eqn, view):
    """A view of the whole that is made after the gather; a cast to a narrower dtype moves in front of it."""
    if eqn.primitive.name != "convert_element_type":
        return View(view.shards, view.dtype, (*view.after, eqn))
    dtype = eqn.params["new_dtype"]
    casts = [e for e in view.after if e.primitive.name == "convert_element_type"]
    shapes = tuple(e for e in view.after if e.primitive.name != "convert_element_type")
    if dtype == view.dtype:
        return View(view.shards, dtype, shapes)
    if not casts and dtype.itemsize < view.dtype.itemsize:
        return View(view.shards, dtype, shapes)
    return View(view.shards, view.dtype, (*view.after, eqn))


def _settle(view):
    """The view with what changes its shape done to the shards; None if they would not stay intact."""
    value, dim = view.shards.value.astype(view.dtype), view.shards.dim
    casts = tuple(eqn for eqn in view.after if eqn.primitive.name == "convert_element_type")
    shapes = [eqn for eqn in view.after if eqn not in casts]
    if not shapes:
        return view
    for eqn in shapes:
        to = moved_dim(eqn, dim)
        if to is None:
            return None
        value, dim = on_shard(eqn, value, dim), to
    old = view.shards
    return View(Shards(value, dim, old.leaf, old.length, old.phase), view.dtype, casts)


def _sliced(run, eqn, ins):
    """A slice of a view as a view, if it takes all of the dim that is cut."""
    view = _settle(ins[0])
    if view is None or moved_dim(eqn, view.shards.dim) is None:
        return None
    old = view.shards
    value = on_shard(eqn, old.value, old.dim, *ins[1:])
    return View(Shards(value, old.dim, old.leaf, old.length, run.phase), view.dtype, view.after)


def _whole(run: Run, x: Any, eqn: Any, early: str = "") -> Any:
    """The whole array behind a view: gathered at its first use in this phase. Other values come back as they are."""
    if not isinstance(x, View):
        return x
    shards = x.shards
    key, full = (run.phase, x.dtype), (run.phase, shards.value.dtype)
    if key not in shards.gathered and full in shards.gathered:
        shards.gathered[key] = shards.gathered[full].astype(x.dtype)
    if key not in shards.gathered:
        value = shards.value.astype(x.dtype)
        if run.phase == BACKWARD and shards.phase == FORWARD:
            # Not before the loss is there, and not the same as the gather of the forward pass.
            value, _ = lax.optimization_barrier((value, run.loss))
        shards.gathered[key] = gather(run.layout, value, shards.dim, shards.length)
        size = shards.gathered[key].size * x.dtype.itemsize
        where = source_of(eqn) if eqn is not None else "the result"
        run.gatherings.append(Gathering(shards.leaf.path, where, run.phase, str(x.dtype), size, run.times, early))
    value = shards.gathered[key]
    for eqn in x.after:
        value = bind(eqn, [value])[0]
    return value


def _jit(run, eqn, ins, wants, shared):
    inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return _evaluate(run, *open_jaxpr(inner), ins, wants)


def _remat(run, eqn, ins, wants, shared):
    ins = [_whole(run, x, eqn) if many else x for x, many in zip(ins, shared, strict=True)]
    if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
        # What the lowering of remat does as well: without it XLA would find the forward pass in the recomputation.
        plain = lax.optimization_barrier([x.shards.value if isinstance(x, View) else x for x in ins])
        ins = [_on(old, value, run.phase) if isinstance(old, View) else value for old, value in zip(ins, plain)]
    return _evaluate(run, *open_jaxpr(eqn.params["jaxpr"]), ins, wants)


def _on(view, value, phase, *, dims: int = 0):
    """The same view of other shards, with so many dims more in front."""
    old = view.shards
    return View(Shards(value, old.dim + dims, old.leaf, old.length, phase), view.dtype, view.after)


def _scan(run, eqn, ins, wants, shared):
    params = eqn.params
    jaxpr, closed = open_jaxpr(params["jaxpr"])
    consts, carry, xs = split_scan(eqn, ins)
    # A leaf that the body closes over is gathered once, in front of the loop, unless the body only takes slices of it.
    consts = [x if _only_sliced(jaxpr, v) else _whole(run, x, eqn) for x, v in zip(consts, jaxpr.invars)]
    carry = [_whole(run, x, eqn) for x in carry]
    scanned = [_settle(x) if isinstance(x, View) else x for x in xs]
    early = [isinstance(x, View) and (s is None or s.shards.dim == 0) for x, s in zip(xs, scanned, strict=True)]
    xs = [_whole(run, x, eqn, early="scan") if now else s for x, s, now in zip(xs, scanned, early, strict=True)]
    wants_ys = [_at(want, -1) for want in wants[len(carry) :]]
    ends: dict[int, Any] = {}

    def body(carry, values):
        times, run.times = run.times, run.times * params["length"]
        inner = [_on(x, v, run.phase, dims=-1) if isinstance(x, View) else v for x, v in zip(xs, values, strict=True)]
        outs = _evaluate(run, jaxpr, closed, [*consts, *carry, *inner], [*[None] * len(carry), *wants_ys])
        run.times = times
        ys = []
        for index, (y, want) in enumerate(zip(outs[len(carry) :], wants_ys, strict=True)):
            y = y if want is None else _reduced(run, y, want) if not isinstance(y, Reduced) else y
            settled = _settle(y) if isinstance(y, View) else y
            y = _whole(run, y, eqn) if settled is None else settled
            source = next((k for k, x in enumerate(inner) if isinstance(y, View) and y.shards is x.shards), None) if isinstance(y, View) else None
            ends[index] = (y, source)
            ys.append(None if source is not None else y.shards.value if isinstance(y, View) else y.value if isinstance(y, Reduced) else y)
        return [_whole(run, x, eqn) for x in outs[: len(carry)]], ys

    raw = [x.shards.value if isinstance(x, View) else x for x in xs]
    carry, ys = lax.scan(
        body, carry, raw, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )

    def stacked(index, value):
        y, source = ends[index]
        if source is not None:
            return View(xs[source].shards, y.dtype, y.after)
        if isinstance(y, View):
            return _on(y, value, run.phase, dims=1)
        return Reduced(value, y.dim + 1) if isinstance(y, Reduced) else value

    ys = [stacked(index, value) for index, value in enumerate(ys)]
    late = zip(ys, wants[len(carry) :], strict=True)
    return [*carry, *(_reduced(run, y, want) if want is not None and not isinstance(y, Reduced) else y for y, want in late)]


def _only_sliced(jaxpr, var):
    users = [eqn for eqn in jaxpr.eqns if var in eqn.invars]
    return var not in jaxpr.outvars and all(eqn.primitive.name in SLICES and eqn.invars[0] is var for eqn in users)


def _at(want, by):
    """A demand on one slice along the first dim of what is wanted; None if that is the dim to be cut."""
    return None if want is None or want.dim == 0 else Demand(want.leaf, want.dim + by)


RULES = {"jit": _jit, "pjit": _jit, "closed_call": _jit, "scan": _scan} | dict.fromkeys(REMAT, _remat)
BOUNDARIES = {"custom_vjp_call", "custom_jvp_call", "while", "cond", "shard_map", "pure_callback", "io_callback"}
MARK = "jzero.gather"
