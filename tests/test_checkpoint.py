"""Saved in one layout, restored in another: every bit is the same."""

import itertools
import json
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.checkpoint import Checkpointer, cut, encoding, parts, store
from jzero.checkpoint.chunks import grid, halved
from tests.checkpoints import (
    CONFIGS,
    KEY,
    MESHES,
    OTHERS,
    TX,
    check_placed,
    held,
    layout_of,
    random_bits,
    random_state,
)


def covering():
    """Pairs of configurations in which each pair of stages, of meshes, and of a stage and a mesh occurs, and each
    configuration is saved and restored."""
    names = list(MESHES)
    found = []
    for i, j in itertools.product(range(5), range(5)):
        found.append(((((i + 2 * j) % 4), names[i]), (((2 * i + j + i * j) % 4), names[j])))
    left = set(CONFIGS) - {source for source, _ in found}
    right = set(CONFIGS) - {target for _, target in found}
    while left or right:
        source = left.pop() if left else CONFIGS[len(found) % 20]
        target = right.pop() if right else CONFIGS[len(found) % 20]
        found.append((source, target))
    stages = {(a[0], b[0]) for a, b in found}
    found += [((a, names[a]), (b, names[b])) for a, b in itertools.product(range(4), range(4)) if (a, b) not in stages]
    return found


def test_the_pairs_cover_all():
    pairs = covering()
    assert {a for a, _ in pairs} == {b for _, b in pairs} == set(CONFIGS) and len(pairs) < 40
    for one, other in itertools.product((0, 1), (0, 1)):
        sizes = len({a[one] for a in CONFIGS}) * len({a[other] for a in CONFIGS})
        assert len({(a[one], b[other]) for a, b in pairs}) == sizes or one != other
    assert len({(a[0], b[0]) for a, b in pairs}) == 16 and len({(a[1], b[1]) for a, b in pairs}) == 25


@pytest.fixture(scope="module")
def states():
    """One state with the same bits in every configuration, placed by hand."""
    made = {}

    def state(config):
        if config not in made:
            layout = layout_of(*config)
            made[config] = random_state(layout), layout
        return made[config]

    return state


def round_trip(states, folder, pairs, monkeypatch):
    monkeypatch.setattr(cut, "LARGEST", 256)  # bytes: the larger leaves have several chunks
    wanted: dict = {}
    with Checkpointer(folder, async_=False) as checkpointer:
        for source in sorted({source for source, _ in pairs}, key=CONFIGS.index):
            state, layout = states(source)
            found = held(state, layout)
            wanted = wanted or found
            assert found == wanted, "the same at every stage and mesh, before anything is saved"
            number = CONFIGS.index(source)
            checkpointer.save(number, state, TX, layout)
        for source, target in pairs:
            layout = states(target)[1]
            restored = checkpointer.restore(TX, layout, step=CONFIGS.index(source), **OTHERS).state
            check_placed(restored, layout)
            found = held(restored, layout)
            assert [name for name in wanted if found[name] != wanted[name]] == [], (source, target)
            assert list(found) == list(wanted)


def test_each_layout_is_restored_in_others(states, tmp_path, monkeypatch):
    round_trip(states, tmp_path, covering(), monkeypatch)


@pytest.mark.slow
def test_each_layout_is_restored_in_each(states, tmp_path, monkeypatch):
    round_trip(states, tmp_path, list(itertools.product(CONFIGS, CONFIGS)), monkeypatch)


def test_a_save_of_what_was_restored_is_the_same(states, tmp_path):
    state, layout = states((1, "8"))
    other = states((3, "4,2"))[1]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, TX, layout)
        checkpointer.save(2, checkpointer.restore(TX, other, **OTHERS).state, TX, other)
        checkpointer.wait()
    files = [checkpointer.manifest(step).files for step in (1, 2)]
    assert {n: s.check for n, s in files[0].items()} == {n: s.check for n, s in files[1].items()}


def test_training_goes_on_bit_for_bit(tmp_path):
    """With a checkpoint in between, in another layout and back, and with one that is read where it was saved."""

    def init_params(key):
        return {"w": jax.random.normal(key, (13, 16)), "v": jnp.ones((16, 13))}

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - x) ** 2)

    def job(stage, **axes):
        layout = jzero.zero(
            jax.eval_shape(init_params, KEY),
            stage=stage,
            mesh=jzero.make_mesh(**axes),
            min_shard_size=0,
            precision="bf16",
        )
        return layout, jzero.train_step(loss_fn, tx, layout, clip_norm=1.0, loss_scale=scale)

    def run(state, layout, step, begin, end):
        losses = []
        for n in range(begin, end):
            x = np.random.default_rng(n).normal(size=(16, 13)).astype(np.float32)
            state, metrics = step(state, layout.put_batch(x.astype(jnp.bfloat16)))
            losses.append(float(metrics["loss"]))
        return state, losses

    tx, scale = optax.adam(0.01), jzero.DynamicLossScale(growth_interval=3)
    layout, step = job(2, data=8)
    other, _ = job(3, data=4, model=2)
    state = jzero.init(init_params, tx, layout, KEY, loss_scale=scale)
    state, _ = run(state, layout, step, 0, 4)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, state, tx, layout)
        state, wanted = run(state, layout, step, 4, 8)
        moved = checkpointer.restore(tx, other, loss_scale=scale).state
        checkpointer.save(5, moved, tx, other)
        for number in (4, 5):
            restored = checkpointer.restore(tx, layout, step=number, loss_scale=scale)
            again, losses = run(restored.state, layout, step, 4, 8)
            assert losses == wanted
            for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
                assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_leaves_of_every_kind(tmp_path):
    """In the model state, which holds whatever the user puts there."""
    rng = np.random.default_rng(0)
    names = sorted((encoding.NATIVE | encoding.BITS) - {"float64", "int64", "uint64", "complex128"})
    tied, special = jnp.arange(3.0), np.array([0x7F800001, 0xFFC12345, 0x80000000, 1, 0x807FFFFF], np.uint32)
    model_state = {
        "dtypes": {name: jnp.asarray(random_bits(rng, (3, 5), encoding.dtype_of(name))) for name in names},
        "special": jnp.asarray(special.view(np.float32)),
        "scalar": jnp.float32(-0.0),
        "empty": {"": jnp.zeros((0, 3), jnp.bfloat16), "a": jnp.zeros((2, 0), jnp.int32)},
        "a.b": {"c": jnp.ones(2)},
        "a": {"b.c": jnp.zeros(2), "b": {"c": jnp.full(2, 2.0)}},
        "../../up": {"/": jnp.ones(1), ".": jnp.zeros(1), "..": jnp.full(1, 3.0)},
        "Name": jnp.ones(1),
        "name": jnp.zeros(1),
        "long" * 100: jnp.ones(4),
        "日本 \n%\\": jnp.ones(1),
        "lists": [jnp.ones(1), (jnp.zeros(1), None, jnp.full(1, 5))],
        "keys": jax.random.split(jax.random.key(7, impl="rbg"), (2, 3)),
        "tied": [tied, tied],
    }
    layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=0)
    state = jzero.init(lambda: {"w": jnp.ones(8)}, TX, layout, model_state=model_state)
    template = jax.tree.map(jnp.zeros_like, {k: v for k, v in model_state.items() if k != "keys"})
    template["keys"] = model_state["keys"]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, TX, layout)
        restored = checkpointer.restore(TX, layout, model_state=template).state
        manifest = checkpointer.manifest(1)
    assert jax.tree.structure(restored.model_state) == jax.tree.structure(model_state)
    for (path, x), y in zip(
        jax.tree_util.tree_flatten_with_path(state.model_state)[0], jax.tree.leaves(restored.model_state), strict=True
    ):
        assert x.dtype == y.dtype and x.shape == y.shape, path
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(x) == jax.random.key_impl(y) == "rbg"
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path
    inside = {path.resolve().relative_to(tmp_path.resolve()).parts[0] for path in tmp_path.rglob("*")}
    assert inside == {"1"}, "no name leads out of the checkpoint"
    folders = [leaf.folder for leaf in manifest.leaves]
    assert len({folder.lower() for folder in folders}) == len(folders) and max(map(len, folders)) < 256
    assert {leaf.dtype: leaf.stored for leaf in manifest.leaves}["uint4"] == "uint8"


def test_wide_leaves(tmp_path, x64):
    values = {name: random_bits(np.random.default_rng(1), (4, 3), name) for name in ("float64", "int64", "complex128")}
    model_state = jax.tree.map(jnp.asarray, values)
    layout = jzero.zero({"w": jnp.ones(8)}, stage=1, mesh=jzero.make_mesh(data=8), min_shard_size=0)
    state = jzero.init(lambda: {"w": jnp.full(8, 1 / 3)}, TX, layout, model_state=model_state)
    assert state.params["w"].dtype == jnp.float64
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, TX, layout)
        restored = checkpointer.restore(TX, layout, model_state=model_state).state
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_asynchronous_save_keeps_what_it_was_given(tmp_path, monkeypatch, stage):
    """The state is donated to the next steps before any of it is written."""
    layout = jzero.zero({"w": jnp.ones(1 << 16)}, stage=stage, mesh=jzero.make_mesh(data=8))
    tx, go, write = optax.sgd(1.0), threading.Event(), store.write
    state = jzero.init(lambda: {"w": jnp.full(1 << 16, 5.0)}, tx, layout)
    step = jzero.train_step(lambda params, x: jnp.sum(params["w"]) * jnp.mean(x), tx, layout)
    monkeypatch.setattr(store, "write", lambda *args: write(*args) if go.wait(60) else 1 / 0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, tx, layout)
        for _ in range(3):
            state, _ = step(state, layout.put_batch(np.ones(8, np.float32)))
        assert float(state.params["w"][0]) == 2 and not checkpointer.steps
        go.set()
        assert np.all(np.asarray(checkpointer.restore_params(layout)["w"]) == 5)


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("config", [(3, "8"), (1, "2,2,2"), (0, "4,2")])
def test_every_chunk_is_written_once_by_a_process_that_holds_it(states, monkeypatch, processes, config):
    """With the devices shared out among processes that are not there."""

    class Holders(cut.Holders):
        def __init__(self, array):
            super().__init__(array)
            for cell in self.processes:
                self.processes[cell] = set()
            for device, index in array.sharding.devices_indices_map(array.shape).items():
                begins = [part.indices(size)[0] for part, size in zip(index, array.shape, strict=True)]
                cell = tuple(begin // size for begin, size in zip(begins, self.cell, strict=True))
                self.processes[cell].add(device.id * processes // 8)

    monkeypatch.setattr(cut, "Holders", Holders)
    monkeypatch.setattr(cut, "LARGEST", 64)
    state, layout = states(config)
    written = [0] * processes
    for source in cut.sources(parts.items(state, TX, layout)):
        x, entry, numbers = source.array, source.entry, []
        for process in range(processes):
            devices = {device for device in jax.devices() if device.id * processes // 8 == process}
            parts_held = [shard.index for shard in x.addressable_shards if shard.device in devices]
            held_by = np.zeros(x.shape, bool)
            for index in parts_held:
                held_by[index] = True
            for piece in cut.pieces(source, process):
                assert held_by[tuple(slice(b, e) for b, e in piece.region)].all()
                numbers.append(piece.chunk)
                written[process] += piece.array.nbytes
        assert sorted(numbers) == [number for number, _ in grid(entry.stored_shape, entry.chunk)]
    assert min(written) > 0.5 * sum(written) / processes, "each has its share"


def test_chunks_are_small_and_about_as_long_in_each_dim():
    assert halved((), 4, 1) == ()
    assert halved((4096, 4096), 4, 2**20) == (512, 512)
    assert halved((12, 10), 4, 64, cut=[True, True]) == (3, 5)
    for shape in [(50257, 768), (7, 1, 1 << 20), (1 << 24,), (3, 5)]:
        chunk = halved(shape, 4, 2**16)
        assert (np.prod(chunk) * 4 <= 2**16 and np.prod(chunk) * 4 > 2**13) or chunk == shape
    for shape in [(6283, 768), (12, 1 << 20)]:
        chunk = halved(shape, 4, 2**16, cut=[True, True])
        assert not any(size % step for size, step in zip(shape, chunk, strict=True))


def test_the_manifest_says_what_there_is(states, tmp_path):
    state, layout = states((1, "2,2,2"))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, TX, layout, data={"epoch": 2}, metrics={"loss": 0.5})
        checkpointer.wait()
        manifest = checkpointer.manifest(3)
    assert manifest.step == 3 and manifest.data == {"epoch": 2} and manifest.metrics == {"loss": 0.5}
    assert manifest.saved_from["mesh"] == {"replica": 2, "data": 2, "model": 2}
    assert manifest.saved_from["precision"]["compute"] == "bfloat16"
    leaf = {leaf.name: leaf for leaf in manifest.leaves}["params/ruled"]
    assert (leaf.shape, leaf.dtype, leaf.spec) == ((6, 10), "float32", (("data",), ("model",)))
    on_disk = {str(path.relative_to(tmp_path / "3")) for path in (tmp_path / "3").rglob("*") if path.is_file()}
    assert on_disk == {*manifest.files, "jzero.json"}, "every file has a checksum"
    json.loads((tmp_path / "3" / "jzero.json").read_text())


def test_reads_are_bounded(states, tmp_path, monkeypatch):
    """Chunks that are being read at once, on a state of many."""
    monkeypatch.setattr(cut, "LARGEST", 128)
    state, layout = states((3, "8"))
    alive, most = [0], [0]
    read = store.open_array

    class Watched:
        def __init__(self, array):
            self.array = array

        def __getitem__(self, index):
            return Watched(self.array[index])

        def read(self):
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            future = self.array.read()
            return type("Future", (), {"result": lambda _: (alive.__setitem__(0, alive[0] - 1), future.result())[1]})()

    with Checkpointer(tmp_path, async_=False) as checkpointer:
        checkpointer.save(1, state, TX, layout)
        monkeypatch.setattr(store, "open_array", lambda *args, **kwargs: Watched(read(*args, **kwargs)))
        checkpointer.restore(TX, layout, **OTHERS)
    assert 1 < most[0] <= store.AT_ONCE and alive[0] == 0


def test_a_checkpointer_without_a_metric_and_one_that_was_closed(tmp_path):
    layout: Any = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))
    tx: Any = optax.sgd(0.1)
    state = jzero.init(lambda: {"w": jnp.ones(8)}, tx, layout)
    with jzero.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, tx, layout)
        with pytest.raises(ValueError, match="step='best' needs a metric; make the Checkpointer with best="):
            checkpointer.restore(tx, layout, step="best")
        with pytest.raises(TypeError, match=r"restore\(tx, layout\): tx is a Layout"):
            checkpointer.restore(layout, tx)
    with pytest.raises(ValueError, match="was closed; make another one"):
        checkpointer.save(2, state, tx, layout)
