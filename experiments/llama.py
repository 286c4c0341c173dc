"""Llama 3's shape (arXiv:2407.21783) in plain JAX, to look at before there are machines: `jzero preflight` takes it.

    jzero preflight experiments.llama:train_8b --target h200x2x8

RMSNorm before each half of a block, rotary positions, grouped-query attention, SwiGLU; blocks are stacked and scanned,
and recomputed in the backward pass. Letters in names are dims: B batch, T time, D width, F width of the MLP, H query
heads, G key and value heads, R = H / G, K channels of a head, V vocabulary, L layers.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jzero


@dataclass(frozen=True)
class Sizes:
    """Dims of the model; the defaults are Llama 3 8B, of 8.03 billion params."""

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    theta: float = 500_000.0


RULES = [
    ("embedding", P("model")),
    ("head", P(None, "model")),
    ("blocks/[qkv]", P(None, None, "model")),
    ("blocks/out", P(None, "model")),
    ("blocks/gate", P(None, None, "model")),
    ("blocks/up", P(None, None, "model")),
    ("blocks/down", P(None, "model")),
]
"""Tensor parallelism, for a mesh with an axis named model: heads, the MLP and the vocabulary."""


def init_params(sizes: Sizes, key: jax.Array) -> dict[str, Any]:
    """Random params in float32; those of all blocks are stacked along a first dim L."""
    width, channels = sizes.width, sizes.width // sizes.heads
    shapes = {
        "q": (width, sizes.heads * channels),
        "k": (width, sizes.kv_heads * channels),
        "v": (width, sizes.kv_heads * channels),
        "out": (sizes.heads * channels, width),
        "gate": (width, sizes.hidden),
        "up": (width, sizes.hidden),
        "down": (sizes.hidden, width),
    }
    *keys, first, last = jax.random.split(key, len(shapes) + 2)
    blocks = {
        name: 0.02 * jax.random.normal(k, (sizes.layers, *shape))
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    norms = {name: jnp.ones((sizes.layers, width)) for name in ("attn_norm", "mlp_norm")}
    return {
        "embedding": 0.02 * jax.random.normal(first, (sizes.vocabulary, width)),
        "blocks": blocks | norms,
        "norm": jnp.ones(width),
        "head": 0.02 * jax.random.normal(last, (width, sizes.vocabulary)),
    }


def loss_fn(sizes: Sizes, params: Any, tokens_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy of each next token; tokens are (B, T + 1)."""
    x_BTD = params["embedding"][tokens_BT[:, :-1]]
    x_BTD, _ = lax.scan(jax.checkpoint(functools.partial(block, sizes)), x_BTD, params["blocks"])
    logits_BTV = (normalise(x_BTD, params["norm"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:]).mean()


def block(sizes: Sizes, x_BTD: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """One block of the residual stream."""
    x_BTD = x_BTD + attention(sizes, normalise(x_BTD, weights["attn_norm"]), weights)
    return x_BTD + mlp(normalise(x_BTD, weights["mlp_norm"]), weights), None


def attention(sizes: Sizes, x_BTD: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Each of G heads of keys and values serves R heads of queries."""
    batch, time, _ = x_BTD.shape
    q_BTHK, k_BTGK, v_BTGK = (
        (x_BTD @ weights[name]).reshape(batch, time, heads, -1)
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
    )
    q_BTHK, k_BTGK = rotated(q_BTHK, sizes.theta), rotated(k_BTGK, sizes.theta)
    mixed_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, is_causal=True)
    return mixed_BTHK.reshape(batch, time, -1) @ weights["out"]


def mlp(x_BTD: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """SwiGLU (arXiv:2002.05202)."""
    return (jax.nn.silu(x_BTD @ weights["gate"]) * (x_BTD @ weights["up"])) @ weights["down"]


def normalise(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """RMSNorm (arXiv:1910.07467), in float32."""
    wide = x_BTD.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x_BTD.dtype) * scale_D


def rotated(x_BTHK: jax.Array, theta: float) -> jax.Array:
    """Turns pairs of channels by angles that grow with the position (arXiv:2104.09864)."""
    time, channels = x_BTHK.shape[1], x_BTHK.shape[-1]
    angle_TK = jnp.arange(time)[:, None] * theta ** (-jnp.arange(0, channels, 2) / channels)
    cos, sin = (f(angle_TK)[:, None].astype(x_BTHK.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def planned(mesh: Mesh, sizes: Sizes, *, context: int, sequences: int) -> tuple[jzero.TrainStep, Any, Any]:
    """A training step in bfloat16 with AdamW, and the shapes of its state and batch.

    Stage 3; stage 1 beside a model axis. A mesh axis named replica repeats what data cuts.

    Args:
        mesh: Has an axis data, perhaps replica and model.
        sizes: The model.
        context: Tokens per sequence.
        sequences: Per batch shard.
    """
    axes, key = mesh.shape, jax.random.key(0)
    init = functools.partial(init_params, sizes)
    layout = jzero.zero(
        jax.eval_shape(init, key),
        stage=3 if axes.get("model", 1) == 1 else 1,
        mesh=mesh,
        replica_axes=tuple(name for name in mesh.axis_names if name == "replica"),
        rules=RULES if "model" in mesh.axis_names else (),
        precision="bf16",
    )
    tx = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    step = jzero.train_step(functools.partial(loss_fn, sizes), tx, layout, clip_norm=1.0)
    state = jax.eval_shape(functools.partial(jzero.init, init, tx, layout), key)
    return step, state, jax.ShapeDtypeStruct((sequences * layout.batch_shards, context + 1), jnp.int32)


def train_8b(mesh: Mesh) -> tuple[jzero.TrainStep, Any, Any]:
    """Llama 3 8B, one sequence of 4096 tokens per batch shard."""
    return planned(mesh, Sizes(), context=4096, sequences=1)
