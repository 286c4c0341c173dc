"""Which devices a run uses, and the mesh over them."""

import contextlib
import math

import jax
from jax.sharding import Mesh

import jzero
from experiments.gpt.config import Config

SIMULATED = 8
"""How many CPU devices are simulated where there is no accelerator."""


def make_mesh(config: Config) -> Mesh:
    """Takes the accelerators of this machine, or simulates CPU devices where there are none, and arranges them.

    Raises:
        ValueError: More devices are asked for than there are, or the axes do not fit the devices.
    """
    sizes = [size for _, size in config.mesh]
    count = config.devices
    if count is None and -1 not in sizes:
        count = math.prod(sizes)
    # Once JAX has started the number is fixed, and the devices that are there must do.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count or SIMULATED)
    devices = jax.devices()
    if count is not None and count > len(devices):
        asked = f"--devices {count}" if config.devices else f"--mesh {format_mesh(config)} needs {count} devices"
        raise ValueError(f"{asked}: this machine has {len(devices)} ({devices[0].device_kind}).")
    return jzero.make_mesh(devices=devices[:count], **dict(config.mesh))


def describe(mesh: Mesh) -> str:
    """One sentence on the devices and the mesh."""
    device = mesh.devices.flat[0]
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    if device.platform == "cpu":
        return (
            f"No accelerator: {mesh.size} devices are simulated on this machine's CPU "
            f"(one program each, real collectives between them). Mesh: {axes}."
        )
    return f"{mesh.size} x {device.device_kind}. Mesh: {axes}."


def format_mesh(config: Config) -> str:
    """The mesh as it is written on the command line."""
    return ",".join(f"{name}={size}" for name, size in config.mesh)
