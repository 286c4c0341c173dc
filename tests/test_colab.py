"""The notebooks: in step with their scripts, run from top to bottom, and no number in their prose."""

import os
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from jzero.targets import has_pjrt
from tests import gpus

ROOT = Path(__file__).parent.parent
SCRIPTS = {path.stem: path for path in sorted((ROOT / "colab").glob("*.py"))}
VARIES = "varies"  # the tag of a cell whose text depends on rounding, and so on versions and machines


def read(name):
    return nbformat.read(SCRIPTS[name].with_suffix(".ipynb"), as_version=4)


def run(notebook, *folders):
    """Runs a notebook in its own folder, with this checkout of jzero, and with Python modules from these folders."""
    path = os.pathsep.join([*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH", "")])
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT / "colab")}})
    return client.execute(env=os.environ | {"PYTHONPATH": path})


def printed(cell, stream="stdout"):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == stream)


def code_cells(notebook):
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and "skip-execution" not in cell.metadata.get("tags", [])
    ]


def check_run(notebook, committed):
    """Every cell ran in order and without a warning, and what the committed notebook shows is still so."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell, before in zip(cells, code_cells(committed), strict=True):
        assert "Warning" not in printed(cell, "stderr"), cell.source
        assert "\x1b" not in printed(cell), cell.source  # tables are plain text
        if VARIES not in cell.metadata.get("tags", []):
            assert printed(cell) == printed(before), cell.source


@pytest.mark.parametrize("name", SCRIPTS)
def test_notebook_is_in_step_with_its_script(name):
    def cells(notebook):
        return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]

    assert cells(read(name)) == cells(jupytext.read(SCRIPTS[name])), (
        f"run: jupytext --update --to ipynb colab/{name}.py && jupyter execute --inplace colab/{name}.ipynb"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_committed_notebook_was_run_and_is_small(name):
    check_run(read(name), read(name))
    assert SCRIPTS[name].with_suffix(".ipynb").stat().st_size < 400_000


@pytest.mark.parametrize("name", SCRIPTS)
def test_prose_has_no_number_that_no_cell_computes(name):
    for cell in read(name).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"`[^`]*`|\$[^$]*\$|\[[^]]*\]\([^)]*\)", "", cell.source)  # code, formulas, links
            text = re.sub(r"[sS]tages?\s\d(\s(to|and|or)\s\d)*|H200", "", text)  # names
            assert not re.search(r"\d", text), text


def test_zero_by_hand():
    check_run(run(read("01_zero_by_hand")), read("01_zero_by_hand"))


@pytest.mark.parametrize(
    "compiler",
    [pytest.param(True, marks=pytest.mark.slow, id="with a compiler for GPUs"), pytest.param(False, id="without")],
)
def test_plan_before_you_pay(compiler, tmp_path):
    if compiler and not has_pjrt():
        pytest.skip(gpus.COMPILER)
    folders = []
    if not compiler:
        (tmp_path / "jax_plugins").mkdir()
        (tmp_path / "jax_plugins/__init__.py").touch()  # stands in front of the one with plugins in it
        folders = [tmp_path]
    notebook = run(read("02_plan_before_you_pay"), *folders)
    check_run(notebook, read("02_plan_before_you_pay"))
    text = "".join(map(printed, code_cells(notebook)))
    assert "backward: 40 x" in text and "Every promise is kept" in text  # explain, audit
    assert ("Largest buffers" in text) == compiler
    assert ("is not installed" in text) == (not compiler)
    assert ("choose (stage, microbatches): None" in text) == (not compiler)
