"""From options to a compiled program."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import jzero
from experiments.schedule.config import Config
from experiments.schedule.models import MODELS
from jzero.schedule import Window, windows
from jzero.state import compile_init
from jzero.targets import target_mesh


@dataclass(frozen=True)
class Program:
    """A compiled program, as far as it is looked at.

    Attributes:
        mesh: The mesh of GPUs that it is for.
        windows: Its collectives, and what runs beside them.
        temp_bytes: Bytes per device that it needs beside its arguments and results.
    """

    mesh: Mesh
    windows: tuple[Window, ...]
    temp_bytes: int


def compile_program(config: Config) -> Program:
    """Compiles ahead of time; nothing is run.

    Raises:
        ValueError: A target, a mesh or sizes that do not fit one another.
        RuntimeError: No way to compile for GPUs here, or options that XLA refuses.
    """
    memory = None if config.device_memory is None else int(config.device_memory * 2**30)
    mesh = target_mesh(config.target, device_memory=memory, **dict(config.mesh))
    model = MODELS[config.model](config)
    replica = tuple(name for name in mesh.axis_names if name == "replica")
    rules = model.rules if "model" in mesh.axis_names else ()
    layout = jzero.zero(
        model.params,
        stage=config.stage,
        mesh=mesh,
        replica_axes=replica,
        rules=rules,
        regather=config.regather,
        ahead=config.ahead,
    )
    tx = optax.adamw(1e-3)
    state = jax.eval_shape(compile_init(lambda params: params, tx, layout), model.params)
    shape = (layout.batch_shards * config.batch, *model.batch.shape[1:])
    batch = _placed(model.batch.update(shape=shape), layout.batch_spec, layout)
    if config.what == "step":
        lowered = jzero.train_step(model.loss_fn, tx, layout, compiler_options={}).lower(state, batch)
    else:
        params = jax.tree.map(lambda x, spec: _placed(x, spec, layout), state.params, layout.param_specs)
        lowered = jax.jit(jzero.value_and_grad(model.loss_fn, layout)).lower(params, batch)
    ours: dict[str, Any] = (
        {} if config.xla_defaults else jzero.compiler_options(layout, bucket_bytes=config.bucket_bytes)
    )
    compiled = lowered.compile(compiler_options=ours | dict(config.options))
    memory: Any = compiled.memory_analysis()
    return Program(mesh, windows(compiled, layout=layout), memory.temp_size_in_bytes)


def _placed(x, spec, layout):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding(spec))
