"""The body of a loop with leaves among its scanned inputs, or gradients among its stacked outputs.

Leaves are handed to it as shards. A leaf that is cut along the scanned dim is gathered before the loop; one that the
body closes over as well, unless the body only takes slices of it.
"""

from collections.abc import Callable
from typing import Any

from jzero.jaxprs import inner_jaxpr, split_scan
from jzero.rules import Cut
from jzero.run import KEPT, Run
from jzero.shapes import moved
from jzero.views import SLICES, Pending, Reduced, View

Wholes = dict[tuple[str, str], Any]


class Body:
    """The body of a scan, on shards.

    Attributes:
        length: How often it runs.
        reverse: Whether from the last of the scanned inputs to the first.
        xs: What it is scanned over: stacked arrays, and views of stacked leaves.
        kept: For each of `xs` what the forward pass has kept of it, stacked.
        ends: Its stacked outputs as the last evaluation has left them, each with the index in `xs` of the leaf that it
            is itself, if it is one: that is not stacked again.
    """

    def __init__(self, run: Run, eqn: Any, ins: list[Any], wants: list[Cut | None], evaluate: Callable[..., list[Any]]):
        self.run, self.eqn, self.evaluate = run, eqn, evaluate
        self.jaxpr, self.closed = inner_jaxpr(eqn)
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        consts, carry, xs = split_scan(eqn, ins)
        self.consts = [self._closed_over(x, v) for x, v in zip(consts, self.jaxpr.invars, strict=False)]
        self.carry = [run.whole(x, eqn) for x in carry]
        self.xs = [self._scannable(x) for x in xs]
        self.wants = wants[len(carry) :]
        self.inside = [None if want is None or want.first else want.inside() for want in self.wants]
        self.kept: list[Wholes] = [_kept(x) for x in self.xs]
        self.ends: list[tuple[Any, int | None]] = []
        self.views: list[Any] = []

    def __call__(
        self, carry: Any, values: list[Any], kept: list[Wholes], ahead: list[Wholes], times: int, lazy: bool = False
    ) -> tuple[Any, list[Any], list[Wholes]]:
        """One evaluation.

        Args:
            carry: The carry.
            values: The slice of each of `xs`; of a leaf, the shard.
            kept: The slices of `self.kept`.
            ahead: For each of `xs` what has been gathered of it for this evaluation.
            times: How often it runs so.
            lazy: Whether gradients are left to be reduced later.

        Returns:
            The carry; what is to be stacked; for each of `xs` what is to be kept of it for the backward pass.
        """
        run = self.run
        self.views = inner = [
            x.on(v, run.phase, x.shards.cut.inside()) if isinstance(x, View) else v
            for x, v in zip(self.xs, values, strict=True)
        ]
        for x, wholes, fetched in zip(inner, kept, ahead, strict=True):
            if wholes or fetched:
                x.shards.gathered.update(wholes | fetched)
                x.shards.ahead = set(fetched)
        outer = run.times, run.lazy, run.inside
        run.times, run.lazy, run.inside = run.times * times, lazy, True
        own = [x.on(x.shards.value, run.phase) if isinstance(x, View) else x for x in self.consts]
        first = [None] * len(self.carry)
        outs = self.evaluate(run, self.jaxpr, self.closed, [*own, *carry, *inner], first + self.inside)
        carry = [run.whole(x, self.eqn) for x in outs[: len(first)]]
        ys = [self._stackable(y) for y in outs[len(first) :]]
        run.times, run.lazy, run.inside = outer
        self.ends = [(y, self._source(y)) for y in ys]
        new = [
            {key: whole for key, whole in _kept(x).items() if key not in held}
            for x, held in zip(inner, kept, strict=True)
        ]
        return carry, [None if k is not None else plain(y) for y, k in self.ends], new

    def _closed_over(self, x, var):
        """A leaf closed over: whole, or a view if the body only takes slices that keep the shards intact."""
        view = x.settle() if isinstance(x, View) else None
        if view is not None and var not in self.jaxpr.outvars:
            users = [user for user in self.jaxpr.eqns if var in user.invars]
            if all(user.primitive.name in SLICES and moved(user, view.shards.cut) is not None for user in users):
                return view
        return self.run.early(x, self.eqn)

    def _scannable(self, x):
        """A scanned input: a view that keeps its shards when it is taken apart along the first dim, or an array."""
        if not isinstance(x, View):
            return x
        run, view = self.run, x.settle()
        if view is None or view.shards.cut.first or (run.until(x.shards) != KEPT and run.holds(x)):
            x = run.early(x, self.eqn, early="" if run.holds(x) else "scan")
            view = x.settle() if isinstance(x, View) else None
            return run.whole(x, self.eqn) if view is None or view.shards.cut.first else view
        return view

    def _stackable(self, y):
        if isinstance(y, View):
            view = y.settle()
            return self.run.whole(y, self.eqn, early="scan") if view is None else view
        return y

    def _source(self, y):
        """Which of the scanned leaves an output is itself (what the backward pass needs of it)."""
        for index, x in enumerate(self.views):
            if isinstance(x, View) and isinstance(y, View) and y.shards is x.shards:
                return index
        return None


def plain(x: Any) -> Any:
    """The array in a value of the pass."""
    return x.shards.value if isinstance(x, View) else x.value if isinstance(x, Reduced | Pending) else x


def _kept(x: Any) -> Wholes:
    return {key: whole for key, whole in x.shards.gathered.items() if key[0] == KEPT} if isinstance(x, View) else {}
