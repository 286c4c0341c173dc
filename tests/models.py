"""Losses of many kinds over one set of params: what people write, and what gets in the way of moving a gather."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jzero
from jzero import Stage

# The four of the table, and those of one's own that make sense.
STAGES = {
    "0": 0,
    "1": 1,
    "2": 2,
    "3": 3,
    "deepspeed1": Stage("replicated", "replicated", "sharded", "end"),
    "no_sync": Stage("sharded", "sharded", "sharded", "end"),
    "by_block": Stage("replicated", "replicated", "replicated", "block"),
}

L, D, F, V, H = 3, 24, 48, 64, 4

# Tensor parallelism: vocabulary, columns, rows, heads; a bias whose only other dim is that of the layers.
RULES = [
    ("table", P("model")),
    ("blocks/up", P(None, None, "model")),
    ("blocks/down", P(None, "model")),
    ("blocks/bias", P(None, "model")),
    ("attention/qkv", P(None, None, "model")),
    ("attention/out", P(None, "model")),
    ("square", P(None, "model")),
    ("nested", P(None, None, None, "model")),
    ("kernel", P(None, None, None, "model")),
]


def init_params(key):
    keys = jax.random.split(key, 12)

    def normal(index, *shape):
        return jax.random.normal(keys[index], shape) * 0.1

    return {
        "table": normal(0, V, D),
        "blocks": {"up": normal(1, L, D, F), "down": normal(2, L, F, D), "bias": normal(3, L, D)},
        "square": normal(4, D, D),
        "odd": normal(5, L, 7, 5),
        "nested": normal(6, 2, L, D, D),
        "first": normal(7, 8, 3, 5),  # on 8 devices only the first dim divides, which a scan takes apart
        "attention": {"qkv": normal(8, L, D, 3 * D), "out": normal(9, L, D, D), "norm": 1 + normal(10, L, D)},
        "kernel": normal(11, L, 3, D, D),
    }


def batch():
    return {"tokens": np.random.default_rng(0).integers(0, V, (48, 8))}


def block(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"] + w["bias"]


def _scan(x, p):
    return lax.scan(lambda x, w: (block(x, w), None), x, p["blocks"])[0]


def _remat(x, p):
    return lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None)), x, p["blocks"])[0]


def _remat_saving_dots(x, p):
    policy = jax.checkpoint_policies.dots_saveable
    return lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None), policy=policy), x, p["blocks"])[0]


def _remat_saving_all(x, p):
    policy = jax.checkpoint_policies.everything_saveable
    return lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None), policy=policy), x, p["blocks"])[0]


def _layer(p, index):
    return jax.tree.map(lambda w: w[index], p["blocks"])


def _unrolled(x, p):
    for index in range(L):
        x = block(x, _layer(p, index))
    return x


def _unrolled_remat(x, p):
    for index in range(L):
        x = jax.checkpoint(block)(x, _layer(p, index))
    return x


def _nested(x, p):
    def outer(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], None

    return lax.scan(jax.checkpoint(outer), x, p["nested"])[0]


def _jitted(x, p):
    return jax.jit(block)(x, _layer(p, 0))


def _vmapped(x, p):
    return jnp.sum(jax.vmap(lambda w: jnp.tanh(x @ w @ w.T))(p["nested"][0]), 0)


def _fori(x, p):
    return lax.fori_loop(0, L, lambda index, x: block(x, _layer(p, index)), x)


def _shared(x, p):
    return lax.scan(jax.checkpoint(lambda x, _: (jnp.tanh(x @ p["square"]), None)), x, None, length=4)[0]


def _recurrent(x, p):
    def cell(h, x):
        h = jnp.tanh(h @ p["square"] + x)
        return h, h

    return jnp.moveaxis(lax.scan(cell, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))[1], 0, 1)


def _cond(x, p):
    return lax.cond(jnp.sum(p["blocks"]["bias"]) > -1e9, lambda x: x @ p["square"], lambda x: x + 1, x)


def _while(x, p):
    def body(state):
        return state[0] + 1, state[1] + jnp.sum(p["square"])

    return x * lax.stop_gradient(lax.while_loop(lambda state: state[0] < 3, body, (0, jnp.zeros((), x.dtype)))[1])


@jax.custom_vjp
def _matmul(x, w):
    return x @ w


def _matmul_backward(saved, grad):
    x, w = saved
    return grad @ w.T, jnp.einsum("...i,...j->ij", x, grad)


_matmul.defvjp(lambda x, w: (x @ w, (x, w)), _matmul_backward)


def _custom_vjp(x, p):
    return _matmul(x, p["square"])


def _custom_jvp(x, p):
    return jax.nn.relu(x @ p["square"]) + jax.nn.silu(x @ p["square"].T)


def _reshaped(x, p):
    heads = p["blocks"]["up"][0].reshape(D, 4, F // 4).transpose(1, 0, 2)
    return x + jnp.einsum("btd,hdf->bthf", x, heads).reshape(*x.shape[:2], F)[..., :D]


def _experts(x, p):
    weights = jax.nn.softmax(x @ p["square"][:, :L])
    outs = jnp.einsum("btd,edf->btef", x, p["blocks"]["up"])
    return x + jnp.einsum("btef,efd,bte->btd", jax.nn.gelu(outs), p["blocks"]["down"], weights)


def _padded(x, p):
    return x + lax.scan(lambda c, w: (c + jnp.sum(jnp.sin(w)), None), jnp.zeros((), x.dtype), p["odd"])[0]


def _scanned_first(x, p):
    return x + lax.scan(lambda c, w: (c + jnp.sum(jnp.sin(w)), None), jnp.zeros((), x.dtype), p["first"])[0]


def _mapped(x, p):
    return x + jnp.sum(lax.map(lambda w: jnp.tanh(x @ w), p["nested"][1]), 0)


def _marked(x, p):
    return block(x, jzero.gather(_layer(p, 1)))


def _cond_experts(x, p):
    def expert(w):
        used = jnp.sum(w["bias"]) > 0  # not the same for all experts
        return lax.cond(used, lambda: jax.nn.gelu(x @ w["up"]) @ w["down"], lambda: x * jnp.sum(w["bias"]))

    gate = jax.nn.softmax(x @ p["square"][:, :L])
    return x + sum(gate[..., index, None] * expert(_layer(p, index)) for index in range(L))


def _gpt_block(x, w):
    """Attention and MLP, with the sequence cut over the model axis between them, where there is one that divides."""
    attention, mlp = w
    sequence = P(None, "model") if x.shape[1] % 4 == 0 else P()
    x = jzero.hint(x, sequence)
    h = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * attention["norm"]
    q, k, v = jnp.split((h @ attention["qkv"]).reshape(*x.shape[:2], H, -1), 3, -1)
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jzero.hint(jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v), P(None, None, "model"))
    return block(x + mixed.reshape(x.shape) @ attention["out"], mlp)


def _gpt(x, p):
    body = jax.checkpoint(lambda x, w: (_gpt_block(x, w), None))
    return lax.scan(body, x, (p["attention"], p["blocks"]))[0]


def _gpt_unrolled(x, p):
    for index in range(L):
        x = _gpt_block(x, jax.tree.map(lambda w, index=index: w[index], (p["attention"], p["blocks"])))
    return x


BODIES = {
    body.__name__.strip("_"): body
    for body in (
        _scan,
        _remat,
        _remat_saving_dots,
        _remat_saving_all,
        _unrolled,
        _unrolled_remat,
        _nested,
        _jitted,
        _vmapped,
        _fori,
        _shared,
        _recurrent,
        _cond,
        _while,
        _custom_vjp,
        _custom_jvp,
        _reshaped,
        _experts,
        _padded,
        _scanned_first,
        _mapped,
        _marked,
        _cond_experts,
        _gpt,
        _gpt_unrolled,
    )
}


def loss(name):
    """The loss with this body between a tied table of tokens."""

    def loss_fn(params, batch):
        x = BODIES[name](params["table"][batch["tokens"]], params)
        logs = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logs, (batch["tokens"][..., None] + 1) % V, -1))

    return loss_fn


def conv_loss(batch_axes=()):
    """A residual convolutional net with batch norm over the whole batch, which is cut over these axes."""

    def over_batch(x):
        mean = jnp.mean(x, (0, 1))
        return jax.lax.pmean(mean, batch_axes) if batch_axes else mean

    def loss_fn(params, batch):
        def layer(x, kernel):
            y = lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
            y = y - over_batch(y)
            return x + jax.nn.relu(y * lax.rsqrt(over_batch(y**2) + 1e-6)), None

        x, _ = lax.scan(layer, params["table"][batch["tokens"]], params["kernel"])
        logs = jax.nn.log_softmax(jnp.mean(x, 1) @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logs, batch["tokens"][:, :1], -1))

    return loss_fn
