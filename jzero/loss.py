"""What a loss may return, and how it is summed over devices and microbatches."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_map_with_path

from jzero.check import check_structure


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


def check_call(loss_fn: Any, given: Iterable[str]) -> None:
    """Raises unless `loss_fn` can be called with params, a batch, and these keyword arguments.

    Raises:
        TypeError: It lacks one of them, or needs another.
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(None, None, **dict.fromkeys(given))
    except TypeError as error:
        call = "".join(f", {name}={name}" for name in given)
        raise TypeError(
            f"loss_fn cannot be called as loss_fn(params, batch{call}): {error}. It gets key= with with_key=True, and "
            f"model_state= with with_model_state=True (jzero.explain: where key= or model_state= is passed), and "
            f"nothing else; close over the rest."
        ) from None


_FORMS = {
    (False, False): "loss",
    (True, False): "(loss, aux)",
    (False, True): "(loss, model_state)",
    (True, True): "(loss, (model_state, aux))",
}


def take_apart(out: Any, *, has_aux: bool, with_model_state: bool, model_state: Any) -> tuple[jax.Array, Any, Any]:
    """Takes apart what a loss returned.

    Args:
        out: What it returned.
        has_aux: Whether an aux was asked for.
        with_model_state: Whether a model state was asked for.
        model_state: The model state that the loss was given.

    Returns:
        The total, whose gradient is wanted; the sums (total, weight or None for a mean, aux times weight); the new
        model state.

    Raises:
        TypeError: Another form than asked for, or a loss or aux that is not floating.
        ValueError: A loss that is no scalar, or a model state that changes its structure, shapes or dtypes.
    """
    form, aux = _FORMS[has_aux, with_model_state], None
    if has_aux and with_model_state:
        out, more = _pair(out, form)
        model_state, aux = _changed(model_state, (pair := _pair(more, form))[0]), pair[1]
    elif with_model_state:
        out, more = _pair(out, form)
        model_state = _changed(model_state, more)
    elif has_aux:
        out, aux = _pair(out, form)
    elif isinstance(out, tuple):
        raise TypeError("loss_fn returned a tuple; pass has_aux=True if it returns (loss, aux).")
    weight = None
    if isinstance(out, Weighted):
        total = _scalar("Weighted.total", out.total)
        weight = lax.stop_gradient(_array("Weighted.weight", out.weight))
        if weight.shape:
            raise ValueError(f"Weighted.weight has shape {weight.shape}; wanted a scalar, such as its sum.")
        weight = weight.astype(total.dtype)
    else:
        total = _scalar("The loss", out)

    def weigh(path, x):
        x = _array(f"aux{keystr(path)}", x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"aux{keystr(path)} has dtype {x.dtype}; aux is averaged over the batch, so it must be floating. "
                f"Cast it, for example with .astype('float32')."
            )
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # it is summed over devices and microbatches
        # Without the `where`, the mean of nothing (0/0) in one microbatch would spoil the mean of all.
        return x if weight is None else jnp.where(weight == 0, 0, x * weight.astype(x.dtype))

    return total, (total, weight, tree_map_with_path(weigh, aux)), model_state


def _pair(out, form):
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"loss_fn returned a {type(out).__name__}; it was asked for {form}.")
    return out


def _changed(before, after):
    named = check_structure("The model_state that loss_fn returned", after, jax.tree.structure(before))
    for (path, x), old in zip(named, jax.tree.leaves(before), strict=True):
        if (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(old), jnp.result_type(old)):
            raise ValueError(
                f"The model_state that loss_fn returned has {jnp.result_type(x)}{jnp.shape(x)} at {keystr(path)}; it "
                f"was given {jnp.result_type(old)}{jnp.shape(old)}, and keeps shape and dtype from step to step."
            )
    return after


def _scalar(what, x):
    """The loss as a scalar of at least float32."""
    x = _array(what, x)
    if x.shape:
        raise ValueError(
            f"{what} has shape {x.shape}; wanted a scalar. Take the mean over the batch, or return a "
            f"jzero.Weighted(total, weight)."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{what} has dtype {x.dtype}; wanted a floating scalar.")
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _array(what, x):
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"{what} is a {type(x).__name__}; wanted a number or an array.")
    return jnp.asarray(x)
