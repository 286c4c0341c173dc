"""The GPT and its loss: plain flax for one device, which knows nothing of meshes or stages.

Two hints say how activations lie on a model axis, if there is one. Pre-norm blocks, rotary positions (RoFormer,
arXiv:2104.09864), a squared ReLU (Primer, arXiv:2109.08668; on CPU it takes far less time than a GELU), one embedding
for input and output. Letters in names are dims: B batch, T time, D width, H heads, K channels of a head, C = 3K,
V = 256 bytes.
"""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jzero

VOCABULARY = 256


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream that it adds to."""

    width: int
    heads: int
    depth: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        inner = nn.initializers.lecun_normal()
        # The residual stream sums 2 x depth branches: smaller ones keep its variance near 1 at the start.
        outer = nn.initializers.variance_scaling(0.5 / self.depth, "fan_in", "truncated_normal")

        def dense(features, name, init):
            return nn.Dense(features, use_bias=False, kernel_init=init, name=name)

        x_BTD = jzero.hint(x_BTD, P(None, "model"))  # sequence parallelism: between blocks, cut along the sequence
        h_BTD = nn.RMSNorm(name="attn_norm")(x_BTD)
        # One head's queries, keys and values lie beside each other, so that columns can be cut into heads.
        qkv_BTHC = dense(3 * self.width, "qkv", inner)(h_BTD).reshape(*x_BTD.shape[:-1], self.heads, -1)
        q_BTHK, k_BTHK, v_BTHK = jnp.split(qkv_BTHC, 3, axis=-1)
        mixed_BTHK = jax.nn.dot_product_attention(rotate(q_BTHK), rotate(k_BTHK), v_BTHK, is_causal=True)
        mixed_BTHK = jzero.hint(mixed_BTHK, P(None, None, "model"))  # within attention, along the heads
        x_BTD = x_BTD + dense(self.width, "out", outer)(mixed_BTHK.reshape(x_BTD.shape))
        h_BTD = nn.RMSNorm(name="mlp_norm")(x_BTD)
        h_BTF = jnp.square(jax.nn.relu(dense(4 * self.width, "up", inner)(h_BTD)))
        return x_BTD + dense(self.width, "down", outer)(h_BTF), None


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Block params are stacked along a first layer dim, for `nn.scan`."""

    layers: int
    width: int
    heads: int
    remat: bool

    @nn.compact
    def __call__(self, bytes_BT: jax.Array) -> jax.Array:
        embedding = nn.Embed(VOCABULARY, self.width, embedding_init=nn.initializers.normal(0.02), name="embedding")
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        blocks = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x_BTD, _ = blocks(self.width, self.heads, self.layers, name="blocks")(embedding(bytes_BT), None)
        return embedding.attend(nn.RMSNorm(name="norm")(x_BTD))


def rotate(x_BTHK: jax.Array) -> jax.Array:
    """Turns pairs of channels by angles that grow with the position."""
    time, channels = x_BTHK.shape[1], x_BTHK.shape[-1]
    angle_TK = jnp.arange(time)[:, None] * 10_000.0 ** (-jnp.arange(0, channels, 2) / channels)
    cos, sin = (f(angle_TK)[:, None].astype(x_BTHK.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def next_byte_logits(model: GPT, params: Any, bytes_BT: jax.Array) -> jax.Array:
    """Logits of the byte after each, (B, T) to (B, T, V)."""
    return cast(jax.Array, model.apply({"params": params}, bytes_BT))


def loss_per_byte(model: GPT, params: Any, windows: jax.Array) -> jax.Array:
    """Cross-entropy in nats of each byte after the first of each window, (B, T + 1) to (B, T)."""
    logits_BTV = next_byte_logits(model, params, windows[:, :-1])
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))  # a sum of 256 exponentials
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, windows[:, 1:])


def mean_loss(model: GPT, params: Any, windows: jax.Array) -> jax.Array:
    """The training loss: mean over the windows that it is given."""
    return loss_per_byte(model, params, windows).mean()
