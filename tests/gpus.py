"""What tests need that compile for GPUs which are not there."""

import os

import pytest

from jzero.targets import has_pjrt

COMPILER = 'needs what compiles for GPUs: pip install -e ".[preflight]"'
HERE = f"{COMPILER}, and JAX_PLATFORMS=cpu"
can_compile_here = has_pjrt() and os.environ.get("JAX_PLATFORMS") == "cpu"
"""Whether this process can: jax must not look for real GPUs in it."""

needs_compiler = pytest.mark.skipif(not has_pjrt(), reason=COMPILER)
compiles = pytest.mark.skipif(not can_compile_here, reason=HERE)
