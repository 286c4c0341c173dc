"""From a stage to placements: where params, gradients, optimizer state and batches live."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path

from jzero.check import check_batch
from jzero.rules import MIN_SHARD_SIZE, Leaf, place
from jzero.stage import Placement, Stage, as_stage


@dataclass(frozen=True)
class Layout:
    """Where params, their gradients and any optimizer's state live on a mesh. Made by `zero`.

    Attributes:
        mesh: The device mesh.
        stage: The three placements, and when gradients are reduced.
        data_axes: Mesh axes over which leaves are cut.
        replica_axes: Mesh axes over which the cut leaves are repeated (HSDP, MiCS).
        min_shard_size: Leaves with fewer elements stay whole.
        treedef: Structure of the params.
        leaves: One `Leaf` for each of the params, in tree order.
    """

    mesh: Mesh
    stage: Stage
    data_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    min_shard_size: int
    treedef: PyTreeDef
    leaves: tuple[Leaf, ...]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch: the replica axes, then the data axes."""
        return self.replica_axes + self.data_axes

    def size(self, axes: Sequence[str]) -> int:
        """Number of devices along `axes` together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def shards(self) -> int:
        """Number of parts that a sharded leaf is cut into."""
        return self.size(self.data_axes)

    @property
    def batch_shards(self) -> int:
        """Number of parts that a batch is cut into."""
        return self.size(self.batch_axes)

    def spec(self, leaf: Leaf, placement: Placement) -> P:
        """PartitionSpec of one leaf, placed "replicated" or "sharded"."""
        if placement == "replicated" or leaf.dim is None:
            return P()
        return P(*[None] * leaf.dim, _entry(self.data_axes))

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of every batch leaf: the first dim over the batch axes."""
        return P(_entry(self.batch_axes))

    def sharding(self, spec: P) -> NamedSharding:
        """A PartitionSpec on this layout's mesh."""
        return NamedSharding(self.mesh, spec)

    def _specs(self, placement: Placement) -> Any:
        return self.treedef.unflatten([self.spec(leaf, placement) for leaf in self.leaves])

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(self.sharding, specs, is_leaf=lambda x: isinstance(x, P))

    @property
    def param_specs(self) -> Any:
        """PartitionSpecs of the params between steps, in the params' structure."""
        return self._specs(self.stage.params)

    @property
    def grad_specs(self) -> Any:
        """PartitionSpecs of the reduced gradients, in the params' structure."""
        return self._specs(self.stage.grads)

    def opt_specs(self, tx: optax.GradientTransformation) -> Any:
        """PartitionSpecs of the optimizer state, in the structure of `tx.init(params)`."""
        treedef, leaves = self.opt_leaves(tx)
        return treedef.unflatten([self.spec(leaf, self.stage.opt_state) for leaf in leaves])

    @property
    def param_shardings(self) -> Any:
        """NamedShardings of the params between steps, in the params' structure."""
        return self._shardings(self.param_specs)

    @property
    def grad_shardings(self) -> Any:
        """NamedShardings of the reduced gradients, in the params' structure."""
        return self._shardings(self.grad_specs)

    def opt_shardings(self, tx: optax.GradientTransformation) -> Any:
        """NamedShardings of the optimizer state, in the structure of `tx.init(params)`."""
        return self._shardings(self.opt_specs(tx))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a layout is small, and init, step and explain ask again
    def opt_leaves(self, tx: optax.GradientTransformation) -> tuple[PyTreeDef, tuple[Leaf, ...]]:
        """Structure and leaves of the state of `tx`, by shapes alone.

        A state leaf whose path ends in a param's path, with that param's shape, is cut as the param is. Others (the row
        and column means of Adafactor, say) follow the same size rule on their own shape. Placement never changes
        what is computed, since the optimizer runs in the global view. Paths are used rather than
        `optax.tree_map_params`, which needs every `tx.init` to run on placeholders that are no arrays.
        """
        named, treedef = tree_flatten_with_path(jax.eval_shape(tx.init, self.abstract_params))
        params = {leaf.path: leaf for leaf in self.leaves}

        def find(path, abstract):
            for start in range(len(path) + 1):
                param = params.get(keystr(path[start:]))
                if param is not None and param.shape == abstract.shape:
                    return Leaf(keystr(path), param.shape, jnp.dtype(abstract.dtype), param.dim, param.reason)
            return place(keystr(path), abstract, self.shards, self.min_shard_size)

        return treedef, tuple(find(path, abstract) for path, abstract in named)

    @property
    def abstract_params(self) -> Any:
        """The params' logical shapes and dtypes, in their structure."""
        return self.treedef.unflatten([leaf.abstract for leaf in self.leaves])

    def put_batch(self, batch: Any) -> Any:
        """Places a batch on the mesh, each leaf cut along its first dim over `batch_axes`.

        In a run of several processes each passes its own part, and the result is the global batch
        (`jax.make_array_from_process_local_data`). No collective runs.

        Args:
            batch: A tree of arrays whose first dim counts examples.

        Returns:
            The same tree of global `jax.Array`s.

        Raises:
            ValueError: A leaf is a scalar, or its first dim does not divide.

        Example:
            >>> layout = zero({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, stage=3, mesh=jax.make_mesh(
            ...     (8,), ("data",), axis_types=(AxisType.Auto,)))
            >>> layout.put_batch(np.zeros((16, 3))).sharding.spec
            P('data',)
        """
        processes = jax.process_count()
        check_batch(batch, self, processes=processes)
        sharding = self.sharding(self.batch_spec)

        def put(leaf):
            if isinstance(leaf, jax.Array) and (processes == 1 or leaf.sharding == sharding):
                return jax.device_put(leaf, sharding)
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

        return jax.tree.map(put, batch)

    def logical(self, tree: Any) -> Any:
        """The tree with logical shapes: what the loss and the optimizer see. The identity: nothing is padded yet."""
        return tree

    def stored(self, tree: Any) -> Any:
        """The tree with stored shapes, the inverse of `logical`. The identity: nothing is padded yet."""
        return tree


def zero(
    params: Any,
    *,
    stage: int | Stage,
    mesh: Mesh,
    data_axes: Sequence[str] = ("data",),
    replica_axes: Sequence[str] = (),
    min_shard_size: int = MIN_SHARD_SIZE,
) -> Layout:
    """Decides where params, gradients and optimizer state live, at a ZeRO stage on a mesh.

    A leaf is cut along its largest dim that divides by the number of shards, along the first only where no other
    does. Leaves that are small or that do not divide stay whole on every device; `explain` says which and why.
    Nothing is computed or moved.

    Args:
        params: A tree of floating arrays or `jax.ShapeDtypeStruct`s (as from `jax.eval_shape`).
        stage: 0, 1, 2, 3 or a `Stage` of your own.
        mesh: A mesh whose axes are of type `Auto`, as `make_mesh` makes it.
        data_axes: Axes over which leaves are cut.
        replica_axes: Axes over which the cut leaves are repeated: hybrid sharding (HSDP; MiCS, arXiv:2205.00119).
        min_shard_size: Leaves with fewer elements than this stay whole.

    Returns:
        The `Layout`.

    Raises:
        ValueError: An unknown stage; an axis that the mesh lacks or that is named twice; a mesh axis that is not
            `Auto`; a negative `min_shard_size`; no array leaf.
        TypeError: A leaf that is no array, or whose dtype cannot be trained.

    Example:
        >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        >>> layout = zero({"w": jax.ShapeDtypeStruct((512, 64), "float32")}, stage=3, mesh=mesh)
        >>> layout.param_specs
        {'w': P(None, 'data')}
    """
    stage = as_stage(stage)
    data_axes = _axes("data_axes", data_axes, mesh)
    replica_axes = _axes("replica_axes", replica_axes, mesh)
    if not data_axes:
        raise ValueError("zero: data_axes is empty; name at least one mesh axis to cut the params over.")
    if both := set(data_axes) & set(replica_axes):
        raise ValueError(f"zero: mesh axis {sorted(both)} is named in data_axes and in replica_axes; choose one.")
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            raise ValueError(
                f"zero: mesh axis {name!r} has type {kind}; jzero needs Auto. Make the mesh with jzero.make_mesh, or "
                f"pass axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)} to jax.make_mesh."
            )
    if min_shard_size < 0:
        raise ValueError(f"zero: min_shard_size={min_shard_size}; it counts elements, so 0 or more.")
    named, treedef = tree_flatten_with_path(params)
    if not named:
        raise ValueError(f"zero: params has no array leaf (got {type(params).__name__}: {treedef}).")
    for path, leaf in named:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"zero: params{keystr(path)} is a {type(leaf).__name__}, not an array. Pass arrays or "
                f"ShapeDtypeStructs; register your own containers with jax.tree_util.register_dataclass."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"zero: params{keystr(path)} has dtype {leaf.dtype}; only floating leaves can be trained. "
                f"Keep it out of params: close over it in loss_fn, or pass it with the batch."
            )
    shards = math.prod(mesh.shape[axis] for axis in data_axes)
    leaves = tuple(place(keystr(path), leaf, shards, min_shard_size) for path, leaf in named)
    return Layout(mesh, stage, data_axes, replica_axes, min_shard_size, treedef, leaves)


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def _axes(option: str, axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(f"zero: {option} names {axis!r}, but the mesh has axes {mesh.axis_names}.")
        if axes.count(axis) > 1:
            raise ValueError(f"zero: {option}={axes} names {axis!r} twice.")
    return axes
