"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

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
