"""A small model for tests of precision: a tied table around two scanned blocks, in the dtype of its table.

Each block is rematerialised, so that at stage 3 all of it is gathered twice. Every leaf divides by 8, and on a model
axis of two, with `RULES`, all but the norm are halved.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jzero

SHAPES = {"blocks": {"down": (2, 32, 16), "norm": (2, 16), "up": (2, 16, 32)}, "table": (64, 16)}
SIZES = {"blocks/down": 2 * 32 * 16, "blocks/norm": 2 * 16, "blocks/up": 2 * 16 * 32, "table": 64 * 16}
ELEMENTS = sum(SIZES.values())
RULES = [("table", P("model")), ("blocks/up", P(None, None, "model")), ("blocks/down", P(None, "model"))]
MESHES = [{"data": 8}, {"replica": 2, "data": 4}, {"data": 4, "model": 2}]


def init_params():
    def leaf(shape):
        return jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32) ** 1.5).reshape(shape) * 0.3

    params = jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    params["blocks"]["norm"] += 1
    return params


def block(x, w):
    return x + jnp.tanh((x * w["norm"]).astype(x.dtype) @ w["up"]) @ w["down"], None


def loss_fn(params, batch):
    x, _ = lax.scan(jax.checkpoint(block), params["table"][batch["tokens"]], params["blocks"])
    logs = jax.nn.log_softmax((x @ params["table"].T).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, batch["next"][..., None], -1))


def make_batch(examples=48):
    tokens = np.random.default_rng(0).integers(0, 64, (examples, 5))
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:]}


def make_layout(stage, precision, axes=MESHES[0], params=None, *, min_shard_size=0, **options):
    """Of the model's params, or of others, on as many devices as the axes name."""
    return jzero.zero(
        jax.eval_shape(init_params) if params is None else params,
        stage=stage,
        mesh=jzero.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes),
        precision=precision,
        replica_axes=("replica",) if "replica" in axes else (),
        rules=RULES if "model" in axes and params is None else (),
        min_shard_size=min_shard_size,
        **options,
    )


def elements_per_model_shard(axes):
    """Of all params: what one model shard has, of which the data axes cut each part."""
    return ELEMENTS if "model" not in axes else (ELEMENTS - SIZES["blocks/norm"]) // 2 + SIZES["blocks/norm"]
