"""Two real processes of four devices each train as one process of eight."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jzero.checkpoint import Checkpointer
from tests import process_worker
from tests.checkpoints import OTHERS, TX, held, layout_of, random_state

PROCESSES, LIMIT = 2, 240  # seconds


@contextlib.contextmanager
def workers(folder, script, outs):
    """Starts a process for each of `outs`, which it is given; none outlives this. Yields them and their logs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    logs, started = [folder / f"{n}.log" for n in range(len(outs))], []
    try:
        for n, (log, out) in enumerate(zip(logs, outs, strict=True)):
            command = [sys.executable, here / script, address, str(n), str(len(outs)), out]
            with log.open("w") as file:
                started.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        yield started, logs
    finally:
        for worker in started:
            worker.kill()
            worker.wait()


def run_workers(folder):
    """Runs the worker in each process; returns what each wrote."""
    results, deadline = [folder / f"{n}.json" for n in range(PROCESSES)], time.monotonic() + LIMIT
    with workers(folder, "process_worker.py", results) as (started, logs):
        # One that fails leaves the others waiting in a collective, so the first failure ends all.
        while None in (codes := [worker.poll() for worker in started]) and not any(codes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    tails = "\n".join(f"process {n}:\n{log.read_text()[-4000:]}" for n, log in enumerate(logs))
    assert codes == [0] * PROCESSES, f"exit codes {codes} after at most {LIMIT} s (None: still running)\n{tails}"
    return [json.loads(result.read_text()) for result in results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the workers run; with a checkpoint that one process has saved."""
    folder = tmp_path_factory.mktemp("processes")
    layout = layout_of(2, "4,2")
    with Checkpointer(folder / "checkpoints" / "alone") as checkpointer:
        checkpointer.save(0, random_state(layout, 5), TX, layout)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return run_workers(folder)


@pytest.mark.parametrize(
    ("run", "stage", "axes"),
    [("1", 1, {"data": 8}), ("3", 3, {"data": 8}), ("3 hybrid", 3, {"replica": 2, "data": 4})],
)
def test_training_is_that_of_one_process(results, run, stage, axes):
    alone = process_worker.train(stage, 0, 1, **axes)
    assert jax.process_count() == 1
    assert len({loss for loss, _ in alone}) == process_worker.STEPS
    for result in results:
        np.testing.assert_allclose(result[run], alone, rtol=1e-5)


def test_each_process_sees_the_same_losses(results):
    first, second = ({name: one for name, one in result.items() if name != "checkpoints"} for result in results)
    assert first == second


def test_a_bad_batch_is_refused_in_each_process(results):
    for result in results:
        assert "batch (3, 2): 3 x 2 processes = 6 examples do not divide into 8 equal parts" in result["refusal"]


@pytest.mark.parametrize(("stage", "mesh"), process_worker.PROCESS_CONFIGS)
def test_checkpoints_of_two_processes_and_of_one(results, folder, stage, mesh):
    for n, result in enumerate(results):
        found = result["checkpoints"][f"{stage} {mesh}"]
        assert found["own"], f"process {n} restored what both have saved"
        assert found["alone"], f"process {n} restored what one process has saved"
        assert found["data"] == {"of": 0}
    saved = Checkpointer(folder / "checkpoints" / f"{stage} {mesh}".replace(",", "x"))
    layout = layout_of(0, "3")
    only = {} if stage == 1 else {"only": ("params",), "init": lambda: random_state(layout, 5)}
    restored = saved.restore(TX, layout, **(OTHERS | only))
    assert held(restored.state, layout) == held(random_state(layout, 5), layout)
    assert saved.steps == [restored.step] == [2 if stage == 1 else 3], "one is kept"
    assert saved.manifest(restored.step).saved_from["processes"] == 2


def test_a_save_that_one_process_cannot_write_is_given_up_by_both(results, folder):
    found = [result["checkpoints"]["3 2,2,2"] for result in results]
    assert [one["steps"] for one in found] == [[3], [3]]
    assert len(found[0]["failed"]) == 1 and len(found[1]["failed"]) == 2
    assert (
        "SaveFailed" in found[0]["failed"][0]
        and "was not written by process 1: OSError: no more space." in found[0]["failed"][0]
    )
    assert "no more space" in found[1]["failed"][0] and "SaveFailed" in found[1]["failed"][1]
    # Where another job is at it, both hear so, and nothing of that one is touched.
    said = "9 is being written by process"
    assert found[0]["refused"][0].startswith("BeingWritten") and said in found[0]["refused"][0]
    assert found[1]["refused"][0].startswith("SaveFailed") and said in found[1]["refused"][0]
    assert found[0]["refused"][1] == found[1]["refused"][1] == []
    assert [path.name for path in (folder / "checkpoints" / "3 2x2x2").iterdir()] == ["3"], "nothing is left"


def test_what_one_process_writes_alone_or_first_keeps_the_others_waiting_for_nothing(results):
    assert [result["checkpoints"]["3 2,2,2"]["orders"] for result in results] == [[[1], [1]], [[1], [1]]]


def test_a_restore_that_one_process_cannot_do_is_given_up_by_both(results):
    """At stage 1 the others would wait for it in a gather; and the first process says which step is the latest."""
    for name in ("1 8", "3 2,2,2"):
        first, second = (result["checkpoints"][name]["damaged"] for result in results)
        assert first[:2] == [f"RestoreFailed: process 1: {said}" for said in second[:2]]
        assert all(said.startswith("CorruptCheckpoint: leaf params/w: ") for said in second[:2])
        assert first[2] == second[2] == "2"


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_save_leaves_what_was_there(tmp_path):
    saved = tmp_path / "saved"
    with workers(tmp_path, "killed_process_worker.py", [saved, saved]) as (started, logs):
        assert started[1].wait(LIMIT) == -signal.SIGKILL, logs[1].read_text()
        assert started[0].wait(LIMIT) != 0, "the other one does not go on as if it had been saved"
    layout, state = layout_of(1, "8"), random_state(layout_of(1, "8"), 5)
    with Checkpointer(saved) as checkpointer:
        assert checkpointer.steps == [1]
        assert held(checkpointer.restore(TX, layout, **OTHERS).state, layout) == held(state, layout)
        checkpointer.save(2, state, TX, layout)
    assert sorted(path.name for path in saved.iterdir()) == ["1", "2"]
