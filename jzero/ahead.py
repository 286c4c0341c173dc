"""A loop that gathers one block ahead and reduces one block behind, so that both run while a block computes.

DeepSpeed's prefetch, Megatron-LM's overlap-param-gather and overlap-grad-reduce, written into the program: while block
i computes, block i + 1 is gathered, and the gradients of the block before are reduce-scattered. Neither waits for block
i, which is all that a scheduler needs to know. It takes the memory of one more gathered block, and of one block's whole
gradients. The ends of the loop are written out: no block is gathered or reduced that the plain loop would not. Stacked
outputs are written in place, since putting loop and ends together would copy them.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.collectives import gather
from jzero.rules import Cut
from jzero.run import BACKWARD
from jzero.shapes import moved
from jzero.views import Pending, View


def loop_ahead(body: Any, values: list[Any]) -> tuple[Any, list[Any], list[Any]] | None:
    """Runs the body of a scan over its length, gathering ahead and reducing behind.

    Args:
        body: The `scan.Body`.
        values: The stacked arrays that it is scanned over; of a leaf, the shards.

    Returns:
        The carry, the stacked outputs, and what is kept of each leaf; None if there is nothing to gather or reduce.
    """
    run, length, none = body.run, body.length, [{} for _ in values]

    def at(step):
        return length - 1 - step if body.reverse else step

    def take(tree, step):
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, at(step), keepdims=False), tree)

    # A trial, to see what the body gathers of the leaves that it is scanned over, and which gradients it has reduced.
    before = list(run.gatherings)
    shapes = jax.eval_shape(lambda: body(body.carry, *take((values, body.kept), 0), none, length, lazy=True))
    fetches = [(k, key) for k, x in enumerate(body.views) if isinstance(x, View) for key in sorted(x.shards.gathers)]
    trial, run.gatherings[:] = run.gatherings[len(before) :], before
    late = [k for k, (y, _) in enumerate(body.ends) if isinstance(y, Pending)]
    if (not fetches and not late) or _has_keys(shapes[1:]):
        return None

    def fetch(step, outside):
        """What the body gathers of its leaves, for one step."""
        wholes = [{} for _ in values]
        for k, key in fetches:
            cut = body.xs[k].shards.cut.inside()
            shard = take(values[k], step).astype(key[1])
            if outside and run.phase == BACKWARD:
                shard = run.after_loss(shard)
            wholes[k][key] = gather(run.layout, shard, cut, run.phase)
        return wholes

    def compute(carry, step, wholes, times):
        """One block: the carry, gradients to be reduced, and the other outputs."""
        carry, ys, new = body(carry, *take((values, body.kept), step), wholes, times, lazy=True)
        pending = [ys[k] for k in late]
        return carry, pending, ([None if k in late else y for k, y in enumerate(ys)], new)

    def reduce(pending):
        return [run.due(replace(body.ends[k][0], value=value)).value for k, value in zip(late, pending, strict=True)]

    def write(stack, part, step):
        return jax.tree.map(lambda s, x: lax.dynamic_update_index_in_dim(s, x, at(step), 0), stack, part)

    def stack_of(part):
        return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), part)

    first, last = (1 if late else 0), (length - 1 if fetches else length)
    carry, wholes, pending = body.carry, fetch(0, True) if fetches else none, []
    _, plain_shapes, new_shapes = shapes
    others = stack_of(([None if k in late else y for k, y in enumerate(plain_shapes)], new_shapes))
    if late:
        ahead = fetch(1, True) if fetches else none
        carry, pending, part = compute(carry, 0, wholes, 1)
        others, wholes = write(others, part, 0), ahead
    reduced = stack_of(jax.eval_shape(reduce, pending))

    def step(state, t):
        carry, wholes, pending, others, reduced = state
        ahead = fetch(t + 1, False) if fetches else none
        if late:
            reduced = write(reduced, reduce(pending), t - 1)
        carry, pending, part = compute(carry, t, wholes, last - first)
        return (carry, ahead, pending, write(others, part, t), reduced), None

    state = (carry, wholes, pending, others, reduced)
    (carry, wholes, pending, others, reduced), _ = lax.scan(step, state, jnp.arange(first, last))
    if fetches:
        if late:
            reduced = write(reduced, reduce(pending), length - 2)
        carry, pending, part = compute(carry, length - 1, wholes, 1)
        others = write(others, part, length - 1)
    if late:
        reduced = write(reduced, reduce(pending), length - 1)
    run.gatherings[:] = [*before, *trial]
    ys, new = others
    for k, value in zip(late, reduced, strict=True):
        ys[k] = value
        body.ends[k] = run.as_reduced(value, _final(body.ends[k][0])), None
    return carry, ys, new


def _final(pending: Pending) -> Cut:
    """How a gradient is cut once all is done to it that was put off."""
    cut: Cut | None = pending.cut
    for eqn, _ in pending.after:
        assert cut is not None
        cut = moved(eqn, cut)
    assert cut is not None
    return cut


def _has_keys(tree: Any) -> bool:
    """Whether a tree holds random keys, of which there are no zeros to write over."""
    return any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(tree))
