"""Between logical shapes, which the loss and the optimizer see, and stored shapes, which divide."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer


def pad(x: Any, shape: tuple[int, ...]) -> Any:
    """Appends zeros to each dim up to `shape`. An array that has it already comes back as it is."""
    if tuple(x.shape) == tuple(shape):
        return x
    return jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def unpad(x: Any, shape: tuple[int, ...]) -> Any:
    """Drops what `pad` appended. Inside of jit this costs nothing where the padding lies with the last shards."""
    if tuple(x.shape) == tuple(shape):
        return x
    return lax.slice(x, (0,) * len(shape), tuple(shape))


def is_concrete(x: Any) -> bool:
    """Whether `x` is a `jax.Array` with a placement, and no tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not isinstance(x, np.ndarray)
