"""The devices that a collective runs over, and the mesh axes that these are."""

import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

Groups = Sequence[Sequence[int]]  # devices that talk to one another, as positions in the program's device order
AxesByGroups = dict[frozenset[frozenset[int]], tuple[str, ...]]


def mesh_groups(ids: np.ndarray, sizes: dict[str, int], axes: Iterable[tuple[str, int, int]]) -> Groups:
    """Groups of a collective over mesh axes, each given as (name, pre, size).

    A whole axis is (name, 1, its size). XLA also splits an axis, into `pre` times `size` times what is left, and names
    the middle part.
    """
    coords = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, pre, size in axes:
        stride = sizes[name] // (pre * size)
        coords[name] = coords[name] - coords[name] // stride % size * stride
    first = np.ravel_multi_index(tuple(coords.values()), tuple(sizes.values())).ravel()
    return [ids.ravel()[first == n].tolist() for n in np.unique(first)]


def axes_by_groups(mesh: jax.sharding.Mesh, n_devices: int) -> AxesByGroups:
    """Every set of axes of a mesh, fewest first, by the groups that a collective over them has.

    Raises:
        ValueError: The program runs on another number of devices than the mesh.
    """
    if n_devices != mesh.size:
        raise ValueError(
            f"The program runs on {n_devices} devices, but the mesh {dict(mesh.shape)} has {mesh.size}: pass the mesh "
            "that the program runs on."
        )
    names = [name for name, size in mesh.shape.items() if size > 1]
    subsets = [axes for n in range(len(names) + 1) for axes in itertools.combinations(names, n)]
    return {frozenset(map(frozenset, groups_over(mesh, axes))): axes for axes in subsets}


def groups_over(mesh: jax.sharding.Mesh, axes: Iterable[str]) -> Groups:
    """Groups of a collective over whole axes of a mesh."""
    return mesh_groups(np.arange(mesh.size), dict(mesh.shape), [(axis, 1, mesh.shape[axis]) for axis in axes])


def participants(kind: str, groups: Groups, by_groups: AxesByGroups | None) -> tuple[tuple[str, ...], int]:
    """Mesh axes and group size. Linked pairs of a permute are one group; its axes, the fewest that hold all."""
    linked: list[frozenset[int]] = []
    for group in map(frozenset, groups):
        apart = [other for other in linked if not other & group]
        linked = [*apart, group.union(*(other for other in linked if other & group))]
    size = max(map(len, linked))
    if by_groups is None:
        return (), size
    if kind != "collective-permute":
        return by_groups.get(frozenset(linked), ()), size
    return next(axes for known, axes in by_groups.items() if all(any(s <= k for k in known) for s in linked)), size
