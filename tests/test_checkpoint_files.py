"""What becomes of a checkpoint whose files are damaged, or whose save is stopped; and what plain orbax makes of it."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from orbax.checkpoint import v1 as ocp

import jzero
from jzero.checkpoint import Checkpointer, CorruptCheckpoint, Manifest, SaveFailed, cut, orbax_format, place
from jzero.checkpoint.manifest import _digest
from jzero.cli import main
from tests.checkpoints import OTHERS, TX, held, layout_of, random_state

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 1 with some chunks in each leaf, and what it holds."""
    folder, patch = tmp_path_factory.mktemp("saved"), pytest.MonkeyPatch()
    patch.setattr(cut, "LARGEST", 256)
    layout = layout_of(3, "8")
    state = random_state(layout)
    with Checkpointer(folder, async_=False) as checkpointer:
        checkpointer.save(1, state, TX, layout, data={"batch": 1})
    patch.undo()
    return folder, layout, held(state, layout)


# --- damage


def damage(folder, rng):
    """Does one thing to one file; returns its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # Half of the time one of the few that belong to no leaf.
    few = [path for path in files if path.parent.name in (folder.name, "state")]
    path = rng.choice(few if rng.integers(2) else files)
    data = bytearray(path.read_bytes())
    kind, at = rng.choice(["bit", "byte", "cut", "gone"]), rng.integers(len(data))
    if kind == "gone":
        path.unlink()
    else:
        if kind == "bit":
            data[at] ^= 1 << rng.integers(8)
        elif kind == "byte":
            data[at] = (data[at] + rng.integers(1, 256)) % 256
        path.write_bytes(data[:at] if kind == "cut" else data)
    return str(path.relative_to(folder))


def trial(saved, folder, seed):
    """Whether the damage was found; if it was not, nothing has changed."""
    original, layout, wanted = saved
    shutil.copytree(original, folder)
    name = damage(folder / "1", np.random.default_rng(seed))
    checkpointer = Checkpointer(folder)
    try:
        restored = checkpointer.restore(TX, layout, step=1, **OTHERS)
    except FileNotFoundError as error:
        assert name == "jzero.json" and str(folder / "1") in str(error)
        return True
    except CorruptCheckpoint as error:
        assert Path(error.file) == folder / "1" / name, "the file is named"
        parts = name.split("/")
        if len(parts) > 2:
            leaf = next(leaf for leaf in Manifest.read(original / "1").leaves if leaf.folder == parts[1])
            assert error.leaf == leaf.name and leaf.name in str(error), "the leaf is named"
        return True
    assert held(restored.state, layout) == wanted and restored.data == {"batch": 1}
    return False


def trials(saved, tmp_path, seeds):
    found = [trial(saved, tmp_path / str(seed), seed) for seed in seeds]
    assert sum(found) >= 0.9 * len(found), "most damage matters"


def test_damage_is_found(saved, tmp_path):
    trials(saved, tmp_path, range(30))


@pytest.mark.slow
def test_more_damage_is_found(saved, tmp_path):
    trials(saved, tmp_path, range(1000, 1300))


def test_a_chunk_of_another_array_is_found(saved, tmp_path):
    """Whole, with a checksum that fits its content, and not what was written there."""
    shutil.copytree(saved[0], tmp_path / "c")
    state = tmp_path / "c" / "1" / "state"
    shutil.copy(state / "opt_state.0.mu.even" / "c" / "0" / "0", state / "opt_state.0.nu.even" / "c" / "0" / "0")
    with pytest.raises(CorruptCheckpoint, match=r"opt_state/0/nu/even: .*nu.even/c/0/0 has crc32c:"):
        Checkpointer(tmp_path / "c").restore(TX, saved[1], **OTHERS)


def test_what_is_not_read_may_be_damaged(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "1" / "state" / "opt_state.0.mu.even")
    Checkpointer(tmp_path / "c").restore_params(saved[1])


def test_a_manifest_cannot_lead_out_of_the_checkpoint(saved):
    body = json.loads((saved[0] / "1" / "jzero.json").read_text())["body"]

    def signed(body):
        return json.dumps({"sha256": _digest(body), "body": body})

    Manifest.from_json(signed(body))
    for name in ("../../etc/passwd", "/etc/passwd", "state/../../x", "state//x", "a\\b"):
        with pytest.raises(ValueError, match="which none of a checkpoint can be"):
            Manifest.from_json(signed(body | {"files": {name: [1, "sha256:0"]}}))
    for name in ("..", "a/b", "a..b", ".", "a\\b", "a" * 300, ""):
        with pytest.raises(ValueError, match="may not be one"):
            Manifest.from_json(signed(body | {"leaves": [body["leaves"][0] | {"folder": name}]}))
    with pytest.raises(ValueError, match="format 2"):
        Manifest.from_json(signed(body | {"format": 2}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "1"),
        ("metrics", [1]),
        ("metrics", {"loss": "low"}),
        ("saved_from", None),
        ("saved_from", {"mesh": ["data"]}),
        ("saved_from", {"mesh": {"data": 0}}),
        ("saved_from", {"precision": ["bf16"]}),
        ("saved_from", {"data_axes": 5}),
        ("saved_from", {"processes": "2"}),
        ("files", {"state/a\0b": [1, "sha256:0"]}),
        ("files", {"state/x": [1, 2]}),
        ("files", {}),
        ("spec", [[1], [2]]),
        ("spec", []),
        ("shape", [10**30, 7]),
    ],
)
def test_what_a_manifest_cannot_say_is_damage(saved, tmp_path, key, value, capsys):
    """Even if it is signed: it may come from anywhere, and no command is to stumble over it, or to count for years."""
    shutil.copytree(saved[0] / "1", tmp_path / "1")
    body = json.loads((tmp_path / "1" / "jzero.json").read_text())["body"]
    (leaf,) = [leaf for leaf in body["leaves"] if leaf["path"] == ["params", "odd"]]
    assert leaf["shape"] == [13, 7]
    (leaf if key in leaf else body)[key] = value
    leaf["stored_shape"] = leaf["shape"]
    (tmp_path / "1" / "jzero.json").write_text(json.dumps({"sha256": _digest(body), "body": body}))
    for command in (["inspect"], ["inspect", "--json"], ["inspect", "--fits", "data=2"], ["verify"]):
        assert main([*command, str(tmp_path)]) == 1
    assert "jzero.json" in capsys.readouterr().err


def test_a_manifest_that_is_nested_too_deep_is_damage(tmp_path):
    (tmp_path / "jzero.json").write_text("[" * 100_000)
    assert main(["verify", str(tmp_path)]) == 1


# --- saves that are stopped

KILLED = '''
import json, os, random, shutil, signal, sys, time
from pathlib import Path

import numpy as np

from jzero.checkpoint import Checkpointer, Entry, Manifest, place
from jzero.checkpoint.store import Piece
from jzero.checkpoint.write import write

folder, trials, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
shapes = {"shape": (64, 64), "stored_shape": (64, 64), "chunk": (32, 64), "dtype": "float32", "stored": "float32"}
leaves = tuple(Entry(path=("params", str(i)), folder=f"params.{i}", **shapes) for i in range(60))


def save(step, overwrite=False):
    place.clean(folder)
    array = np.full((32, 64), step, np.float32)
    pieces = (Piece(leaf, (n, 0), ((32 * n, 32 * n + 32), (0, 64)), array) for leaf in leaves for n in range(2))
    write(folder / str(step), Manifest(leaves, step=step), pieces, overwrite=overwrite)


def apart(work):
    """In a process of its own: tensorstore's threads do not survive a fork."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def check():
    """Every checkpoint that is found is whole and what it should be, the first one among them."""
    from jzero.checkpoint.chunks import grid
    from jzero.checkpoint.origin import Origin

    steps = Checkpointer(folder).steps
    assert 1 in steps and set(steps) <= {1, 2}, steps
    for step in steps:
        manifest = Manifest.read(folder / str(step))
        manifest.check_small(folder / str(step))
        wanted = ((leaf, *chunk) for leaf in leaves for chunk in grid(leaf.shape, leaf.chunk))
        assert all((piece.array == step).all() for piece in Origin(folder / str(step), manifest).chunks(wanted))


def done(child):
    status = os.waitpid(child, 0)[1]
    assert status == 0, status


done(apart(lambda: save(1)))
began = time.perf_counter()
done(apart(lambda: save(2)))
whole = time.perf_counter() - began
moment, outcomes = random.Random(seed), []
for trial in range(trials):
    overwrite = trial % 3 == 2  # a replacement of step 1 or 2, whose old content is the same
    if not overwrite:
        shutil.rmtree(folder / "2", ignore_errors=True)
    child = apart(lambda: save(2, overwrite))
    time.sleep(moment.uniform(0, whole))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    before = {path.name for path in folder.iterdir()}
    done(apart(check))
    done(apart(lambda: save(2, overwrite=True)))  # goes through, and removes what was left
    assert {path.name for path in folder.iterdir()} == {"1", "2"}, list(folder.iterdir())
    done(apart(check))
    outcomes.append(sorted(before))
print(json.dumps(outcomes))
'''


def killed(folder, trials, seed):
    folder.mkdir()
    script = folder.parent / "killed.py"
    script.write_text(KILLED)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(folder), str(trials), str(seed)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = json.loads(run.stdout)
    assert len(outcomes) == trials
    return sum("2.jzero-tmp" in names for names in outcomes)


def test_a_killed_save_leaves_what_was_there(tmp_path):
    assert killed(tmp_path / "run", 3, seed=0) >= 1, "some were killed half-way"


@pytest.mark.slow
def test_many_killed_saves_leave_what_was_there(tmp_path):
    assert killed(tmp_path / "run", 60, seed=1) >= 20


def test_half_a_checkpoint_is_never_taken_for_one(saved, tmp_path):
    """Whatever it is called: a copy under the number of a step as well."""
    folder = tmp_path / "c"
    shutil.copytree(saved[0], folder)
    shutil.copytree(folder / "1", folder / "7.jzero-tmp")
    shutil.copytree(folder / "1", folder / "8")
    (folder / "8" / "jzero.json").unlink()
    shutil.copytree(folder / "1", folder / "007")
    checkpointer = Checkpointer(folder, async_=False)
    with pytest.warns(UserWarning, match=r"8 has no jzero.json"):
        assert checkpointer.steps == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpointer.latest == 1
        with pytest.raises(FileNotFoundError, match=r"8 holds no jzero.json.*has steps 1\."):
            checkpointer.restore(TX, saved[1], step=8, **OTHERS)
        checkpointer.save(9, random_state(saved[1]), TX, saved[1])
        assert checkpointer.steps == [1, 9]
    assert not (folder / "7.jzero-tmp").exists() and (folder / "8").exists(), "what it does not know it leaves"


def test_a_full_disk_ends_a_save_and_gives_its_space_back(saved, tmp_path):
    """As files may not grow beyond a size, writing them fails as it does on a disk that is full."""
    folder = tmp_path / "c"
    shutil.copytree(saved[0], folder)
    layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=8), min_shard_size=0)
    state = jzero.init(lambda: {"w": jnp.ones(8)}, TX, layout, model_state=jnp.ones(1 << 16))
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpointer = Checkpointer(folder)
    for asynchronous in (False, True):
        checkpointer = Checkpointer(folder, async_=asynchronous)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))
            with pytest.raises(SaveFailed, match=r"2 was not written: .*What was there before is as it was"):
                checkpointer.save(2, state, TX, layout)
                checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.name for path in folder.iterdir()] == ["1"]
    signal.signal(signal.SIGXFSZ, handler)
    checkpointer.save(2, state, TX, layout)
    checkpointer.close()
    assert checkpointer.steps == [1, 2]


def test_a_failed_save_does_not_stop_the_next(saved, tmp_path, monkeypatch):
    layout, state = saved[1], random_state(saved[1])
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(orbax_format, "files", lambda manifest: 1 / 0)
        checkpointer.save(1, state, TX, layout)
        assert checkpointer._pending is not None
        wait([checkpointer._pending[1]])
        monkeypatch.undo()
        with pytest.warns(UserWarning, match="The save before step 2 failed: .*division by zero"):
            checkpointer.save(2, state, TX, layout)
        checkpointer.wait()
        assert checkpointer.steps == [2]


def test_a_save_that_cannot_be_copied_is_not_written(saved, tmp_path, monkeypatch):
    """What has been written of it by then is no checkpoint."""
    layout, state = saved[1], random_state(saved[1])
    whole = cut.snapshot
    with Checkpointer(tmp_path) as checkpointer:
        taken = []

        def some(piece):
            taken.append(piece)
            return whole(piece) if len(taken) < 9 else 1 / 0

        monkeypatch.setattr(cut, "snapshot", some)
        with pytest.raises(ZeroDivisionError):
            checkpointer.save(1, state, TX, layout)
        with pytest.raises(SaveFailed):
            checkpointer.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_interrupted_does_not_stop_the_next(saved, tmp_path, monkeypatch):
    """As where Ctrl-C ends a cell of a notebook, and the next cell goes on."""
    layout, state = saved[1], random_state(saved[1])

    def interrupted(piece):
        raise KeyboardInterrupt

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(cut, "snapshot", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, state, TX, layout)
        monkeypatch.undo()
        with pytest.warns(UserWarning, match="The save before step 2 failed: .*it was stopped"):
            checkpointer.save(2, state, TX, layout)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_a_run_that_went_back_keeps_what_it_saves(saved, tmp_path):
    layout, state = saved[1], random_state(saved[1])
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(5, state, TX, layout)
        with pytest.warns(UserWarning, match="step 3 comes before step 5, which .* has already: that one stays"):
            checkpointer.save(3, state, TX, layout)
        checkpointer.wait()
        assert checkpointer.steps == [3, 5]
        with pytest.warns(UserWarning, match="step 4 comes before"):
            checkpointer.save(4, state, TX, layout)
        checkpointer.wait()
        assert checkpointer.steps == [4, 5]


def test_a_position_is_what_it_was_when_it_was_saved(saved, tmp_path):
    layout, state = saved[1], random_state(saved[1])
    data = {"batch": 1, "files": ["a"]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, TX, layout, data=data)
        data["batch"] = 2
        data["files"].append("b")
        assert checkpointer.restore(TX, layout, **OTHERS).data == {"batch": 1, "files": ["a"]}


def test_keys_that_json_changes_are_refused(saved, tmp_path):
    """They came back as others, in another order: the manifest had not the digest that it names, and all was lost."""
    layout, state = saved[1], random_state(saved[1])
    with Checkpointer(tmp_path) as checkpointer:
        numbered = {9: 0, 10: 1}
        cases: list[dict[str, Any]] = [{"data": {"epochs": [numbered]}}, {"metrics": numbered}]
        for options in cases:
            with pytest.raises(TypeError, match="the key 9 is a int, and JSON has strings for keys only"):
                checkpointer.save(1, state, TX, layout, **options)


def test_what_is_no_checkpoint_is_not_replaced_by_one(saved, tmp_path):
    layout, state = saved[1], random_state(saved[1])
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "notes").write_text("mine")
    said = "holds notes, which is not of a checkpoint of jzero"
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(FileExistsError, match=said):
        checkpointer.save(1, state, TX, layout, overwrite=True)
    assert (tmp_path / "1" / "notes").read_text() == "mine"


def test_old_checkpoints_go_and_the_best_stays(saved, tmp_path):
    layout, state = saved[1], random_state(saved[1])
    with Checkpointer(tmp_path, keep=2, best=("loss", "min")) as checkpointer:
        for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 4.0]):
            checkpointer.save(step, state, TX, layout, metrics={"loss": loss})
        checkpointer.wait()
        assert checkpointer.steps == [1, 3, 4] and checkpointer.best_step == 1
        assert checkpointer.restore(TX, layout, step="best", **OTHERS).step == 1
        assert checkpointer.restore(TX, layout, **OTHERS).step == 4
    assert Checkpointer(tmp_path, best=("loss", "max")).best_step == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "4"]


def test_a_damaged_manifest_does_not_stop_saves(saved, tmp_path):
    layout, state = saved[1], random_state(saved[1])
    with Checkpointer(tmp_path, keep=2, best=("loss", "min"), async_=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state, TX, layout, metrics={"loss": step})
        (tmp_path / "1" / "jzero.json").write_text("{}")
        with pytest.warns(UserWarning, match="not known how good step 1 is: .*is no manifest"):
            checkpointer.save(3, state, TX, layout, metrics={"loss": 3})
        assert checkpointer.steps == [2, 3] and checkpointer.best_step == 2


def test_a_removal_that_was_stopped_is_taken_up_again(saved, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(saved[0], folder)
    (folder / "1").rename(folder / "1.jzero-old")  # killed between the two names of a replacement
    checkpointer = Checkpointer(folder, async_=False)
    assert checkpointer.latest == 1 and held(checkpointer.restore(TX, saved[1], **OTHERS).state, saved[1]) == saved[2]
    with pytest.raises(FileExistsError, match="overwrite=True"):
        checkpointer.save(1, random_state(saved[1]), TX, saved[1])
    place.clean(folder)
    assert Checkpointer(folder).steps == [1]
    shutil.copytree(folder / "1", folder / "1.jzero-old")  # killed behind them
    shutil.copytree(folder / "1", folder / "0.jzero-tmp")  # killed in a removal
    (folder / "2.jzero-lock").touch()  # killed when it was through
    place.clean(folder)
    assert [path.name for path in folder.iterdir()] == ["1"]


# --- orbax


def test_plain_orbax_reads_it(saved):
    folder, _, wanted = saved
    path = folder.resolve() / "1"
    tree = ocp.load(path)
    assert tree["params"]["deep%2Eer"]["n%2F%C3%BC"].shape == (5,) and "none" not in tree["params"]
    for name, keys in {
        "params['odd']": ("params", "odd"),
        "params['deep.er'][''][0]": ("params", "deep%2Eer", "%empty", "0"),
        "opt_state[0].mu['ruled']": ("opt_state", "0", "mu", "ruled"),
        "step": ("step",),
        "loss_scale.scale": ("loss_scale", "scale"),
        "params['frozen']": ("params", "frozen"),
    }.items():
        leaf = tree
        for key in keys:
            leaf = leaf[key]
        assert isinstance(leaf, np.ndarray)
        assert (str(leaf.dtype), leaf.shape, leaf.tobytes()) == wanted[name]
    old = orbax.checkpoint.PyTreeCheckpointer().restore(path / "state")
    assert jax.tree.structure(old) == jax.tree.structure(tree)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(tree), strict=True))


def test_plain_orbax_places_it(saved):
    folder, layout, wanted = saved
    sharding = layout.sharding(jax.sharding.PartitionSpec(None, "data"))
    tree = ocp.load(folder.resolve() / "1")
    whole = layout.sharding(jax.sharding.PartitionSpec())
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)
    target["params"]["even"] = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding)
    x = ocp.load(folder.resolve() / "1", target)["params"]["even"]
    assert x.sharding == sharding and np.asarray(x).tobytes() == wanted["params['even']"][2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what orbax leaves running then
def test_plain_orbax_finds_a_flipped_bit(saved, tmp_path):
    """The checksum of a chunk is part of the array; this is what the choice of codecs in `orbax_format` is for."""
    shutil.copytree(saved[0], tmp_path / "c")
    chunk = tmp_path / "c" / "1" / "state" / "params.even" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 4
    chunk.write_bytes(data)
    with pytest.raises(Exception, match="Digest mismatch"):
        ocp.load(tmp_path.resolve() / "c" / "1")
