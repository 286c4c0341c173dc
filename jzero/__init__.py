"""ZeRO for JAX: parameters, gradients and optimizer state stored once instead of N times."""

from jzero import audit, memory
from jzero.explain import explain
from jzero.grad import Weighted, value_and_grad
from jzero.layout import Layout, zero
from jzero.mesh import make_mesh
from jzero.stage import STAGES, Stage
from jzero.state import TrainState, apply_gradients, init
from jzero.step import train_step

__all__ = [
    "STAGES",
    "Layout",
    "Stage",
    "TrainState",
    "Weighted",
    "apply_gradients",
    "audit",
    "explain",
    "init",
    "make_mesh",
    "memory",
    "train_step",
    "value_and_grad",
    "zero",
]
