"""Which link a collective goes over, and how fast that is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh

from jzero.devices import Device
from jzero.groups import groups_over


@dataclass(frozen=True)
class Link:
    """What a collective over some mesh axes goes over.

    Attributes:
        name: "within hosts" or "between hosts".
        bandwidth: Bytes per second that each device can send over it, in one collective over these axes.
        stated: Whether that was stated for an axis, and is not the device's own.
    """

    name: str
    bandwidth: float
    stated: bool = False


def link_of(mesh: Mesh, axes: tuple[str, ...], device: Device, hosts: int, stated: Mapping[str, float]) -> Link:
    """The link of a collective over some axes of a mesh; all axes if none is named.

    Within a host it is that of the device. A group that spans hosts with k devices on each sends over the networks of
    all k at once, in k rings, so that each device moves up to k times the bytes of its network, but no more than its
    own link carries.

    Args:
        mesh: The mesh, whose devices come host by host.
        axes: The axes.
        device: Gives the speeds.
        hosts: How many hosts there are.
        stated: Speeds of axes that are known better, in bytes per second; the slowest of a collective's axes counts.

    Raises:
        ValueError: A group spans hosts, and nothing says how fast these are connected.

    Example:
        >>> from jzero.devices import DEVICES
        >>> mesh = jzero.make_mesh(replica=2, data=4)
        >>> link_of(mesh, ("replica",), DEVICES["h200"], 2, {})
        Link(name='between hosts', bandwidth=50000000000, stated=False)
        >>> link_of(mesh, ("data",), DEVICES["h200"], 2, {})
        Link(name='within hosts', bandwidth=450000000000, stated=False)
        >>> link_of(mesh, ("replica", "data"), DEVICES["h200"], 2, {}).bandwidth
        200000000000
    """
    axes = axes or mesh.axis_names
    per_host = mesh.size // hosts
    group = groups_over(mesh, axes)[0]
    sharing = max(sum(other // per_host == one // per_host for other in group) for one in group)
    spans = len({one // per_host for one in group}) > 1
    name = "between hosts" if spans else "within hosts"
    known = [stated[axis] for axis in axes if axis in stated]
    if known:
        return Link(name, min(known), stated=True)
    if not spans:
        return Link(name, device.link)
    if not device.network:
        raise ValueError(
            f"The axes {', '.join(axes)} span hosts, and it is not known how fast {device.name}s of different hosts "
            f"are connected. State it: links={{{axes[0]!r}: bytes per second}}, or --link {axes[0]}=50GB/s."
        )
    return Link(name, min(device.network * sharing, device.link if sharing > 1 else math.inf))
