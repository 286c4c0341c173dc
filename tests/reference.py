"""A small GPT and its training in float64, in numpy alone: forward and backward pass by hand, updates from the papers.

Nothing of jax, optax or jzero is used here, so that what agrees with it does not agree by sharing a mistake.
Dims: layers L, batch B, length T, width D, heads H, head size K, hidden F, vocabulary V.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

HEAD_SIZE = 16
EPSILON = 1e-6  # of RMSNorm
DECAYED = ("qkv", "out", "up", "down")  # the matrices of the blocks: no norm, no embedding


def init_params(seed=0, layers=2, width=32, length=16, vocabulary=64):
    """Blocks are stacked along their first dim. The norms' scales are not 1, so that none goes missing unseen."""
    rng = np.random.default_rng(seed)

    def normal(*shape, std):
        return rng.normal(size=shape) * std

    return {
        "embedding": normal(vocabulary, width, std=0.1),
        "position": normal(length, width, std=0.1),
        "blocks": {
            "attention_norm": 1 + normal(layers, width, std=0.1),
            "qkv": normal(layers, width, 3 * width, std=width**-0.5),
            "out": normal(layers, width, width, std=width**-0.5),
            "mlp_norm": 1 + normal(layers, width, std=0.1),
            "up": normal(layers, width, 4 * width, std=width**-0.5),
            "down": normal(layers, 4 * width, width, std=(4 * width) ** -0.5),
        },
        "norm": 1 + normal(width, std=0.1),
    }


def make_batches(steps, examples=8, seed=1, length=16, vocabulary=64):
    """Text that can be learned: each token is followed by one of four that depend on it. (B, T + 1) per batch."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (steps, examples, length + 1))
    for t in range(length):
        tokens[..., t + 1] = (5 * tokens[..., t] + tokens[..., t + 1] % 4) % vocabulary
    return [{"tokens": batch} for batch in tokens]


# Trees: dicts of dicts of arrays.


def map_tree(function, tree, *rest):
    if isinstance(tree, dict):
        return {name: map_tree(function, tree[name], *(other[name] for other in rest)) for name in tree}
    return function(tree, *rest)


def flatten(tree, prefix=""):
    """{"blocks/up": array, ...}"""
    if not isinstance(tree, dict):
        return {prefix: tree}
    inner = [flatten(tree[name], f"{prefix}/{name}" if prefix else name) for name in tree]
    return {path: leaf for leaves in inner for path, leaf in leaves.items()}


def global_norm(tree):
    return math.sqrt(sum((leaf**2).sum() for leaf in flatten(tree).values()))


def decay_mask(tree, decayed=False):
    """True for each leaf whose weights decay."""
    if isinstance(tree, dict):
        return {name: decay_mask(child, name in DECAYED) for name, child in tree.items()}
    return decayed


# The model. Each `_backward` takes the gradient of what its forward gave, and what the forward saved.


def rms_norm(x, scale):
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    normed = x * inverse
    return normed * scale, (normed, inverse, scale)


def rms_norm_backward(dy, saved):
    normed, inverse, scale = saved
    dnormed = dy * scale
    dx = inverse * (dnormed - normed * (dnormed * normed).mean(-1, keepdims=True))
    return dx, (dy * normed).reshape(-1, scale.size).sum(0)


def matmul_backward(dy, x, w):
    """Gradients of x and w for y = x @ w."""
    return dy @ w.T, np.einsum("bti,btj->ij", x, dy)


def gelu(x):
    """The approximation by tanh (Hendrycks and Gimpel 2016), and its derivative."""
    c = math.sqrt(2 / math.pi)
    tanh = np.tanh(c * (x + 0.044715 * x**3))
    return x * (1 + tanh) / 2, (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * c * (1 + 3 * 0.044715 * x**2)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(h_BTD, qkv, out):
    B, T, D = h_BTD.shape
    q, k, v = np.moveaxis((h_BTD @ qkv).reshape(B, T, 3, D // HEAD_SIZE, HEAD_SIZE), 2, 0)
    scores_BHTS = np.einsum("bthk,bshk->bhts", q, k) / math.sqrt(HEAD_SIZE)
    weights = softmax(np.where(np.tril(np.ones((T, T), bool)), scores_BHTS, -np.inf))
    mixed_BTD = np.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D)
    return mixed_BTD @ out, (h_BTD, qkv, out, q, k, v, weights, mixed_BTD)


def attention_backward(dy, saved):
    h_BTD, qkv, out, q, k, v, weights, mixed_BTD = saved
    dmixed, dout = matmul_backward(dy, mixed_BTD, out)
    dmixed = dmixed.reshape(q.shape)
    dv = np.einsum("bhts,bthk->bshk", weights, dmixed)
    dweights = np.einsum("bthk,bshk->bhts", dmixed, v)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) / math.sqrt(HEAD_SIZE)
    dq = np.einsum("bhts,bshk->bthk", dscores, k)
    dk = np.einsum("bhts,bthk->bshk", dscores, q)
    dh, dqkv = matmul_backward(np.stack([dq, dk, dv], 2).reshape(*h_BTD.shape[:2], -1), h_BTD, qkv)
    return dh, dqkv, dout


def block(x, w):
    h, attention_norm = rms_norm(x, w["attention_norm"])
    y, attended = attention(h, w["qkv"], w["out"])
    x = x + y
    h, mlp_norm = rms_norm(x, w["mlp_norm"])
    hidden, slope = gelu(h @ w["up"])
    return x + hidden @ w["down"], (w, attention_norm, attended, mlp_norm, h, hidden, slope)


def block_backward(dx, saved):
    w, attention_norm, attended, mlp_norm, h, hidden, slope = saved
    dhidden, ddown = matmul_backward(dx, hidden, w["down"])
    dh, dup = matmul_backward(dhidden * slope, h, w["up"])
    dh, dmlp_norm = rms_norm_backward(dh, mlp_norm)
    dx = dx + dh
    dh, dqkv, dout = attention_backward(dx, attended)
    dh, dattention_norm = rms_norm_backward(dh, attention_norm)
    grads = {"attention_norm": dattention_norm, "qkv": dqkv, "out": dout}
    return dx + dh, {**grads, "mlp_norm": dmlp_norm, "up": dup, "down": ddown}


def predict(params, tokens):
    """Probabilities of the next token, and what the backward pass needs: (B, T) -> (B, T, V)."""
    x_BTD, saved_blocks = params["embedding"][tokens] + params["position"], []
    for layer in range(len(params["blocks"]["qkv"])):
        x_BTD, saved = block(x_BTD, map_tree(lambda w, layer=layer: w[layer], params["blocks"]))
        saved_blocks.append(saved)
    h_BTD, norm = rms_norm(x_BTD, params["norm"])
    return softmax(h_BTD @ params["embedding"].T), (h_BTD, norm, saved_blocks)


def gradients(params, batch, loss_scale=1.0):
    """The mean cross-entropy of the next token, and the gradients of it times the loss scale."""
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:, None]
    probabilities_BTV, (h_BTD, norm, saved_blocks) = predict(params, tokens)
    of_targets = np.take_along_axis(probabilities_BTV, targets, -1)
    dlogits = probabilities_BTV.copy()
    np.put_along_axis(dlogits, targets, of_targets - 1, -1)
    dh, dhead = matmul_backward(dlogits * loss_scale / tokens.size, h_BTD, params["embedding"].T)
    dx, dnorm = rms_norm_backward(dh, norm)
    dblocks = []
    for saved in reversed(saved_blocks):
        dx, dblock = block_backward(dx, saved)
        dblocks.insert(0, dblock)
    dembedding = dhead.T.copy()  # tied: from the logits, and from the lookup
    np.add.at(dembedding, tokens, dx)
    dblocks = map_tree(lambda *layers: np.stack(layers), *dblocks)
    grads = {"embedding": dembedding, "position": dx.sum(0), "blocks": dblocks, "norm": dnorm}
    return -np.log(of_targets).mean(), grads


# Training.


@dataclasses.dataclass
class DynamicLossScale:
    """DeepSpeed's rule, one call of `update` per step; `scale` is the one that the next step uses.

    In the words of its docstring: the scale grows after `growth_interval` clean steps. Its newest code waits for one
    more after the start and after each overflow.
    """

    initial: float = 2.0**16
    growth_interval: int = 1000
    factor: float = 2.0
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive_hysteresis: bool = False

    def __post_init__(self):
        self.scale, self.hysteresis_left, self.clean_steps = self.initial, self.hysteresis, 0

    def update(self, overflow):
        if overflow:
            if self.hysteresis_left > 1:
                self.hysteresis_left -= 1
            elif self.scale == self.minimum:
                raise FloatingPointError(f"overflow with the loss scale at its minimum, {self.minimum}")
            else:
                self.scale = max(self.scale / self.factor, self.minimum)
            self.clean_steps = 0
            return
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.scale *= self.factor
            self.hysteresis_left, self.clean_steps = self.hysteresis, 0


@dataclasses.dataclass
class Trainer:
    """AdamW (Loshchilov and Hutter 2019) over microbatches, with clipping and a loss scale.

    `learning_rate`: a number, or a function of the count of updates made so far. `params`, the moments `mu` and `nu`
    and `count` are replaced at each step and never written into.
    """

    params: dict
    learning_rate: float | Callable[[int], float] = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    microbatches: int = 1
    loss_scale: float | DynamicLossScale = 1.0

    def __post_init__(self):
        self.mu = self.nu = map_tree(np.zeros_like, self.params)
        self.count = self.skipped_in_a_row = 0

    def accumulate(self, batch, scale, overflow_in):
        """Loss and gradients of the whole batch, as means over equal parts; gradients still carry the loss scale."""
        loss, grads = 0.0, map_tree(np.zeros_like, self.params)
        for index, tokens in enumerate(np.split(batch["tokens"], self.microbatches)):
            part_loss, part = gradients(self.params, {"tokens": tokens}, scale)
            if index == overflow_in:
                part["norm"][0] = np.inf
            loss += part_loss / self.microbatches
            grads = map_tree(lambda total, g: total + g / self.microbatches, grads, part)
        return loss, grads

    def step(self, batch, overflow_in=None):
        """One step, and its metrics. `overflow_in`: the microbatch in which one gradient becomes infinite."""
        dynamic = self.loss_scale if isinstance(self.loss_scale, DynamicLossScale) else None
        scale = dynamic.scale if dynamic else self.loss_scale
        loss, grads = self.accumulate(batch, scale, overflow_in)
        grads = map_tree(lambda g: g / scale, grads)
        norm = global_norm(grads)
        clip_factor = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        overflow = not all(np.isfinite(g).all() for g in flatten(grads).values())
        learning_rate = self.learning_rate(self.count) if callable(self.learning_rate) else self.learning_rate
        if not overflow:
            self.update(map_tree(lambda g: g * clip_factor, grads), learning_rate)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if overflow else 0
        if dynamic:
            dynamic.update(overflow)
        return {
            "loss": loss,
            "grad_norm": norm,
            "clipped_norm": norm * clip_factor,
            "learning_rate": learning_rate,
            "loss_scale": scale,
            "skipped": overflow,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def update(self, grads, learning_rate):
        self.count += 1
        self.mu = map_tree(lambda m, g: self.b1 * m + (1 - self.b1) * g, self.mu, grads)
        self.nu = map_tree(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, self.nu, grads)

        def updated(w, m, v, decayed):
            direction = m / (1 - self.b1**self.count) / (np.sqrt(v / (1 - self.b2**self.count)) + self.eps)
            return w - learning_rate * (direction + self.weight_decay * decayed * w)

        self.params = map_tree(updated, self.params, self.mu, self.nu, decay_mask(self.params))
