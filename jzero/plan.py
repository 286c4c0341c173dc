"""Where to reduce gradients: from what is wanted of a jaxpr's outputs back to where that is born."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jzero.jaxprs import is_var
from jzero.rules import Cut
from jzero.views import pushed_back

LOOPS_AND_BLOCKS = {"jit", "pjit", "closed_call", "eval_jaxpr", "scan", "checkpoint", "remat", "remat2"}
"""Equations whose inside the pass walks through."""


def plan(jaxpr: Any, wants: Sequence[Cut | None]) -> dict[Any, Cut]:
    """Which values to reduce, or to expect reduced: from the cuts wanted of outputs as far back as that saves bytes.

    It does in front of a cast to a wider dtype, in front of the placing of parts among zeros (the gradient of a stack
    of which a loss takes single layers), and inside of a loop or block. A sum of several uses is reduced once. How a
    gradient is cut over model axes is known as far back as that goes: such a `Cut` without a dim asks for no reduction.
    """
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v))
    uses.update(v for v in jaxpr.outvars if is_var(v))
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    want: dict[Any, Cut] = {}

    def alone(atom):
        """Whether this is made here, for one use."""
        return is_var(atom) and uses[atom] == 1 and atom in maker

    def parts(atom, cut):
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
            elif eqn.primitive.name == "pad" and pushed_back(eqn, cut) is not None and alone(eqn.invars[0]):
                pads.append(atom)
            else:
                return [], []
        return sums, pads

    def push(atom, cut):
        chain, useful = [], 0
        while alone(atom):
            chain.append((atom, cut))
            eqn = maker[atom]
            if eqn.primitive.name in LOOPS_AND_BLOCKS:
                useful = len(chain) - 1
            elif eqn.primitive.name == "add_any":
                sums, pads = parts(atom, cut)
                if pads and sum(_bytes(maker[pad].invars[0]) for pad in pads) <= _bytes(atom):
                    useful = len(chain) - 1
                    want.update(dict.fromkeys(sums, cut))
                    for pad in pads:
                        push(pad, cut)
            before = pushed_back(eqn, cut)
            if before is None or not alone(eqn.invars[0]):
                break
            if _bytes(eqn.invars[0]) < _bytes(atom):
                useful = len(chain)
            atom, cut = eqn.invars[0], before
        want.update(chain[: useful + 1])

    def follow(atom, cut):
        todo = [(atom, cut)]
        while todo:
            atom, cut = todo.pop()
            if not alone(atom) or not any(cut.model):
                continue
            want.setdefault(atom, cut.gathered())
            eqn = maker[atom]
            if eqn.primitive.name == "add_any":
                todo.extend((part, cut) for part in eqn.invars)
            elif (before := pushed_back(eqn, cut)) is not None:
                todo.append((eqn.invars[0], before))

    for atom, cut in zip(jaxpr.outvars, wants, strict=True):
        if cut is not None:
            push(atom, cut)
            follow(atom, cut)
    return want


def _bytes(atom):
    return atom.aval.size * atom.aval.dtype.itemsize
