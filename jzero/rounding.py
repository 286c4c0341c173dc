"""Arithmetic between dtypes: products that keep their bits, and rounding that is right on average."""

from typing import Any

import jax
import jax.numpy as jnp


def cast(x: Any, dtype: Any) -> Any:
    """The array in this dtype; random keys and others that need no cast come back as they are."""
    return x if x.dtype == dtype else x.astype(dtype)


def scaled(x: jax.Array, factor: Any, dtype: Any) -> jax.Array:
    """A product in at least float32, so that a share of a long batch does not lose its bits in bfloat16."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * jnp.asarray(factor, wide)).astype(dtype)


def rounded(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """Casts to another dtype: to bfloat16 up or down at random, so that it is right on average."""
    if dtype != jnp.bfloat16 or x.dtype == jnp.bfloat16:
        return cast(x, dtype)
    x = x.astype(jnp.float32)
    # What bfloat16 leaves out of a float32 are its last 16 bits. Adding to them what is as often each number below
    # 2 ** 16 carries over as often as they are near to that.
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(bits, jnp.float32), x).astype(dtype)
