"""Every example in a docstring runs, and every one in the README."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from tests import gpus

MODULES = ["jzero", *(module.name for module in pkgutil.walk_packages(jzero.__path__, "jzero."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "jzero": jzero}
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert not failed


def test_public_functions_have_examples():
    functions = [getattr(jzero, name) for name in jzero.__all__ if name[0].islower()]
    missing = [f.__name__ for f in functions if callable(f) and ">>>" not in (f.__doc__ or "")]
    assert not missing


# --- the README

ROOT = Path(__file__).parents[1]
PARTS = re.split(r"^##+ (.+)\n", (ROOT / "README.md").read_text(), flags=re.M)
SECTIONS = dict(zip(PARTS[1::2], PARTS[2::2], strict=True))


def code(section, language="python"):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", SECTIONS[section], flags=re.M | re.S)
    return [text for name, text in blocks if name == language]


QUICK_START, *_ = code("Quick start")
WITH_CODE = [section for section in SECTIONS if code(section) and section != "Your own model"]


def test_the_quick_start_is_a_whole_script_and_prints_what_is_said(tmp_path):
    (tmp_path / "script.py").write_text(QUICK_START)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = [sys.executable, "script.py"]
    done = subprocess.run(run, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, said = code("Quick start", language="")
    assert [line.rstrip() for line in done.stdout.splitlines()] == said.splitlines()


@pytest.fixture(scope="module")
def quick_start():
    """The names that the script leaves, after two steps."""
    script = QUICK_START
    for line, other in (
        ('jax.config.update("jax_num_cpu_devices", 8)', "pass"),
        ("steps = jax.random.key(0), 200", "steps = jax.random.key(0), 2"),
    ):
        assert line in script
        script = script.replace(line, other)
    names = {}
    exec(script, names)
    return names


@pytest.mark.parametrize("section", WITH_CODE)
def test_examples_go_on_from_the_quick_start(section, quick_start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = dict(quick_start)
    for example in code(section)[section == "Quick start" :]:
        if "Llama" in example:
            continue  # it is not here
        if "preflight" in example and not gpus.can_compile_here:
            pytest.skip(gpus.HERE)
        exec(example, names)


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_a_model_of_each_library_trains(library, quick_start):
    first, *recipes, last = code("Your own model")
    (recipe,) = [example for example in recipes if re.match(rf"(from flax )?import {library}", example)]
    names = dict(quick_start)
    for example in (first, recipe, last):
        exec(example, names)
    assert names["state"].step == 1 and jnp.isfinite(names["metrics"]["loss"])


def test_no_example_uses_a_name_that_is_not_there():
    """Those included that are not run above."""
    text = "\n".join(example for section in SECTIONS for example in code(section))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=concise", "-"]
    done = subprocess.run(ruff, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_contributing_names_every_module():
    """But for those of commands, and for the many formats of `exchange/`."""
    said = set(re.findall(r"`(?:jzero/)?(\w+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
    there = {path for path in (ROOT / "jzero").rglob("*.py") if not path.name.startswith("__")}
    assert said <= {path.name for path in there}
    assert {path.name for path in there if path.parent.name not in ("cli", "exchange")} <= said
