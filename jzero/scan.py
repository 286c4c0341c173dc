"""A loop with leaves among its scanned inputs, or gradients among its stacked outputs."""

from collections.abc import Callable
from typing import Any

from jax import lax

from jzero.ahead import loop_ahead
from jzero.body import Body, plain
from jzero.rules import Cut
from jzero.run import Run
from jzero.views import Reduced, View


def scan(run: Run, eqn: Any, ins: list[Any], wants: list[Cut | None], evaluate: Callable[..., list[Any]]) -> list[Any]:
    """Evaluates a `scan` equation on arrays and views."""
    body = Body(run, eqn, ins, wants, evaluate)
    values, ends = [plain(x) for x in body.xs], None
    if run.ahead and body.length > 2 and eqn.params["unroll"] == 1:
        ends = loop_ahead(body, values)
    if ends is None:

        def step(carry, slices):
            own, kept = slices
            carry, ys, new = body(carry, own, kept, [{}] * len(own), body.length)
            return carry, (ys, new)

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, (stacked, new) = lax.scan(step, body.carry, (values, body.kept), **options)
        ends = carry, stacked, new
    carry, stacked, new = ends
    for x, wholes in zip(body.xs, new, strict=True):
        if wholes:
            x.shards.gathered.update(wholes)

    def outside(end, value):
        y, source = end
        if source is not None:
            return View(body.xs[source].shards, y.dtype, y.after)
        if isinstance(y, View):
            return y.on(value, run.phase, y.shards.cut.outside())
        return Reduced(value, y.cut.outside()) if isinstance(y, Reduced) else value

    ys = [outside(end, value) for end, value in zip(body.ends, stacked, strict=True)]
    return [*carry, *(run.reduced(y, want) for y, want in zip(ys, body.wants, strict=True))]
