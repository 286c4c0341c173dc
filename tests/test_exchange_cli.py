"""`jzero export` and `jzero import`: output, JSON, exit codes and messages; and what a kill leaves."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors import safe_open

from jzero.checkpoint import Manifest, export_safetensors, import_params
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
        ("export run run", 2, "run is what is read, or inside of it, or holds it"),
        ("export run hf.jzero-tmp", 2, "cannot be the name of something that is whole. Choose another place"),
        ("export run/8.jzero-tmp hf", 2, "8.jzero-tmp is not whole: .jzero-tmp ends the name of what is still being"),
        ("import gone new", 2, "gone is not there"),
        ("import hf.jzero-tmp/model.safetensors new", 2, "model.safetensors is not whole: .jzero-tmp ends the name"),
        ("import broken.safetensors new.jzero-old", 2, "cannot be the name of something that is whole"),
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


RUNS = """
import sys
from jzero.checkpoint import export_safetensors, import_params
command, source, target = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
if command == "export":
    export_safetensors(source, target, max_shard=10**6, overwrite=True)
else:
    import_params(source, target, overwrite=True)
"""


def run(command, source, target):
    if command == "export":
        export_safetensors(source, target, max_shard=10**6, overwrite=True)
    else:
        import_params(source, target, overwrite=True)


def starting(command, source, target):
    """A process of its own that will run a command when it is told to."""
    line = [sys.executable, "-c", RUNS, command, str(source), str(target)]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def killed(command, sources, target, trials, look):
    """Kills a command at random moments. Then a whole folder is there, and the next run leaves nothing else.

    Returns how often it was killed half-way.
    """
    began = time.perf_counter()
    run(command, sources[0], target)
    took, turn, half = time.perf_counter() - began, random.Random(0), 0
    batches = [range(trials)[first : first + 3] for first in range(0, trials, 3)]
    for batch in batches:
        processes = {number: starting(command, sources[(number + 1) % 2], target) for number in batch}
        try:
            for number, process in processes.items():
                assert process.stdout and process.stdin and process.stdout.readline() == "ready\n"
                process.stdin.write("\n")
                process.stdin.flush()
                time.sleep(turn.uniform(0, 1.5 * took))
                process.kill()
                process.wait()
                names = {path.name for path in target.parent.glob("out*")}
                assert names <= {"out", "out.jzero-tmp", "out.jzero-old", "out.jzero-lock"}
                half += names != {"out"}
                # Between two renames the old one has another name; the next run takes it back.
                there = target if target.exists() else target.with_name("out.jzero-old")
                assert look(there) in (0, 1)
                run(command, sources[(number + 1) % 2], target)
                assert [path.name for path in target.parent.glob("out*")] == ["out"]
                assert look(target) == (number + 1) % 2
        finally:
            for process in processes.values():
                process.kill()
                process.communicate()
    return half


TWO = [{("a",): bits_of(np.float32, 700, 500), ("b", "c"): bits_of(np.float32, 300, 500)} for _ in range(2)]


def which(found):
    """Which of the two it is; None if it is not all of one."""
    turns = [number for number, leaves in enumerate(TWO) if found == {path: x.tobytes() for path, x in leaves.items()}]
    return turns[0] if turns else None


@pytest.mark.parametrize("trials", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_kills_of_an_export(tmp_path, trials):
    sources = [saved(tmp_path / str(number), leaves, 100_000) for number, leaves in enumerate(TWO)]

    def look(folder):
        return which({tuple(name.split(".")): data for name, data in written(folder).items()})

    half = killed("export", sources, tmp_path / "out", trials, look)
    assert trials == 3 or half > 3


@pytest.mark.slow
def test_kills_of_an_import(tmp_path):
    sources = []
    for number, leaves in enumerate(TWO):
        export_safetensors(saved(tmp_path / str(number), leaves, 100_000), tmp_path / f"files{number}")
        sources.append(tmp_path / f"files{number}")

    def look(folder):
        return which({path: x.tobytes() for path, x in held(folder).items()})

    assert killed("import", sources, tmp_path / "out", 30, look) > 3


def written(folder):
    """The bytes of tensors, by name, as the safetensors library reads them."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            found |= {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118, no dict
    return found
