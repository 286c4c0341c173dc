"""One leaf with its logical shape, and as it is stored."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jzero.padding import is_concrete, pad, unpad
from jzero.rules import Leaf
from jzero.stage import Placement


def unpadded(path: str, x: Any, leaf: Leaf, shards: int, whole: Sharding | None) -> Any:
    """With its logical shape; outside of jit made whole on every device, with this sharding if there is one.

    Raises:
        ValueError: It is padded, outside of jit, and there is no sharding; or it has another shape.
        TypeError: It is no array.
    """
    shape = _shape_of("logical", path, x, leaf)
    if shape == leaf.shape or not is_concrete(x):
        return unpad(x, leaf.shape)
    if whole is None:
        raise ValueError(
            f"logical: {path} is stored padded to {leaf.stored}; its logical shape {leaf.shape} does not "
            f"divide over {shards} devices, and JAX has no uneven shardings outside of jit. Call logical "
            f"inside of jax.jit, or pass replicate=True for a whole copy on every device."
        )
    return jax.jit(unpad, static_argnums=1, out_shardings=whole)(x, leaf.shape)


def padded(path: str, x: Any, leaf: Leaf, placement: Placement, sharding: Sharding) -> Any:
    """As it is stored under a placement; outside of jit also placed with this sharding, if it has to be padded.

    Raises:
        ValueError: It has another shape.
        TypeError: It is no array.
    """
    wanted = leaf.placed(placement).shape
    if _shape_of("stored", path, x, leaf) not in (leaf.shape, wanted):
        raise ValueError(f"stored: {path} has the padded shape {x.shape}; wanted its logical shape {leaf.shape}.")
    if tuple(x.shape) == wanted or isinstance(x, Tracer):
        return pad(x, wanted)
    return jax.jit(pad, static_argnums=1, out_shardings=sharding)(x, wanted)


def _shape_of(method: str, path: str, x: Any, leaf: Leaf) -> tuple[int, ...]:
    if not hasattr(x, "dtype"):
        raise TypeError(f"{method}: {path} is a {type(x).__name__}, not an array.")
    shape = tuple(np.shape(x))
    if shape not in (leaf.shape, leaf.stored):
        padded = f", or stored {leaf.stored}" if leaf.stored != leaf.shape else ""
        raise ValueError(f"{method}: {path} has shape {shape}; wanted {leaf.shape}{padded}.")
    return shape
