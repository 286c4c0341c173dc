"""Text from a trained model, one byte after another."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.jit, static_argnames=("apply", "context", "count"))
def _continue(apply, params, text, start, key, temperature, *, context, count):
    def next_byte(text, at):
        begin = jnp.maximum(at - context, 0)
        # Bytes at and after `at` are not written yet; no position before them can see them.
        logits = apply(params, jax.lax.dynamic_slice(text, (begin,), (context,))[None])[0, at - begin - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / jnp.maximum(temperature, 1e-6))
        byte = jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(text.dtype)
        return text.at[at].set(byte), byte

    return jax.lax.scan(next_byte, text, start + jnp.arange(count))[1]


def generate(
    apply: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: bytes,
    *,
    count: int,
    context: int,
    temperature: float,
    seed: int,
) -> bytes:
    """Draws `count` bytes that go on from `prompt`, on one device; a pure function of its arguments.

    Args:
        apply: `(params, bytes) -> logits`, as of a `Job`.
        params: Whole params, on one device or in host memory.
        prompt: One byte or more.
        count: How many bytes to draw.
        context: How many bytes the model sees at once.
        temperature: Divides the logits; 0 takes the likeliest byte.
        seed: Of the draws.

    Returns:
        The bytes drawn, without the prompt.
    """
    text = np.zeros(max(len(prompt) + count, context), np.int32)
    text[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    key = jax.random.key(seed)
    drawn = _continue(apply, params, text, len(prompt), key, temperature, context=context, count=count)
    return np.asarray(drawn).astype(np.uint8).tobytes()


def printable(text: bytes) -> str:
    """The text as UTF-8, with what is no text (a model that has learnt little makes any byte) shown as U+FFFD."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in decoded)
