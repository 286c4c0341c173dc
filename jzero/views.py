"""Values of the streaming pass: leaves that are still cut, and gradients that are cut already.

A leaf that is whole over the data axes, but cut over model axes, is followed in the same way.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jzero.jaxprs import is_zero
from jzero.rules import Cut, Leaf, Model
from jzero.shapes import moved, moved_from, on_shard

STRUCTURAL = {"convert_element_type", "copy", "transpose", "squeeze", "reshape"}
"""Operations on a whole leaf that can wait until it is gathered."""
SLICES = {"slice", "dynamic_slice"}
"""Operations that can be done to the shards if they take all of the dim that is cut."""


class Shards:
    """A leaf, or a slice of one, as this device's shard; remembers what has been gathered of it.

    Attributes:
        value: The shard.
        cut: How the whole is cut.
        leaf: The leaf that it is, or is a part of.
        phase: Where it came into being, "forward" or "backward".
        gathered: Whole arrays, by until when they are kept and by dtype.
        ahead: Which of these were gathered ahead of a loop's body.
        gathers: Which of these it was gathered for, and not ahead.
    """

    def __init__(self, value: jax.Array, cut: Cut, leaf: Leaf, phase: str):
        self.value, self.cut, self.leaf, self.phase = value, cut, leaf, phase
        self.gathered: dict[tuple[str, str], jax.Array] = {}
        self.ahead: set[tuple[str, str]] = set()
        self.gathers: set[tuple[str, str]] = set()
        self._settled: dict[tuple[int, ...], Shards | None] = {}

    def settled(self, shapes: list[Any]) -> "Shards | None":
        """What the operations make of the shards; None if they would not stay intact."""
        key = tuple(map(id, shapes))
        if key not in self._settled:
            value, cut = self.value, self.cut
            for eqn in shapes:
                to = moved(eqn, cut)
                if to is None:
                    break
                value, cut = on_shard(eqn, value, cut.dim), to
            else:
                self._settled[key] = Shards(value, cut, self.leaf, self.phase) if shapes else self
                return self._settled[key]
            self._settled[key] = None
        return self._settled[key]


@dataclass(frozen=True)
class View:
    """Shards in the narrowest dtype that the model casts them to, and what it does to the whole before using it.

    Attributes:
        shards: The shards.
        dtype: The dtype that they are gathered in.
        after: Equations with one operand, to be done after the gather.
    """

    shards: Shards
    dtype: Any
    after: tuple[Any, ...] = ()

    def then(self, eqn: Any) -> "View":
        """The view after one more structural operation. A cast to a narrower dtype moves in front of the gather."""
        if eqn.primitive.name != "convert_element_type":
            return View(self.shards, self.dtype, (*self.after, eqn))
        casts, shapes, dtype = *self.sorted(), eqn.params["new_dtype"]
        if _floating(dtype, self.dtype, *(e.params["new_dtype"] for e in casts)):
            # Back from wider floats nothing is lost; float16 and bfloat16 are neither wider than the other.
            wider = [jnp.promote_types(e.params["new_dtype"], dtype) == e.params["new_dtype"] for e in casts]
            if (dtype == self.dtype and all(wider)) or (not casts and dtype.itemsize < self.dtype.itemsize):
                return View(self.shards, dtype, tuple(shapes))
        return View(self.shards, self.dtype, (*self.after, eqn))

    def sorted(self) -> tuple[list[Any], list[Any]]:
        """What is to be done after the gather: casts, and changes of shape."""
        casts = [eqn for eqn in self.after if eqn.primitive.name == "convert_element_type"]
        return casts, [eqn for eqn in self.after if eqn.primitive.name != "convert_element_type"]

    @property
    def model(self) -> Model | None:
        """The model axes of each dim of what it stands for; None if there are none, or they cannot be told."""
        cut: Cut | None = self.shards.cut.gathered()
        for eqn in self.after:
            cut = cut and moved(eqn, cut)
        return cut.model if cut is not None and any(cut.model) else None

    def settle(self) -> "View | None":
        """The view with all changes of shape done to the shards; None if they would not stay intact."""
        casts, shapes = self.sorted()
        shards = self.shards.settled(shapes)
        return None if shards is None else View(shards, self.dtype, tuple(casts))

    def slice(self, eqn: Any, starts: list[Any], phase: str) -> "View | None":
        """A slice of the view, done to the shards; None if it does not take all of the dim that is cut."""
        view = self.settle()
        cut = None if view is None else moved(eqn, view.shards.cut)
        if view is None or cut is None:
            return None
        return view.on(on_shard(eqn, view.shards.value, view.shards.cut.dim, *starts), phase, cut)

    def on(self, value: jax.Array, phase: str, cut: Cut | None = None) -> "View":
        """The same view of another shard, cut like this one unless said otherwise."""
        return View(Shards(value, cut or self.shards.cut, self.shards.leaf, phase), self.dtype, self.after)


@dataclass(frozen=True)
class Reduced:
    """A gradient that has been reduce-scattered.

    Attributes:
        value: This device's shard, in the dtype that gradients are accumulated in, whatever the program says.
        cut: How the whole is cut.
    """

    value: jax.Array
    cut: Cut

    def through(self, eqn: Any, others: list[Any]) -> "Reduced":
        """The gradient after a linear operation that keeps the shards intact."""
        if eqn.primitive.name == "add_any":
            assert isinstance(others[0], Reduced)
            dtype = jnp.promote_types(self.value.dtype, others[0].value.dtype)
            return Reduced(lax.add(self.value.astype(dtype), others[0].value.astype(dtype)), self.cut)
        cut = moved(eqn, self.cut)
        assert cut is not None
        if eqn.primitive.name == "convert_element_type":
            return self  # it is rounded once, at the end
        return Reduced(on_shard(eqn, self.value, self.cut.dim, *others), cut)


@dataclass(frozen=True)
class Pending:
    """A whole local gradient that is to be reduced later.

    Attributes:
        value: The gradient.
        cut: How it will be cut.
        after: Equations, with their other operands, to be done to the shard once it is reduced.
    """

    value: jax.Array
    cut: Cut
    after: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

    def can(self, eqn: Any, others: list[Any]) -> bool:
        """Whether an equation can be put off as well: one of constants, or the sum of two that nothing was done to."""
        if eqn.primitive.name == "add_any":
            return not self.after and isinstance(others[0], Pending) and not others[0].after
        return not any(isinstance(x, Tracer | Reduced) for x in others)

    def through(self, eqn: Any, others: list[Any]) -> "Pending":
        """The gradient after an operation that can be put off."""
        if eqn.primitive.name == "add_any":
            return Pending(lax.add(self.value, others[0].value), self.cut)
        return Pending(self.value, self.cut, (*self.after, (eqn, tuple(others))))


def _floating(*dtypes: Any) -> bool:
    return all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def pushed_back(eqn: Any, want: Cut) -> Cut | None:
    """How to reduce the operand of a linear operation so that its result comes out cut as wanted; None if it cannot be.

    A reduction moves neither in front of a cast that would make it wider, nor of one from integers, nor of a pad with
    anything but zeros: these would not be linear.
    """
    name = eqn.primitive.name
    if name not in STRUCTURAL | {"broadcast_in_dim", "pad"}:
        return None
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if before.dtype.itemsize > after.dtype.itemsize:
        return None
    if not _floating(before.dtype, after.dtype) or (name == "pad" and not is_zero(eqn.invars[1])):
        return None
    return moved_from(eqn, want)
