"""Checkpoints looked at, checked and rewritten by the library behind `jzero inspect`, `verify` and `reshard`."""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from jzero.checkpoint import (
    Checkpointer,
    CheckpointMismatch,
    CorruptCheckpoint,
    Entry,
    Manifest,
    SaveFailed,
    chunks,
    encoding,
    place,
    store,
)
from jzero.checkpoint.blocks import BASE, COPIES, ENOUGH, MEMORY, Reader, budget, regions, shape_of_blocks
from jzero.checkpoint.compare import compare
from jzero.checkpoint.errors import LimitExceeded
from jzero.checkpoint.inspection import inspect
from jzero.checkpoint.joints import Merge, Split
from jzero.checkpoint.layers import Stack, Unstack
from jzero.checkpoint.manifest import _digest
from jzero.checkpoint.names import folders
from jzero.checkpoint.origin import Origin, find, left_behind
from jzero.checkpoint.patterns import Pattern
from jzero.checkpoint.recipe import same
from jzero.checkpoint.rename import Cast, Rename, applied
from jzero.checkpoint.reshard import reshard
from jzero.checkpoint.store import Piece
from jzero.checkpoint.verify import verify
from jzero.checkpoint.write import write
from tests.checkpoints import OTHERS, TX, held, layout_of, random_bits, random_state

ROOT = Path(__file__).parent.parent


def write_arrays(folder, arrays, largest=256, **about):
    """Writes a checkpoint of numpy arrays, by path."""
    entries, pieces = [], []
    for (path, x), name in zip(arrays.items(), folders(list(arrays)), strict=True):
        dtype = str(x.dtype)
        stored = None if 0 in x.shape else encoding.stored_dtype(dtype)
        chunk = chunks.halved(x.shape, x.dtype.itemsize, largest) if stored else x.shape
        entry = Entry(path, ".".join(name), x.shape, dtype, stored, x.shape, chunk)
        entries.append(entry)
        if stored:
            for number, region in chunks.grid(x.shape, chunk):
                part = encoding.bits(x[tuple(slice(*ends) for ends in region)], stored)
                pieces.append(Piece(entry, number, region, np.array(part, order="C")))
    write(folder, Manifest(tuple(entries), **about), pieces)
    return folder


def read_arrays(folder):
    """The arrays of a checkpoint, read by tensorstore alone."""
    found = {}
    for leaf in Manifest.read(folder).leaves:
        if leaf.stored is None:
            found[leaf.path] = np.zeros(leaf.shape, encoding.dtype_of(leaf.dtype))
            continue
        store = {"driver": "file", "path": f"{folder.absolute()}/state/{leaf.folder}/"}
        x = ts.open({"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}).result().read().result()
        found[leaf.path] = encoding.values(x, leaf.dtype)
    return found


def bits(arrays):
    return {path: (str(x.dtype), x.shape, x.tobytes()) for path, x in arrays.items()}


def layers(rng, count=3):
    """Params with numbered layers, and the state of an optimizer that mirrors them."""

    def tree():
        yield ("emb",), rng.standard_normal((13, 8), np.float32)
        for number in range(count):
            yield ("blocks", str(number), "qkv", "kernel"), rng.standard_normal((8, 12), np.float32)
            yield ("blocks", str(number), "qkv", "bias"), rng.standard_normal((12,), np.float32)
            yield ("blocks", str(number), "norm"), rng.standard_normal((8,), np.float32)

    found: dict[tuple[str, ...], np.ndarray] = {("params", *path): x for path, x in tree()}
    found |= {("opt_state", "0", "mu", *path): x for path, x in tree()}
    return found | {("step",): np.array(7, np.int32)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state that a run on 4 x 2 devices saved at stage 3, and what it holds."""
    folder, layout = tmp_path_factory.mktemp("run"), layout_of(3, "4,2")
    state = random_state(layout)
    with Checkpointer(folder, async_=False) as checkpointer:
        checkpointer.save(5, state, TX, layout, data={"batch": 1}, metrics={"loss": 2.5})
    return folder, held(state, layout)


# --- inspect


def test_inspect_says_what_is_there_and_reads_no_array(saved, tmp_path, monkeypatch):
    shutil.copytree(saved[0], tmp_path / "run")
    (tmp_path / "run" / "6.jzero-tmp").mkdir()
    for chunk in (tmp_path / "run" / "5" / "state").rglob("c"):
        shutil.rmtree(chunk) if chunk.is_dir() else chunk.unlink()
    found = inspect(tmp_path / "run")
    assert found.origin.folder == tmp_path / "run" / "5"
    assert [path.name for path in found.stale] == ["6.jzero-tmp"]
    assert found.origin.manifest.saved_from["mesh"] == {"data": 4, "model": 2}
    assert found.bytes == sum(len(data) for _, _, data in saved[1].values())
    assert set(found.parts) == {"params", "opt_state", "step", "key", "model_state", "loss_scale", "skipped"}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", ["4,2", "3"])
def test_what_fits_is_what_a_device_holds(saved, stage, mesh):
    """Counted on the arrays of a state that is there."""
    layout = layout_of(stage, mesh)
    state = random_state(layout)
    device = layout.mesh.devices.flat[-1]
    # The leaves of an optimizer without elements, and what is saved of a key, take no place on a device.
    wanted = sum(
        shard.data.nbytes
        for x in jax.tree.leaves((state.params, state.master, state.opt_state))
        for shard in x.addressable_shards
        if shard.device == device
    )
    fits = inspect(saved[0], mesh=layout.mesh.shape, stage=stage).fits
    mine = [one for one in fits if one.leaf.path[0] in ("params", "opt_state")]
    assert sum(one.bytes for one in mine) == wanted
    shards = [leaf for leaf in layout.leaves if stage == 3 or (stage and leaf.has_master)]
    padded = {leaf.path for leaf in shards if leaf.stored != leaf.shape}
    assert {
        one.leaf.name.removeprefix("params/") for one in mine if one.leaf.path[0] == "params" and one.note
    } == padded
    assert not any(one.refused for one in mine)


def test_a_model_axis_that_does_not_divide_is_named(saved):
    (one,) = [
        one for one in inspect(saved[0], mesh={"data": 2, "model": 4}, stage=3).fits if one.leaf.path[1:] == ("ruled",)
    ]
    assert one.refused and one.note == "dim 1 of size 10 does not divide by 4 (mesh axis 'model')"
    with pytest.raises(ValueError, match="no data axis; wanted 'data'"):
        inspect(saved[0], mesh={"model": 2})


@pytest.mark.parametrize(
    ("mesh", "stage", "says"),
    [
        ({"data": 4, "model": 2}, 3, {}),
        ({"data": 4, "model": 4}, 3, {"model": "would cut only leaves that this mesh does not divide"}),
        ({"data": 4, "tp": 2}, 3, {"tp": "where the checkpoint was saved they were cut over 'model' and not over it"}),
        ({"data": 4, "model": 2}, 0, {"data": "cuts no leaf at this stage, and so all devices along it hold the same"}),
        ({"data": 4, "model": 1}, 3, {}),
    ],
)
def test_an_axis_that_cuts_nothing_is_told(saved, mesh, stage, says):
    found = inspect(saved[0], mesh=mesh, stage=stage).idle
    assert found.keys() == says.keys() and all(says[axis] in found[axis] for axis in says)


def test_a_model_axis_is_asked_of_a_run_without_one(tmp_path):
    layout = layout_of(3, "8")
    with Checkpointer(tmp_path / "run", async_=False) as checkpointer:
        checkpointer.save(1, random_state(layout), TX, layout)
    found, alone = (inspect(tmp_path / "run", mesh=mesh) for mesh in ({"data": 4, "model": 2}, {"data": 4}))
    assert [one.bytes for one in found.fits] == [one.bytes for one in alone.fits]  # nothing is cut over it
    assert found.idle == {
        "model": "cuts no leaf: where the checkpoint was saved, no model axis did. Devices along it hold the same, "
        "unless rules= of `jzero.zero` cut leaves over it"
    }
    write_arrays(tmp_path / "made", {("params", "w"): np.ones((8, 8), np.float32)})
    assert (
        inspect(tmp_path / "made", mesh={"data": 2, "model": 2})
        .idle["model"]
        .startswith(
            "is not known to cut a leaf: the checkpoint does not say which axes cut its leaves. Devices along it"
        )
    )


# --- verify


def test_a_whole_checkpoint_is_whole(saved):
    found = verify(saved[0], memory=MEMORY)
    assert found.problems == () and found.unknown == () and found.has_checksums
    assert found.files == sum(path.is_file() for path in (saved[0] / "5").rglob("*"))


def test_all_that_is_damaged_is_named_at_once(tmp_path):
    rng = np.random.default_rng(0)
    folder = write_arrays(tmp_path / "c", {("params", name): rng.random((16, 16), np.float32) for name in "abcd"})
    state = folder / "state"
    (state / "params.a" / "c" / "0" / "0").unlink()
    shutil.rmtree(state / "params.b")
    chunk = state / "params.c" / "c" / "1" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    (state / "mine.txt").write_text("hello")
    found = verify(folder, memory=MEMORY)
    names = {str(Path(problem.file).relative_to(folder)): problem.leaf for problem in found.problems}
    assert names["state/params.a/c/0/0"] == "params/a" and names["state/params.b/zarr.json"] == "params/b"
    assert names["state/params.c/c/1/1"] == "params/c" and names["_CHECKPOINT_METADATA"] is None
    assert len(names) == 3 + 1 + 4 and found.unknown == ("state/mine.txt",)


def test_a_chunk_of_another_array_is_found(tmp_path):
    """Whole, with a checksum that fits its content, and not what was written there."""
    arrays = {(name,): np.full((16, 16), i, np.float32) for i, name in enumerate("ab")}
    folder = write_arrays(tmp_path / "c", arrays)
    shutil.copy(folder / "state" / "a" / "c" / "0" / "0", folder / "state" / "b" / "c" / "0" / "0")
    (problem,) = verify(folder, memory=MEMORY).problems
    assert problem.leaf == "b" and "has crc32c:" in str(problem)
    with pytest.raises(CorruptCheckpoint, match=r"leaf b: .*b/c/0/0 has crc32c:"):
        reshard(folder, tmp_path / "made")


def test_half_a_copy_is_not_taken_for_a_checkpoint_of_orbax(tmp_path):
    folder = write_arrays(tmp_path / "c", {("w",): np.ones(3, np.float32)})
    (folder / "jzero.json").unlink()
    (problem,) = verify(folder, memory=MEMORY).problems
    assert problem.file == str(folder / "jzero.json") and "jzero wrote this checkpoint" in str(problem)
    for work in (inspect, lambda folder: reshard(folder, tmp_path / "made")):
        with pytest.raises(CorruptCheckpoint, match=r"jzero.json is missing"):
            work(folder)


def damage(folder, rng):
    """Does one thing to one file; returns its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    few = [path for path in files if path.parent.name in (folder.name, "state")]
    path = rng.choice(few if rng.integers(3) == 0 else files)
    data = bytearray(path.read_bytes())
    kind, at = rng.choice(["bit", "byte", "cut", "gone"]), rng.integers(len(data))
    if kind == "gone":
        path.unlink()
        return path
    if kind == "bit":
        data[at] ^= 1 << rng.integers(8)
    elif kind == "byte":
        data[at] = (data[at] + rng.integers(1, 256)) % 256
    path.write_bytes(data[:at] if kind == "cut" else data)
    return path


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory):
    """A checkpoint that `reshard` wrote."""
    folder = tmp_path_factory.mktemp("rewritten")
    write_arrays(folder / "source", layers(np.random.default_rng(0)), step=1, data={"batch": 3}, metrics={"loss": 1.5})
    rules = [Stack.parse("**/blocks/#=**/blocks"), Cast.parse("params=bfloat16")]
    reshard(folder / "source", folder / "made", rules=rules, chunk=128)
    return folder / "made"


def trial(rewritten, folder, seed):
    """Whether the damage is found; if it is not, nothing has changed."""
    shutil.copytree(rewritten, folder)
    path = damage(folder, np.random.default_rng(seed))
    found = verify(folder, memory=MEMORY)
    if not found.problems:
        assert not list(compare(Origin.open(rewritten), Origin.open(folder), MEMORY))
        assert Manifest.read(folder) == Manifest.read(rewritten)
        return False
    (problem,) = found.problems
    assert Path(problem.file) == path
    parts = path.relative_to(folder).parts
    if len(parts) > 2:
        leaf = next(leaf for leaf in Manifest.read(rewritten).leaves if leaf.folder == parts[1])
        assert problem.leaf == leaf.name and leaf.name in str(problem)
    return True


def test_damage_to_what_was_rewritten_is_found(rewritten, tmp_path):
    assert sum(trial(rewritten, tmp_path / str(seed), seed) for seed in range(30)) >= 27


@pytest.mark.slow
def test_more_damage_to_what_was_rewritten_is_found(rewritten, tmp_path):
    assert sum(trial(rewritten, tmp_path / str(seed), seed) for seed in range(1000, 1300)) >= 270


def test_equal_whatever_the_chunks(tmp_path):
    rng = np.random.default_rng(0)
    arrays = layers(rng)
    one = Origin.open(write_arrays(tmp_path / "one", arrays, largest=100))
    assert not list(compare(one, Origin.open(write_arrays(tmp_path / "two", arrays, largest=333)), MEMORY))
    others = dict(arrays)
    changed = others["params", "blocks", "0", "qkv", "kernel"] = arrays["params", "blocks", "0", "qkv", "kernel"].copy()
    changed[2, 5] += 0.5
    changed[7, 11] = np.nan
    others["params", "emb"] = arrays["params", "emb"].astype(ml_dtypes.bfloat16)
    others["opt_state", "new"] = others.pop(("opt_state", "0", "mu", "emb"))
    found = {each.leaf: each.reason for each in compare(one, Origin.open(write_arrays(tmp_path / "3", others)), MEMORY)}
    assert set(found) == {"params/blocks/0/qkv/kernel", "params/emb", "opt_state/new", "opt_state/0/mu/emb"}
    assert "2 of 96 elements differ, by up to 0.5, the first at (2, 5): " in found["params/blocks/0/qkv/kernel"]
    assert "has float32(13, 8)" in found["params/emb"] and "has bfloat16(13, 8)" in found["params/emb"]
    assert found["opt_state/new"].startswith("only") and "3 has it: float32(13, 8)" in found["opt_state/new"]


def test_minus_zero_is_another_zero_and_one_nan_is_not_the_next(tmp_path):
    for dtype in ("float32", "bfloat16", "complex128", "float8_e4m3fn"):
        zero = np.zeros((5, 3), encoding.dtype_of(dtype))
        minus = zero.copy()
        minus[4, 1] = -0.0
        one, two = (
            Origin.open(write_arrays(tmp_path / f"{dtype}{i}", {("x",): x})) for i, x in enumerate((zero, minus))
        )
        (found,) = compare(one, two, MEMORY)
        assert found.reason.startswith("1 of 15 elements differ, by up to 0, the first at (4, 1)")
        assert not list(compare(two, two, MEMORY))


# --- reshard


def test_every_kind_of_leaf_keeps_its_bits(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for dtype in sorted(encoding.NATIVE | encoding.BITS):
        arrays["params", dtype] = random_bits(rng, (13, 7), encoding.dtype_of(dtype))
    arrays |= {
        ("params", "a.b"): rng.random((3,), np.float32),
        ("params", "a", "b"): rng.random((3,), np.float32),
        ("params", "ü/../..", ""): rng.random((2, 3, 4, 5), np.float32),
        ("params", "none"): np.zeros((0, 4), np.float32),
        ("step",): np.array(3, np.int32),
    }
    write_arrays(tmp_path / "source", arrays, largest=50)
    for target, options in {
        "same": {},
        "mesh": {"mesh": {"data": 3}},
        "tiny": {"chunk": 9},
        "one": {"chunk": 10**6},
    }.items():
        reshard(tmp_path / "source", tmp_path / target, **options)
        assert bits(read_arrays(tmp_path / target)) == bits(arrays)
        assert not verify(tmp_path / target, memory=MEMORY).problems
        assert set(ocp.load((tmp_path / target).absolute())) == {"params", "step"}


def test_what_was_resharded_restores_anywhere(saved, tmp_path):
    reshard(saved[0], tmp_path / "run" / "5", mesh={"data": 3}, chunk=100)
    assert {leaf.chunk for leaf in Manifest.read(tmp_path / "run" / "5").leaves} != {
        leaf.chunk for leaf in Manifest.read(saved[0] / "5").leaves
    }
    layout = layout_of(2, "3")
    restored = Checkpointer(tmp_path / "run").restore(TX, layout, **OTHERS)
    assert held(restored.state, layout) == saved[1]
    assert (restored.step, restored.data, restored.metrics) == (5, {"batch": 1}, {"loss": 2.5})


def test_devices_of_the_mesh_read_whole_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("jzero.checkpoint.placing.SMALL", 1)
    spec = ((), ("model",))
    write_arrays(tmp_path / "source", {("params", "w"): np.arange(24 * 32 * 16, dtype=np.float32).reshape(24, 32, 16)})
    manifest = Manifest.read(tmp_path / "source")
    leaf = manifest.leaves[0]
    document = json.loads((tmp_path / "source" / "jzero.json").read_text())
    document["body"]["leaves"][0]["spec"] = [[], ["model"], []]
    document["sha256"] = _digest(document["body"])
    (tmp_path / "source" / "jzero.json").write_text(json.dumps(document))
    reshard(tmp_path / "source", tmp_path / "made", mesh={"data": 4, "model": 2}, chunk=1000)
    (leaf,) = Manifest.read(tmp_path / "made").leaves
    shard = (24, 16, 4)  # the last dim is the largest that divides and has no model axis
    assert all(size % step == 0 for size, step in zip(shard[1:], leaf.chunk[1:], strict=True)), (leaf.chunk, spec)
    assert np.prod(leaf.chunk) * 4 <= 1000


def expected_layers(arrays):
    """The arrays with their layers stacked."""
    stacked = {}
    for path, x in arrays.items():
        if "blocks" in path:
            at = path.index("blocks") + 1
            stacked.setdefault((*path[:at], *path[at + 1 :]), []).append(x)
        else:
            stacked[path] = x
    return {path: np.stack(x) if isinstance(x, list) else x for path, x in stacked.items()}


def test_layers_are_stacked_and_unstacked(tmp_path):
    arrays = layers(np.random.default_rng(0), count=11)  # 10 comes behind 9
    write_arrays(tmp_path / "source", arrays)
    reshard(tmp_path / "source", tmp_path / "stacked", rules=[Stack.parse("**/blocks/#=**/blocks")])
    assert bits(read_arrays(tmp_path / "stacked")) == bits(expected_layers(arrays))
    reshard(tmp_path / "stacked", tmp_path / "back", rules=[Unstack.parse("**/blocks=**/blocks/#")])
    assert bits(read_arrays(tmp_path / "back")) == bits(arrays)
    rules = [Stack.parse("params/**/blocks/#=params/**/layers@1"), Unstack.parse("params/layers=params/layer_#@1")]
    reshard(tmp_path / "source", tmp_path / "named", rules=[*rules, Rename.parse("params/layer_#=params/blocks/#")])
    assert bits(read_arrays(tmp_path / "named")) == bits(arrays)


def test_leaves_are_split_merged_cast_and_dropped(tmp_path):
    arrays = layers(np.random.default_rng(0))
    write_arrays(tmp_path / "source", arrays)
    rules = [
        Stack.parse("**/blocks/#=**/h"),
        Split.parse("**/qkv=**/q,**/k,**/v"),
        Merge.parse("**/k,**/v=**/kv"),
        Split.parse("params/emb=params/head:5,params/tail:8@0"),
        Cast.parse("params/**/kernel=bfloat16"),
        Cast.parse("params/head=float64"),
    ]
    reshard(tmp_path / "source", tmp_path / "made", drop=[Pattern("step")], only=[Pattern("params")], rules=rules)
    stacked, found = expected_layers(arrays), read_arrays(tmp_path / "made")
    kernel, bias = stacked["params", "blocks", "qkv", "kernel"], stacked["params", "blocks", "qkv", "bias"]
    wanted = {
        ("params", "h", "q", "kernel"): kernel[..., :4].astype(ml_dtypes.bfloat16),
        ("params", "h", "kv", "kernel"): kernel[..., 4:].astype(ml_dtypes.bfloat16),
        ("params", "h", "q", "bias"): bias[..., :4],
        ("params", "h", "kv", "bias"): bias[..., 4:],
        ("params", "h", "norm"): stacked["params", "blocks", "norm"],
        ("params", "head"): arrays["params", "emb"][:5].astype(np.float64),
        ("params", "tail"): arrays["params", "emb"][5:],
    }
    assert bits(found) == bits(wanted)


ODD = ("a=b", "a@1", "k,v", "x:3", "back\\slash", "st*r", "#1", "sl/ash")
QUOTED = [r"a\=b", r"a\@1", r"k\,v", r"x\:3", r"back\\slash", r"st\*r", r"\#1", r"sl\/ash"]


@pytest.mark.parametrize(("name", "quoted"), list(zip(ODD, QUOTED, strict=True)))
def test_names_with_what_rules_are_written_with(name, quoted):
    """A backslash lets it stand for itself on either side of each rule."""

    def leaf(*path, dtype="float32"):
        return same(Entry(path, ".".join(folders([path])[0]), (4, 4), dtype, dtype, (4, 4), (4, 4)))

    def made(rule, *leaves):
        return [(one.path, one.shape, one.dtype) for one in applied("it", [rule], leaves)]

    one, rest = (4, 4), "float32"
    assert made(Rename.parse(f"p/{quoted}=q/{quoted}s"), leaf("p", name)) == [(("q", name + "s"), one, rest)]
    assert made(Rename.parse(f"*/{quoted}=*/w"), leaf("p", name), leaf("p", "other")) == [
        (("p", "w"), one, rest),
        (("p", "other"), one, rest),
    ]
    assert made(Cast.parse(f"{quoted}=bfloat16"), leaf(name)) == [((name,), one, "bfloat16")]
    assert made(Stack.parse(f"{quoted}/#={quoted}@1"), leaf(name, "0"), leaf(name, "1")) == [((name,), (4, 2, 4), rest)]
    assert made(Unstack.parse(f"{quoted}=n/#/{quoted}"), leaf(name))[3] == (("n", "3", name), (4,), rest)
    assert made(Split.parse(f"{quoted}={quoted}1:1,{quoted}2:3@0"), leaf(name)) == [
        ((name + "1",), (1, 4), rest),
        ((name + "2",), (3, 4), rest),
    ]
    assert made(Merge.parse(f"{quoted},other={quoted}s@-2"), leaf(name), leaf("other")) == [
        ((name + "s",), (8, 4), rest)
    ]
    assert Pattern(quoted).match((name, "below")) and not Pattern(quoted).match(("other",))


def test_rules_follow_rules(tmp_path):
    """Parts of parts: merged leaves are unstacked and split where none of them begins."""
    rng = np.random.default_rng(0)
    arrays = {("a",): rng.random((3, 6), np.float32), ("b",): rng.random((2, 6), np.float32)}
    write_arrays(tmp_path / "source", arrays, largest=30)
    whole = np.concatenate([arrays["a",], arrays["b",]])
    merge = Merge.parse("a,b=ab@0")
    reshard(tmp_path / "source", tmp_path / "1", rules=[merge, Unstack.parse("ab=row_#")])
    assert bits(read_arrays(tmp_path / "1")) == bits({(f"row_{i}",): whole[i] for i in range(5)})
    reshard(tmp_path / "source", tmp_path / "2", rules=[merge, Split.parse("ab=c:4,d:1@0"), Split.parse("c=e:1,f:5@1")])
    assert bits(read_arrays(tmp_path / "2")) == bits({("e",): whole[:4, :1], ("f",): whole[:4, 1:], ("d",): whole[4:]})
    reshard(tmp_path / "source", tmp_path / "3", rules=[merge, Unstack.parse("ab=col_#@1"), Stack.parse("col_#=t")])
    assert bits(read_arrays(tmp_path / "3")) == bits({("t",): np.ascontiguousarray(whole.T)})


def test_blocks_cover_each_leaf_once_whatever_the_chunks():
    rng = random.Random(0)
    for _ in range(60):
        ndim = rng.randint(0, 3)
        shape = tuple(rng.randint(1, 40) for _ in range(ndim))
        source, target = (tuple(rng.randint(1, size) for size in shape) for _ in range(2))
        leaf = same(Entry(("x",), "x", shape, "float32", "float32", shape, source))
        block = shape_of_blocks(leaf, target, rng.choice([4, 400, 4000, 10**6]))
        seen = np.zeros(shape, int)
        for region in regions(leaf, block):
            seen[tuple(slice(*ends) for ends in region)] += 1
            assert all(begin % step == 0 for (begin, _), step in zip(region, target, strict=True))
        assert (seen == 1).all()


def test_blocks_follow_the_chunks_of_the_source_where_memory_lets_them():
    leaf = same(Entry(("x",), "x", (4096, 4096), "float32", "float32", (4096, 4096), (2048, 2048)))
    assert shape_of_blocks(leaf, (512, 4096), 2**26)[0] % 2048 == 0
    assert shape_of_blocks(leaf, (4096, 512), 2**26)[1] % 2048 == 0
    assert shape_of_blocks(leaf, (512, 4096), 2**23) == (512, 4096)


def test_random_rewrites_keep_every_bit(tmp_path):
    rng = np.random.default_rng(1)
    for number in range(6):
        arrays = {}
        for name in "abc":
            shape = tuple(int(n) for n in rng.integers(1, 30, rng.integers(0, 4)))
            arrays["params", name] = random_bits(rng, shape, np.dtype(rng.choice(["float32", "int8", "complex64"])))
        source, target = tmp_path / f"source{number}", tmp_path / f"target{number}"
        write_arrays(source, arrays, largest=int(rng.integers(8, 5000)))
        reshard(source, target, chunk=int(rng.integers(8, 5000)))
        assert bits(read_arrays(target)) == bits(arrays)


def test_what_cannot_be_is_told_at_once_and_nothing_is_written(tmp_path):
    arrays = layers(np.random.default_rng(0))
    arrays |= {("params", "blocks", n, "norm"): arrays["params", "blocks", n, "norm"].astype(np.float16) for n in "12"}
    write_arrays(tmp_path / "source", arrays)

    def refused(match, error: type[Exception] = CheckpointMismatch, **options):
        with pytest.raises(error, match=match) as raised:
            reshard(tmp_path / "source", tmp_path / "made", **options)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
        return str(raised.value)

    refused("--drop nothing matches none of the 21 leaves", drop=[Pattern("nothing")])
    refused("leave no leaf", only=[Pattern("params")], drop=[Pattern("**")])
    message = refused(
        "3 leaves do not fit", rules=[Split.parse("params/blocks/*/norm=params/blocks/*/a,params/blocks/*/b@1")]
    )
    assert message.count("(8,) cannot be cut into 2 equal parts along dim 1") == 3
    refused("step: the checkpoint has int32.*only floats are cast", rules=[Cast.parse("step=bfloat16")])
    refused("--stack .* matches none", rules=[Stack.parse("params/h/#=params/h")])
    refused("two leaves would have this name", rules=[Rename.parse("params/emb=step")])
    refused("below step, which is a leaf", rules=[Rename.parse("params=step")])
    refused(
        "layer 1 is not there", drop=[Pattern("params/blocks/1")], rules=[Stack.parse("params/blocks/#=params/blocks")]
    )
    refused(
        r"params/blocks/1/norm: it is float16\(8,\), but params/blocks/0/norm float16\(8,\) cast from float32",
        rules=[
            Cast.parse("params/blocks/0/norm=float16"),
            Stack.parse("params/blocks/#/norm=params/norm"),
        ],
    )
    refused("--merge .* finds nothing for params/z", rules=[Merge.parse("params/emb,params/z=params/y")])
    refused(
        "cannot be joined along dim 0",
        rules=[Merge.parse("params/emb,params/blocks/0/norm=params/y@0")],
    )
    refused(r"no data axis", ValueError, mesh={"model": 2})
    refused(r"needs --max-memory \d+MB; 10MB are allowed", LimitExceeded, memory=10**7)
    refused("chunks of 0 bytes", ValueError, chunk=0)


def test_a_layer_that_is_there_twice_is_told():
    leaves = [same(Entry(("h", n), n, (2,), "float32", "float32", (2,), (2,))) for n in ("0", "1", "01")]
    with pytest.raises(CheckpointMismatch, match="h/01: --stack h/#=h finds part 1 of h twice"):
        applied("it", [Stack.parse("h/#=h")], leaves)


def test_a_target_that_is_in_the_way_stays(tmp_path):
    source = write_arrays(tmp_path / "source", {("w",): np.ones(3, np.float32)})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    for folder, error in ((source, ValueError), (source / "in", ValueError), (tmp_path, ValueError)):
        with pytest.raises(error, match="Choose another place"):
            reshard(source, folder, overwrite=True)
    with pytest.raises(
        FileExistsError, match=r"holds notes.txt, which is not of a checkpoint of jzero, and would be lost"
    ):
        reshard(source, tmp_path / "mine", overwrite=True)
    reshard(source, tmp_path / "made")
    with pytest.raises(FileExistsError, match="--overwrite"):
        reshard(source, tmp_path / "made")
    reshard(source, tmp_path / "made", rules=[Rename.parse("w=v")], overwrite=True)
    assert list(read_arrays(tmp_path / "made")) == [("v",)]


def test_a_damaged_source_is_named_and_nothing_is_written(tmp_path):
    source = write_arrays(tmp_path / "source", {("params", "w"): np.ones((16, 16), np.float32)})
    chunk = source / "state" / "params.w" / "c" / "1" / "1"
    data = bytearray(chunk.read_bytes())
    data[9] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"params/w: \S*/c/1/1 cannot be read \(Digest mismatch, [^/]*\)"):
        reshard(source, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_was_not_written_right_gets_no_name(tmp_path, monkeypatch):
    """A fault between reading and writing; each chunk has a checksum that fits it."""
    source = write_arrays(tmp_path / "source", {("params", "w"): np.ones((16, 16), np.float32)})
    cast = sys.modules["jzero.checkpoint.blocks"].cast
    calls = itertools.count()

    def faulty(array, leaf):
        found = cast(array, leaf).copy()
        if next(calls) == 0:
            found[3, 3] = 2
        return found

    monkeypatch.setattr("jzero.checkpoint.blocks.cast", faulty)
    with pytest.raises(CorruptCheckpoint, match=r"params/w: .*would not hold what was read"):
        reshard(source, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_names_from_elsewhere_stay_inside(tmp_path):
    """Of a manifest that is made to lead out, with a checksum that fits."""
    source = write_arrays(tmp_path / "in" / "source", {("params", "w"): np.ones(3, np.float32)})
    document = json.loads((source / "jzero.json").read_text())
    for path in (["..", "..", "out"], ["/etc/x"], ["a\\..\\b"], ["\x1b[31m"], ["c:"], ["."], ["a/../../../../b"]):
        document["body"]["leaves"][0]["path"] = path
        document["sha256"] = _digest(document["body"])
        (source / "jzero.json").write_text(json.dumps(document))
        reshard(source, tmp_path / "in" / "made", overwrite=True)
        assert [leaf.path for leaf in Manifest.read(tmp_path / "in" / "made").leaves] == [tuple(path)]
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert {path.name for path in (tmp_path / "in").iterdir()} == {"source", "made"}
    leaf = document["body"]["leaves"][0]
    for changed, message in (
        *(
            ({"leaves": [leaf | change]}, "has a leaf")
            for change in (
                {"chunk": [0]},
                {"chunk": [-1]},
                {"shape": [2]},
                {"stored_shape": [3, 3]},
                {"path": []},
                {"path": [1]},
                {"stored": None},
                {"stored": "int8"},
            )
        ),
        ({"leaves": [leaf, leaf | {"folder": "x"}]}, "has two leaves of the path"),
        ({"leaves": [leaf, leaf | {"path": ["x"]}]}, "has two leaves of the folder"),
        ({"leaves": [leaf | {"dtype": None}]}, "is not as jzero writes it"),
        ({"leaves": [{}]}, "is not as jzero writes it .*folder"),
        ({"files": []}, "is not as jzero writes it"),
    ):
        body = document["body"] | changed
        (source / "jzero.json").write_text(json.dumps({"sha256": _digest(body), "body": body}))
        with pytest.raises(CorruptCheckpoint, match=message):
            inspect(source)


def test_no_leaf_takes_the_place_of_a_file_of_orbax(tmp_path):
    source = write_arrays(tmp_path / "source", {(name,): np.full(3, i, np.float32) for i, name in enumerate("abc")})
    names = ("_METADATA", "_sharding", "array_metadatas")
    rules = [Rename.parse(f"{old}={new}") for old, new in zip("abc", names, strict=True)]
    reshard(source, tmp_path / "made", rules=rules)
    assert list(read_arrays(tmp_path / "made")) == [(name,) for name in names]
    found = ocp.load(tmp_path / "made")
    assert sorted(x[0] for x in jax.tree.leaves(found)) == [0, 1, 2]


def test_a_file_that_cannot_be_read_is_damage(tmp_path):
    """A folder in its place here; a bad sector fails in the same way."""
    source = write_arrays(tmp_path / "source", {("params", name): np.ones(3, np.float32) for name in "vw"})
    for name in ("params.v/c/0", "params.w/zarr.json"):
        (source / "state" / name).unlink()
        (source / "state" / name).mkdir()
    found = verify(source, memory=MEMORY)
    assert [problem.leaf for problem in found.problems] == ["params/v", "params/w"]
    assert all("cannot be read" in str(problem) for problem in found.problems)


# --- what others wrote


@pytest.mark.parametrize("storage", ["zarr3", "zarr2", "folders"])
def test_checkpoints_of_plain_orbax(tmp_path, storage):
    import orbax.checkpoint as old

    rng = np.random.default_rng(0)
    tree = {
        "params": {"a.b": rng.random((12, 6), np.float32), "l": [rng.random(3), np.ones((), np.float32)]},
        "step": np.array(3),
    }
    folder = tmp_path / "orbax"
    if storage == "zarr3":
        ocp.save(folder, tree | {"note": "text", "none": None})
    else:
        handler = old.PyTreeCheckpointHandler(use_ocdbt=storage == "zarr2")
        old.Checkpointer(handler).save(folder, tree | {"note": "text", "none": None})
    (tmp_path / "7.orbax-checkpoint-tmp-12").mkdir()
    found = inspect(folder)
    assert not found.origin.has_checksums and [path.name for path in found.stale] == ["7.orbax-checkpoint-tmp-12"]
    assert {name.split("/")[0] for name in found.origin.others} == {"note", "none"}
    checked = verify(folder, memory=MEMORY)
    assert not checked.problems and not checked.has_checksums
    reshard(folder, tmp_path / "made", chunk=64)
    assert not list(compare(Origin.open(folder), Origin.open(tmp_path / "made"), MEMORY))
    wanted = {
        ("params", "a.b"): tree["params"]["a.b"],
        ("params", "l", "0"): tree["params"]["l"][0],
        ("params", "l", "1"): tree["params"]["l"][1],
        ("step",): tree["step"],
    }
    assert bits(read_arrays(tmp_path / "made")) == bits(wanted)


def test_what_orbax_has_lost_is_told(tmp_path):
    ocp.save(tmp_path / "c", {"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float32)})
    metadata = tmp_path / "c" / find(tmp_path / "c").joinpath("state").name / "_METADATA"
    text = metadata.read_text()
    # Two names that orbax joins to one: the array of one of them is gone.
    metadata.write_text(text.replace('[{"key": "b", "key_type": 2}]', '[{"key": "a", "key_type": 2}]'))
    with pytest.raises(CorruptCheckpoint, match="names 2 leaves 'a', of which orbax kept one"):
        inspect(tmp_path / "c")
    metadata.write_text(text.replace('[{"key": "b", "key_type": 2}]', '[{"key": "../../b", "key_type": 2}]'))
    with pytest.raises(CorruptCheckpoint, match="leads out of it"):
        inspect(tmp_path / "c")
    metadata.write_text(text.replace('[{"key": "b", "key_type": 2}]', '[{"key": "gone", "key_type": 2}]'))
    with pytest.raises(CorruptCheckpoint, match=r"leaf gone: .*cannot be opened"):
        inspect(tmp_path / "c")


def test_damaged_descriptions_of_orbax_are_told(tmp_path):
    whole = jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec("data"))
    ocp.save(tmp_path / "c", {"a": jax.device_put(np.ones(4, np.float32), whole), "k": jax.random.key(0)})
    assert {leaf.name: (leaf.dtype, leaf.spec) for leaf in inspect(tmp_path / "c").origin.leaves} == {
        "a": ("float32", (("data",),)),
        "k": ("key:threefry2x32", None),
    }
    for name, old, new in (
        ("_sharding", "partition_spec", "partition_spex"),
        ("_sharding", '{"', '{"!'),  # no base64
        ("_sharding", '{\\"', '{!\\"'),
        ("_sharding", "axis_names", "axis_namez"),
        ("array_metadatas/process_0", "param_name", "param_namf"),
        ("array_metadatas/process_0", '"array_metadatas"', '"brray_metadatas"'),
        ("_METADATA", "key_metadata", "key_metadatb"),
    ):
        file = tmp_path / "c" / "state" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(CorruptCheckpoint, match=f"{name} is not as orbax writes it"):
            inspect(tmp_path / "c")
        file.write_text(text)


def test_large_chunks_of_others_are_told_first():
    found = budget("reshard", 10**9, source=16 * 2**20, chunk=16 * 2**20)
    assert found.block > 2**26
    with pytest.raises(LimitExceeded, match=r"needs --max-memory \d+MB; 1000MB .* to read is 537 MB") as raised:
        budget("reshard", 10**9, source=2**29, chunk=16 * 2**20)
    assert budget("reshard", raised.value.needed, source=2**29, chunk=16 * 2**20).block >= 2**29


@given(st.integers(2**16, 2**28), st.integers(2**16, 2**26), st.integers(0, 2**30))
def test_blocks_and_chunks_fit_into_the_memory(source, chunk, spare):
    """Three blocks where the next is read ahead, else two; one of a chunk that is a block."""
    least = BASE + COPIES * (source + max(chunk, store.IN_FLIGHT)) + max(source, 2 * chunk)
    found = budget("reshard", least + spare, source, chunk)
    blocks = 3 if found.ahead else 2 if source <= ENOUGH else 1
    taken = BASE + COPIES * (found.reading + max(chunk, store.IN_FLIGHT)) + blocks * found.block
    assert taken <= least + spare and found.block >= chunk and found.reading >= source
    assert found.ahead or source > ENOUGH or spare < 2**30 // 4, "where there is room it is used"


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_block_is_read_while_one_is_used(tmp_path, monkeypatch, ahead):
    arrays: dict[tuple[str, ...], np.ndarray] = {("a",): np.arange(12.0), ("b",): np.arange(5.0)}
    origin = Origin.open(write_arrays(tmp_path / "1", arrays, 16))
    wanted = [(same(leaf), region) for leaf in origin.leaves for region in regions(same(leaf), (4,))]
    reader, begun, block = Reader(origin, 2**20), [], Reader.block
    monkeypatch.setattr(Reader, "block", lambda self, *job: begun.append(job) or block(self, *job))
    for number, (found, (leaf, region)) in enumerate(zip(reader.blocks(wanted, ahead), wanted, strict=True)):
        assert found.tolist() == arrays[leaf.path][slice(*region[0])].tolist()
        if ahead and number + 1 < len(wanted):  # the thread begins it; when, is up to the system
            while len(begun) < number + 2:
                time.sleep(1e-3)
        assert begun == wanted[: min(len(wanted), number + 1 + ahead)]
    (tmp_path / "1" / origin.leaves[1].file((0,))).write_bytes(b"")
    good = []
    with pytest.raises(CorruptCheckpoint, match="leaf b: "):
        good += reader.blocks(wanted, ahead)
    assert len(good) == 3, "those before it come"


# --- rewrites that are stopped

REWRITES = """
import sys
import time
from pathlib import Path

from jzero.checkpoint.reshard import reshard

print("ready", flush=True)
sys.stdin.readline()
reshard(Path(sys.argv[1]), Path(sys.argv[2]), chunk=6000, overwrite=True)
"""


def rewriting(source, target):
    """A process of its own that will rewrite, when it is told to. Not a fork, which tensorstore does not survive."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REWRITES, str(source), str(target)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def killed(tmp_path, trials, seed):
    """How many rewrites were killed half-way; each time what is found is whole, and the next one goes through."""
    rng, moment, half = np.random.default_rng(0), random.Random(seed), 0
    arrays = {("params", str(i)): rng.random((64, 64), np.float32) for i in range(12)}
    source, target = write_arrays(tmp_path / "source", arrays, 10**6), tmp_path / "made"
    reshard(source, target, chunk=6000)
    began = time.perf_counter()
    reshard(source, target, chunk=6000, overwrite=True)
    whole = time.perf_counter() - began
    waiting = [rewriting(source, target)]
    for trial in range(trials):
        if trial + 1 < trials:
            waiting.append(rewriting(source, target))
        if trial % 2:  # else one that is there is replaced: it is still there, or the new one is
            place.remove(target)
        child = waiting.pop(0)
        with child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            time.sleep(moment.uniform(0, whole))
            child.kill()
        left = left_behind(tmp_path)
        half += bool(left)
        if target.exists():
            assert bits(read_arrays(target)) == bits(arrays) and not verify(target, memory=MEMORY).problems
        else:
            # Between its two names what was to be replaced is whole, under the other one.
            assert trial % 2 or bits(read_arrays(tmp_path / "made.jzero-old")) == bits(arrays)
        reshard(source, target, chunk=6000, overwrite=True)
        assert bits(read_arrays(target)) == bits(arrays)
        assert {path.name for path in tmp_path.iterdir()} == {"source", "made"}, "the space is back"
    return half


def test_a_killed_rewrite_leaves_nothing_that_is_taken_for_whole(tmp_path):
    assert killed(tmp_path, 3, seed=0) >= 1, "one was killed half-way"


@pytest.mark.slow
def test_many_killed_rewrites_leave_nothing_that_is_taken_for_whole(tmp_path):
    assert killed(tmp_path, 60, seed=1) >= 6, "some were killed half-way"


def test_a_replacement_that_was_stopped_between_its_names_is_taken_back(tmp_path):
    source = write_arrays(tmp_path / "source", {("new",): np.ones(3, np.float32)})
    old = write_arrays(tmp_path / "made", {("old",): np.ones(3, np.float32)}).rename(tmp_path / "made.jzero-old")
    assert inspect(tmp_path / "made").origin.folder == old
    with pytest.raises(FileExistsError):
        reshard(source, tmp_path / "made")
    assert list(read_arrays(tmp_path / "made")) == [("old",)] and not old.exists()
    (tmp_path / "made").rename(old)
    reshard(source, tmp_path / "made", overwrite=True)
    assert list(read_arrays(tmp_path / "made")) == [("new",)] and not old.exists()


def test_the_latest_is_found_where_its_replacement_was_stopped(tmp_path):
    for step in (3, 5):
        write_arrays(tmp_path / str(step), {("w",): np.ones(3, np.float32)}, step=step)
    (tmp_path / "5").rename(tmp_path / "5.jzero-old")
    assert find(tmp_path) == find(tmp_path / "5") == tmp_path / "5.jzero-old"
    (tmp_path / "5.jzero-old").rename(tmp_path / "5.jzero-tmp")  # killed while it was removed
    assert find(tmp_path) == tmp_path / "3"


def test_one_that_is_half_removed_is_not_taken_back(tmp_path, monkeypatch):
    """Whatever has become of the one that took its place."""
    write_arrays(tmp_path / "5", {("w",): np.ones(3, np.float32)})

    def stopped(folder):
        (folder / "state" / "w" / "c" / "0").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        place.remove(tmp_path / "5")
    monkeypatch.undo()
    assert place.standing(tmp_path / "5") == tmp_path / "5"
    place.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_is_back_if_the_new_one_does_not_get_its_name(tmp_path, monkeypatch):
    source = write_arrays(tmp_path / "source", {("new",): np.ones(3, np.float32)})
    write_arrays(tmp_path / "made", {("old",): np.ones(3, np.float32)})
    rename = Path.rename

    def failing(self, target):
        if self.name == "made.jzero-tmp":
            raise OSError("stale handle")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(SaveFailed, match=r"stale handle.* What was there before is as it was"):
        reshard(source, tmp_path / "made", overwrite=True)
    assert list(read_arrays(tmp_path / "made")) == [("old",)]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "made"}


def test_a_failure_waits_for_what_is_being_written():
    """Else it would be written after all has been removed."""
    waited = []

    class Writing:
        def __init__(self, name):
            self.name = name

        def result(self):
            waited.append(self.name)
            if self.name == 1:
                raise OSError("full")

    jobs = ((1, lambda name=name: Writing(name), lambda future: future.result()) for name in range(4))
    with pytest.raises(OSError, match="full"):
        store.windowed(jobs, limit=3)
    assert waited == [0, 1, 2, 3]


def test_a_disk_that_is_too_small_is_told_first(tmp_path, monkeypatch):
    source = write_arrays(tmp_path / "source", {("params", "w"): np.ones((64, 64), np.float32)})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000))
    with pytest.raises(LimitExceeded, match=r"takes \d+ kB; 20.00 kB are free there") as raised:
        reshard(source, tmp_path / "made")
    assert raised.value.limit == 20_000 and [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_that_fills_up_gives_its_space_back(tmp_path, monkeypatch):
    """Something else took the space after it was counted; files may not grow, as on a disk that is full."""
    arrays = {("params", name): np.ones((256, 256), np.float32) for name in "ab"}
    source = write_arrays(tmp_path / "source", arrays, largest=10**6)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))
        with pytest.raises(SaveFailed, match=r"made was not written: .*nothing of this is left"):
            reshard(source, tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
