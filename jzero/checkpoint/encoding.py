"""How a leaf becomes an array that tensorstore and orbax can hold, and back, without losing a bit.

| leaf | stored as |
|---|---|
| a dtype that zarr 3 knows | itself |
| any other (uint4, float8_e4m3, ...) | its bits, in unsigned integers of the same number of bytes |
| a random key | its uint32 words, with one more dim; the implementation's name is in the manifest |
| an array without elements | nothing; shape and dtype are in the manifest |
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

NATIVE = frozenset(
    {
        "bool",
        "int2",
        "int4",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
    }
)
"""Dtypes that tensorstore writes in zarr 3."""

BITS = frozenset({"uint2", "uint4", "float8_e4m3"})
"""Dtypes of JAX that it does not, one byte for each element."""

SOME = 2**16
"""How many numbers are cast at once."""

KEY = "key:"
"""Starts the dtype of a leaf of random keys; the name of the implementation follows."""


def name_of(x: Any) -> str:
    """The dtype of an array as manifests have it, such as "float32" or "key:threefry2x32"."""
    return KEY + str(jax.random.key_impl(x)) if is_key(x) else str(x.dtype)


def is_key(x: Any) -> bool:
    """Whether an array holds random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def dtype_of(name: str) -> np.dtype:
    """The dtype of numpy that a name stands for.

    Raises:
        ValueError: No dtype that checkpoints hold.
    """
    if name not in NATIVE | BITS:
        raise ValueError(f"dtype {name!r} is none that a checkpoint of jzero holds.")
    return np.dtype(getattr(ml_dtypes, name, name))


def stored_dtype(name: str) -> str:
    """In which dtype a leaf with elements is stored."""
    if name.startswith(KEY):
        return "uint32"
    return f"uint{8 * dtype_of(name).itemsize}" if name in BITS else str(dtype_of(name))


def bits(array: np.ndarray, stored: str) -> np.ndarray:
    """An array as it is stored. Nothing is copied."""
    return array if str(array.dtype) == stored else array.view(dtype_of(stored))


def values(array: np.ndarray, name: str) -> np.ndarray:
    """The array that was stored. Nothing is copied."""
    return array if name.startswith(KEY) or str(array.dtype) == name else array.view(dtype_of(name))


def is_float(name: str) -> bool:
    """Whether this is the name of a dtype of floats, of any width, that can be stored.

    Example:
        >>> is_float("float8_e4m3fn"), is_float("int8"), is_float("key:threefry2x32"), is_float("real")
        (True, False, False, False)
    """
    return name in NATIVE | BITS and jnp.issubdtype(dtype_of(name), jnp.floating)


def cast(array: np.ndarray, name: str) -> np.ndarray:
    """Floats as others, each rounded once to the nearest, ties to even, and C-contiguous.

    Numpy does so to float32 and float16; to what is narrower, float64 goes through float32 there, and is rounded twice.
    Here that float32 is rounded to odd: what lies between two of its numbers becomes the one whose last bit is set, and
    so stays on its side of the middle of any two narrower ones (S. Boldo, G. Melquiond, "When double rounding is odd",
    2005). Float32 has more than the two further bits that this needs.
    """
    target = dtype_of(name)
    if array.dtype != np.float64 or target in (np.float64, np.float32, np.float16):
        with np.errstate(invalid="ignore"):  # a NaN that signals becomes one that does not
            if array.itemsize == target.itemsize == 1:  # numpy has no cast between float8_e8m0fnu and others of 8 bits
                array = array.astype(np.float32)
            return array.astype(target, order="C")
    found = np.empty(array.shape, target)
    flat = found.reshape(-1)
    for begin in range(0, flat.size, SOME):  # a few at a time, for what this takes beside the result
        flat[begin : begin + SOME] = _to_odd(array.flat[begin : begin + SOME]).astype(target)
    return found


def _to_odd(array: np.ndarray) -> np.ndarray:
    """Float64 as float32: what lies between two numbers becomes the one of them that is odd."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = array.astype(np.float32)
    back = near.astype(np.float64)
    between = back != array
    # Of numbers with the same sign the bits are in the order of their size: one less is the next towards zero.
    towards = near.view(np.uint32) - (between & (np.abs(back) > np.abs(array)))
    return (towards | between).view(np.float32)


def words(x: Any) -> Any:
    """Random keys as their uint32 words; any other array as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def wrapped(x: jax.Array, name: str) -> jax.Array:
    """The inverse of `words`."""
    return jax.random.wrap_key_data(x, impl=name.removeprefix(KEY)) if name.startswith(KEY) else x


def nbytes(shape: tuple[int, ...], stored: str) -> int:
    """Bytes of an array of this stored dtype."""
    return math.prod(shape) * dtype_of(stored).itemsize
