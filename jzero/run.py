"""One run of the streaming pass: what it has gathered and reduced, and where it stands."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax import lax

from jzero.collectives import gather, scatter_over_data, sum_over_replicas, wire_dtype
from jzero.jaxprs import bind, source_of
from jzero.layout import Layout
from jzero.rules import Cut
from jzero.views import Pending, Reduced, Shards, View

FORWARD: Literal["forward"] = "forward"
BACKWARD: Literal["backward"] = "backward"
KEPT = "kept"


@dataclass(frozen=True)
class Gathering:
    """One place where a leaf is gathered.

    Attributes:
        path: Path of the leaf.
        where: Function and line of the use, as the user wrote it.
        phase: "forward" or "backward".
        dtype: Dtype on the wire.
        bytes: Bytes of the gathered array, or of each model shard of it, without padding.
        padded: The same with padding, which travels as well.
        times: How often it runs in one microbatch.
        early: The primitive that the gather could not be moved into or behind; empty at a first real use.
    """

    path: str
    where: str
    phase: str
    dtype: str
    bytes: int
    padded: int
    times: int
    early: str

    def __str__(self) -> str:
        """One line, as in "forward: 3 x 1,024 bytes of bfloat16 in block (model.py:31)"."""
        early = f", early because of {self.early}" if self.early else ""
        return f"{self.phase}: {self.times} x {self.bytes:,} bytes of {self.dtype} in {self.where}{early}"


@dataclass(frozen=True)
class Reduction:
    """One gradient, or part of one, that is reduced in the backward pass.

    Attributes:
        path: Path of the leaf.
        dtype: Dtype on the wire.
        padded: Bytes of the whole gradient, or of each model shard of it, with padding.
        times: How often it runs in one microbatch.
    """

    path: str
    dtype: str
    padded: int
    times: int


@dataclass
class Account:
    """What the pass has done to a gradient program.

    Attributes:
        gatherings: Where leaves are gathered, in the order of the program.
        reductions: Which gradients are reduced in the backward pass.
        unused: For each trainable leaf whether the loss does not use it: its gradient is zeros, and is not reduced.
    """

    gatherings: list[Gathering] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    unused: list[bool] = field(default_factory=list)


@dataclass
class Run:
    """One evaluation of the pass.

    Attributes:
        layout: The stage, and the placement of each leaf.
        share: What a gradient is multiplied by when it is reduced.
        account: Where it has gathered, and what it has reduced.
        times: How often the loops around this point run.
        phase: FORWARD, or BACKWARD once the loss is there.
        loss: The loss, once it is there.
        inside: Whether this is the body of a loop.
        lazy: Whether gradients are to be reduced later, outside of that body.
        used: What was gathered outside of loops, in order: its bytes, and an array that it was used with, if any.
        calls: The calls, blocks and loops around this point, from the outside in.
    """

    layout: Layout
    share: float
    account: Account = field(default_factory=Account)
    times: int = 1
    phase: Literal["forward", "backward"] = FORWARD
    loss: Any = None
    inside: bool = False
    lazy: bool = False
    used: list[tuple[int, Any]] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)

    def reduced(self, x: Any, want: Cut | None) -> Any:
        """What is wanted of a gradient: reduced here, if it was not before, and is to be now."""
        if want is None or want.dim is None or isinstance(x, Reduced | Pending):
            return x
        x = self.whole(x, None)
        return Pending(x, want) if self.lazy else self.due(Pending(x, want))

    def due(self, x: Pending) -> Reduced:
        """Reduces a gradient whose reduction was put off, and does to the shard what was done to it since."""
        self.note(x)
        return self.summed(x, self.scattered(x))

    def note(self, x: Pending, times: int = 1) -> None:
        """Puts a reduction into the account, which runs so often wherever this point is reached."""
        shape, dim = x.value.shape, x.cut.dim
        assert dim is not None
        model_shards = self.layout.size([axis for axes in x.cut.model for axis in axes])
        dtype = wire_dtype(self.layout, x.value.dtype)
        elements = math.prod(shape[:dim]) * x.cut.stored * math.prod(shape[dim + 1 :]) // model_shards
        found = Reduction(x.cut.path, str(dtype), elements * dtype.itemsize, self.times * times)
        self.account.reductions.append(found)

    def scattered(self, x: Pending) -> jax.Array:
        """The first half of `due`: the shard that is left to be summed over the replicas."""
        return scatter_over_data(self.layout, x.value, x.cut, self.share)

    def summed(self, x: Pending, shard: jax.Array) -> Reduced:
        """The second half of `due`, of which the first has made this shard."""
        reduced = Reduced(sum_over_replicas(self.layout, shard, x.cut, self.share), x.cut)
        for eqn, others in x.after:
            reduced = reduced.through(eqn, list(others))
        return reduced

    def until(self, shards: Shards) -> str:
        """Until when a gathered leaf is kept: to the end of the phase, or of both."""
        return self.phase if shards.leaf.regather else KEPT

    def holds(self, x: View) -> bool:
        """Whether the view has been gathered, and that is still kept."""
        return any(key[0] == self.until(x.shards) for key in x.shards.gathered)

    @property
    def ahead(self) -> bool:
        """Whether blocks are gathered ahead and reduced behind; on one device there is nothing to wait for."""
        return self.layout.ahead and self.layout.batch_shards > 1

    def whole(self, x: Any, eqn: Any, early: str = "", beside: Any = None) -> Any:
        """The whole array behind a view: gathered at its first use in this phase. Other values come back as is.

        Args:
            x: A value of the pass.
            eqn: Where it is used.
            early: What the gather could not be moved into or behind.
            beside: An array that it is used with, if there is one.
        """
        if not isinstance(x, View):
            return x
        held, time = x.shards.gathered, self.until(x.shards)
        key, widest = (time, str(x.dtype)), (time, str(x.shards.value.dtype))
        if key not in held:
            held[key] = held[widest].astype(x.dtype) if widest in held else self._gather(x, eqn, early, beside)
        value = held[key]
        for later in x.after:
            (value,) = bind(later, [value])
        return value

    def early(self, x: Any, eqn: Any, early: str = "") -> Any:
        """Gathers before the use. What is cut over model axes is still followed to there."""
        if not isinstance(x, View) or x.shards.cut.dim is None:
            return x
        whole, model = self.whole(x, eqn, early), x.model
        if model is None:
            return whole
        return View(Shards(whole, Cut(None, 0, 0, model), x.shards.leaf, self.phase), whole.dtype)

    def _gather(self, x: View, eqn: Any, early: str, beside: Any) -> jax.Array:
        shards, value = x.shards, x.shards.value.astype(x.dtype)
        if shards.cut.dim is None:
            return value
        model_shards = self.layout.size([axis for axes in shards.cut.model for axis in axes])
        size = value.size * self.layout.shards * value.dtype.itemsize // model_shards
        value = self._not_before(value, shards, size)
        whole = gather(self.layout, value, shards.cut, self.phase)
        if not self.inside:
            self.used.append((size, beside))
        own = whole.size * whole.dtype.itemsize // model_shards
        where = source_of(eqn, self.calls)
        found = Gathering(shards.leaf.path, where, self.phase, str(x.dtype), own, size, self.times, early)
        self.account.gatherings.append(found)
        shards.gathers.add((self.until(shards), str(x.dtype)))
        return whole

    def _not_before(self, value: jax.Array, shards: Shards, size: int) -> jax.Array:
        """A shard that cannot be gathered before its time.

        In the backward pass that is when the loss is there. Gathering ahead, it is also when the leaf is used that is
        as many bytes away as the largest has: blocks that are written out are so gathered one ahead, and no earlier.
        """
        if self.phase == BACKWARD and shards.phase == FORWARD:
            value = self.after_loss(value)
        if self.ahead and not self.inside:
            free = max([size, *(size for size, _ in self.used)])
            for size, beside in reversed(self.used):
                free -= size
                if free < 0 and beside is not None:
                    return lax.optimization_barrier((value, beside))[0]
        return value

    def after_loss(self, value: jax.Array) -> jax.Array:
        """A shard for a gather of the backward pass: not before the loss is there, nor one with that of the forward."""
        return lax.optimization_barrier((value, self.loss))[0]
