"""Export and import of safetensors: bits, names, shapes, plain readers, damage, limits, and names from anywhere."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors import deserialize, safe_open
from safetensors.numpy import save_file

import jzero
from jzero.checkpoint import (
    Checkpointer,
    CheckpointMismatch,
    CorruptCheckpoint,
    LimitExceeded,
    Manifest,
    Rules,
    encoding,
    export_safetensors,
    import_params,
    load_safetensors,
)
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.exchange import export, slices
from jzero.checkpoint.exchange.dims import Dims, Turn
from jzero.checkpoint.exchange.export import shape_of_blocks
from jzero.checkpoint.exchange.files import find
from jzero.checkpoint.exchange.format import CODES, CorruptTensors, read_header
from jzero.checkpoint.exchange.link import Link
from jzero.checkpoint.exchange.source import Source
from tests.exchange import RANDOM, bits_of, held, saved


def written(folder):
    """The tensors of files, by name, as the safetensors library finds them: dtype, shape and bytes."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: row for file in files for name, row in deserialize(file.read_bytes())}


def same(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


ODD = {("dtype", dtype): bits_of(encoding.dtype_of(dtype), 3, 7) for dtype in CODES} | {
    ("scalar",): bits_of(np.float32),
    ("nothing",): bits_of(np.float32, 0, 5),
    ("signs",): np.array([-0.0, 0.0, np.nan, -np.inf, 1e-45], np.float32),
    ("a.b", "c/d", "ü ☃", ""): bits_of(ml_dtypes.bfloat16, 5),
    ("a", "b"): bits_of(np.float32, 37, 29),
    ("four",): bits_of(np.float32, 3, 5, 7, 11),
    ("100%",): bits_of(np.int16, 13),
}


@pytest.mark.parametrize("max_shard", [10**9, 1000])
def test_export_then_import_keeps_every_bit(tmp_path, max_shard):
    folder = saved(tmp_path / "1", ODD)
    done = export_safetensors(folder, tmp_path / "hf", max_shard=max_shard)
    assert done.tensors == len(ODD) and done.nbytes == sum(array.nbytes for array in ODD.values())
    import_params(tmp_path / "hf", tmp_path / "2")
    found = held(tmp_path / "2")
    assert found.keys() == ODD.keys()
    assert all(same(found[path], ODD[path]) for path in ODD)
    tensors = written(tmp_path / "hf")
    for dtype in CODES:
        row = tensors[f"dtype.{dtype}"]
        assert (row["dtype"], row["shape"]) == (CODES[dtype], [3, 7])
        assert bytes(row["data"]) == ODD["dtype", dtype].tobytes()


def test_shards_and_index(tmp_path):
    leaves = {(name,): bits_of(np.float32, 10, 10) for name in "abcde"} | {("large",): bits_of(np.float32, 300)}
    done = export_safetensors(saved(tmp_path / "1", leaves), tmp_path / "hf", max_shard=800)
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert list(done.files) == names
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3200
    groups = ["ab", "cd", "e", ["large"]]
    assert index["weight_map"] == {name: file for file, group in zip(names, groups, strict=True) for name in group}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers opens no others
            assert same(opened.get_tensor(name), leaves[(name,)])
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [*names, "model.safetensors.index.json"]
    found = find(tmp_path / "hf/model.safetensors.index.json").tensors
    assert {tensor.name for tensor in found} == index["weight_map"].keys()


# GPT-2 with 2 layers, width 4, 11 tokens and 6 positions, as transformers names it.
GPT2 = {
    "transformer.wte.weight": (11, 4),
    "transformer.wpe.weight": (6, 4),
    "transformer.h.0.ln_1.weight": (4,),
    "transformer.h.0.ln_1.bias": (4,),
    "transformer.h.0.attn.c_attn.weight": (4, 12),
    "transformer.h.0.attn.c_attn.bias": (12,),
    "transformer.h.0.attn.c_proj.weight": (4, 4),
    "transformer.h.0.attn.c_proj.bias": (4,),
    "transformer.h.0.ln_2.weight": (4,),
    "transformer.h.0.ln_2.bias": (4,),
    "transformer.h.0.mlp.c_fc.weight": (4, 16),
    "transformer.h.0.mlp.c_fc.bias": (16,),
    "transformer.h.0.mlp.c_proj.weight": (16, 4),
    "transformer.h.0.mlp.c_proj.bias": (4,),
    "transformer.h.1.ln_1.weight": (4,),
    "transformer.h.1.ln_1.bias": (4,),
    "transformer.h.1.attn.c_attn.weight": (4, 12),
    "transformer.h.1.attn.c_attn.bias": (12,),
    "transformer.h.1.attn.c_proj.weight": (4, 4),
    "transformer.h.1.attn.c_proj.bias": (4,),
    "transformer.h.1.ln_2.weight": (4,),
    "transformer.h.1.ln_2.bias": (4,),
    "transformer.h.1.mlp.c_fc.weight": (4, 16),
    "transformer.h.1.mlp.c_fc.bias": (16,),
    "transformer.h.1.mlp.c_proj.weight": (16, 4),
    "transformer.h.1.mlp.c_proj.bias": (4,),
    "transformer.ln_f.weight": (4,),
    "transformer.ln_f.bias": (4,),
}

# Llama with 2 layers, width 8, 4 heads of 2 over 2 of keys and values, MLP 12, 10 tokens.
LLAMA = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.layers.1.self_attn.k_proj.weight": (4, 8),
    "model.layers.1.self_attn.v_proj.weight": (4, 8),
    "model.layers.1.self_attn.o_proj.weight": (8, 8),
    "model.layers.1.mlp.gate_proj.weight": (12, 8),
    "model.layers.1.mlp.up_proj.weight": (12, 8),
    "model.layers.1.mlp.down_proj.weight": (8, 12),
    "model.layers.1.input_layernorm.weight": (8,),
    "model.layers.1.post_attention_layernorm.weight": (8,),
    "model.norm.weight": (8,),
    "lm_head.weight": (10, 8),
}


def model(names, folder):
    """Files of a model, by the safetensors library, and their tensors."""
    tensors: dict[str, np.ndarray] = {name: bits_of(np.float32, *shape) for name, shape in names.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_gpt2(tmp_path):
    tensors = model(GPT2, tmp_path / "hf")
    import_params(tmp_path / "hf", tmp_path / "0", map="gpt2")
    leaves = held(tmp_path / "0")
    assert len(leaves) == 2 + 12 + 2
    # Conv1D and a kernel of flax both have (in, out).
    kernel = leaves["blocks", "attn", "c_attn", "kernel"]
    assert kernel.shape == (2, 4, 12)
    assert same(kernel[1], tensors["transformer.h.1.attn.c_attn.weight"])
    assert same(leaves["blocks", "ln_2", "bias"][0], tensors["transformer.h.0.ln_2.bias"])
    assert same(leaves["wte", "embedding"], tensors["transformer.wte.weight"])
    export_safetensors(tmp_path / "0", tmp_path / "again", map="gpt2")
    found = written(tmp_path / "again")
    assert {name: tuple(row["shape"]) for name, row in found.items()} == GPT2
    assert all(bytes(found[name]["data"]) == tensors[name].tobytes() for name in GPT2)


def test_gpt2_as_it_is_on_the_hub(tmp_path):
    tensors = model(GPT2, tmp_path / "hf")
    hub = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    hub |= {f"h.{n}.attn.bias": np.tril(np.ones((1, 1, 6, 6), np.float32)) for n in range(2)}
    hub["lm_head.weight"] = hub["wte.weight"].copy()
    save_file(hub, tmp_path / "hub.safetensors")
    done = import_params(tmp_path / "hub.safetensors", tmp_path / "0", map="gpt2")
    assert sorted(done.ignored) == ["h.0.attn.bias", "h.1.attn.bias", "lm_head.weight"]
    import_params(tmp_path / "hf", tmp_path / "1", map="gpt2")
    one, two = held(tmp_path / "0"), held(tmp_path / "1")
    assert one.keys() == two.keys() and all(same(one[path], two[path]) for path in one)
    hub["lm_head.weight"].view(np.uint32)[3, 2] ^= 1  # a head of its own would be lost without a word
    save_file(hub, tmp_path / "hub.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"lm_head.weight: .* copy of transformer.wte.weight, but their elem"):
        import_params(tmp_path / "hub.safetensors", tmp_path / "2", map="gpt2")
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("stacked", [True, False])
def test_llama(tmp_path, stacked):
    tensors = model(LLAMA, tmp_path / "hf")
    rules = Rules.read("llama", stacked=stacked, under="params")
    import_params(tmp_path / "hf", tmp_path / "0", map=rules)
    leaves = held(tmp_path / "0")
    wanted = tensors["model.layers.1.self_attn.k_proj.weight"].T  # PyTorch's Linear has (out, in)
    if stacked:
        assert leaves["params", "layers", "self_attn", "k_proj", "kernel"].shape == (2, 8, 4)
        assert same(leaves["params", "layers", "self_attn", "k_proj", "kernel"][1], wanted)
    else:
        assert same(leaves["params", "layers", "1", "self_attn", "k_proj", "kernel"], wanted)
    assert same(leaves["params", "lm_head", "kernel"], tensors["lm_head.weight"].T)
    assert same(leaves["params", "embed_tokens", "embedding"], tensors["model.embed_tokens.weight"])
    export_safetensors(tmp_path / "0", tmp_path / "again", map=rules)
    found = written(tmp_path / "again")
    assert {name: tuple(row["shape"]) for name, row in found.items()} == LLAMA
    assert all(bytes(found[name]["data"]) == tensors[name].tobytes() for name in LLAMA)


MAP = """
stacked = ["layer", "expert"]
skip = ["step/{n}", "*/unused"]
ignore = ["more.*.{n}"]
[leaves]
"conv/kernel" = { tensor = "conv.weight", dims = "o i h w -> h w i o" }
"experts/{expert}/{layer}/w" = { tensor = "l{layer}.e{expert}.w", transpose = true }
"head/{n}/b" = "head_{n}.bias"
"""


def test_a_map_of_ones_own(tmp_path):
    (tmp_path / "map.toml").write_text(MAP)
    leaves = {
        ("conv", "kernel"): bits_of(np.float32, 3, 5, 4, 6),  # HWIO
        ("experts", "w"): bits_of(np.float32, 2, 3, 8, 5),
        ("head", "7", "b"): bits_of(np.float32, 9),
        ("step", "1"): bits_of(np.int32, 3),
        ("very", "much", "unused"): bits_of(np.int32, 3),
    }
    folder = saved(tmp_path / "1", leaves)
    done = export_safetensors(folder, tmp_path / "hf", map=tmp_path / "map.toml")
    assert done.left == ("params/step/1", "params/very/much/unused")
    with safe_open(tmp_path / "hf/model.safetensors", "np") as file:
        assert len(file.keys()) == 1 + 6 + 1
        assert same(file.get_tensor("conv.weight"), leaves["conv", "kernel"].transpose(3, 2, 0, 1).copy())  # OIHW
        assert same(file.get_tensor("l1.e2.w"), leaves["experts", "w"][1, 2].T.copy())
        assert same(file.get_tensor("head_7.bias"), leaves["head", "7", "b"])
        tensors = {name: file.get_tensor(name) for name in file.keys()} | {"more.of.it.7": np.ones(3)}  # noqa: SIM118
    save_file(tensors, tmp_path / "hf/model.safetensors")
    assert import_params(tmp_path / "hf", tmp_path / "2", map=tmp_path / "map.toml").ignored == ("more.of.it.7",)
    found = held(tmp_path / "2")
    assert found.keys() == set(list(leaves)[:3]) and all(same(found[path], leaves[path]) for path in found)


def reference(tensor, sizes, order, groups):
    """A leaf by numpy alone: the tensor in factors, these in another order, and then joined."""
    joined, at = [], 0
    for group in groups:
        joined.append(int(np.prod([sizes[factor] for factor in order[at : at + group]])))
        at += group
    return tensor.reshape(sizes).transpose(order).reshape(joined)


@pytest.mark.parametrize("seed", range(60))
def test_any_slice_of_a_leaf_is_found_in_the_tensor(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 6))
    names, sizes = list("abcdef"[:count]), random.integers(1, 5, count).tolist()

    def groups():
        found = []
        while sum(found) < count:
            found.append(int(random.integers(1, count - sum(found) + 1)))
        return found

    def written(names, groups):
        ends = np.cumsum(groups)
        return " ".join(f"({' '.join(names[end - n : end])})" for n, end in zip(groups, ends, strict=True))

    order, mine, theirs = random.permutation(count).tolist(), groups(), groups()
    text = f"{written(names, mine)} -> {written([names[i] for i in order], theirs)}"
    tensor = np.arange(np.prod(sizes), dtype=np.int32)
    tensor = reference(tensor, sizes, list(range(count)), mine)
    leaf = reference(tensor, sizes, order, theirs)
    lengths = dict(zip(names, sizes, strict=True))
    if count:
        turn = Dims.parse(text, lengths).turn(tensor.shape, "tensor")
        assert turn == Dims.parse(text, lengths).turn(leaf.shape, "leaf")
    else:
        turn = Turn.of_order((), ())
    assert (turn.tensor_shape, turn.leaf_shape) == (tensor.shape, leaf.shape)
    for _ in range(10):
        region = tuple(tuple(sorted(random.integers(0, size + 1, 2).tolist())) for size in leaf.shape)
        wanted = leaf[tuple(slice(*ends) for ends in region)]
        found, back, read = np.full(wanted.shape, -1, np.int32), np.full(tensor.shape, -1, np.int32), 0
        pieces = list(turn.pieces(region))
        for piece in pieces:
            index = (*(slice(*ends) for ends in piece.region), ...)
            box, place = tensor[index], piece.of(found)
            place[...] = box.reshape(place.shape)
            back[index] = piece.of(wanted).reshape(box.shape)
            read += box.size
            if len(pieces) == 1:
                assert np.array_equal(piece.alone(box), wanted)
        assert np.array_equal(found, wanted) and read == wanted.size
        assert sorted(back[back >= 0].tolist()) == sorted(wanted.reshape(-1).tolist())
        assert np.array_equal(back[back >= 0], tensor[back >= 0])


FACTORS = """
stacked = ["layer"]
[sizes]
head = 4
three = 3
[leaves]
"layers/{layer}/query/kernel" = { tensor = "h.{layer}.q.weight", dims = "(head k) d -> d head k" }
"layers/{layer}/out/kernel" = { tensor = "h.{layer}.o.weight", dims = "d (head k) -> head k d" }
"qkv/kernel" = { tensor = "qkv.weight", dims = "(head three k) d -> d (three head k)" }
"qkv/bias" = { tensor = "qkv.bias", dims = "(head three k) -> (three head k)" }
"""


@pytest.fixture
def factors(tmp_path):
    """A map, leaves of attention as flax has them, and tensors as PyTorch and Megatron-LM have them."""
    (tmp_path / "map.toml").write_text(FACTORS)
    query, out = bits_of(np.float32, 2, 10, 4, 6), bits_of(np.float32, 2, 4, 6, 10)
    kernel, bias = bits_of(np.float32, 10, 72), bits_of(np.float32, 72)
    leaves = {
        ("layers", "query", "kernel"): query,
        ("layers", "out", "kernel"): out,
        ("qkv", "kernel"): kernel,
        ("qkv", "bias"): bias,
    }
    # [q; k; v] of all heads on the one side; q, k and v of one head after another on the other.
    tensors: dict[str, np.ndarray] = {"qkv.weight": kernel.reshape(10, 3, 4, 6).transpose(2, 1, 3, 0).reshape(72, 10)}
    tensors["qkv.bias"] = bias.reshape(3, 4, 6).transpose(1, 0, 2).reshape(72)
    for layer in range(2):
        tensors[f"h.{layer}.q.weight"] = query[layer].reshape(10, 24).T.copy()
        tensors[f"h.{layer}.o.weight"] = out[layer].reshape(24, 10).T.copy()
    return tmp_path / "map.toml", leaves, tensors


@pytest.mark.parametrize("largest", [50, 300, 10**6])
def test_dims_are_cut_and_joined_there_and_back(factors, tmp_path, largest, monkeypatch):
    rules, leaves, tensors = factors
    monkeypatch.setattr("jzero.checkpoint.exchange.export.ENOUGH", 4 * largest)
    monkeypatch.setattr("jzero.checkpoint.exchange.bring.LARGEST", largest)
    done = export_safetensors(saved(tmp_path / "1", leaves, largest), tmp_path / "hf", map=rules, memory=250 * 10**6)
    assert done.tensors == len(tensors)
    with safe_open(tmp_path / "hf/model.safetensors", "np") as file:
        assert all(same(file.get_tensor(name), tensors[name]) for name in tensors)
    import_params(tmp_path / "hf", tmp_path / "2", map=rules)
    found = held(tmp_path / "2")
    assert found.keys() == leaves.keys() and all(same(found[path], leaves[path]) for path in leaves)
    chunks = {leaf.chunk_count for leaf in Manifest.read(tmp_path / "2").leaves}
    assert (chunks == {1}) == (largest == 10**6)


def test_devices_read_what_they_hold_of_dims_that_are_cut(factors, tmp_path, monkeypatch):
    rules, leaves, tensors = factors
    save_file(tensors, tmp_path / "x.safetensors")
    mesh = jzero.make_mesh(data=2, model=4)
    shardings = {
        "layers": {
            "query": {"kernel": jax.NamedSharding(mesh, jax.P(None, "data", "model"))},
            "out": {"kernel": jax.NamedSharding(mesh, jax.P(None, "model", None, "data"))},
        },
        "qkv": {
            "kernel": jax.NamedSharding(mesh, jax.P("data", "model")),
            "bias": jax.NamedSharding(mesh, jax.P("model")),
        },
    }
    read, real = [], slices.Files.read
    monkeypatch.setattr(slices, "SHORT", 0)
    monkeypatch.setattr(slices.Files, "read", lambda *arguments: read.append(len(arguments[3])) or real(*arguments))
    found = load_safetensors(tmp_path / "x.safetensors", shardings, map=rules)
    for path, array in leaves.items():
        x = found
        for key in path:
            x = x[key]
        assert same(np.asarray(x), array)
        assert x.addressable_shards[0].data.nbytes == array.nbytes // (4 if path[-1] == "bias" else 8)
    assert sum(read) == sum(array.nbytes for array in leaves.values())  # each element once, though on several devices
    read.clear()
    with Source(tmp_path / "x.safetensors", Rules.read(rules)) as source:
        [link] = [link for link in source.links if link.path[1:] == ("qkv", "kernel")]
        part = source.slice(link, ((2, 7), (20, 31)))  # across q and k, from inside of one head to inside of another
    assert same(part, leaves["qkv", "kernel"][2:7, 20:31].copy()) and sum(read) == part.nbytes


def test_dims_that_do_not_fit_are_refused(factors, tmp_path):
    rules, leaves, tensors = factors
    bad = tensors | {"qkv.bias": np.ones(70, np.float32), "h.0.q.weight": np.ones(24, np.float32)}
    bad["h.1.q.weight"] = bad["h.0.q.weight"]
    save_file(bad, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointMismatch) as caught:
        import_params(tmp_path / "x.safetensors", tmp_path / "0", map=rules)
    assert caught.value.problems == (
        "params/layers/query/kernel: the file has h.0.q.weight F32(24,), which has 1 dims, where dims = "
        '"(head k) d -> d head k" of the map has 2.',
        "params/qkv/bias: the file has qkv.bias F32(70,), which has 70 in its dim 0, but dims = "
        '"(head three k) -> (three head k)" of the map makes it head x three x k, with head = 4, three = 3.',
    )
    bad = leaves | {("layers", "out", "kernel"): bits_of(np.float32, 2, 5, 6, 10)}
    with pytest.raises(CheckpointMismatch) as caught:
        export_safetensors(saved(tmp_path / "1", bad), tmp_path / "hf", map=rules)
    assert caught.value.problems == (
        "params/layers/out/kernel: the checkpoint has float32(2, 5, 6, 10); behind stacked dims it has 5 in its dim 0, "
        'but dims = "d (head k) -> head k d" of the map makes it head, with head = 4.',
    )
    rules.write_text(FACTORS.replace("three = 3", ""))
    with pytest.raises(CheckpointMismatch, match=r"qkv/bias: .* name the length of three or k in \[sizes\] of the map"):
        import_params(tmp_path / "x.safetensors", tmp_path / "0", map=rules)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "map.toml", "x.safetensors"]


@pytest.mark.parametrize("seed", range(3))
def test_slices_of_any_region(tmp_path, seed):
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 12, random.integers(1, 5)).tolist())
    array = random.integers(0, 2**16, shape).astype(np.uint16)
    save_file({"first": np.ones(3, np.uint32), "x": array}, tmp_path / "x.safetensors")
    [tensor] = [tensor for tensor in read_header(tmp_path / "x.safetensors") if tensor.name == "x"]
    handle, files = os.open(tmp_path / "x.safetensors", os.O_RDWR), slices.Files()
    for _ in range(40):
        ends = [sorted(random.integers(0, size + 1, 2).tolist()) for size in shape]
        region, index = tuple(map(tuple, ends)), tuple(slice(*pair) for pair in ends)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slices, "SHORT", int(random.choice([0, 8, 4096])))  # runs alone, some rows, all rows
            patch.setattr(slices, "GROUP", 64)
            assert np.array_equal(slices.read(files, tensor, region), array[index])
        array[index] = random.integers(0, 2**16, array[index].shape)
        slices.write(handle, tensor, region, np.ascontiguousarray(array[index]))
    os.close(handle)
    files.__exit__()
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("x"), array)


def test_blocks_are_whole_chunks_and_grow_along_rows_of_the_tensor():
    leaf = Entry(("params", "w"), "params.w", (4, 64, 50), "float32", "float32", (4, 64, 50), (1, 1, 25))
    straight = Link(leaf.path, "float32", ("0", "1", "2", "3"), (4,), Turn.of_order((64, 50), (0, 1)))
    turned = dataclasses.replace(straight, turn=Turn.of_order((50, 64), (1, 0)))
    split = dataclasses.replace(straight, turn=Dims.parse("c (a b) -> (b a) c", {"b": 2}).turn((50, 64), "tensor"))
    assert shape_of_blocks(leaf, straight, 4000) == (1, 20, 50)
    assert shape_of_blocks(leaf, turned, 4000) == (1, 40, 25)
    assert shape_of_blocks(leaf, turned, 30000) == (2, 64, 50)
    assert shape_of_blocks(leaf, turned, 1) == (1, 1, 25)
    assert shape_of_blocks(leaf, split, 4000) == (1, 40, 25)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A state with bfloat16 params and float32 master weights, on the disk, and its params."""
    folder = tmp_path_factory.mktemp("run")
    make = {"w": (8, 13, 24), "odd": (13, 7), "b": (24,)}

    def init():
        return {
            name: jnp.asarray(np.random.default_rng(1).normal(size=shape), "float32") for name, shape in make.items()
        }

    layout = jzero.zero(
        jax.eval_shape(init), stage=2, mesh=jzero.make_mesh(data=-1), precision="bf16", min_shard_size=0
    )
    tx = optax.adam(1e-3)
    state = jzero.init(init, tx, layout)
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(3, state, tx, layout)
    return folder, init, tx, {name: np.asarray(x) for name, x in init().items()}


def test_master_weights_are_what_is_exported(trained, tmp_path):
    folder, _, _, params = trained
    done = export_safetensors(folder / "run", tmp_path / "hf")
    assert done.checkpoint == folder / "run/3" and done.dtypes == {"float32": 3} and "opt_state" in done.left
    with safe_open(tmp_path / "hf/model.safetensors", "np") as file:
        assert all(same(file.get_tensor(name), params[name]) for name in params)
    export_safetensors(folder / "run", tmp_path / "half", dtype="bfloat16")
    rows = written(tmp_path / "half")
    for name, array in params.items():
        assert rows[name]["dtype"] == "BF16"
        assert bytes(rows[name]["data"]) == np.asarray(jnp.asarray(array).astype(jnp.bfloat16)).tobytes()


def test_what_plain_orbax_saved_is_exported_as_well(tmp_path):
    w = bits_of(np.float32, 6, 5)
    ocp.save(tmp_path / "orbax", {"params": {"w": w}, "other": np.ones(3)})
    done = export_safetensors(tmp_path / "orbax", tmp_path / "hf")
    assert done.left == ("other",)
    with safe_open(tmp_path / "hf/model.safetensors", "np") as file:
        assert same(file.get_tensor("w"), w)


def test_a_number_too_large_for_a_dtype_is_no_infinity(tmp_path):
    folder = saved(tmp_path / "1", {("w",): np.array([1, 70000, np.inf], np.float32), ("n",): np.array([2**40])})
    with pytest.raises(ValueError, match=r"params/w: 70000.0 is too large for float16"):
        export_safetensors(folder, tmp_path / "hf", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]
    export_safetensors(folder, tmp_path / "hf", dtype="bfloat16")
    assert {name: row["dtype"] for name, row in written(tmp_path / "hf").items()} == {"w": "BF16", "n": "I64"}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_load_into_a_layout_and_train(trained, tmp_path, stage):
    folder, init, tx, params = trained
    export_safetensors(folder / "run", tmp_path / "hf")
    mesh = jzero.make_mesh(data=4, model=2)
    rules = [("w", jax.P(None, None, "model"))]
    layout = jzero.zero(jax.eval_shape(init), stage=stage, mesh=mesh, precision="bf16", min_shard_size=0, rules=rules)
    loaded = load_safetensors(tmp_path / "hf", layout)
    state = jzero.init(layout.logical, tx, layout, loaded)
    master = jzero.master_params(state, layout, replicate=True)
    assert all(same(np.asarray(master[name]), params[name]) for name in params)
    held = {name: loaded[name].addressable_shards[0].data.nbytes / params[name].nbytes for name in params}
    assert held["w"] == (1 / 2 if stage == 0 else 1 / 8)  # never whole on a device


def test_import_then_restore(trained, tmp_path):
    folder, init, tx, params = trained
    export_safetensors(folder / "run", tmp_path / "hf")
    import_params(tmp_path / "hf", tmp_path / "new/0")
    layout = jzero.zero(jax.eval_shape(init), stage=3, mesh=jzero.make_mesh(data=-1))
    with Checkpointer(tmp_path / "new") as checkpointer:
        restored = checkpointer.restore(tx, layout, only=("params",), init=lambda: jzero.init(init, tx, layout))
    assert restored.step == 0
    logical = layout.logical(restored.state.params, replicate=True)
    assert all(same(np.asarray(logical[name]), params[name]) for name in params)


def test_load_by_shardings_reads_each_slice_once(tmp_path, monkeypatch):
    tensors = model(LLAMA, tmp_path / "hf")
    mesh = jzero.make_mesh(data=4, model=2)
    sharding = jax.NamedSharding(mesh, jax.P("model", "data"))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    target = {
        "lm_head": {"kernel": jax.ShapeDtypeStruct((8, 10), jnp.bfloat16, sharding=rows)},
        "norm": {"scale": jax.NamedSharding(mesh, jax.P())},
        "layers": {"mlp": {"up_proj": {"kernel": sharding}}},
    }
    read = []
    real = slices.Files.read
    monkeypatch.setattr(slices, "SHORT", 0)
    monkeypatch.setattr(slices.Files, "read", lambda *arguments: read.append(len(arguments[3])) or real(*arguments))
    found = load_safetensors(tmp_path / "hf", target, map="llama", on_extra="ignore", cast=True)
    head = tensors["lm_head.weight"].T
    assert sum(read) == head.nbytes + 8 * 4 + 2 * 8 * 12 * 4
    with np.errstate(all="ignore"):
        assert np.array_equal(
            np.asarray(found["lm_head"]["kernel"]).view(np.uint16), head.astype(ml_dtypes.bfloat16).view(np.uint16)
        )
    ups = np.stack([tensors[f"model.layers.{n}.mlp.up_proj.weight"].T for n in range(2)])
    assert same(np.asarray(found["layers"]["mlp"]["up_proj"]["kernel"]), ups)
    assert found["layers"]["mlp"]["up_proj"]["kernel"].sharding == sharding
    with Source(tmp_path / "hf", Rules.read("llama")) as source:
        [link] = [link for link in source.links if link.path[-3:] == ("mlp", "up_proj", "kernel")]
        read.clear()
        assert same(source.slice(link, ((1, 2), (2, 4), (0, 12))), ups[1:2, 2:4].copy())
        assert sum(read) == 2 * 12 * 4


def test_all_that_does_not_fit_is_named_at_once(tmp_path):
    model(LLAMA, tmp_path / "hf")
    sharding = jax.NamedSharding(jzero.make_mesh(data=-1), jax.P("data"))
    target = {
        "norm": {"scale": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)},
        "embed_tokens": {"embedding": sharding},
        "lm_head": {"kernel": jax.ShapeDtypeStruct((8, 10), jnp.bfloat16, sharding=sharding)},
        "absent": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=sharding),
    }
    with pytest.raises(CheckpointMismatch) as caught:
        load_safetensors(tmp_path / "hf", target, map="llama")
    text = "\n".join(caught.value.problems)
    assert "params/norm/scale: the files have float32(8,), of model.norm.weight, asked for float32(16,)." in text
    assert "params/embed_tokens/embedding: the files have float32(10, 8)" in text and "cannot be placed so" in text
    assert "params/lm_head/kernel: the files have float32(8, 10), of lm_head.weight, asked for bfloat16(8, 10)" in text
    assert "params/absent: the files have no tensor for it; asked for int32(8,)" in text
    assert (
        "params/layers/mlp/up_proj/kernel: the files have float32(2, 8, 12), of model.layers.0.mlp.up_proj.weight and "
        "1 more, which was not asked for" in text
    )
    assert len(caught.value.problems) == 4 + 9


def test_a_name_that_claims_a_billion_layers_is_an_error_at_once(tmp_path):
    """None of them is counted, which would take minutes and gigabytes."""
    save_file({"model.layers.999999999.mlp.up_proj.weight": np.ones((4, 3), np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointMismatch, match=r"1 tensors of 1000000000; missing are model\.layers\.0\.mlp\.up_proj"
    ):
        import_params(tmp_path / "x.safetensors", tmp_path / "0", map="llama")


def test_all_that_makes_no_leaf_is_named_at_once(tmp_path):
    tensors = model(LLAMA, tmp_path / "hf")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.gate_proj.weight"] = np.ones((11, 8), np.float32)
    tensors |= {"model.layers.0.moe.router": np.ones(2, np.float32), "norm.weight": np.ones(8, np.float32)}
    tensors["lm_head.weight"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(CheckpointMismatch) as caught:
        import_params(tmp_path / "hf", tmp_path / "0", map="llama")
    text = "\n".join(caught.value.problems)
    assert "the file has 1 tensors of 2; missing are model.layers.0.mlp.up_proj.weight" in text
    assert "gate_proj.weight F32(12, 8) and model.layers.1.mlp.gate_proj.weight F32(11, 8), which cannot be st" in text
    assert "model.layers.0.moe.router F32(2,): map llama has no such tensor" in text
    assert "would be the leaf params/norm/scale, as is" in text
    assert "lm_head.weight F32(3,), which has 1 dims, and the map transposes it" in text
    assert len(caught.value.problems) == 5 and not (tmp_path / "0").exists()


def test_all_that_makes_no_tensor_is_named_at_once(tmp_path):
    leaves = {
        ("wte", "embedding"): bits_of(np.float32, 3, 2),
        ("blocks", "0", "ln_1", "scale"): bits_of(np.float32, 3),
        ("ln_f", "bias"): bits_of(ml_dtypes.int4, 3),
    }
    folder = saved(tmp_path / "1", leaves)
    with pytest.raises(CheckpointMismatch) as caught:
        export_safetensors(folder, tmp_path / "hf", map="gpt2")
    one, two = caught.value.problems
    assert one.startswith("params/blocks/0/ln_1/scale: the checkpoint has float32(3,); map gpt2 has no leaf")
    assert two.startswith("params/ln_f/bias: the checkpoint has int4(3,), and safetensors has no such dtype.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]
    with pytest.raises(CheckpointMismatch, match="would be tensor"):
        (tmp_path / "map.toml").write_text(
            '[leaves]\n"wte/embedding" = "w"\n"blocks/{n}/ln_1/scale" = "w{n}"\n"ln_f/bias" = "w0"'
        )
        export_safetensors(
            saved(tmp_path / "2", leaves | {("ln_f", "bias"): bits_of(np.float32, 3)}),
            tmp_path / "hf",
            map=tmp_path / "map.toml",
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[leaves]\n"a" = "b"\n[more]', "'more' is not known"),
        ("stacked = 3", "stacked = 3; wanted a list of strings"),
        ("", "is missing or empty"),
        ('[leaves]\n"a" = 3\n"b" = { tensor = "x", transposed = true }', "'b': .*wanted a tensor"),
        (
            '[leaves]\n"a/{n}" = "b"',
            "'a/{n}': has {n}, its tensor no name in braces; both must have the same",
        ),
        ('[leaves]\n"a" = "x"\n"b" = "x"', "'x' is the tensor of several leaves"),
        ('[leaves]\n"a" = { tensor = "x", transpose = "yes" }', "wanted true or false"),
        ('[leaves]\n"a" = { tensor = "x", transpose = [1, 0] }', 'Other orders are dims = "o i h w -> h w i o"'),
        ('[leaves]\n"a" = { tensor = "x", dims = 3 }', "dims = 3; wanted the dims of the tensor and, behind an arrow"),
        ('[leaves]\n"a" = { tensor = "x", dims = "a b" }', "behind an arrow, those of the leaf"),
        ('[leaves]\n"a" = { tensor = "x", dims = "(a (b)) -> a b" }', "behind an arrow, those of the leaf"),
        ('[leaves]\n"a" = { tensor = "x", dims = "(a b) -> a c" }', "wanted each name once on each side"),
        ('[leaves]\n"a" = { tensor = "x", dims = "a a -> a a" }', "wanted each name once on each side"),
        ('[leaves]\n"a" = { tensor = "x", dims = "a -> a", transpose = true }', "has transpose and dims; wanted one"),
        ('[sizes]\nh = 0\n[leaves]\n"a" = "x"', r"h = 0 in \[sizes\]; wanted an int of 1 or more"),
        ('[sizes]\nh = 2\n[leaves]\n"a" = "x"', r"'h' of \[sizes\] is in no dims"),
        ('stacked = ["n"]\n[leaves]\n"a_{n}/w" = "x{n}"', "must be a key of its own"),
        ('[leaves]\n"a" = "__metadata__"', "the format has something else under this name"),
        ("[leaves", "is no TOML"),
    ],
)
def test_maps_that_are_none(tmp_path, text, says):
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(ValueError, match=says):
        Rules.read(tmp_path / "map.toml")


def test_a_map_that_is_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="map mistral: no such file, and no map of jzero, which has gpt2, llama"
    ):
        Rules.read("mistral")


def header(rows, data=b"", length=None):
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no safetensors file, or was cut short"),
        (header({}, length=2**63), "its header would be"),
        (header(b"[1]"), "it is no dict"),
        (header(b'{"a": '), "cannot be read"),
        (header(b"[" * 100_000), "cannot be read"),
        (header(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}'), "'a' is there twice"),
        (header({"a": ROW}, bytes(7)), "was cut short: its tensors end at byte"),
        (header({"a": ROW}, bytes(9)), "has more than its tensors"),
        (header({"a": ROW | {"shape": [3]}}, bytes(8)), "has 8 bytes, F32 of shape"),
        (header({"a": ROW | {"shape": [-2]}}, bytes(8)), "wanted ints from 0 on"),
        (header({"a": ROW | {"shape": [2.0]}}, bytes(8)), "wanted ints from 0 on"),
        (header({"a": ROW | {"data_offsets": [True, 8]}}, bytes(8)), "wanted ints from 0 on"),
        (header({"a": ROW | {"dtype": "F99"}}, bytes(8)), "'F99', which the format does not know"),
        (header({"a": ROW | {"dtype": ["F32"]}}, bytes(8)), "the format does not know"),
        (header({"a": {"dtype": "F32"}}), "wanted dtype, shape and data_offsets"),
        (header({"a": ROW, "b": ROW}, bytes(8)), "leaf|tensor b: .*begins at byte"),
        (header({"a": ROW | {"data_offsets": [4, 12]}}, bytes(12)), "begins at byte"),
    ],
)
def test_files_that_lie(tmp_path, content, says):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CorruptTensors, match=says) as caught:
        import_params(tmp_path / "x.safetensors", tmp_path / "0")
    assert "x.safetensors" in str(caught.value) and not (tmp_path / "0").exists()


def test_every_truncation_and_every_changed_byte_of_a_header(tmp_path):
    leaves = {("a", "b"): bits_of(np.float32, 3, 2), ("c",): bits_of(ml_dtypes.bfloat16, 5)}
    export_safetensors(saved(tmp_path / "1", leaves), tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    content = file.read_bytes()
    whole = {tensor.name: (tensor.code, tensor.shape, tensor.begin) for tensor in find(file).tensors}
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(CorruptTensors):
            find(file)
    changed = 0
    for at in range(8 + int.from_bytes(content[:8], "little")):
        other = bytearray(content)
        other[at] ^= 1 << RANDOM.integers(8)
        file.write_bytes(other)
        try:
            found = {tensor.name: (tensor.code, tensor.shape, tensor.begin) for tensor in find(file).tensors}
        except CorruptTensors:
            continue
        # What passes is another letter of a name, another dtype of that size or another order of sizes: no checksum
        # is in the format, so a change that leaves a file consistent cannot be seen. Bytes stay where they are.
        assert sorted(begin for *_, begin in found.values()) == sorted(begin for *_, begin in whole.values())
        changed += 1
    assert changed < 60


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../../evil", "..", ".", "c:\\evil", "a\0b", "x" * 300])
def test_names_of_tensors_lead_nowhere(tmp_path, name):
    (tmp_path / "in").mkdir()
    content = header({name: ROW, "z" + name: ROW | {"data_offsets": [8, 16]}}, bytes(16))
    (tmp_path / "in/model.safetensors").write_bytes(content)
    import_params(tmp_path / "in", tmp_path / "deep/out/0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "in"]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out"]
    assert sorted(path.name for path in (tmp_path / "deep/out").iterdir()) == ["0"]
    assert len(held(tmp_path / "deep/out/0")) == 2
    export_safetensors(tmp_path / "deep/out", tmp_path / "deep/hf")
    assert [path.name for path in (tmp_path / "deep/hf").iterdir()] == ["model.safetensors"]
    import_params(tmp_path / "deep/hf", tmp_path / "deep/out/1")
    assert held(tmp_path / "deep/out/1").keys() == held(tmp_path / "deep/out/0").keys()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda index: index["weight_map"].update(a="../1/model.safetensors"),
            "names a file '../1/model.safetensors' ou",
        ),
        (lambda index: index["weight_map"].update(a="/etc/passwd"), "names a file '/etc/passwd' outside"),
        (lambda index: index["weight_map"].update(a="gone.safetensors"), "gone.safetensors is missing; model.safe"),
        (lambda index: index["weight_map"].pop("b"), r"they differ in b \(index: none, found: model-00001"),
        (lambda index: index["weight_map"].pop("c"), "names model-00001-of-00002.safetensors, and not model-00002"),
        (lambda index: index["weight_map"].update(x=index["weight_map"]["a"]), r"x \(index: model-00001.*found: none"),
        (lambda index: index["weight_map"].update(a=3), "is no index"),
        (lambda index: index.pop("weight_map"), "is no index"),
    ],
)
def test_an_index_that_lies(tmp_path, change, says):
    leaves = {(name,): bits_of(np.float32, 10, 10) for name in "abc"}
    export_safetensors(saved(tmp_path / "1", leaves), tmp_path / "hf", max_shard=800)
    file = tmp_path / "hf/model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    with pytest.raises(CorruptTensors, match=says):
        import_params(tmp_path / "hf", tmp_path / "0")


def test_shards_without_an_index(tmp_path):
    leaves = {(name,): bits_of(np.float32, 10, 10) for name in "abc"}
    export_safetensors(saved(tmp_path / "1", leaves), tmp_path / "hf", max_shard=400)
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    assert import_params(tmp_path / "hf", tmp_path / "2").leaves == 3
    (tmp_path / "hf/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptTensors, match=r"model-00002-of-00003.safetensors is missing, model-00001"):
        import_params(tmp_path / "hf", tmp_path / "3")
    shutil.copy(tmp_path / "hf/model-00001-of-00003.safetensors", tmp_path / "hf/model-00002-of-00003.safetensors")
    with pytest.raises(CorruptTensors, match=r"tensor a: .* holds this tensor twice"):
        import_params(tmp_path / "hf", tmp_path / "3")


def test_pickles_are_not_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle, which can run code"):
        import_params(tmp_path, tmp_path / "0")


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    folder = saved(tmp_path / "1", {("a",): bits_of(np.float32, 30, 30), ("b",): bits_of(np.float32, 30, 30)})
    chunk = sorted((folder / "state/params.b/c").rglob("*"))[-1]
    content = bytearray(chunk.read_bytes())
    content[11] ^= 4
    chunk.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="leaf params/b"):
        export_safetensors(folder, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


def test_what_was_written_is_read_back(tmp_path, monkeypatch):
    folder = saved(tmp_path / "1", {("a",): bits_of(np.float32, 30, 30), ("b",): bits_of(np.float32, 30, 30)})
    real, written = os.pwrite, []

    def flipped(handle, data, at):
        written.append(at)
        data = bytearray(data)
        if len(written) == 2:
            data[5] ^= 1
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", flipped)
    with pytest.raises(CorruptTensors, match=r"tensor [ab]: .*reads back with other bytes than were written"):
        export_safetensors(folder, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


def test_what_is_kept_of_what_was_written_does_not_grow_with_its_pieces(tmp_path, monkeypatch):
    """Of a matrix whose rows go to every other place a block is written row by row."""
    rule = '{ tensor = "t", dims = "(k two) d -> d (two k)" }'
    (tmp_path / "map.toml").write_text(f"[sizes]\ntwo = 2\n[leaves]\nw = {rule}")
    monkeypatch.setattr(export, "ENOUGH", 3000)
    w = bits_of(np.float32, 5, 300)
    sums, check, write, rows = [], export._check, slices.write, []
    monkeypatch.setattr(export, "_check", lambda *arguments: sums.append(arguments[2]) or check(*arguments))
    monkeypatch.setattr(slices, "write", lambda *arguments: rows.append(arguments[2]) or write(*arguments))
    export_safetensors(saved(tmp_path / "1", {("w",): w}, 200), tmp_path / "hf", map=tmp_path / "map.toml")
    assert len(rows) == 300 and len(sums[0]) < 10
    with safe_open(tmp_path / "hf/model.safetensors", "np") as file:
        assert same(file.get_tensor("t"), w.reshape(5, 2, 150).transpose(2, 1, 0).reshape(300, 5))
    at = []

    def flipped(handle, tensor, region, part):
        at.append(region)
        write(handle, tensor, region, part if len(at) != 170 else np.zeros_like(part))

    monkeypatch.setattr(slices, "write", flipped)
    with pytest.raises(CorruptTensors, match=r"tensor t: .*reads back with other bytes than were written"):
        export_safetensors(tmp_path / "1", tmp_path / "other", map=tmp_path / "map.toml")


def test_memory_and_disk_are_looked_at_before_anything_is_written(tmp_path, monkeypatch):
    folder = saved(tmp_path / "1", {("a",): bits_of(np.float32, 1000, 1000)}, largest=10**7)
    with pytest.raises(LimitExceeded, match=r"largest\n?.*chunk to read is 4.00 MB") as caught:
        export_safetensors(folder, tmp_path / "hf", memory=30_000_000)
    assert caught.value.limit == 30_000_000 < caught.value.needed < 200_000_000
    export_safetensors(folder, tmp_path / "hf", memory=caught.value.needed)
    with pytest.raises(LimitExceeded, match=r"import .*needs --max-memory 95MB; 1MB are allowed"):
        import_params(tmp_path / "hf", tmp_path / "2", memory=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**5))
    with pytest.raises(LimitExceeded, match="MB; 100 kB are free there"):
        export_safetensors(folder, tmp_path / "hf2")
    with pytest.raises(LimitExceeded, match="MB; 100 kB are free there"):
        import_params(tmp_path / "hf", tmp_path / "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "hf"]


def test_nothing_is_overwritten_unasked(tmp_path):
    one, two = (saved(tmp_path / str(n), {("a",): bits_of(np.float32, 30)}) for n in (1, 2))
    export_safetensors(one, tmp_path / "hf", max_shard=10)
    with pytest.raises(FileExistsError, match=r"hf is there already\. Pass overwrite=True"):
        export_safetensors(two, tmp_path / "hf")
    export_safetensors(two, tmp_path / "hf", overwrite=True)
    assert same(held(import_into(tmp_path / "hf", tmp_path / "3"))[("a",)], held(two)[("a",)])
    with pytest.raises(FileExistsError, match="3 is there already"):
        import_params(tmp_path / "hf", tmp_path / "3")
    import_params(tmp_path / "hf", tmp_path / "3", overwrite=True)
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"holds config.json, which is not of an export, and would be lost"):
        export_safetensors(one, tmp_path / "hf", overwrite=True)
    with pytest.raises(FileExistsError, match="not of a checkpoint"):
        import_params(tmp_path / "hf", tmp_path / "hf", overwrite=True)


def import_into(source, folder):
    import_params(source, folder)
    return folder


WORKER = """
import sys
import jax, numpy as np
from safetensors import safe_open
import jzero
from jzero.checkpoint.exchange import slices
file, address, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=process)
read, real = [], slices.Files.read
slices.Files.read = lambda *arguments: read.append(len(arguments[3])) or real(*arguments)
with safe_open(file, "np") as opened:
    whole = {name: opened.get_tensor(name) for name in ("w", "odd")}
layout = jzero.zero(whole, stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=0)
params = jzero.checkpoint.load_safetensors(file, layout)
for name, x in params.items():
    assert not x.is_fully_addressable
    for shard in x.addressable_shards:
        wanted = np.zeros(x.shape, x.dtype)
        wanted[tuple(slice(size) for size in whole[name].shape)] = whole[name]
        assert np.array_equal(np.asarray(shard.data), wanted[shard.index])
print(sum(read))
"""


@pytest.mark.slow
def test_each_of_two_processes_reads_its_part(tmp_path):
    tensors = {"w": np.arange(16384, dtype=np.float32).reshape(8, 2048), "odd": np.arange(13, dtype=np.float32)}
    save_file(tensors, tmp_path / "x.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    line = [sys.executable, "-c", WORKER, str(tmp_path / "x.safetensors"), address]
    workers = [subprocess.Popen([*line, str(n)], stdout=subprocess.PIPE, text=True) for n in range(2)]
    try:
        said = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    # Of 16 elements, padded, the first process holds 8 and the second the 5 others.
    assert [int(text.split()[-1]) for text in said] == [4 * 8192 + 4 * 8, 4 * 8192 + 4 * 5]
