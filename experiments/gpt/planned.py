"""Runs as `jzero preflight` takes them: a function of a mesh that returns a step, and the shapes of state and batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jzero
from experiments.gpt.config import Config
from experiments.gpt.job import build

Planned = tuple[jzero.TrainStep, Any, Any]


def planned(config: Config, mesh: Mesh) -> Planned:
    """The step of a run on a mesh, from shapes alone; the mesh's axes are those of `Config.mesh`."""
    job = build(config, mesh)
    state = jax.eval_shape(lambda: job.init(config.seed))
    batch = jax.ShapeDtypeStruct((config.batch_size, config.context + 1), jnp.int32)
    return job.step, state, batch


def train_config(mesh: Mesh) -> Planned:
    """The run that `python -m experiments.gpt` makes without options; its batch of 32 goes on up to 32 devices."""
    return planned(Config(mesh=tuple(mesh.shape.items())), mesh)


def train_1b3(mesh: Mesh) -> Planned:
    """1.3 billion params: GPT-3 XL's width and heads (arXiv:2005.14165), in bfloat16, four sequences per batch shard.

    With bytes for a vocabulary, 26 blocks make up for the embedding that GPT-3 XL has beside its 24.
    """
    axes = dict(mesh.shape)
    config = Config(
        stage=3 if axes.get("model", 1) == 1 else 1,
        mesh=tuple(axes.items()),
        precision="bf16",
        layers=26,
        width=2048,
        heads=16,
        context=2048,
        batch_size=4 * axes.get("replica", 1) * axes.get("data", 1),  # without a data axis zero refuses the mesh
    )
    return planned(config, mesh)
