"""`value_and_grad`: the only shard_map around a user's loss."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.arguments import check_arguments
from jzero.border import border_spec, enter, entered, leave, left
from jzero.check import check_batch, check_tree
from jzero.collectives import all_reduce, reduce
from jzero.layout import Layout
from jzero.loss import check_call, take_apart
from jzero.loss_scale import DynamicLossScale
from jzero.model_state import merge, warn_differing
from jzero.rounding import cast, scaled
from jzero.run import Account
from jzero.stream import reduces_in_backward, stream


def value_and_grad(
    loss_fn: Callable[..., Any],
    layout: Layout,
    *,
    microbatches: int = 1,
    has_aux: bool = False,
    with_key: bool = False,
    with_model_state: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad(loss_fn)`, over a mesh, with params and gradients placed by a layout.

    Each device runs `loss_fn(params, batch)` on its own part of the batch, one microbatch after another. The result is
    that of the whole batch on one device. The axes of `layout.batch_axes` exist by name inside of the loss, for
    collectives of its own. Any other mesh axis is automatic: leaves lie on it as the layout's rules say, matmuls and
    lookups with those that it cuts are placed to fit (Megatron-LM, arXiv:1909.08053), and the partitioner does the
    rest. Of such a leaf only the model shards travel over the data axes.

    For M elements of params, m microbatches, and everything cut, the collectives over the data axes are:

    | stage | collectives |
    |---|---|
    | 0 | all-reduce M, once |
    | 1 | reduce-scatter M, once |
    | 2 | reduce-scatter M in each microbatch: mM |
    | 3 | all-gather M and reduce-scatter M in each microbatch, and again in the backward pass what it needs: 2mM + mM |

    At stage 3 a leaf is gathered at its first real use, in the dtype that the loss casts it to, and at stages 2 and 3 a
    gradient is reduced where it is born: inside of a scan over layers one layer at a time. `explain(layout, loss_fn,
    batch)` says where. The layout's `Precision` may ask for other dtypes. Leaves that stay whole are all-reduced once.
    With replica axes, the reduced shards are all-reduced across them. An all-reduce of a scalar makes the loss. On one
    device there are none. Leaves that are not trained are gathered, and not reduced.

    Randomness: with `with_key`, each call of the loss gets `fold_in(fold_in(key, i), j)`, where i is the index of the
    batch shard in the order of `layout.batch_axes` and j the microbatch. Results therefore do not depend on the stage,
    and do depend on how many parts the batch is cut into, as with dropout on any mesh.

    Model state: with `with_model_state`, the state goes through the microbatches one after another on each batch shard;
    then floating leaves are averaged over the batch axes, and the others must be the same everywhere.

    Args:
        loss_fn: `loss_fn(params, batch)`: the mean over the batch that it is given, or a `Weighted`; with `has_aux` a
            pair of that and a tree of floating arrays. It takes `key=` with `with_key`. With `with_model_state` it
            takes `model_state=` and returns `(loss, model_state)`, or with `has_aux` `(loss, (model_state, aux))`.
        layout: Placement of the params and of the gradients.
        microbatches: Into how many parts each device's batch is split; gradients are summed over them.
        has_aux: Whether `loss_fn` returns an aux, which is averaged with the loss's weights, in float32 or wider.
        with_key: Whether `loss_fn` takes a random key.
        with_model_state: Whether `loss_fn` takes and returns model state.

    Returns:
        A function `(params, batch, *, key=None, model_state=None, loss_scale=None) -> (value, grads)`, where `value` is
        what `loss_fn` returns: `loss`, `(loss, aux)`, `(loss, model_state)` or `(loss, (model_state, aux))`. `params`
        are placed as `layout.param_specs`, `batch` is cut by `layout.batch_spec`, `grads` come as `layout.grad_specs`
        in the precision's `accumulate` dtype, or that of the params as the loss gets them; padded as stored, None where
        a leaf is not trained; the rest is whole on every device. A `loss_scale`, a scalar, multiplies the loss that is
        differentiated, and divides the gradients once they are summed; they then come in at least float32. It works
        inside and outside of `jax.jit`.

    Raises:
        ValueError: `microbatches` is no positive int; from the function returned, before any work: params that the
            layout was not made for; a batch that does not divide, or whose leaves differ in their first dim; a loss
            that is no scalar; no `key` or `model_state` where one is asked for.
        TypeError: A loss that takes other arguments than it is given; a loss or an `aux` that is not floating, or no
            pair where one is asked for.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> loss, grads = value_and_grad(loss_fn, layout)({"w": jnp.ones(8)}, jnp.ones((16, 8)))
        >>> float(loss), grads["w"].sharding.spec
        (64.0, P('data',))
    """
    check_arguments("value_and_grad(loss_fn, layout)", layout=layout)
    program = gradient_program(
        loss_fn,
        layout,
        microbatches=microbatches,
        has_aux=has_aux,
        with_key=with_key,
        with_model_state=with_model_state,
    )

    def value_and_grad_of_batch(params, batch, *, key=None, model_state=None, loss_scale=None):
        (loss, model_state, aux), grads, differ = program(params, batch, key, model_state, loss_scale)
        warn_differing(model_state, differ)
        extra = {(True, True): (model_state, aux), (True, False): model_state, (False, True): aux}
        pair = (with_model_state, has_aux)
        return ((loss, extra[pair]) if pair in extra else loss), grads

    return value_and_grad_of_batch


def gradient_program(
    loss_fn: Callable[..., Any],
    layout: Layout,
    *,
    microbatches: int,
    has_aux: bool,
    with_key: bool,
    with_model_state: bool,
    found: list[Account] | None = None,
) -> Callable[..., Any]:
    """The program behind `value_and_grad`.

    It is `(params, batch, key, model_state, loss_scale) -> ((loss, model_state, aux), grads, differ)`.
    `differ` says for each of `must_agree(model_state)` whether the batch shards returned different values. Tracing it
    puts into `found` the account of where leaves are gathered and which gradients are reduced.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; wanted a function loss_fn(params, batch).")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is a {type(layout).__name__}; wanted the Layout that jzero.zero returns.")
    if not isinstance(microbatches, Integral) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}; wanted an int of 1 or more.")
    check_call(loss_fn, [name for name, asked in (("key", with_key), ("model_state", with_model_state)) if asked])
    stage, precision, parts = layout.stage, layout.precision, layout.batch_shards * microbatches

    unused = [False] * len(layout.trainable)

    def objective(leaves, batch, key, model_state, loss_scale):
        leaves = [cast(x, leaf.dtypes.compute) for leaf, x in zip(layout.leaves, leaves, strict=True)]
        batch = precision.cast_to_compute(batch)
        own = jax.tree.map(lambda x: x, model_state)  # the loss may change it in place, as nnx and equinox do
        given = ({"key": key} if with_key else {}) | ({"model_state": own} if with_model_state else {})
        out = loss_fn(layout.treedef.unflatten(leaves), batch, **given)
        total, *sums = take_apart(out, has_aux=has_aux, with_model_state=with_model_state, model_state=model_state)
        return total if loss_scale is None else total * loss_scale, tuple(sums)

    def gradient(*args):
        grads, sums, account = stream(layout, 1 / parts, objective, *args)
        unused[:] = account.unused
        if found is not None:
            found[:] = [account]
        return grads, sums

    def local(shards, batch, key, model_state, loss_scale):
        shards = [entered(leaf, x, stage.params) for leaf, x in zip(layout.leaves, shards, strict=True)]
        key = _fold(key, lax.axis_index(layout.batch_axes)) if with_key else None
        if microbatches == 1:
            grads, (sums, model_state) = gradient(shards, batch, _fold(key, 0), model_state, loss_scale)
        else:

            def add(carry, part):
                sums, model_state = carry
                index, batch = part
                grads, (more, model_state) = gradient(shards, batch, _fold(key, index), model_state, loss_scale)
                return (jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, (grads, more)), model_state), None

            split = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
            first = jax.tree.map(lambda x: x[0], split)
            grads, (sums, _) = jax.eval_shape(gradient, shards, first, key, model_state, loss_scale)
            grads = [jnp.zeros(x.shape, precision.sum_dtype(x.dtype)) for x in grads]
            zeros = grads, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
            carry, _ = lax.scan(add, (zeros, model_state), (jnp.arange(microbatches), split))
            (grads, sums), model_state = carry
        grads = [
            grad if zero or reduces_in_backward(layout, leaf) else reduce(layout, leaf, grad, 1 / parts)
            for leaf, grad, zero in zip(layout.trainable, grads, unused, strict=True)
        ]
        total, weight, aux = jax.tree.map(lambda x: all_reduce(layout, x), sums)
        share = 1 / parts if weight is None else jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight))
        model_state, differ = merge(layout, model_state)
        # Where they are reduced, gradients are divided by the number of parts; here by what is not known before.
        rest = 1 if weight is None else share * parts
        rest = rest if loss_scale is None else rest / jnp.asarray(loss_scale, jnp.result_type(float))
        dtypes = [leaf.grad_dtype(scaled=loss_scale is not None) for leaf in layout.trainable]
        grads = [scaled(grad, rest, dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
        grads = [leave(layout, leaf, x, stage.grads) for leaf, x in zip(layout.trainable, grads, strict=True)]
        total, aux = jax.tree.map(lambda x: scaled(x, share, x.dtype), (total, aux))
        return (total, model_state, aux), grads, differ

    on_data_shards = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            [border_spec(layout, leaf, stage.params) for leaf in layout.leaves],
            layout.batch_spec,
            P(),
            P(),
            P(),
        ),
        out_specs=(P(), [border_spec(layout, leaf, stage.grads) for leaf in layout.trainable], P()),
        axis_names=set(layout.batch_axes),
        check_vma=False,
    )

    @jax.jit
    def sharded(params, *args):
        params = [enter(layout, leaf, x, stage.params) for leaf, x in zip(layout.leaves, params, strict=True)]
        value, grads, differ = on_data_shards(params, *args)
        return (
            value,
            [left(layout, leaf, x, stage.grads) for leaf, x in zip(layout.trainable, grads, strict=True)],
            differ,
        )

    def program(params, batch, key, model_state, loss_scale=None):
        check_tree("params", params, layout, layout.treedef, layout.leaves, stage.params)
        check_batch(batch, layout, microbatches=microbatches)
        precision.check_batch(batch)
        if isinstance(loss_scale, DynamicLossScale) or (loss_scale is not None and np.shape(loss_scale)):
            raise TypeError(f"loss_scale={loss_scale!r}; wanted a scalar, such as state.loss_scale.scale.")
        for name, asked, given in (("key", with_key, key), ("model_state", with_model_state, model_state)):
            if asked and given is None:
                raise ValueError(f"{name}=None, but with_{name}=True: pass {name}=, or give it to jzero.init.")
            if given is not None and not asked:
                raise ValueError(f"{name}= was passed, but the loss does not get it: ask for it with with_{name}=True.")
        key, model_state = key if with_key else None, model_state if with_model_state else None
        value, grads, differ = sharded(jax.tree.leaves(params), batch, key, model_state, loss_scale)
        return value, layout.trainable_treedef.unflatten(grads), differ

    return program


def _fold(key, index):
    return None if key is None else jax.random.fold_in(key, index)
