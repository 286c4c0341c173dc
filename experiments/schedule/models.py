"""What is compiled: a byte-level GPT of any size in plain JAX, which knows nothing of meshes or stages.

Params are float32, and each block casts its own to bfloat16. Letters in names are dims: B batch, T time, D width,
F width of the MLP, H heads, K channels of a head, V = 256 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.schedule.config import Config

VOCABULARY = 256


@dataclass(frozen=True)
class Model:
    """What is compiled.

    Attributes:
        params: Abstract params.
        loss_fn: `loss_fn(params, batch)`.
        batch: The abstract batch of one data shard.
        rules: Which dims an axis named model cuts, as for `zero`.
    """

    params: Any
    loss_fn: Callable[[Any, jax.Array], jax.Array]
    batch: jax.ShapeDtypeStruct
    rules: tuple[tuple[str, P], ...]


def gpt(config: Config) -> Model:
    """The GPT; its batch is bytes, (B, T + 1)."""
    width, heads = config.width, config.heads
    shapes = {
        "attn": {"norm": (width,), "qkv": (width, 3 * width), "out": (width, width)},
        "mlp": {"norm": (width,), "up": (width, 4 * width), "down": (4 * width, width)},
    }

    def block(x_BTD, weights):
        weights = _to_bfloat16(weights)
        x_BTD = x_BTD + _attention(x_BTD, heads, **weights["attn"])
        return x_BTD + _mlp(x_BTD, **weights["mlp"]), None

    def loss_fn(params, bytes_BT):
        embedding_VD, norm_D = _to_bfloat16((params["embedding"], params["norm"]))
        x_BTD = embedding_VD[bytes_BT[:, :-1]]
        run = jax.checkpoint(block) if config.remat else block
        if config.unrolled:
            for weights in params["blocks"]:
                x_BTD, _ = run(x_BTD, weights)
        else:
            x_BTD, _ = lax.scan(run, x_BTD, params["blocks"])
        logits_BTV = (_normalise(x_BTD, norm_D) @ embedding_VD.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, bytes_BT[:, 1:]).mean()

    def leaves(*stack):
        def leaf(shape):
            return jax.ShapeDtypeStruct((*stack, *shape), jnp.float32)

        return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))

    params = {
        "embedding": jax.ShapeDtypeStruct((VOCABULARY, width), jnp.float32),
        "blocks": [leaves() for _ in range(config.layers)] if config.unrolled else leaves(config.layers),
        "norm": jax.ShapeDtypeStruct((width,), jnp.float32),
    }
    rows, columns = (P("model"), P(None, "model")) if config.unrolled else (P(None, "model"), P(None, None, "model"))
    rules = ("*/qkv", columns), ("*/out", rows), ("*/up", columns), ("*/down", rows)
    return Model(params, loss_fn, jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32), rules)


def _attention(x_BTD, heads, norm, qkv, out):
    width, time = x_BTD.shape[-1], x_BTD.shape[1]
    mixed = (_normalise(x_BTD, norm) @ qkv).reshape(*x_BTD.shape[:2], heads, -1)
    q_BTHK, k_BTHK, v_BTHK = jnp.split(mixed, 3, axis=-1)
    scores_BHTT = jnp.einsum("bqhk,bshk->bhqs", q_BTHK, k_BTHK).astype(jnp.float32) * (width // heads) ** -0.5
    scores_BHTT = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores_BHTT, -jnp.inf)
    weights_BHTT = jax.nn.softmax(scores_BHTT).astype(x_BTD.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights_BHTT, v_BTHK).reshape(x_BTD.shape) @ out


def _mlp(x_BTD, norm, up, down):
    return jax.nn.gelu(_normalise(x_BTD, norm) @ up) @ down


def _normalise(x_BTD, scale_D):
    wide = x_BTD.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x_BTD.dtype) * scale_D


def _to_bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


MODELS = {"gpt": gpt}
