"""A loop that gathers one block ahead and reduces one block behind, so that both run while a block computes.

DeepSpeed's prefetch, Megatron-LM's overlap-param-gather and overlap-grad-reduce, written into the program: while block
i computes, block i + 1 is gathered, and the gradients of the block before are reduce-scattered. Neither waits for block
i, which is all that a scheduler needs to know. A sum over replicas, which waits for the scatter, comes one block later.
It takes the memory of one more gathered block, and of one block's whole gradients. The ends of the loop are written
out: no block is gathered or reduced that the plain loop would not. Stacked outputs are written in place, since putting
loop and ends together would copy them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.body import Body
from jzero.collectives import gather, wide
from jzero.rules import Cut
from jzero.run import BACKWARD, Run
from jzero.shapes import moved
from jzero.views import Pending, Reduced, View


def loop_ahead(body: Body, values: list[Any]) -> tuple[Any, list[Any], list[Any]] | None:
    """Runs the body of a scan over its length, gathering ahead and reducing behind.

    Args:
        body: The body.
        values: The stacked arrays that it is scanned over; of a leaf, the shards.

    Returns:
        The carry, the stacked outputs, and what is kept of each leaf; None if there is nothing to gather or reduce, or
        if so few blocks that none is left in the loop.
    """
    run, length, none = body.run, body.length, [{} for _ in values]

    def at(step):
        return length - 1 - step if body.reverse else step

    def take(tree, step):
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, at(step), keepdims=False), tree)

    def evaluate(carry, step, wholes):
        """One block: the carry, gradients to be reduced, and the other outputs."""
        own, kept = take((values, body.kept), step)
        carry, ys, new = body(carry, own, kept, wholes, length, lazy=True)
        late = [isinstance(y, Pending) for y, _ in body.ends]
        others = [None if put_off else y for y, put_off in zip(ys, late, strict=True)]
        return carry, [y for y, put_off in zip(ys, late, strict=True) if put_off], (others, new)

    # A trial, to see what the body gathers of the leaves that it is scanned over, and which gradients it has reduced.
    account = run.account
    before = list(account.gatherings), list(account.reductions)
    _, grads, others = jax.eval_shape(lambda: evaluate(body.carry, 0, none))
    fetches = [(k, key) for k, x in enumerate(body.views) if isinstance(x, View) for key in sorted(x.shards.gathers)]
    trial = list(account.gatherings), list(account.reductions)
    account.gatherings, account.reductions = before
    late = {k: y for k, (y, _) in enumerate(body.ends) if isinstance(y, Pending)}
    tasks = _tasks(run, list(late.values())) if late else []
    first, last = len(tasks), length - 1 if fetches else length
    if (not fetches and not late) or first >= last or _has_keys((grads, others)):
        return None

    def fetch(step, inside=False):
        """What the body gathers of its leaves, for one step."""
        wholes = [{} for _ in values]
        for k, key in fetches:
            cut = body.xs[k].shards.cut.inside()
            shard = take(values[k], step).astype(key[1])
            if not inside and run.phase == BACKWARD:
                shard = run.after_loss(shard)
            wholes[k][key] = gather(run.layout, shard, cut, run.phase)
        return wholes

    def write(stack, part, step):
        return jax.tree.map(lambda s, x: lax.dynamic_update_index_in_dim(s, x, at(step), 0), stack, part)

    def stack_of(part):
        return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), part)

    def reduce(tasks, waiting, reduced, step):
        """Does the next task for each of the blocks before whose gradients wait, the last block first."""
        done = [task(grads) for task, grads in zip(tasks, waiting, strict=False)]
        if late and len(done) == len(tasks):
            reduced = write(reduced, done.pop(), step - first)
        return done, reduced

    def compute(state, step, ahead):
        """One step, in which what was gathered for its block is used, and others are reduced."""
        carry, wholes, waiting, others, reduced = state
        waiting, reduced = reduce(tasks, waiting, reduced, step)
        carry, grads, part = evaluate(carry, step, wholes)
        return carry, ahead, [grads, *waiting] if late else [], write(others, part, step), reduced

    for task in tasks:
        grads = jax.eval_shape(task, grads)
    state = body.carry, fetch(0), [], stack_of(others), stack_of(grads)
    for step in range(first):
        state = compute(state, step, fetch(step + 1))
    steps = jnp.arange(first, last)
    state, _ = lax.scan(lambda state, step: (compute(state, step, fetch(step + 1, inside=True)), None), state, steps)
    if fetches:
        state = compute(state, last, none)
    carry, _, waiting, (ys, new), reduced = state
    for done in range(first):
        waiting, reduced = reduce(tasks[done:], waiting, reduced, length + done)
    account.gatherings, account.reductions = trial
    for pending in late.values():
        run.note(pending, length)
    for (k, y), value in zip(late.items(), reduced, strict=True):
        ys[k] = value
        body.ends[k] = Reduced(value, _final(y)), None
    return carry, ys, new


def _tasks(run: Run, ends: list[Pending]) -> list[Callable[[list[jax.Array]], list[jax.Array]]]:
    """What is done to the gradients of a block to reduce them, one step of the loop each.

    A sum over replicas waits for the scatter in front of it. In a step of its own it does not, and each of the two has
    all matmuls of a block to run beside.
    """

    def each(task):
        return lambda values: [task(end, x) for end, x in zip(ends, values, strict=True)]

    scatter, finish = (
        each(lambda end, x: run.scattered(replace(end, value=x))),
        each(lambda end, x: run.summed(end, x).value),
    )
    if wide(run.layout, run.layout.data_axes) and wide(run.layout, run.layout.replica_axes):
        return [scatter, finish]
    return [lambda values: finish(scatter(values))]


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
