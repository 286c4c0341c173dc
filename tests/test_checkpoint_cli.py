"""`jzero inspect`, `verify` and `reshard`: what they print, their JSON, exit codes and messages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jzero.checkpoint import Manifest, store
from jzero.checkpoint.manifest import _digest
from jzero.cli import main
from tests.test_checkpoint_tools import write_arrays

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    """A folder of two checkpoints, 1 and 20."""
    rng = np.random.default_rng(0)
    saved_from = {
        "mesh": {"data": 8},
        "data_axes": ["data"],
        "replica_axes": [],
        "processes": 1,
        "stage": {"params": "sharded", "grads": "sharded", "opt_state": "sharded", "reduce": "block"},
        "min_shard_size": 4,
    }
    for step in (1, 20):
        arrays = {
            ("params", "h", "0", "w"): rng.random((16, 8), np.float32),
            ("params", "h", "1", "w"): rng.random((16, 8), np.float32),
            ("params", "odd"): rng.random((7, 5), np.float32),
            ("opt_state", "mu"): rng.random((7, 5), np.float32),
            ("step",): np.array(step, np.int32),
        }
        about = {"step": step, "data": {"batch": 3}, "metrics": {"loss": 1.5}, "saved_from": saved_from}
        write_arrays(tmp_path / "run" / str(step), arrays, **about)
    (tmp_path / "run" / "30.jzero-tmp").mkdir()
    return tmp_path / "run"


def called(capsys, *command):
    code = main(list(map(str, command)))
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys, *command):
    code, out, _ = called(capsys, *command, "--json")
    return code, json.loads(out)


def test_inspect(run, capsys):
    code, out, err = called(capsys, "inspect", run, "--fits", "data=4,stage=3")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0].endswith("20: written by jzero, step 20, 5 leaves, 1.31 kB")
    assert "saved from mesh data 8, stage 3, 1 process" in out and "metrics loss 1.5" in out
    (row,) = [line for line in lines if line.startswith("params/h/0/w ")]
    assert row.split() == ["params/h/0/w", "float32", "(16,", "8)", "512", "B", "?", "2", "of", "(8,", "8)"]
    assert "cuts no leaf" not in out
    assert "On data 4 at stage 3, each of 4 devices holds between steps:" in out
    assert "params/odd (7, 5): no dim of (7, 5) divides by 4: stored padded to (8, 5)" in out
    assert "30.jzero-tmp" in out
    code, found = as_json(capsys, "inspect", run / "1", "--fits", "data=4")
    assert code == 0 and found["step"] == 1 and found["bytes"] == 2 * 512 + 2 * 140 + 4
    assert found["leaves"][0] == {
        "path": ["params", "h", "0", "w"],
        "dtype": "float32",
        "shape": [16, 8],
        "bytes": 512,
        "spec": None,
        "chunk": [8, 8],
    }
    # Cut in four: 16 x 2, 2 x 5 of 8 x 5 with padding, and the step on each.
    assert found["fits"]["bytes_per_device"] == 2 * 128 + 2 * 40 + 4
    assert found["fits"]["padding_per_device"] == 2 * (40 - 35)
    assert found["stale"] == [str(run / "30.jzero-tmp")] and found["fits"]["idle"] == {}
    said = "is not known to cut a leaf: the checkpoint does not say which axes cut its leaves."
    assert f"'model' {said}" in called(capsys, "inspect", run / "1", "--fits", "data=4,model=2")[1]
    fits = as_json(capsys, "inspect", run / "1", "--fits", "data=4,model=2")[1]["fits"]
    assert fits["bytes_per_device"] == found["fits"]["bytes_per_device"] and said in fits["idle"]["model"]


def test_json_has_no_nan(tmp_path, capsys):
    metrics = {"loss": float("nan"), "best": float("-inf"), "fine": 2.5}
    write_arrays(tmp_path / "c", {("w",): np.ones(3, np.float32)}, metrics=metrics, data={"at": [1, float("inf")]})

    def strict(text):
        raise AssertionError(f"{text} is no JSON")

    assert main(["inspect", str(tmp_path / "c"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=strict)
    assert found["metrics"] == {"loss": None, "best": None, "fine": 2.5} and found["data"] == {"at": [1, None]}
    assert "metrics loss nan, best -inf, fine 2.5" in called(capsys, "inspect", tmp_path / "c")[1]


def test_verify(run, capsys):
    code, out, _ = called(capsys, "verify", run)
    assert code == 0 and "20 is whole: " in out
    code, found = as_json(capsys, "verify", run / "1", "--against", run / "20")
    assert (
        code == 1
        and not found["equal"]
        and {each["leaf"] for each in found["differences"]}
        == {
            "params/h/0/w",
            "params/h/1/w",
            "params/odd",
            "opt_state/mu",
            "step",
        }
    )
    shutil.copytree(run / "20", run / "21")
    assert called(capsys, "verify", run / "21", "--against", run / "20")[0] == 0
    (run / "21" / "state" / "params.odd" / "c" / "0" / "0").unlink()
    code, out, _ = called(capsys, "verify", run)
    assert code == 1 and "21 is damaged; 1 file:" in out and "leaf params/odd: " in out and "0/0 is missing" in out
    code, found = as_json(capsys, "verify", run)
    assert code == 1 and found["problems"][0]["leaf"] == "params/odd" and not found["whole"]
    (run / "21" / "jzero.json").write_text("{}")
    for command in (["verify", run / "21"], ["inspect", run / "21"], ["reshard", run / "21", run / "22"]):
        code, out, err = called(capsys, *command)
        assert code == 1 and "jzero.json is no manifest" in out + err


def test_reshard(run, tmp_path, capsys):
    made = tmp_path / "made"
    command = ["reshard", run, made, "--drop", "opt_state", "--stack", "params/h/#=params/h"]
    code, out, err = called(capsys, *command, "--cast", "params/**=bfloat16", "--mesh", "data=2,stage=3")
    assert code == 0 and err == "" and f"20 to {made}: 3 leaves" in out and "compared with what was read" in out
    leaves = {leaf.name: (leaf.dtype, leaf.shape) for leaf in Manifest.read(made).leaves}
    assert leaves == {
        "params/h/w": ("bfloat16", (2, 16, 8)),
        "params/odd": ("bfloat16", (7, 5)),
        "step": ("int32", ()),
    }
    code, found = as_json(capsys, "reshard", run, made, "--overwrite", "--only", "step")
    assert code == 0 and found["leaves"] == 1 and found["bytes"] == 4 and found["left_out"] == []


def test_a_leaf_with_the_signs_of_rules_in_its_name(tmp_path, capsys):
    write_arrays(tmp_path / "c", {("params", "a=b,c@1"): np.ones((2, 2), np.float32)})
    rename = ["--rename", r"params/a\=b\,c\@1=params/x\:2", "--cast", r"params/x\:2=bfloat16"]
    assert called(capsys, "reshard", tmp_path / "c", tmp_path / "made", *rename)[0] == 0
    assert [(leaf.path, leaf.dtype) for leaf in Manifest.read(tmp_path / "made").leaves] == [
        (("params", "x:2"), "bfloat16")
    ]
    assert r"params/a\=b=params/c" in called(capsys, "reshard", "--help")[1]


def test_rules_are_applied_in_their_order(run, tmp_path, capsys):
    command = [
        "reshard",
        run,
        tmp_path / "made",
        "--rename",
        "params/h=params/x",
        "--split",
        "params/x/*/w=params/x/*/a,params/x/*/b",
    ]
    assert called(capsys, *command, "--merge", "params/x/0/a,params/x/1/b=params/ab@0")[0] == 0
    found = {leaf.name: leaf.shape for leaf in Manifest.read(tmp_path / "made").leaves}
    assert found["params/ab"] == (32, 4) and found["params/x/1/a"] == (16, 4) and "params/h/0/w" not in found


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["inspect", "nowhere"], "nowhere is not there"),
        (["inspect", "."], "holds none: it has neither jzero.json nor orbax's _METADATA"),
        (["inspect", "."], "Did you mean run?"),
        (["inspect", "run", "--fits", "data=-1"], "wanted the size of each axis"),
        (["inspect", "run", "--fits", "stage=3"], "wanted axes and perhaps a stage"),
        (["inspect", "run", "--fits", "data=2,stage=4"], "stage of 0 to 3"),
        (["inspect", "run", "--fits", "model=2"], "no data axis"),
        (["verify", "run", "--max-memory", "lots"], "'lots'; wanted whole bytes"),
        (["verify", "run", "--against", "nowhere"], "nowhere is not there"),
        (["inspect", "run/30.jzero-tmp"], "30.jzero-tmp is not whole: .jzero-tmp ends the name of what is still being"),
        (["verify", "run/30.jzero-tmp"], "is not whole"),
        (["verify", "run", "--against", "run/30.jzero-tmp"], "is not whole"),
        (["reshard", "run/30.jzero-tmp", "made"], "is not whole"),
        (["reshard", "run", "made.jzero-tmp"], "cannot be the name of something that is whole. Choose another place"),
        (["reshard", "run", "made.jzero-old"], "cannot be the name of something that is whole. Choose another place"),
        (["reshard", "run", "run/20"], "Choose another place"),
        (["reshard", "run/20", "run/1"], "is there already"),
        (["reshard", "run", "made", "--drop", "a//b"], "has an empty level"),
        (["reshard", "run", "made", "--drop", "nothing"], "--drop nothing matches none of the 5 leaves"),
        (["reshard", "run", "made", "--cast", "params=int8"], "of a float dtype"),
        (["reshard", "run", "made", "--cast", "step=bfloat16"], "step: the checkpoint has int32(), asked for bfloat16"),
        (["reshard", "run", "made", "--stack", "params/h=params/x"], "with # for the number of the layer on the left"),
        (["reshard", "run", "made", "--unstack", "params/h/#=params/x"], "on the right"),
        (["reshard", "run", "made", "--rename", "params/*=params"], "to know what they stand for"),
        (["reshard", "run", "made", "--rename", "params"], "wanted LEFT=RIGHT"),
        (["reshard", "run", "made", "--rename", "a=b=c"], r"(in names a backslash goes before these: \= \@ \, \:)"),
        (["reshard", "run", "made", "--rename", "a=b:3"], "in names a backslash"),
        (["reshard", "run", "made", "--stack", "a@1/#=b"], "in names a backslash"),
        (["reshard", "run", "made", "--split", "a=b:c,d:3"], "in names a backslash"),
        (["reshard", "run", "made", "--split", "a=b:1:3,d"], "in names a backslash"),
        (["reshard", "run", "made", "--merge", "a,b=c,d"], "in names a backslash"),
        (["reshard", "run", "made", "--rename", "a=b"], "--rename a=b matches none of the 5 leaves; they are from"),
        (["reshard", "run", "made", "--cast", "a=bfloat16"], "--cast a=bfloat16 matches none of the 5 leaves"),
        (["reshard", "run", "made", "--cast", "a=b=bfloat16"], "in names a backslash"),
        (["reshard", "run", "made", "--drop", r"a\b"], r"a backslash stands before one of \/*#=@,: only"),
        (["reshard", "run", "made", "--split", "params/odd=params/a:3,params/b"], "all sizes or none"),
        (
            ["reshard", "run", "made", "--split", "params/odd=params/a:3,params/b:3"],
            "cannot be cut into 3 + 3 elements",
        ),
        (["reshard", "run", "made", "--merge", "params/odd=params/b"], "wanted LEFT,LEFT,...=RIGHT"),
    ],
)
def test_bad_input_is_told(run, monkeypatch, capsys, command, message):
    monkeypatch.chdir(run.parent)
    code, out, err = called(capsys, *command)
    assert code == 2 and out == "" and message in err
    assert {path.name for path in run.parent.iterdir()} == {"run"} and len(list(run.iterdir())) == 3


def test_limits_are_told_before_anything_is_written(run, tmp_path, monkeypatch, capsys):
    for command in (
        ["reshard", run, tmp_path / "made", "--max-memory", "20MB"],
        ["verify", run, "--max-memory", "20MB"],
        ["verify", run / "1", "--against", run / "20", "--max-memory", "20MB"],
    ):
        code, _, err = called(capsys, *command)
        assert code == 3 and "needs --max-memory " in err and "20MB are allowed" in err
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, _, err = called(capsys, "reshard", run, tmp_path / "made")
    assert code == 3 and "1.00 kB are free there" in err
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_exit_codes_of_what_could_not_be_written(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for command in ("reshard", "export"):
        code, _, err = called(capsys, command, run, tmp_path / "file" / "made")
        assert code == 2 and "made was not written: " in err and "Free some space" not in err

    def full(*_):
        raise ValueError("UNKNOWN: Failed to write [OS error 28: No space left on device]")  # as tensorstore says it

    monkeypatch.setattr("jzero.checkpoint.store.write", full)
    code, _, err = called(capsys, "reshard", run, tmp_path / "made")
    assert code == 3 and "Free some space" in err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "file"}


@pytest.mark.parametrize("command", ["inspect", "verify", "reshard"])
def test_help_has_examples_and_exit_codes(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"jzero {command} run/checkpoints" in out and "exit codes: 0 done; 1 damaged or different; 2" in out


def test_a_name_cannot_write_to_the_terminal(tmp_path, capsys):
    write_arrays(tmp_path / "c", {("params", "\x1b[2J\n"): np.ones(3, np.float32)})
    for command in (["inspect", tmp_path / "c"], ["verify", tmp_path / "c"]):
        code, out, _ = called(capsys, *command)
        assert code == 0 and "\x1b" not in out
    assert "params/\\x1b[2J\\n" in called(capsys, "inspect", tmp_path / "c")[1]
    document = json.loads((tmp_path / "c" / "jzero.json").read_text())
    body = document["body"] | {"saved_from": {"mesh": {"\x1b[2J": 8}}}
    body["leaves"][0]["spec"] = [["\x1b[2J"]]
    (tmp_path / "c" / "jzero.json").write_text(json.dumps({"sha256": _digest(body), "body": body}))
    code, out, _ = called(capsys, "inspect", tmp_path / "c")
    assert code == 0 and "\x1b" not in out and "mesh \\x1b[2J 8" in out


def test_a_path_may_lead_through_the_folder_above(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert called(capsys, "verify", "../run/../run/1")[0] == 0
    assert called(capsys, "reshard", "../run/1", "../new")[0] == 0
    assert called(capsys, "export", "../run/1", "../hf")[0] == 0
    assert called(capsys, "verify", "../new", "--against", f"/{run}/1")[0] == 0
    write_arrays(Path("../run/2"), {("params", "w"): np.ones(3, np.float32)})
    assert called(capsys, "verify", "../run/2")[0] == 0


def test_an_export_does_not_go_into_the_checkpoint(run, capsys):
    """It would go with it when the run removes it."""
    code, _, err = called(capsys, "export", run / "1", run / "1" / "hf")
    assert code == 2 and "is what is read, or inside of it, or holds it" in err


@pytest.mark.parametrize(
    ("command", "streams", "code"),
    [
        ("verify run/1", ">&-", 0),
        ("verify run/1", ">&- 2>&-", 0),
        ("inspect run/1", ">/dev/full", 2),
        ("inspect gone", "2>/dev/full", 2),
        ("inspect gone", ">/dev/full 2>/dev/full", 2),
    ],
)
def test_streams_that_take_nothing(run, command, streams, code):
    program = f"{sys.executable} -c 'import sys; from jzero.cli import main; sys.exit(main())' {command} {streams}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, shell=True, cwd=run.parent, env=env, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr


def test_what_may_not_be_read_is_not_called_damaged(run, monkeypatch, capsys):
    whole = Path.open

    def refused(path, *args, **options):
        if path.parent.parent.name == "c":
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    code, _, err = called(capsys, "verify", run / "1")
    assert code == 2 and "Permission denied" in err


def test_ctrl_c_stops_a_command(run, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write", stopped)
    code, _, err = called(capsys, "reshard", run / "1", tmp_path / "new")
    assert code == 130 and err == "jzero: stopped\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
