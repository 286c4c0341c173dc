"""Checkpoints that PyTorch and DeepSpeed themselves saved, and files that would run code when they are opened."""

import os
import pickle
import zipfile

import jax
import numpy as np
import pytest

import jzero
from jzero.checkpoint import CheckpointMismatch, import_params, load_safetensors
from jzero.checkpoint.exchange import slices, torch_file
from jzero.checkpoint.exchange.files import find
from jzero.checkpoint.exchange.format import CorruptTensors
from jzero.cli import main
from tests.exchange import held, unpacked

KINDS = ("stage1_bf16", "stage2_fp32", "stage3_fp32", "stage3_bf16")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return unpacked("deepspeed", tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_are_those_of_zero_to_fp32(saved, tmp_path, kind):
    reference = dict(np.load(saved / kind / "reference.npz"))
    import_params(saved / kind, tmp_path / "0")
    found = {".".join(path): array for path, array in held(tmp_path / "0").items()}
    # At stage 1 in bfloat16 zero_to_fp32 leaves out params that are not trained.
    assert reference.keys() <= found.keys() <= reference.keys() | {"frozen.weight", "frozen.bias"}
    assert {"wte.weight", "head.weight", "a.bias", "mask", "frozen.bias"} <= found.keys()
    assert all(np.array_equal(found[name].astype(np.float32), reference[name]) for name in reference)
    assert found["a.weight"].dtype == np.float32
    # As the model computed with: what bfloat16 has no bits for is there all the same.
    assert kind.endswith("fp32") or (found["a.weight"].view(np.uint32) & 0xFFFF).any()


def test_straight_into_shards_and_from_one_step(saved):
    sharding = jax.NamedSharding(jzero.make_mesh(data=7, devices=jax.devices()[:7]), jax.P("data"))
    target = {"a": {"weight": sharding}}
    params = load_safetensors(saved / "stage3_bf16/global_step2", target, on_extra="ignore")
    wanted = np.load(saved / "stage3_bf16/reference.npz")["a.weight"]
    assert np.array_equal(np.asarray(params["a"]["weight"]), wanted)
    assert params["a"]["weight"].addressable_shards[0].data.shape == (1, 5)


def copied(saved, tmp_path, kind):
    for path in (saved / kind).rglob("*.*"):
        if path.suffix == ".pt":
            (tmp_path / path.relative_to(saved)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path.relative_to(saved)).write_bytes(path.read_bytes())
    return tmp_path / kind / "global_step2"


@pytest.mark.parametrize(
    ("kind", "change", "error", "says"),
    [
        ("stage3_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", CorruptTensors, "and none of rank 1"),
        ("stage3_fp32", "zero_pp_rank_2_mp_rank_00_optim_states.pt", CorruptTensors, "was saved by 3 ranks, and holds"),
        ("stage3_fp32", "zero_pp_rank_2_mp_rank_00_model_states.pt", CorruptTensors, r"\*_model_states.pt of 2"),
        ("stage2_fp32", "zero_pp_rank_*_optim_states.pt", ValueError, "was not saved by ZeRO at stage 1, 2 or 3"),
    ],
)
def test_ranks_that_are_missing(saved, tmp_path, kind, change, error, says):
    folder = copied(saved, tmp_path, kind)
    for file in folder.glob(change):
        file.unlink()
    with pytest.raises(error, match=says):
        import_params(folder, tmp_path / "0")
    assert not (tmp_path / "0").exists()


def test_tensor_parallelism_is_refused(saved, tmp_path):
    folder = copied(saved, tmp_path, "stage2_fp32")
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"tensor or pipeline parallelism .mp_rank_01_model_states"):
        find(folder)


@pytest.mark.parametrize("name", ["../global_step2", "/etc", "..", "a/b", ""])
def test_latest_leads_nowhere(saved, tmp_path, name):
    copied(saved, tmp_path, "stage2_fp32")
    (tmp_path / "stage2_fp32/latest").write_text(name)
    with pytest.raises(CorruptTensors, match="which is no folder beside it"):
        find(tmp_path / "stage2_fp32")


def test_files_that_were_cut_short(saved, tmp_path, capsys):
    folder = copied(saved, tmp_path, "stage3_fp32")
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = file.read_bytes()
    for length in range(0, len(content), 97):
        file.write_bytes(content[:length])
        with pytest.raises(CorruptTensors, match="zero_pp_rank_1_mp_rank_00_optim_states"):
            find(folder)
    assert main(["import", str(folder), str(tmp_path / "0")]) == 1
    assert "optim_states.pt cannot be read as torch.save writes files" in capsys.readouterr().err


def test_a_changed_pickle_is_refused(saved, tmp_path):
    """By the CRC-32 that the archive has of it."""
    folder, random = copied(saved, tmp_path, "stage3_fp32"), np.random.default_rng(0)
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        [info] = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        begin = content.index(archive.read(info))
    for at in random.integers(begin, begin + info.file_size, 30):
        other = bytearray(content)
        other[at] ^= 1 << random.integers(8)
        file.write_bytes(other)
        with pytest.raises(CorruptTensors, match="Bad CRC-32"):
            find(folder)


def torch_zip(file, data):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/data/0", bytes(16))


class Runs:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00K\x04\x85K\x01\x85\x89}tR"


def test_nothing_is_run(tmp_path):
    for protocol in range(6):
        torch_zip(tmp_path / "x.pt", pickle.dumps({"a": Runs(f"touch {tmp_path}/evil")}, protocol))
        assert isinstance(torch_file.read(tmp_path / "x.pt")["a"], torch_file.Inert)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (TENSOR + b"}X\x04\x00\x00\x00codeX\x03\x00\x00\x00I32sb.", "it changes a tensor"),
        (b"ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__Ns\x86b.", "it changes a function"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x01K\x04\x85K\x01\x85\x89}tR.", "ends behind its st"),
        (TENSOR.replace(b"K\x04tQ", b"K\x05tQ") + b".", "storage 0 has 16 bytes; wanted 5 elements of F32"),
        (TENSOR.replace(b"\x000X", b"\x007X") + b".", "data/7"),
        (b"garbage", "is not as|cannot be read as"),
        (b"}r\xff\xff\xff\x7f.", "it would fill the memory"),
        (b"\x96\xff\xff\xff\xff\x0f\x00\x00\x00.", "expected 68719476735 bytes"),
    ],
)
def test_pickles_that_lie(tmp_path, data, says):
    torch_zip(tmp_path / "x.pt", data)
    with pytest.raises(CorruptTensors, match=says):
        torch_file.read(tmp_path / "x.pt")


def test_a_tensor_of_a_file(tmp_path):
    torch_zip(tmp_path / "x.pt", TENSOR + b".")
    found = torch_file.read(tmp_path / "x.pt")
    assert (found.code, found.shape, found.stretch.nbytes) == ("F32", (4,), 16)
    torch_zip(tmp_path / "x.pt", TENSOR.replace(b"K\x04\x85K\x01\x85", b"K\x02\x85K\x02\x85") + b".")
    assert isinstance(torch_file.read(tmp_path / "x.pt"), torch_file.Inert)  # every second element: not in rows


@pytest.fixture
def boxes(tmp_path):
    return unpacked("torch_dist", tmp_path)


MAP = """
ignore = ["optimizer.*", "plain"]
[leaves]
"layers/up/kernel" = { tensor = "decoder.layers.mlp.linear_fc1.weight", transpose = true }
"layers/down/kernel" = { tensor = "decoder.layers.mlp.linear_fc2.weight", transpose = true }
"norm/scale" = "decoder.final_layernorm.weight"
"embedding" = "embedding.word_embeddings.weight"
"head" = "output_layer.weight"
"""


def test_torch_distributed_checkpoints(boxes, tmp_path):
    reference = dict(np.load(boxes / "reference.npz"))
    import_params(boxes, tmp_path / "0")
    found = {".".join(path): array for path, array in held(tmp_path / "0").items()}
    assert found.keys() == reference.keys()
    assert all(np.array_equal(found[name].astype(reference[name].dtype), reference[name]) for name in reference)
    assert found["embedding.word_embeddings.weight"].dtype.name == "bfloat16"
    (tmp_path / "map.toml").write_text(MAP)
    done = import_params(boxes, tmp_path / "1", map=tmp_path / "map.toml")
    assert sorted(done.ignored) == ["optimizer.state.exp_avg.output_layer.weight", "plain"]
    up = held(tmp_path / "1")["layers", "up", "kernel"]
    assert np.array_equal(up, reference["decoder.layers.mlp.linear_fc1.weight"].transpose(0, 2, 1))


def test_dims_are_cut_across_boxes(boxes, tmp_path):
    """Each tensor lies in boxes, and each device gets parts of heads of several."""
    reference = dict(np.load(boxes / "reference.npz"))
    (tmp_path / "map.toml").write_text("""
ignore = ["optimizer.*", "plain", "output*", "*fc1*", "*norm*", "embedding*"]
[sizes]
head = 2
three = 3
[leaves]
"qkv" = { tensor = "decoder.layers.mlp.linear_fc2.weight", dims = "l d (head three k) -> l (three head k) d" }
""")
    sharding = jax.NamedSharding(jzero.make_mesh(data=4, devices=jax.devices()[:4]), jax.P(None, "data"))
    params = load_safetensors(boxes, {"qkv": sharding}, map=tmp_path / "map.toml")
    wanted = reference["decoder.layers.mlp.linear_fc2.weight"].reshape(3, 8, 2, 3, 2).transpose(0, 3, 2, 4, 1)
    assert np.array_equal(np.asarray(params["qkv"]), wanted.reshape(3, 12, 8))


@pytest.mark.parametrize("seed", range(3))
def test_slices_across_boxes(boxes, seed):
    reference, random = dict(np.load(boxes / "reference.npz")), np.random.default_rng(seed)
    with slices.Files() as files:
        for tensor in find(boxes).tensors:
            ends = [sorted(random.integers(0, size + 1, 2).tolist()) for size in tensor.shape]
            found = slices.read(files, tensor, tuple(map(tuple, ends)))
            wanted = reference[tensor.name][tuple(slice(*pair) for pair in ends)]
            assert np.array_equal(found.astype(wanted.dtype), wanted)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"__0_0.distcp", b"../../x.dist", r"names a file '\.\./\.\./x\.dist', which is none"),
        (b"__0_0.distcp", b"__9_0.distcp", "__9_0.distcp is missing"),
        (b"storage_data", b"storage_dato", "has something else where"),
        (b"relative_path", b"relative_poth", "has something else where"),
        (b"TensorStorageMetadata", b"TensorStorageMetodata", "they hold|has none|no tensors"),
    ],
)
def test_descriptions_that_lie(boxes, tmp_path, old, new, says):
    file = boxes / ".metadata"
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    with pytest.raises((CorruptTensors, CheckpointMismatch), match=says):
        import_params(boxes, tmp_path / "0")
    assert not (tmp_path / "0").exists()


def test_boxes_that_were_cut_short(boxes):
    file = boxes / "__1_0.distcp"
    content = file.read_bytes()
    for length in range(0, len(content), 977):
        file.write_bytes(content[:length])
        with pytest.raises(CorruptTensors, match=r"__1_0\.distcp"):
            find(boxes)


def test_every_changed_byte_of_a_description_is_refused_or_harmless(boxes):
    """Never another error than that of a corrupt file, and never elements that are in no file."""
    file, random = boxes / ".metadata", np.random.default_rng(0)
    content = file.read_bytes()
    for at in random.integers(0, len(content), 300):
        other = bytearray(content)
        other[at] ^= 1 << random.integers(8)
        file.write_bytes(other)
        try:
            tensors = find(boxes).tensors
        except CorruptTensors:
            continue
        with slices.Files() as files:
            for tensor in tensors:
                slices.read(files, tensor, tuple((0, size) for size in tensor.shape))
