"""`jzero export` and `jzero import`: output, JSON, exit codes and messages; and what a kill leaves."""

import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open

from jzero.checkpoint import Manifest
from jzero.cli import main
from tests.exchange import bits_of, held, saved

LEAVES = {("wte", "embedding"): bits_of(np.float32, 11, 4), ("blocks", "ln_1", "scale"): bits_of(np.float32, 3, 4)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "run/7", LEAVES)
    return tmp_path


def test_there_and_back(folder, capsys):
    assert main(["export", "run", "hf", "--format", "safetensors", "--map", "gpt2"]) == 0
    out, err = capsys.readouterr()
    assert "run/7 to hf: 4 tensors (4 float32) in model.safetensors" in out and "read back and compared" in out
    assert not err  # no bars where no terminal is
    assert main(["import", "hf", "new/0", "--map", "gpt2"]) == 0
    assert "new/0: 2 leaves, 224 B in" in capsys.readouterr().out
    assert held(folder / "new/0").keys() == LEAVES.keys()
    assert all(held(folder / "new/0")[path].tobytes() == LEAVES[path].tobytes() for path in LEAVES)


def test_json(folder, capsys):
    options = ["--dtype", "bfloat16", "--max-shard-size", "50", "--max-memory", "200MB", "--json"]
    assert main(["export", "run/7", "hf", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtypes"] == {"bfloat16": 2} and found["tensors"] == 2 and found["nbytes"] == 112
    assert found["files"] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert main(["import", "hf", "new", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leaves"] == 2
    assert [leaf.dtype for leaf in Manifest.read(folder / "new").leaves] == ["bfloat16"] * 2


def test_unstacked_and_under(folder, capsys):
    saved(folder / "one", {("params", "layers", "0", "mlp", "up_proj", "kernel"): bits_of(np.float32, 4, 6)})
    assert main(["export", "one", "hf", "--map", "llama", "--unstacked", "--under", "params"]) == 0
    with safe_open("hf/model.safetensors", "np") as file:
        assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_shape() == [6, 4]
    assert main(["import", "hf", "new", "--map", "llama", "--unstacked", "--under", "params"]) == 0
    assert held(folder / "new").keys() == held(folder / "one").keys()


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("export gone hf", 2, "gone is not there"),
        (
            "export run hf --map llama",
            2,
            "the checkpoint has float32(11, 4); map llama has no leaf wte/embedding",
        ),
        ("export run hf --map gone.toml", 2, "map gone.toml: no such file, and no map of jzero, which has gpt2, llama"),
        ("export run hf --under params", 2, "pass --map as well"),
        ("export run hf --dtype int8", 2, "invalid choice"),
        ("export run hf --max-memory 3MB", 3, "needs --max-memory"),
        ("export run run", 2, "run is there already"),
        ("import gone new", 2, "gone is not there"),
        ("import run new", 2, "run holds no .safetensors files"),
        ("import broken.safetensors new", 1, "broken.safetensors is no safetensors file, or was cut short"),
    ],
)
def test_exit_codes(folder, capsys, line, code, says):
    (folder / "broken.safetensors").write_bytes(b"\xff" * 100)
    assert main(line.split()) == code
    assert says in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["broken.safetensors", "run"]


def test_a_damaged_checkpoint(folder, capsys):
    shutil.rmtree(folder / "run/7/state/params.wte.embedding/c/0")
    assert main(["export", "run", "hf"]) == 1
    assert "leaf params/wte/embedding" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["run"]


def test_a_disk_that_fills_up(folder, capsys, monkeypatch):
    def full(handle, data, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert main(["export", "run", "hf"]) == 3
    assert "hf was not written: [Errno 28] No space left on device. Free some space." in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["run"]


@pytest.mark.parametrize("name", ["export", "import"])
def test_help_has_examples(capsys, name):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"  jzero {name} " in out and "--map gpt2" in out and "exit codes: 0 done; 1 damaged" in out


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from jzero.checkpoint import export_safetensors, import_params
root, command, trials, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
turn = random.Random(seed)

def child(number):
    pid = os.fork()  # imports once; nothing that has threads has run before
    if pid:
        return pid
    try:
        if command == "export":
            export_safetensors(root / str(number % 2), root / "out", max_shard=10**6, overwrite=True)
        else:
            import_params(root / f"files{number % 2}", root / "out", overwrite=True)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)

def whole(number):
    began = time.monotonic()
    assert os.waitpid(child(number), 0)[1] == 0
    return time.monotonic() - began

took = whole(0)
for number in range(trials):
    pid = child(number + 1)
    time.sleep(turn.uniform(0, 1.1 * took))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(*sorted(path.name for path in root.iterdir() if path.name.startswith("out")), flush=True)
    sys.stdin.readline()  # the other process looks
    took = max(took, whole(number + 1))
    print(*sorted(path.name for path in root.iterdir() if path.name.startswith("out")), flush=True)
    sys.stdin.readline()
"""


def killed(tmp_path, command, trials, look):
    """Kills a command at random moments; `look` sees what is there after each kill and each rerun, and its turn."""
    line = [sys.executable, "-c", KILLS, str(tmp_path), command, str(trials), "0"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        for number in range(trials):
            for rerun in (False, True):
                names = process.stdout.readline().split()
                assert names, "the process ended"
                look(names, number + 1, rerun)
                process.stdin.write("\n")
                process.stdin.flush()
    assert process.returncode == 0


TWO = [{("a",): bits_of(np.float32, 700, 500), ("b", "c"): bits_of(np.float32, 300, 500)} for _ in range(2)]


@pytest.mark.parametrize("trials", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_kills_of_an_export(tmp_path, trials):
    for number, leaves in enumerate(TWO):
        saved(tmp_path / str(number), leaves, 100_000)

    def look(names, number, rerun):
        assert names == ["out"] if rerun else {*names} <= {"out", "out.jzero-tmp", "out.jzero-old"}
        there = "out" if "out" in names else "out.jzero-old"  # between two renames; the rerun takes it back
        found = written(tmp_path / there)
        turns = [n for n in range(2) if all(found[".".join(p)] == x.tobytes() for p, x in TWO[n].items())]
        assert turns == [number % 2] if rerun else len(turns) == 1

    killed(tmp_path, "export", trials, look)


@pytest.mark.slow
def test_kills_of_an_import(tmp_path):
    for number, leaves in enumerate(TWO):
        saved(tmp_path / str(number), leaves, 100_000)
        assert main(["export", str(tmp_path / str(number)), str(tmp_path / f"files{number}")]) == 0

    def look(names, number, rerun):
        assert names == ["out"] if rerun else {*names} <= {"out", "out.jzero-tmp", "out.jzero-old"}
        found = held(tmp_path / ("out" if "out" in names else "out.jzero-old"))
        turns = [n for n in range(2) if all(found[p].tobytes() == x.tobytes() for p, x in TWO[n].items())]
        assert turns == [number % 2] if rerun else len(turns) == 1

    killed(tmp_path, "import", 30, look)


def written(folder):
    """The bytes of tensors, by name, as the safetensors library reads them."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            found |= {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118, no dict
    return found
