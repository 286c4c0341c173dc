"""Where params, gradients, optimizer state and batches live."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef, keystr

from jzero.check import check_batch, check_structure
from jzero.follow import followers
from jzero.precision import AS_IT_IS, Precision
from jzero.rounding import cast
from jzero.rules import Leaf, place, spec_of
from jzero.stage import STAGES, Placement, Stage
from jzero.stored import padded, unpadded


@dataclass(frozen=True, repr=False)
class Layout:
    """Where params, their gradients and any optimizer's state live on a mesh. Made by `zero`.

    Attributes:
        mesh: The device mesh; an `AbstractMesh` in a layout that was made to look at only.
        stage: The three placements, and when gradients are reduced.
        data_axes: Mesh axes over which leaves are cut.
        replica_axes: Mesh axes over which the cut leaves are repeated (HSDP, MiCS).
        min_shard_size: Leaves with fewer elements stay whole.
        treedef: Structure of the params.
        leaves: One `Leaf` for each of the params, in tree order.
        ahead: Whether scanned blocks are gathered one ahead and reduced one behind.
        precision: In which dtypes all is stored, used, reduced and updated.
        remade: The call of `zero` that it came from, without arrays: `remade(mesh=mesh)` makes it on another mesh.
    """

    mesh: Mesh
    stage: Stage
    data_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    min_shard_size: int
    treedef: PyTreeDef
    leaves: tuple[Leaf, ...]
    ahead: bool = False
    precision: Precision = AS_IT_IS
    remade: Callable[..., "Layout"] = field(kw_only=True, compare=False, repr=False)

    def on(self, mesh: Mesh | AbstractMesh) -> "Layout":
        """The same choices for the same params on another mesh: what `zero` returns for it.

        Leaves are cut for that mesh, and what `zero` was left to choose (`ahead=None`) is chosen for its devices.

        Args:
            mesh: A mesh that has the axes which the choices name.

        Raises:
            ValueError: As `zero`, for an axis that is missing or a rule that does not divide.

        Example:
            >>> layout = jzero.zero({"w": jnp.ones((64, 100))}, stage=3, mesh=jzero.make_mesh(data=-1))
            >>> layout.leaves[0].dim, layout.on(jzero.mesh.abstract_mesh(data=25)).leaves[0].dim
            (0, 1)
        """
        return self.remade(mesh=mesh)

    def __repr__(self) -> str:
        """In one line; `explain` says all."""
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        stage = STAGES.index(self.stage) if self.stage in STAGES else self.stage
        cut = sum(leaf.dim is not None for leaf in self.leaves)
        return f"<Layout: stage {stage} on {axes}; {len(self.leaves)} leaves, {cut} of them large enough to be cut>"

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

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The mesh's other axes, if larger than 1: rules cut leaves over them, and the partitioner the rest."""
        return tuple(axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in self.batch_axes)

    def spec(self, leaf: Leaf, placement: Placement) -> P:
        """PartitionSpec of one leaf, placed "replicated" or "sharded" over the data axes, and as its rule says."""
        axes = list(leaf.model) or [()] * len(leaf.shape)
        if placement == "sharded" and leaf.dim is not None:
            axes[leaf.dim] += self.data_axes
        return spec_of(axes)

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of every batch leaf: the first dim over the batch axes."""
        return spec_of([self.batch_axes])

    def sharding(self, spec: P) -> NamedSharding:
        """A PartitionSpec on this layout's mesh."""
        return NamedSharding(self.mesh, spec)

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(self.sharding, specs, is_leaf=lambda x: isinstance(x, P))

    @property
    def param_specs(self) -> Any:
        """PartitionSpecs of the params between steps, in the params' structure."""
        return self.treedef.unflatten([self.spec(leaf, self.stage.params) for leaf in self.leaves])

    @property
    def grad_specs(self) -> Any:
        """PartitionSpecs of the reduced gradients, in the params' structure, None where a leaf is not trained."""
        return self.treedef.unflatten(
            [self.spec(leaf, self.stage.grads) if leaf.trainable else None for leaf in self.leaves]
        )

    def opt_specs(self, tx: optax.GradientTransformation) -> Any:
        """PartitionSpecs of the optimizer state, in the structure of `tx.init(trainable params)`."""
        treedef, leaves = self.opt_leaves(tx)
        return treedef.unflatten([self.spec(leaf, self.stage.opt_state) for leaf in leaves])

    @property
    def param_shardings(self) -> Any:
        """NamedShardings of the params between steps, in the params' structure."""
        return self._shardings(self.param_specs)

    @property
    def grad_shardings(self) -> Any:
        """NamedShardings of the reduced gradients, in the params' structure, None where a leaf is not trained."""
        return self._shardings(self.grad_specs)

    def opt_shardings(self, tx: optax.GradientTransformation) -> Any:
        """NamedShardings of the optimizer state, in the structure of `tx.init(trainable params)`."""
        return self._shardings(self.opt_specs(tx))

    @property
    def trainable(self) -> tuple[Leaf, ...]:
        """The leaves that get a gradient, in tree order."""
        return tuple(leaf for leaf in self.leaves if leaf.trainable)

    @functools.cached_property
    def trainable_treedef(self) -> PyTreeDef:
        """Structure of the trainable params, and so of the gradients: that of the params, None where not trained."""
        return jax.tree.structure(self.treedef.unflatten([leaf if leaf.trainable else None for leaf in self.leaves]))

    @functools.cached_property
    def masters(self) -> tuple[PyTreeDef, tuple[Leaf, ...]]:
        """Structure and leaves of the master copies: that of the params, None where a param has no copy of its own.

        They live where the optimizer state lives. All is None where no param has one.
        """
        copies = [replace(leaf, dtype=leaf.dtypes.master) if leaf.has_master else None for leaf in self.leaves]
        if not any(copies):
            return jax.tree.structure(None), ()
        return jax.tree.structure(self.treedef.unflatten(copies)), tuple(leaf for leaf in copies if leaf is not None)

    @property
    def master_specs(self) -> Any:
        """PartitionSpecs of the master copies, in the structure of `TrainState.master`."""
        treedef, leaves = self.masters
        return treedef.unflatten([self.spec(leaf, self.stage.opt_state) for leaf in leaves])

    @property
    def master_shardings(self) -> Any:
        """NamedShardings of the master copies, in the structure of `TrainState.master`."""
        return self._shardings(self.master_specs)

    def opt_leaves(self, tx: optax.GradientTransformation) -> tuple[PyTreeDef, tuple[Leaf, ...]]:
        """Structure and leaves of the state of `tx`, from shapes alone; `jzero.follow` says how they are cut.

        A leaf's `dtype` is the one that it is stored in, and `dtypes.update` is the optimizer's own.
        """
        if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
            raise TypeError(f"tx is a {type(tx).__name__}; wanted an optax optimizer, such as optax.adamw(1e-3).")
        return self._opt_leaves(tx, str(jax.dtypes.canonicalize_dtype(float)))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a layout is small, and init, step and explain ask again
    def _opt_leaves(self, tx, default_dtype):  # float64 under x64, where a state has other dtypes
        cut = functools.partial(place, shards=self.shards, min_shard_size=self.min_shard_size, sizes=self.mesh.shape)
        return followers(tx, self.trainable_treedef, self.trainable, cut, self.precision)

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
            >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))
            >>> layout.put_batch(np.zeros((16, 3))).sharding.spec
            P('data',)
        """
        processes = jax.process_count()
        check_batch(batch, self, processes=processes, placed=False)
        sharding = self.sharding(self.batch_spec)

        def put(leaf):
            if isinstance(leaf, jax.Array) and (processes == 1 or leaf.sharding == sharding):
                return jax.device_put(leaf, sharding)
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

        return jax.tree.map(put, batch)

    def _map(self, what: str, tree: Any, tx: Any, f: Callable[[str, Any, Leaf], Any]) -> Any:
        """Maps over what `tree` should be: a state of `tx`, all params, or the trainable ones."""
        treedef, leaves = self.treedef, self.leaves
        if tx is not None:
            treedef, leaves = self.opt_leaves(tx)
        elif jax.tree.structure(tree) == self.trainable_treedef:
            treedef, leaves = self.trainable_treedef, self.trainable
        named = check_structure(what, tree, treedef)
        return treedef.unflatten([f(keystr(path), x, leaf) for (path, x), leaf in zip(named, leaves, strict=True)])

    def logical(self, tree: Any, *, tx: optax.GradientTransformation | None = None, replicate: bool = False) -> Any:
        """The tree with logical shapes: what the loss and the optimizer see.

        Inside of `jax.jit` the padding is sliced off, which costs neither a collective nor memory. Outside, JAX has no
        arrays with uneven shards, so a padded leaf cannot keep its placement.

        Args:
            tree: Params, trainable params, gradients, or, with `tx`, an optimizer state.
            tx: The optimizer whose state `tree` is.
            replicate: Outside of jit, make padded leaves whole on every device; each costs an all-gather.

        Returns:
            The same tree; leaves that are not padded come back as they are.

        Raises:
            ValueError: A padded leaf outside of jit without `replicate=True`; another structure or shape.

        Example:
            >>> layout = jzero.zero({"w": jnp.ones(9)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
            >>> stored = layout.stored({"w": jnp.ones(9)})
            >>> stored["w"].shape, layout.logical(stored, replicate=True)["w"].shape
            ((16,), (9,))
        """
        whole = self.sharding(P()) if replicate else None
        return self._map("tree", tree, tx, lambda path, x, leaf: unpadded(path, x, leaf, self.shards, whole))

    def computed(self, params: Any, *, replicate: bool = False) -> Any:
        """The params as the loss gets them: logical shapes, and the dtype that the precision computes in.

        For evaluation and inference, from params that are stored in another dtype or padded. Otherwise as `logical`.

        Args:
            params: `state.params`.
            replicate: As for `logical`.

        Example:
            >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1), precision="bf16")
            >>> layout.computed({"w": jnp.ones(8)})["w"].dtype
            dtype(bfloat16)
        """
        logical = self.logical(params, replicate=replicate)
        return self._map("params", logical, None, lambda path, x, leaf: cast(x, leaf.dtypes.compute))

    def stored(self, tree: Any, *, tx: optax.GradientTransformation | None = None) -> Any:
        """The tree with the shapes that a `TrainState` of this layout holds, the inverse of `logical`.

        Args:
            tree: Params or trainable params, or, with `tx`, an optimizer state; logical shapes.
            tx: The optimizer whose state `tree` is.

        Returns:
            The same tree, leaves padded with zeros where the layout stores them padded. Outside of jit these
            are also placed as the layout places them.

        Raises:
            ValueError: Another structure or shape.
        """
        placement = self.stage.params if tx is None else self.stage.opt_state

        def one(path, x, leaf):
            return padded(path, x, leaf, placement, self.sharding(self.spec(leaf, placement)))

        return self._map("tree", tree, tx, one)
