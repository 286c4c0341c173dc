"""Every test sees 8 simulated CPU devices."""

import os

import jax  # XLA reads its flags later, with the first array
import pytest

# LLVM's optimisation is most of the compile time here, and changes no placement, collective or buffer: those are
# decided by XLA's own passes, which run all the same. What is left is mostly MLIR's way of writing out fusions, for
# which versions before 0.11 have another, in a third of the time; its sums differ in the last bit between programs.
GIVEN = os.environ.get("XLA_FLAGS", "")
FUSION_EMITTERS = jax.__version_info__ >= (0, 11) or "xla_cpu_use_fusion_emitters=true" in GIVEN
FLAGS = "--xla_backend_optimization_level=0" + ("" if FUSION_EMITTERS else " --xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = f"{GIVEN} {FLAGS}"

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def x64():
    """Runs a test in float64: what is exact there is right, and not only close."""
    with jax.enable_x64(True):
        yield
