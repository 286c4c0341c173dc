"""Where to reduce gradients: from what is wanted of a jaxpr's outputs back to where that is born."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jzero.jaxprs import is_var
from jzero.views import Demand, pushed_back

LOOPS_AND_BLOCKS = {"jit", "pjit", "closed_call", "eval_jaxpr", "scan", "checkpoint", "remat", "remat2"}
"""Equations whose inside the pass walks through."""


def plan(jaxpr: Any, wants: Sequence[Demand | None]) -> dict[Any, Demand]:
    """Which values to reduce, or to expect reduced: from demands on outputs as far back as that saves bytes.

    It does in front of a cast to a wider dtype, in front of the placing of parts among zeros (the gradient of a stack
    of which a loss takes single layers), and inside of a loop or block. A sum of several uses is reduced once.
    """
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v))
    uses.update(v for v in jaxpr.outvars if is_var(v))
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    want: dict[Any, Demand] = {}

    def alone(atom):
        """Whether this is made here, for one use."""
        return is_var(atom) and uses[atom] == 1 and atom in maker

    def parts(atom, demand):
        """The sums and the pads that a gradient consists of, if it is made of parts put in their places among zeros."""
        sums, pads, todo = [], [], [atom]
        while todo:
            atom = todo.pop()
            if not alone(atom):
                return [], []
            eqn = maker[atom]
            if eqn.primitive.name == "add_any":
                sums.append(atom)
                todo.extend(eqn.invars)
            elif eqn.primitive.name == "pad" and pushed_back(eqn, demand) is not None and alone(eqn.invars[0]):
                pads.append(atom)
            else:
                return [], []
        return sums, pads

    def push(atom, demand):
        chain, useful = [], 0
        while alone(atom):
            chain.append((atom, demand))
            eqn = maker[atom]
            if eqn.primitive.name in LOOPS_AND_BLOCKS:
                useful = len(chain) - 1
            elif eqn.primitive.name == "add_any":
                sums, pads = parts(atom, demand)
                if pads and sum(_bytes(maker[pad].invars[0]) for pad in pads) <= _bytes(atom):
                    useful = len(chain) - 1
                    want.update(dict.fromkeys(sums, demand))
                    for pad in pads:
                        push(pad, demand)
            before = pushed_back(eqn, demand)
            if before is None or not alone(eqn.invars[0]):
                break
            if _bytes(eqn.invars[0]) < _bytes(atom):
                useful = len(chain)
            atom, demand = eqn.invars[0], before
        want.update(chain[: useful + 1])

    for atom, demand in zip(jaxpr.outvars, wants, strict=True):
        if demand is not None:
            push(atom, demand)
    return want


def _bytes(atom):
    return atom.aval.size * atom.aval.dtype.itemsize
