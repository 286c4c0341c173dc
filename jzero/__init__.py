"""ZeRO for JAX: parameters, gradients and optimizer state stored once instead of N times."""

from jzero import bandwidth, checkpoint, memory, program
from jzero.audit import Audit, BrokenPromise, audit
from jzero.estimate import estimate
from jzero.explain import explain
from jzero.grad import value_and_grad
from jzero.layout import Layout
from jzero.loss import Weighted
from jzero.loss_scale import DynamicLossScale
from jzero.mark import gather, hint
from jzero.mesh import make_mesh
from jzero.options import compiler_options
from jzero.partition import combine, partition
from jzero.precision import Precision
from jzero.preflight import preflight
from jzero.stage import STAGES, Stage
from jzero.state import TrainState, init, master_params
from jzero.step import TrainStep, train_step
from jzero.update import apply_gradients
from jzero.zero import zero

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "STAGES",
    "Audit",
    "BrokenPromise",
    "DynamicLossScale",
    "Layout",
    "Precision",
    "Stage",
    "TrainState",
    "TrainStep",
    "Weighted",
    "apply_gradients",
    "audit",
    "bandwidth",
    "checkpoint",
    "combine",
    "compiler_options",
    "estimate",
    "explain",
    "gather",
    "hint",
    "init",
    "make_mesh",
    "master_params",
    "memory",
    "partition",
    "preflight",
    "program",
    "train_step",
    "value_and_grad",
    "zero",
]
