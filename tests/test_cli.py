"""The command `jzero`: what it prints, its JSON, its exit codes and its messages."""

import json
import os
import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import jzero
from jzero.cli import COMMANDS, main
from jzero.cli.options import filled, mesh_axes
from tests.test_checkpoint_tools import write_arrays

MODEL = """
import jax, jax.numpy as jnp, optax
from jax.sharding import PartitionSpec as P

def params():
    return {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 10), "float32"), "b": jax.ShapeDtypeStruct((8,), "float32")}

def arrays():
    return {"w": jnp.ones((1 << 20, 1 << 14))}  # 69 GB, if they were made

def needs(key):
    return key

def fails():
    return 1 / 0

RULES = [("w", P("model"))]
number = 3

def optimizer():
    return optax.lion(1e-3)

sgd = optax.sgd(0.1)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mymodel.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    return tmp_path


def estimated(capsys, *options):
    assert main(["estimate", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_example_of_the_paper(capsys):
    assert main(["estimate", "--params", "7.5e9", "--devices", "64"]) == 0
    out = capsys.readouterr().out
    assert "7,500,000,000 params, adam, bf16, data 64 = 64 devices, 1 microbatch per step" in out
    (line,) = [line for line in out.splitlines() if line.startswith("as the ZeRO paper counts")]
    assert line.split()[-4:] == ["120", "31.4", "16.6", "1.88"]
    assert "Stage 1 is the lowest that fits" in out
    assert max(map(len, out.splitlines())) <= 80


def help_of(capsys, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [[], *([each.__name__.rsplit(".", 1)[1].strip("_")] for each in COMMANDS)])
def test_help_fits_the_terminal_and_its_examples_can_be_pasted(capsys, monkeypatch, command):
    narrow, wide = (help_of(capsys, monkeypatch, command, columns) for columns in (80, 200))
    assert max(map(len, narrow.splitlines())) <= 80
    joined = narrow.replace(" \\\n     ", "").splitlines()
    examples = ["  " + line[2:].split("  ")[0] for line in wide.splitlines() if line.startswith("  jzero")]
    assert all(example in joined for example in examples) and bool(examples) == bool(command)


def test_json_and_text_say_the_same(capsys):
    found = estimated(capsys, "--params", "7.5e9", "--mesh", "replica=2,data=16,model=2", "--microbatches", "4")
    assert found["axes"] == {"replica": 2, "data": 16, "model": 2}
    assert [stage["stage"] for stage in found["stages"]] == [0, 1, 2, 3]
    third = found["stages"][3]
    assert third["stored"]["total"] == sum(entry["bytes"] for entry in third["ledger"][:3]) == 12 * 7.5e9 / 2 / 16
    assert third["total"] == third["stored"]["total"] + third["inside"]["total"]
    assert {(row["what"], tuple(row["axes"])) for row in third["traffic"]} == {
        ("gather, forward", ("data",)),
        ("gather, backward", ("data",)),
        ("reduce", ("data",)),
        ("reduce", ("replica",)),
    }
    assert found["advice"]["lowest"] is not None and found["advice"]["reasons"]


def test_a_model_of_ones_own(folder, capsys):
    found = estimated(capsys, "--model", "mymodel:params", "--devices", "8", "--stage", "3", "--precision", "fp32")
    assert found["params"] == (1 << 30) + 8
    assert found["stages"][0]["stored"]["total"] == 12 * (1 << 30) // 8 + 12 * 8 + 4
    options = ("--model", "mymodel:params", "--mesh", "data=4,model=2", "--stage", "0", "--precision", "fp32")
    ruled = estimated(capsys, *options, "--rules", "mymodel:RULES", "--optimizer", "mymodel:optimizer")
    assert ruled["stages"][0]["stored"]["total"] == 8 * (1 << 29) + 8 * 8 + 4, "lion has one moment"
    assert ruled["stages"] == estimated(capsys, *options, "--rules", "mymodel:RULES", "--optimizer", "lion")["stages"]
    plain = estimated(capsys, *options, "--optimizer", "mymodel:sgd")
    assert plain["stages"][0]["stored"]["total"] == 4 * (1 << 30) + 4 * 8


def test_arrays_are_not_made(folder, capsys):
    assert estimated(capsys, "--model", "mymodel:arrays", "--devices", "8")["params"] == 1 << 34


def test_plot(folder, capsys):
    assert main(["estimate", "--params", "1e9", "--devices", "8", "--plot", "memory.png"]) == 0
    assert (folder / "memory.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--params many --devices 8", "'many' is no number; wanted a count such as 7.5e9"),
        ("--params 7.55 --devices 8", "wanted a whole positive number such as 7.5e9"),
        ("--params 1e9", "on how many devices? Pass --devices 64, or --mesh data=32,model=2"),
        ("--params 1e9 --devices 0", "--devices 0: wanted 1 or more"),
        ("--params 1e9 --devices 64 --mesh data=3,model=2", "3 x 2 are 6 devices, but --devices says 64"),
        ("--params 1e9 --devices 64 --mesh data=-1,model=7", "7 do not divide --devices 64"),
        ("--params 1e9 --mesh data=-1,model=2", "how many devices are left for 'data'? Pass --devices as well"),
        ("--params 1e9 --devices 8 --mesh data", "'data' is not a name and a positive size (or -1)"),
        ("--params 1e9 --devices 8 --mesh model=8", "has no axis 'data'"),
        ("--params 1e9 --devices 8 --device h300", "wanted one of a100-40, a100, h100, h200, b200, l40s"),
        ("--params 1e9 --devices 8 --optimizer adamm", "wanted adam, adamw, lamb, lion, "),
        ("--params 1e9 --devices 8 --optimizer muon", "no shapes for optimizer='muon' to work on. Pass the abstract"),
        ("--params 1e9 --devices 8 --stage 4", "invalid choice: 4"),
        ("--params 1e9 --devices 8 --reserve 2", "reserve=2.0; a share of the memory"),
        ("--params 1e9 --devices 8 --plot nowhere/memory.png", "No such file or directory"),
        ("--params 1e9 --devices 8 --plot memory.xyz", "memory.xyz: cannot write .xyz; "),
        ("--model exits:params --devices 8", "importing 'exits' failed with SystemExit: 3"),
        ("--devices 8", "one of the arguments --params --model is required"),
        ("--model mymodel --devices 8", "wanted module:name"),
        (
            "--model absent:params --devices 8",
            "ModuleNotFoundError: No module named 'absent'. It must be",
        ),
        ("--model broken:params --devices 8", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("--model mymodel:absent --devices 8", "has no 'absent'; it has params, arrays, needs, fails"),
        ("--model mymodel:number --devices 8", "is a int; wanted a function without arguments"),
        ("--model mymodel:needs --devices 8", "takes arguments, (key); wanted a function without arguments"),
        ("--model mymodel:fails --devices 8", "failed with ZeroDivisionError: division by zero"),
        ("--model mymodel:params --devices 8 --optimizer mymodel:number", "is a int; wanted a function"),
    ],
)
def test_bad_input(folder, capsys, options, message):
    assert main(["estimate", *options.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "command", ["estimate --params 1e9 --devices 8", "estimate --params 1e9 --devices 8 --json", "inspect c", "--help"]
)
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_reader_that_has_gone(folder, monkeypatch, capsys, command, buffering):
    """As `| head` has when it has seen enough: told at once, or when what is left in a buffer is written."""
    write_arrays(folder / "c", {("params", "w"): np.ones(3, np.float32)})
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(command.split()) == 128 + signal.SIGPIPE
        pipe.write("more")  # as Python does when it ends
    assert capsys.readouterr().err == ""


def test_a_script_that_exits_is_no_broken_pipe(folder):
    (folder / "leaves.py").write_text("import sys\ndef params():\n    sys.exit(7)\n")
    with pytest.raises(SystemExit) as done:
        main(["estimate", "--model", "leaves:params", "--devices", "8"])
    assert done.value.code == 7


def test_mesh_and_devices():
    assert mesh_axes("replica=2, data=-1") == {"replica": 2, "data": -1}
    assert filled({"data": -1, "model": 2}, 64) == {"data": 32, "model": 2}
    assert filled({"data": 4, "model": 2}, None) == {"data": 4, "model": 2}
    with pytest.raises(ValueError, match="only one axis can be -1"):
        filled({"data": -1, "model": -1}, 64)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jzero {jzero.__version__}, jax {jax.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"], "one place has it"
    assert project["tool"]["hatch"]["version"]["path"] == "jzero/__init__.py"


def test_help_and_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jzero", "estimate", "--help"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("jzero", run_name="__main__")
    assert done.value.code == 0 and "jzero estimate --params 7.5e9 --devices 64" in capsys.readouterr().out
    assert main([]) == 2


def test_commands_start_without_what_only_pictures_need():
    """Matplotlib takes a quarter of the time that the others take together."""
    program = "import sys, jzero.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(jzero.__file__).parents[1]).returncode == 0
