"""What is at a place while something is written there: locks between jobs, remains, names, and a disk that is full."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import jzero
from jzero.checkpoint import Checkpointer, LimitExceeded, SaveFailed, export_safetensors, import_params, place
from jzero.checkpoint.errors import BeingWritten
from jzero.checkpoint.reshard import reshard
from jzero.checkpoint.room import target
from tests.checkpoints import TX, layout_of, random_state
from tests.test_checkpoint_tools import bits, read_arrays, write_arrays

ROOT = Path(__file__).parent.parent

HOLDER = """
import sys
from pathlib import Path
from jzero.checkpoint import place

folder = Path(sys.argv[1])
with place.locked(folder):
    place.tmp(folder).mkdir()
    (place.tmp(folder) / "half").write_text("of something")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def holder(tmp_path):
    """Another process that writes at the places "made" and "2", which it has begun."""
    started = []

    def hold(name):
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / name)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    yield hold
    for child in started:
        child.kill()
        child.communicate()


def test_what_another_process_is_writing_is_left_alone(tmp_path, holder):
    """By each of what writes: and as soon as that process is gone, killed or not, its place is free."""
    (tmp_path / "source").mkdir()
    source = write_arrays(tmp_path / "source" / "1", {("params", "w"): np.ones(3, np.float32)})
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    works = {
        "reshard": lambda: reshard(source, tmp_path / "made"),
        "export": lambda: export_safetensors(source, tmp_path / "made"),
        "import": lambda: import_params(tmp_path / "model.safetensors", tmp_path / "made"),
        "remove": lambda: place.remove(tmp_path / "made"),
    }
    child = holder("made")
    for name, work in works.items():
        with pytest.raises(BeingWritten, match=rf"made is being written by process {child.pid} on .*Wait for it"):
            work()
        assert (tmp_path / "made.jzero-tmp" / "half").exists(), name
    place.clean(tmp_path)
    assert "made.jzero-tmp" in names(tmp_path), "what goes on is no remains"
    child.kill()
    child.wait()
    assert "made.jzero-lock" in names(tmp_path)
    works["reshard"]()
    assert names(tmp_path) == ["made", "model.safetensors", "source"]


def test_what_another_process_has_written_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    """It was not there when this one looked, and is there when this one has the lock."""
    source = write_arrays(tmp_path / "source", {("params", "w"): np.ones(3, np.float32)})
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    layout = layout_of(3, "8")
    state = random_state(layout)
    works = {
        "reshard": lambda: reshard(source, tmp_path / "9"),
        "export": lambda: export_safetensors(source, tmp_path / "9"),
        "import": lambda: import_params(tmp_path / "model.safetensors", tmp_path / "9"),
        "save": lambda: Checkpointer(tmp_path, async_=False).save(9, state, TX, layout),
    }
    flock = fcntl.flock

    def late(handle, how):
        if not (tmp_path / "9").exists():
            shutil.copytree(source, tmp_path / "9")
        return flock(handle, how)

    for name, work in works.items():
        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(FileExistsError, match="9 is there already"):
            work()
        monkeypatch.undo()
        assert names(tmp_path) == ["9", "model.safetensors", "source"], name
        assert list(read_arrays(tmp_path / "9")) == [("params", "w")], name
        shutil.rmtree(tmp_path / "9")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_second_job_does_not_remove_the_first_ones_save(tmp_path, holder, asynchronous):
    layout = layout_of(3, "8")
    state = random_state(layout)
    child = holder("2")
    with Checkpointer(tmp_path, async_=asynchronous, keep=1) as checkpointer:
        checkpointer.save(1, state, TX, layout)  # of another step: it goes its way
        checkpointer.wait()
        with pytest.raises(BeingWritten, match="2 is being written by process"):
            checkpointer.save(2, state, TX, layout)
            checkpointer.wait()
        assert names(tmp_path) == ["1", "2.jzero-lock", "2.jzero-tmp"]
        child.communicate("go on\n")
        checkpointer.save(2, state, TX, layout)
        checkpointer.wait()
        assert names(tmp_path) == ["2"]


def test_one_that_may_not_be_removed_yet_stays_and_is_named(tmp_path, holder):
    layout = layout_of(3, "8")
    state = random_state(layout)
    with Checkpointer(tmp_path, async_=False, keep=1) as checkpointer:
        checkpointer.save(1, state, TX, layout)
        child = holder("1")
        with pytest.warns(UserWarning, match=r"1 is more than keep=1, and stays: .*is being written by process"):
            checkpointer.save(2, state, TX, layout)
        assert checkpointer.steps == [1, 2]
        child.communicate("go on\n")
        checkpointer.save(3, state, TX, layout)
        assert names(tmp_path) == ["3"]


def test_what_cannot_be_removed_does_not_stop_saves(tmp_path, monkeypatch):
    """For other processes may be waiting in them."""
    layout = layout_of(3, "8")
    state = random_state(layout)

    def refused(folder, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(folder))

    with Checkpointer(tmp_path, async_=False, keep=1) as checkpointer:
        checkpointer.save(1, state, TX, layout)
        (tmp_path / "7.jzero-tmp").mkdir()
        monkeypatch.setattr(shutil, "rmtree", refused)
        left = pytest.warns(UserWarning, match=r"What stopped saves have left in .* stays: .*Permission denied")
        with left, pytest.warns(UserWarning, match="keeps more than keep=1"):
            checkpointer.save(2, state, TX, layout)
        monkeypatch.undo()
        checkpointer.save(3, state, TX, layout)
        assert names(tmp_path) == ["3"]


@pytest.mark.filterwarnings(
    "ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning"
)  # the child waits, and ends
def test_children_of_a_process_do_not_keep_its_lock(tmp_path):
    """Such as those that load data: a fork has all files open that its parent has."""
    with place.locked(tmp_path / "made"):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # until the parent closes its end
            os._exit(0)
    os.close(read)
    with place.locked(tmp_path / "made"):
        pass
    os.close(write)
    os.waitpid(child, 0)
    assert names(tmp_path) == []


def test_a_lock_that_goes_while_it_is_taken_is_taken_again(tmp_path, monkeypatch):
    """The one that held it removes its file after this one has opened it."""
    flock, taken = fcntl.flock, []

    def late(handle, how):
        taken.append(how)
        if len(taken) == 1:
            (tmp_path / "made.jzero-lock").unlink()
        return flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with place.locked(tmp_path / "made"):
        monkeypatch.undo()
        with pytest.raises(BeingWritten, match=rf"by process {os.getpid()} on"), place.locked(tmp_path / "made"):
            pass
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_said_and_written_to(tmp_path, monkeypatch):
    def none(handle, how):
        raise OSError(38, "Function not implemented")

    source = write_arrays(tmp_path / "source", {("w",): np.ones(3, np.float32)})
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="is on a file system without locks .*one job at a time"):
        reshard(source, tmp_path / "made")
    assert names(tmp_path) == ["made", "source"]


@pytest.mark.parametrize("name", ["x.jzero-tmp", "x.jzero-old", "x.jzero-lock", "/"])
def test_the_names_of_what_is_not_whole_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name of something that is whole"):
        target(tmp_path / name)


def test_what_a_link_leads_to_is_replaced(tmp_path):
    source = write_arrays(tmp_path / "source", {("new",): np.ones(3, np.float32)})
    write_arrays(tmp_path / "there", {("old",): np.ones(3, np.float32)})
    (tmp_path / "link").symlink_to(tmp_path / "there")
    reshard(source, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and list(read_arrays(tmp_path / "there")) == [("new",)]
    assert names(tmp_path) == ["link", "source", "there"]


def test_a_step_that_is_a_link_is_removed_as_one(tmp_path):
    write_arrays(tmp_path / "there", {("w",): np.ones(3, np.float32)})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1").symlink_to(tmp_path / "there")
    place.remove(tmp_path / "run" / "1")
    assert names(tmp_path / "run") == [] and list(read_arrays(tmp_path / "there")) == [("w",)]


def test_an_export_that_was_to_be_replaced_gets_its_name_back(tmp_path):
    """Beside a run's checkpoints as well, whose next save tidies up there."""
    source = write_arrays(tmp_path / "1", {("params", "w"): np.ones(3, np.float32)})
    export_safetensors(source, tmp_path / "hf")
    (tmp_path / "hf").rename(tmp_path / "hf.jzero-old")
    place.clean(tmp_path)
    assert names(tmp_path) == ["1", "hf"] and names(tmp_path / "hf") == ["model.safetensors"]


# --- a disk that is full


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("known", [True, False], ids=["told before", "filled meanwhile"])
def test_a_full_disk_leaves_what_was_there_and_gives_its_space_back(small_disk, tmp_path, monkeypatch, known):
    """Of 12 MiB there are 4 taken, and 10 are wanted."""
    array = np.random.default_rng(0).random((10, 1 << 18), np.float32)
    before = {("params", "v"): array[:4]}
    source = write_arrays(tmp_path / "source", {("params", "w"): array}, 1 << 18)
    write_arrays(small_disk / "1", before, 1 << 18)
    save_file({"w": array}, tmp_path / "model.safetensors")
    layout = jzero.zero({"w": array}, stage=3, mesh=jzero.make_mesh(data=8))
    state = jzero.init(lambda: {"w": jnp.asarray(array)}, optax.sgd(0.1), layout)
    made = small_disk / "2"
    works = {
        "reshard": lambda: reshard(source, made),
        "export": lambda: export_safetensors(source, made),
        "import": lambda: import_params(tmp_path / "model.safetensors", made),
        "save": lambda: Checkpointer(small_disk, async_=False).save(2, state, optax.sgd(0.1), layout),
    }
    usage, wanted = (
        shutil.disk_usage,
        (LimitExceeded, r"takes 1\d\.\d\d MB; 8\.\d\d MB are free there\. Free some space, or choose"),
    )
    if not known:
        wanted = SaveFailed, r"2 was not written: .*No space left on device.* Free some space\. What was there"
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10**9))
    else:
        del works["save"]  # a save has nobody to tell before, and keeps what is there
    free = usage(small_disk).free
    for name, work in works.items():
        with pytest.raises(wanted[0], match=wanted[1]) as caught:
            work()
        assert isinstance(caught.value, LimitExceeded) or caught.value.full, name
        assert names(small_disk) == ["1"] and bits(read_arrays(small_disk / "1")) == bits(before), name
        assert usage(small_disk).free == free, name
    shutil.rmtree(small_disk / "1")
    for name, work in works.items():
        work()
        assert names(small_disk) == ["2"], name
        shutil.rmtree(made)


def test_what_another_job_finished_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    """It looks whether something is there again when nobody else can write there any more."""
    made, other, model = tmp_path / "made", tmp_path / "other", tmp_path / "model.safetensors"
    save_file({"w": np.ones(3, np.float32)}, model)
    write_arrays(other, {("params", "w"): np.zeros(3, np.float32)})
    hold = place._hold

    def late(lock, folder):
        shutil.copytree(other, made)
        return hold(lock, folder)

    monkeypatch.setattr(place, "_hold", late)
    for work in (
        lambda: import_params(model, made),
        lambda: reshard(other, made),
        lambda: export_safetensors(other, made),
    ):
        with pytest.raises(FileExistsError, match="made is there already"):
            work()
        assert read_arrays(made)[("params", "w")].sum() == 0
        assert names(tmp_path) == ["made", "model.safetensors", "other"]
        shutil.rmtree(made)
