"""Named device meshes."""

import math
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

OPTIONS = ("devices", "device_memory", "target")
"""Names that no axis can have: those of the other arguments of `make_mesh` and `targets.target_mesh`."""


def check_names(what: str, axes: Iterable[str]) -> None:
    """Raises a ValueError for an axis that these functions could not tell from an option.

    Example:
        >>> check_names("f", {"devices": 8})
        Traceback (most recent call last):
        ValueError: f: no mesh axis can be named 'devices', an option of the functions that make meshes; rename it.
    """
    for name in axes:
        if name in OPTIONS:
            raise ValueError(
                f"{what}: no mesh axis can be named {name!r}, an option of the functions that make meshes; rename it."
            )


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """What the mesh's devices are: "cpu", "gpu" or "tpu".

    Raises:
        ValueError: The mesh has no devices.
    """
    if isinstance(mesh, AbstractMesh):
        raise ValueError(f"{mesh} has no devices, so nothing can run on it; make the mesh with jzero.make_mesh.")
    return mesh.devices.flat[0].platform


def abstract_mesh(**axes: int) -> AbstractMesh:
    """A mesh without devices, of any size, to plan for: `zero`, `explain` and `memory` take it, and nothing can run.

    Args:
        **axes: Size of each axis by name.

    Raises:
        ValueError: No axis, or a size that is not positive.
        TypeError: A size that is not an int.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones((4096, 64))}, stage=3, mesh=abstract_mesh(replica=16, data=64))
        >>> layout.leaves[0].local("sharded", layout.shards)
        (4096, 1)
    """
    if not axes:
        raise ValueError("abstract_mesh needs at least one named axis, for example abstract_mesh(data=64).")
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"abstract_mesh: axis {name!r} has size {size!r}; sizes are ints.")
        if size < 1:
            raise ValueError(f"abstract_mesh: axis {name!r} has size {size}; sizes are positive.")
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_mesh(*, devices: Sequence[jax.Device] | None = None, **axes: int) -> Mesh:
    """Arranges devices in a mesh with named axes, in the order given.

    Every axis is of type `Auto`, which the rest of jzero needs: the data axes become manual inside
    `value_and_grad` only, and any other axis is left to the partitioner.

    Args:
        devices: The devices to use; all of this run's devices if None.
        **axes: Size of each axis by name. One of them may be -1: it takes the devices that are left over.

    Returns:
        A `jax.sharding.Mesh` over all the devices.

    Raises:
        ValueError: No axis, no device, a size that is neither positive nor -1, more than one -1, or a product that is
            not the number of devices.
        TypeError: A size that is not an int.

    Example:
        >>> dict(make_mesh(replica=2, data=-1).shape)
        {'replica': 2, 'data': 4}
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("make_mesh: devices is empty, so there are 0 devices; pass some, or None for all.")
    given = ", ".join(f"{name}={size}" for name, size in axes.items())
    if not axes:
        raise ValueError("make_mesh needs at least one named axis, for example make_mesh(data=-1).")
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"make_mesh: axis {name!r} has size {size!r}; sizes are ints.")
        if size < 1 and size != -1:
            raise ValueError(f"make_mesh: axis {name!r} has size {size}; sizes are positive, or -1 for what is left.")
    free = [name for name, size in axes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"make_mesh({given}): only one axis can take the devices left over, not {free}.")
    known = math.prod(size for size in axes.values() if size != -1)
    arithmetic = " x ".join(f"{name} {size}" for name, size in axes.items() if size != -1)
    if free:
        if len(devices) % known:
            raise ValueError(
                f"make_mesh({given}): {arithmetic} = {known} does not divide {len(devices)} devices, "
                f"so nothing whole is left for {free[0]!r}."
            )
        axes = axes | {free[0]: len(devices) // known}
    elif known != len(devices):
        more = f" Use -1 for one axis, or pass devices=jax.devices()[:{known}]."
        if known > len(devices):
            simulated = devices[0].platform == "cpu"
            more = f" To simulate as many, begin with jax.config.update('jax_num_cpu_devices', {known})."
            more = more if simulated else ""
        raise ValueError(f"make_mesh({given}): {arithmetic} = {known}, but there are {len(devices)} devices.{more}")
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=(AxisType.Auto,) * len(axes))
