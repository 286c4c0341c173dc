"""What jzero knows of the inside of jax: how to read a jaxpr and how to evaluate one equation. All of it moves."""

import contextlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util


def inner_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """An equation's jaxpr and its constants. Those of `scan` and `jit` are closed in jax 0.10, and open later."""
    jaxpr = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "jaxpr") else (jaxpr, ())


def bind(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Evaluates one equation as it stands, under the context, the names and the line that it was traced in."""
    params = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    scope = str(eqn.source_info.name_stack)  # keeps the user's names in profiles
    named = jax.named_scope(scope) if scope else contextlib.nullcontext()
    with eqn.ctx.manager, source_info_util.user_context(eqn.source_info.traceback), named:
        out = eqn.primitive.bind(*subfuns, *ins, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def split_scan(eqn: Any, ins: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The constants, carry and scanned inputs of a `scan` equation."""
    if "num_consts" in eqn.params:  # jax 0.10
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        return list(ins[:consts]), list(ins[consts : consts + carry]), list(ins[consts + carry :])
    parts = eqn.params["ft_in"].update(list(range(len(ins)))).unpack()
    consts, carry, xs = ([ins[index] for index in part] for part in parts)
    return consts, carry, xs


def has_jaxpr(eqn: Any) -> bool:
    """Whether an equation runs programs of its own: `cond`, `while`, `custom_vjp_call`, a user's `shard_map`."""
    params = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    return any(hasattr(x, "jaxpr") or hasattr(x, "eqns") for x in params)


def is_var(atom: Any) -> bool:
    """Whether an operand is a variable, and no literal."""
    return not isinstance(atom, core.Literal)


def is_zero(atom: Any) -> bool:
    """Whether an operand is the literal 0."""
    return isinstance(atom, core.Literal) and bool(atom.val == 0)


def are_zeros(jaxpr: Any, atoms: Sequence[Any]) -> list[bool]:
    """Whether each of some outputs is nothing but zeros, as the gradient of what a loss does not use."""
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    makers = [maker.get(atom) if is_var(atom) else None for atom in atoms]
    return [
        is_zero(atom) or (eqn is not None and eqn.primitive.name == "broadcast_in_dim" and is_zero(eqn.invars[0]))
        for atom, eqn in zip(atoms, makers, strict=True)
    ]


def is_placed_by_hand(eqn: Any) -> bool:
    """Whether a `jit` equation has shardings of the user's, which evaluating its inside would lose."""
    shardings = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)


def source_of(eqn: Any, calls: Sequence[Any] = ()) -> str:
    """The user's function, file and line that an equation comes from, as in "block (model.py:31)".

    Inside of a function of jax's own that is jitted, as `jnp.take` is, an equation knows no line outside of it: then it
    is that of the innermost of `calls`, the equations around it from the outside in, which has one.
    """
    for each in (eqn, *reversed(calls)):
        traceback = each.source_info.traceback if each is not None else None
        for frame in traceback.frames if traceback is not None else ():
            if not frame.file_name.startswith(LIBRARIES):
                return f"{frame.function_name.split('.')[-1]} ({frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num})"
    return "unknown"


def _folder(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else spec.origin.rsplit("/", 1)[0] + "/"


LIBRARIES = tuple(filter(None, map(_folder, ("jax", "jaxlib", "flax", "optax", "equinox", "jzero"))))
"""Folders of what stands between a user's line and a primitive."""
