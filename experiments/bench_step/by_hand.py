"""What one writes for this model without a library: collectives inside of `jax.shard_map`, for one stage.

At stage 3 the weights of a block are gathered at the head of its rematerialised body, and JAX's own differentiation
makes reduce-scatters of that. At stage 2 they are whole, and their gradients are scattered in the backward pass of the
body. At stages 0 and 1 all gradients are reduced at the end.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jzero
from experiments.bench_step.model import Size, mean_loss

AXIS = "data"
WHOLE = -1
"""Stands for the dim that is cut where none is: None would be no leaf of a tree."""


def gather(shard: jax.Array, dim: int) -> jax.Array:
    """Whole weights from shards along `dim`."""
    return shard if dim == WHOLE else lax.all_gather(shard, AXIS, axis=dim, tiled=True)


def all_reduce(grad: jax.Array) -> jax.Array:
    """The sum over all devices."""
    return lax.psum(grad, AXIS)


def scatter(grad: jax.Array, dim: int) -> jax.Array:
    """This device's shard along `dim` of the sum over all devices."""
    return all_reduce(grad) if dim == WHOLE else lax.psum_scatter(grad, AXIS, scatter_dimension=dim, tiled=True)


def own_shard(whole: jax.Array, dim: int) -> jax.Array:
    """This device's shard along `dim` of what every device has."""
    if dim == WHOLE:
        return whole
    length = whole.shape[dim] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(AXIS) * length, length, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def whole_with_shard(whole: jax.Array, shard: jax.Array, dim: int) -> jax.Array:
    """The whole weights; their gradient arrives at `shard`, already scattered."""
    return whole


def _forward(whole, shard, dim):
    return whole, None


def _backward(dim, _, grad):
    return None, grad if dim == WHOLE else scatter(grad, dim)


whole_with_shard.defvjp(_forward, _backward)


def local_gradient(size: Size, layout: jzero.Layout) -> Callable:
    """`(params, tokens) -> (loss, grads)` of one device's part of the batch, inside of `jax.shard_map`."""
    stage, dims = layout.stage, cut_dims(layout)
    # As `prepare` gets them: the weights of one block have no layer dim.
    used = {name: dim if dim == WHOLE else dim - 1 for name, dim in dims["blocks"].items()}
    used |= {name: dim for name, dim in dims.items() if name != "blocks"}

    def loss_fn(params, tokens, prepare=lambda weights: weights):
        return mean_loss(size, params, tokens, prepare) / layout.shards  # so that the sum over devices is the mean

    def gathered(weights):
        return {name: gather(shard, used[name]) for name, shard in weights.items()}

    def with_shards(weights):
        return {name: whole_with_shard(*pair, used[name]) for name, pair in weights.items()}

    def gradient(params, tokens):
        if stage.params == "sharded":
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens, gathered)
        elif stage.reduce == "block":
            shards = jax.tree.map(lambda x, dim: jnp.zeros_like(own_shard(x, dim)), params, dims)

            def of_shards(shards):
                pairs = jax.tree.map(lambda whole, shard: (whole, shard), params, shards)
                return loss_fn(pairs, tokens, with_shards)

            loss, grads = jax.value_and_grad(of_shards)(shards)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
            reduce = scatter if stage.grads == "sharded" else lambda grad, _: all_reduce(grad)
            return all_reduce(loss), jax.tree.map(reduce, grads, dims)
        return all_reduce(loss), jax.tree.map(lambda g, dim: all_reduce(g) if dim == WHOLE else g, grads, dims)

    return gradient


def local_step(size: Size, layout: jzero.Layout, tx: optax.GradientTransformation) -> Callable:
    """`(params, opt_state, tokens) -> (params, opt_state, loss)` of one device, inside of `jax.shard_map`.

    For an optimizer that looks at each element alone, so that it can be run on shards.
    """
    gradient, dims = local_gradient(size, layout), cut_dims(layout)
    regather = layout.stage.params == "replicated" and layout.stage.opt_state == "sharded"

    def step(params, opt_state, tokens):
        loss, grads = gradient(params, tokens)
        if regather:
            params = jax.tree.map(own_shard, params, dims)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(gather, params, dims) if regather else params, opt_state, loss

    return step


def cut_dims(layout: jzero.Layout) -> dict:
    """The dim of each leaf that is cut where a stage cuts it."""
    return layout.treedef.unflatten([WHOLE if leaf.dim is None else leaf.dim for leaf in layout.leaves])
