"""What tests need that compile for GPUs which are not there."""

import os

import pytest

from jzero.targets import has_pjrt

COMPILER = 'needs what compiles for GPUs: pip install -e ".[preflight]"'
needs_compiler = pytest.mark.skipif(not has_pjrt(), reason=COMPILER)
"""For tests that compile in a process of their own, or that look at nothing that jax has started."""
compiles = pytest.mark.skipif(
    not has_pjrt() or os.environ.get("JAX_PLATFORMS") != "cpu", reason=f"{COMPILER}, and JAX_PLATFORMS=cpu"
)
"""For tests that compile in this process, where jax must not look for real GPUs."""
