"""Every test sees 8 simulated CPU devices."""

import os

# LLVM's optimisation is most of the compile time here, and changes no placement, collective or buffer: those are
# decided by XLA's own passes, which run all the same.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def x64():
    """Runs a test in float64: what is exact there is right, and not only close."""
    with jax.enable_x64(True):
        yield
