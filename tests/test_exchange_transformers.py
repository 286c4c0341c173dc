"""Models that transformers itself saved: read by the maps, they give its logits, and come back as they were."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import deserialize

import jzero
from experiments import llama
from jzero.checkpoint import Checkpointer, export_safetensors, import_params, load_safetensors
from tests.exchange import unpacked

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return unpacked("transformers", tmp_path_factory.mktemp("saved"))


def tensors(folder):
    files = sorted(folder.glob("*.safetensors"))
    found = {name: row for file in files for name, row in deserialize(file.read_bytes())}
    return {name: (row["dtype"], row["shape"], bytes(row["data"])) for name, row in found.items()}


def expected(folder):
    with np.load(folder / "logits.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


def test_llama(saved, tmp_path):
    sizes = llama.Sizes(layers=2, width=16, hidden=24, heads=4, kv_heads=2, vocabulary=20)
    shapes = jax.eval_shape(lambda: llama.init_params(sizes, jax.random.key(0)))
    layout = jzero.zero(shapes, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    loaded = load_safetensors(saved / "llama", layout, map=ROOT / "experiments/llama.toml")
    tx = optax.sgd(1.0)
    state = jzero.init(layout.logical, tx, layout, loaded)
    params = jax.tree.map(np.asarray, layout.logical(state.params, replicate=True))
    tokens, logits = expected(saved / "llama")

    @jax.jit
    def forward(params, tokens):
        x, _ = jax.lax.scan(
            lambda x, weights: llama.block(sizes, x, weights), params["embedding"][tokens], params["blocks"]
        )
        return llama.normalise(x, params["norm"]) @ params["head"]

    np.testing.assert_allclose(forward(params, tokens), logits, rtol=1e-4, atol=1e-4)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state, tx, layout)
    export_safetensors(tmp_path / "run", tmp_path / "out", map=ROOT / "experiments/llama.toml", max_shard=8000)
    assert tensors(tmp_path / "out") == tensors(saved / "llama")


def test_gpt2(saved):
    names = {
        "wte": ["embedding"],
        "wpe": ["embedding"],
        "ln_f": ["scale", "bias"],
        **{f"blocks/{norm}": ["scale", "bias"] for norm in ("ln_1", "ln_2")},
        **{f"blocks/{part}": ["kernel", "bias"] for part in ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")},
    }
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target: dict = {}
    for path, leaves in names.items():
        place = target
        for key in path.split("/"):
            place = place.setdefault(key, {})
        place.update(dict.fromkeys(leaves, whole))
    params = load_safetensors(saved / "gpt2", target, map="gpt2")
    tokens, logits = expected(saved / "gpt2")
    np.testing.assert_allclose(gpt2(params, tokens), logits, rtol=1e-4, atol=1e-4)


@jax.jit
def gpt2(params, tokens):
    def block(x, weights):
        q, k, v = jnp.split(dense(normalised(x, weights["ln_1"]), weights["attn"]["c_attn"]), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], 2, 8) for part in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + dense(mixed, weights["attn"]["c_proj"])
        hidden = jax.nn.gelu(dense(normalised(x, weights["ln_2"]), weights["mlp"]["c_fc"]), approximate=True)
        return x + dense(hidden, weights["mlp"]["c_proj"]), None

    x = params["wte"]["embedding"][tokens] + params["wpe"]["embedding"][: tokens.shape[1]]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return normalised(x, params["ln_f"]) @ params["wte"]["embedding"].T


def dense(x, weights):
    return x @ weights["kernel"] + weights["bias"]


def normalised(x, weights):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights["scale"] + weights["bias"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_there_and_back(saved, tmp_path, name):
    import_params(saved / name, tmp_path / "0", map=name)
    export_safetensors(tmp_path / "0", tmp_path / "out", map=name, max_shard=8000)
    assert tensors(tmp_path / "out") == tensors(saved / name)
