"""The model of reference.py in jax, as a user would write it: it knows nothing of jzero.

It computes in the dtype of its params. Softmax, cross-entropy and the statistics of norms are in float32, or wider
where the params are. A norm's scale may be wider than the rest.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tests.reference import EPSILON, HEAD_SIZE


def wider(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x, scale):
    wide = wider(x)
    inverse = lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + EPSILON)
    return (wide * inverse * scale).astype(x.dtype)


def attention(h_BTD, w):
    B, T, D = h_BTD.shape
    qkv = (h_BTD @ w["qkv"]).reshape(B, T, 3, D // HEAD_SIZE, HEAD_SIZE)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q, k) * HEAD_SIZE**-0.5
    causal = jnp.where(jnp.tril(jnp.ones((T, T), bool)), wider(scores_BHTS), -jnp.inf)
    weights = jax.nn.softmax(causal).astype(v.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D) @ w["out"]


def block(x, w):
    x = x + attention(rms_norm(x, w["attention_norm"]), w)
    return x + jax.nn.gelu(rms_norm(x, w["mlp_norm"]) @ w["up"], approximate=True) @ w["down"]


def loss_fn(params, batch):
    """The mean cross-entropy of the next token, in float32 or wider; batch["tokens"] is (B, T + 1)."""
    tokens = batch["tokens"]
    x_BTD = params["embedding"][tokens[:, :-1]] + params["position"]
    x_BTD, _ = lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None)), x_BTD, params["blocks"])
    logits_BTV = rms_norm(x_BTD, params["norm"]) @ params["embedding"].T
    logs = jax.nn.log_softmax(wider(logits_BTV))
    return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], -1))
