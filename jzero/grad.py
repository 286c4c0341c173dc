"""`value_and_grad`: the only shard_map around a user's loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_map_with_path

from jzero.check import check_batch, check_tree
from jzero.collectives import all_reduce, gather, reduce, reduce_in_backward
from jzero.layout import Layout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A loss as a sum and the weight that it is to be divided by, when batches do not weigh the same.

    Returned by a loss in place of a mean, it makes `value_and_grad` compute the gradient of (sum of totals) / (sum of
    weights) over all devices and microbatches: the loss per token of the whole batch, not the mean of the means.

    Attributes:
        total: Scalar; the sum of the losses of the batch that the loss was given.
        weight: Scalar; how much counts in it, such as the number of tokens that are not padding. It is a constant to
            the gradient.
    """

    total: Any
    weight: Any


def value_and_grad(
    loss_fn: Callable[..., Any], layout: Layout, *, microbatches: int = 1, has_aux: bool = False
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Like `jax.value_and_grad(loss_fn)`, over a mesh, with params and gradients placed by a layout.

    Each device runs `loss_fn(params, batch)` on its own part of the batch, one microbatch after another, with whole
    params. The result is that of the whole batch on one device. The axes of `layout.batch_axes` exist by name inside of
    the loss, for collectives of its own; any other mesh axis is left to the partitioner.

    For M elements of params, m microbatches, and everything cut, the collectives over the data axes are:

    | stage | collectives |
    |---|---|
    | 0 | all-reduce M, once |
    | 1 | reduce-scatter M, once |
    | 2 | reduce-scatter M in each microbatch: mM |
    | 3 | all-gather M and reduce-scatter M in each microbatch: mM + mM |

    Leaves that stay whole are all-reduced when the others are reduce-scattered. With replica axes, the reduced shards
    are all-reduced across them. One all-reduce of a few scalars makes the loss. On one device there are none.

    Args:
        loss_fn: `loss_fn(params, batch)`: the mean over the batch that it is given, or a `Weighted`; with `has_aux` a
            pair of that and a tree of floating arrays.
        layout: Placement of the params and of the gradients.
        microbatches: Into how many parts each device's batch is split; gradients are summed over them.
        has_aux: Whether `loss_fn` returns a pair. The second part is averaged with the loss's weights.

    Returns:
        A function `(params, batch) -> (loss, grads)`, or `((loss, aux), grads)`. `params` are placed as
        `layout.param_specs`, `batch` is cut by `layout.batch_spec`, `grads` come as `layout.grad_specs` with the
        params' dtypes, `loss` and `aux` whole on every device. It works inside and outside of `jax.jit`.

    Raises:
        ValueError: `microbatches` is no positive int; from the function returned, before any work: params that the
            layout was not made for; a batch that does not divide; a loss that is no scalar.
        TypeError: A loss or an `aux` that is not floating, or no pair with `has_aux`.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> loss, grads = value_and_grad(loss_fn, layout)({"w": jnp.ones(8)}, jnp.ones((16, 8)))
        >>> float(loss), grads["w"].sharding.spec
        (64.0, P('data',))
    """
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}; wanted an int of 1 or more.")
    parts = layout.batch_shards * microbatches
    uses = [reduce_in_backward(lambda grad, leaf=leaf: reduce(layout, leaf, grad)) for leaf in layout.leaves]

    def gradient(shards, batch):
        """Gradient of one microbatch: reduced if the stage reduces by block, else whole and this device's own."""
        whole = shards
        if layout.stage.params == "sharded":
            whole = [gather(layout, leaf, shard) for leaf, shard in zip(layout.leaves, shards, strict=True)]

        def objective(leaves):
            return _summed(loss_fn, has_aux, layout.treedef.unflatten(leaves), batch)

        if layout.stage.reduce == "end":
            return jax.grad(objective, has_aux=True)(whole)
        stand_ins = [
            jnp.zeros(leaf.shard_shape(layout.shards) if layout.stage.grads == "sharded" else leaf.shape, leaf.dtype)
            for leaf in layout.leaves
        ]

        def objective_of_stand_ins(stand_ins):
            return objective([use(s, w) for use, s, w in zip(uses, stand_ins, whole, strict=True)])

        return jax.grad(objective_of_stand_ins, has_aux=True)(stand_ins)

    def local(shards, batch):
        if microbatches == 1:
            grads, sums = gradient(shards, batch)
        else:
            split = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
            grads, sums = _accumulate(lambda part: gradient(shards, part), split)
        if layout.stage.reduce == "end":
            grads = [reduce(layout, leaf, grad) for leaf, grad in zip(layout.leaves, grads, strict=True)]
        total, weight, aux = jax.tree.map(lambda x: all_reduce(layout, x), sums)
        if weight is None:
            share = 1 / parts
        else:
            share = jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))
        return _scale((total, aux), share), _scale(grads, share)

    params_specs = [layout.spec(leaf, layout.stage.params) for leaf in layout.leaves]
    grads_specs = [layout.spec(leaf, layout.stage.grads) for leaf in layout.leaves]
    sharded = jax.jit(
        jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(params_specs, layout.batch_spec),
            out_specs=(P(), grads_specs),
            axis_names=set(layout.batch_axes),
            check_vma=False,
        )
    )

    def value_and_grad_of_batch(params, batch):
        check_tree("params", params, layout, layout.treedef, layout.leaves, layout.stage.params)
        check_batch(batch, layout, microbatches=microbatches)
        (loss, aux), grads = sharded(jax.tree.leaves(params), batch)
        return ((loss, aux) if has_aux else loss), layout.treedef.unflatten(grads)

    return value_and_grad_of_batch


def _accumulate(gradient, split):
    """Sums gradients, totals, weights and aux over the microbatches that lie along the first dim of `split`."""
    like = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], split))

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, gradient(part)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return lax.scan(add, zeros, split)[0]


def _scale(tree, share):
    """Multiplies in at least float32, so that a share of a long batch does not lose its bits in bfloat16."""

    def scale(x):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return (x.astype(wide) * jnp.asarray(share, wide)).astype(x.dtype)

    return jax.tree.map(scale, tree)


def _summed(loss_fn, has_aux, params, batch):
    """Calls the loss; returns its total, and (total, weight or None, aux times weight) to be summed."""
    out = loss_fn(params, batch)
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Weighted):
            raise TypeError(f"loss_fn returned a {type(out).__name__}; with has_aux=True it returns (loss, aux).")
        out, aux = out
    elif isinstance(out, tuple):
        raise TypeError("loss_fn returned a tuple; pass has_aux=True if it returns (loss, aux).")
    weight = None
    if isinstance(out, Weighted):
        total = _scalar("Weighted.total", out.total)
        weight = lax.stop_gradient(jnp.asarray(out.weight))
        if weight.shape:
            raise ValueError(f"Weighted.weight has shape {weight.shape}; wanted a scalar, such as its sum.")
        weight = weight.astype(total.dtype)
    else:
        total = _scalar("The loss", out)

    def weigh(path, x):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"aux{keystr(path)} has dtype {x.dtype}; aux is averaged over the batch, so it must be floating. "
                f"Cast it, for example with .astype('float32')."
            )
        return x if weight is None else x * weight.astype(x.dtype)

    return total, (total, weight, tree_map_with_path(weigh, aux))


def _scalar(what, x):
    """The loss as a scalar of at least float32."""
    x = jnp.asarray(x)
    if x.shape:
        raise ValueError(
            f"{what} has shape {x.shape}; wanted a scalar. Take the mean over the batch, or return a "
            f"jzero.Weighted(total, weight)."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{what} has dtype {x.dtype}; wanted a floating scalar.")
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
