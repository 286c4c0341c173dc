"""Checkpoints that Megatron-LM itself saved: two processes of tensor parallelism, two of data parallelism."""

import hashlib
import json
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jzero
from experiments.gpt.model import GPT, next_byte_logits
from jzero.checkpoint import import_params, load_safetensors
from jzero.checkpoint.exchange import slices, torch_dist, torch_file
from jzero.checkpoint.exchange.files import find
from jzero.checkpoint.exchange.format import CorruptTensors
from jzero.cli import main
from tests.exchange import held, unpacked

PREFIXES = {"none": "optimizer.state.fp32_param.", "fully_reshardable": "optimizer.state.param.", "dp_reshardable": ""}
"""Of the master weights, whatever the optimizer; where it keeps them in buffers, of the params themselves."""

STEP = "iter_0000001"


@pytest.fixture
def saved(tmp_path):
    return unpacked("megatron", tmp_path)


def sum_of(files, tensor):
    array = slices.read(files, tensor, tuple((0, size) for size in tensor.shape))
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("kind", PREFIXES)
def test_every_tensor_is_what_megatron_reads(saved, kind):
    description, sums = torch_dist.describe(saved / kind / STEP), json.loads((saved / kind / "sha256.json").read_text())
    with slices.Files() as files:
        found = {name: sum_of(files, description.tensor(name)) for name in description.shapes}
    assert found == sums
    assert {"rng_state/shard_0.1_1.2", "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2"} < set(description.others)


@pytest.mark.parametrize("kind", PREFIXES)
def test_params_are_the_master_weights_where_they_have_names(saved, kind):
    found, sums = find(saved / kind), json.loads((saved / kind / "sha256.json").read_text())
    assert len(found.tensors) == 8
    assert {tensor.code for tensor in found.tensors} == {"F32" if PREFIXES[kind] else "BF16"}
    with slices.Files() as files:
        for tensor in found.tensors:
            assert sum_of(files, tensor) == sums[PREFIXES[kind] + tensor.name]
            if PREFIXES[kind]:  # what bfloat16 has no bits for
                array = slices.read(files, tensor, tuple((0, size) for size in tensor.shape))
                assert (array.view(np.uint32) & 0xFFFF).any()
    taken = {PREFIXES[kind] + tensor.name for tensor in found.tensors} | {tensor.name for tensor in found.tensors}
    assert set(found.left_out) >= set(sums) - taken and not set(found.left_out) & taken
    assert {"common.pt", "rng_state/shard_0.0_1.2"} <= set(found.left_out)
    says = "" if PREFIXES[kind] else "embedding.word_embeddings.weight and 7 more come in 16 bits"
    assert found.note.startswith(says) and bool(found.note) == bool(says)


def test_a_model_computes_what_it_did_in_megatron(saved):
    """The model of experiments/gpt, of what Megatron trained and saved: the same logits."""
    model, reference = GPT(layers=2, width=8, heads=2, remat=False), np.load(saved / "fully_reshardable/reference.npz")
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 6), jnp.int32))["params"]
    mesh = jzero.make_mesh(data=2, devices=jax.devices()[:2])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P())), shapes
    )
    params = load_safetensors(saved / "fully_reshardable", target, map="megatron-gpt")
    logits = next_byte_logits(model, params, jnp.asarray(reference["tokens"], jnp.int32))
    np.testing.assert_allclose(logits, reference["logits"], rtol=1e-4, atol=1e-6)


def test_layers_that_are_not_stacked(saved, tmp_path):
    """As Megatron-LM names them where they are not all of one kind."""
    import_params(saved / "fully_reshardable", tmp_path / "0", map="megatron-gpt")
    import_params(saved / "fully_reshardable", tmp_path / "1")
    stacked, tensors = held(tmp_path / "0"), {}
    for path, array in held(tmp_path / "1").items():
        if path[:2] == ("decoder", "layers"):
            tensors |= {".".join([*path[:2], str(layer), *path[2:]]): part for layer, part in enumerate(array)}
        else:
            tensors[".".join(path)] = array
    save_file(tensors, tmp_path / "model.safetensors")
    import_params(tmp_path / "model.safetensors", tmp_path / "2", map="megatron-gpt")
    found = held(tmp_path / "2")
    assert stacked.keys() == found.keys() and ("blocks", "qkv", "kernel") in found
    assert all(np.array_equal(array, stacked[path]) for path, array in found.items())


def test_what_is_left_out_is_named(saved, tmp_path, capsys):
    assert main(["import", str(saved / "dp_reshardable"), str(tmp_path / "0"), "--map", "megatron-gpt"]) == 0
    said = capsys.readouterr().out
    assert "Left out, as no params: optimizer.distributed.dp_group_idx_0.gbuf_idx_0" in said
    assert "save with --dist-ckpt-optim-fully-reshardable" in said
    assert main(["import", str(saved / "fully_reshardable"), str(tmp_path / "1"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["note"] == "" and "optimizer.state.exp_avg.decoder.final_layernorm.weight" in done["left_out"]
    assert {"common.pt", "decoder.layers.mlp.linear_fc2._extra_state/shard_0_2"} < set(done["left_out"])
    sharding = jax.NamedSharding(jzero.make_mesh(data=1, devices=jax.devices()[:1]), jax.P())
    target = {"decoder": {"final_layernorm": {"weight": sharding}}}
    with pytest.warns(UserWarning, match="embedding.word_embeddings.weight and 7 more come in 16 bits"):
        load_safetensors(saved / "dp_reshardable", target, on_extra="ignore")


class Runs:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_no_pickle_is_opened(saved, tmp_path):
    """Neither `common.pt` nor the objects between the tensors, which are overwritten here with what would run code."""
    step, evil = saved / "fully_reshardable" / STEP, pickle.dumps(Runs(f"touch {tmp_path}/evil"))
    (step / "common.pt").write_bytes(evil)
    before = {tensor.name: tensor for tensor in find(step).tensors}
    state = torch_file.read_pickle(step / ".metadata").state
    objects = [where.state for key, where in state["storage_data"].items() if "/shard_" in key.state["fqn"]]
    assert len(objects) == 10
    for where in objects:
        with (step / where["relative_path"]).open("r+b") as file:
            file.seek(where["offset"])
            file.write(evil[: where["length"]].ljust(where["length"], b"."))
    assert {tensor.name: tensor for tensor in find(step).tensors} == before
    import_params(step, tmp_path / "0", map="megatron-gpt")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("latest", "says"),
    [
        ("../iter_0000001", "latest_checkpointed_iteration.txt says '../iter_0000001'"),
        ("", "latest_checkpointed_iteration.txt says ''"),
        ("7", "iter_0000007 is missing; latest_checkpointed_iteration.txt names it"),
        ("release", "release is missing"),
    ],
)
def test_latest_leads_nowhere(saved, latest, says):
    (saved / "none/latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(CorruptTensors, match=says):
        find(saved / "none")


def test_saves_that_were_not_finished(saved):
    step = saved / "none" / STEP
    mark = (step / "metadata.json").read_text()
    for text in (None, "", "[]", mark[:20]):
        (step / "metadata.json").write_text(text) if text is not None else (step / "metadata.json").unlink()
        with pytest.raises(CorruptTensors, match=r"metadata\.json is missing or damaged; Megatron-LM writes it last"):
            find(step)
    (step / "metadata.json").write_text(mark.replace("torch_dist", "zarr"))
    with pytest.raises(ValueError, match="format 'zarr'; jzero reads torch_dist"):
        find(step)
    (step / "metadata.json").write_text(mark)
    (step / ".metadata").unlink()
    with pytest.raises(CorruptTensors, match=r"\.metadata is missing; metadata\.json is there"):
        find(step)
