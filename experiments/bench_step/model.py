"""The GPT that is measured, in plain JAX: blocks stacked along a first layer dim, scanned and rematerialised.

Pre-norm blocks, causal attention, a squared ReLU, one embedding for input and output. Letters in names are dims: B
batch, T time, D width, H heads, K channels of a head, F = 4 D, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

Weights = dict[str, jax.Array]


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of the global batch."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 256
    context: int = 128
    batch_size: int = 8

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: wanted 1 or more.")
        if self.width % self.heads:
            raise ValueError(f"--width {self.width} --heads {self.heads}: wanted a width that the heads divide evenly.")


def init_params(size: Size, key: jax.Array) -> dict:
    """Params as `{"embedding": ..., "norm": ..., "blocks": {name: stack over layers}}`."""
    width, layers = size.width, size.layers
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    keys = dict(zip(("embedding", *shapes), jax.random.split(key, 1 + len(shapes)), strict=True))
    blocks = {
        name: jax.random.normal(keys[name], (layers, *shape)) * shape[0] ** -0.5 for name, shape in shapes.items()
    }
    blocks |= {name: jnp.ones((layers, width)) for name in ("attn_norm", "mlp_norm")}
    embedding = jax.random.normal(keys["embedding"], (size.vocabulary, width)) * 0.02
    return {"embedding": embedding, "norm": jnp.ones(width), "blocks": blocks}


def make_tokens(size: Size, key: jax.Array) -> jax.Array:
    """A batch, (B, T + 1)."""
    return jax.random.randint(key, (size.batch_size, size.context + 1), 0, size.vocabulary)


def mean_loss(
    size: Size, params: dict, tokens: jax.Array, prepare: Callable[[dict], Weights] = lambda w: w
) -> jax.Array:
    """Mean cross-entropy of each token after the first.

    `prepare` is for those who shard by hand: it gets the weights outside of the blocks, and at the head of each
    rematerialised block those of the block. All others leave it alone.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)  # inside of a scan there is nothing to prevent
    def block(x_BTD, w):
        return _block(x_BTD, prepare(w), size.heads)

    outer = prepare({"embedding": params["embedding"], "norm": params["norm"]})
    x_BTD, _ = lax.scan(lambda x, w: (block(x, w), None), outer["embedding"][tokens[:, :-1]], params["blocks"])
    logits_BTV = _normed(x_BTD, outer["norm"]) @ outer["embedding"].T
    wanted_BT = jnp.take_along_axis(logits_BTV, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - wanted_BT)


def _block(x_BTD, w, heads):
    q_BTHK, k_BTHK, v_BTHK = (
        part.reshape(*part.shape[:-1], heads, -1)
        for part in jnp.split(_normed(x_BTD, w["attn_norm"]) @ w["qkv"], 3, axis=-1)
    )
    mixed_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True)
    x_BTD = x_BTD + mixed_BTHK.reshape(x_BTD.shape) @ w["out"]
    h_BTF = jnp.square(jax.nn.relu(_normed(x_BTD, w["mlp_norm"]) @ w["up"]))
    return x_BTD + h_BTF @ w["down"]


def _normed(x, scale):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale
