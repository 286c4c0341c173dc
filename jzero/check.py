"""What came, against what a layout wants: every message about trees, shapes, placements and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path

if TYPE_CHECKING:
    from jzero.layout import Layout
    from jzero.rules import Leaf
    from jzero.stage import Placement


def check_tree(
    what: str, tree: Any, layout: Layout, treedef: PyTreeDef, leaves: Sequence[Leaf], placement: Placement
) -> None:
    """Raises unless `tree` has the structure, shapes and dtypes of `leaves`, and lives where `placement` says.

    Tracers and ShapeDtypeStructs have no placement yet, and arrays that JAX is free to move (not committed) may be
    anywhere; both pass on shape and dtype alone.

    Args:
        what: Name of the tree in messages, such as "state.params".
        tree: What came.
        layout: The layout that it should fit.
        treedef: The structure wanted.
        leaves: The leaves wanted, in tree order.
        placement: "replicated" or "sharded".
    """
    named, came = tree_flatten_with_path(tree)
    if came != treedef:
        _differ(what, named, came, treedef, leaves)
    for (path, x), leaf in zip(named, leaves, strict=True):
        if tuple(np.shape(x)) != leaf.shape or getattr(x, "dtype", None) != leaf.dtype:
            raise ValueError(
                f"{what}{keystr(path)} is {getattr(x, 'dtype', type(x).__name__)}{tuple(np.shape(x))}, but the layout "
                f"was made for {leaf.dtype}{leaf.shape}. Make the layout from these params, or init a fresh state."
            )
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            continue
        if x.is_deleted():
            raise ValueError(
                f"{what}{keystr(path)} was deleted: this state was given to a step before, and the step donated its "
                f"memory. Go on with the state that the step returned (state, metrics = step(state, batch))."
            )
        wanted = layout.sharding(layout.spec(leaf, placement))
        if x.committed and not x.sharding.is_equivalent_to(wanted, x.ndim):
            foreign = x.sharding.device_set != wanted.device_set
            raise ValueError(
                f"{what}{keystr(path)} lives on "
                f"{'other devices than the mesh of the layout' if foreign else 'the mesh'} with {x.sharding}; "
                f"wanted {wanted.spec} on {dict(layout.mesh.shape)}. Move it with jax.device_put(tree, shardings), "
                f"with the shardings that the layout gives (param_shardings, grad_shardings, opt_shardings(tx))."
            )


def _differ(what, named, came, treedef, leaves):
    """Names the first leaves that only one side has; the containers themselves where the leaves agree."""
    has, wants = [keystr(path) for path, _ in named], [leaf.path for leaf in leaves]
    extra, missing = [p for p in has if p not in wants], [p for p in wants if p not in has]
    parts = [
        f"{title} {', '.join(paths[:3])}{' and more' if len(paths) > 3 else ''}"
        for title, paths in (("missing", missing), ("not expected", extra))
        if paths
    ]
    detail = "; ".join(parts) or f"same leaves in other containers: got {came}, wanted {treedef}"
    raise ValueError(
        f"{what} has another structure than the layout ({len(has)} leaves, wanted {len(wants)}): {detail}. "
        f"Use the params and the tx that this layout and this state were made with."
    )


def check_batch(batch: Any, layout: Layout, *, microbatches: int = 1, processes: int = 1) -> None:
    """Raises unless every leaf of `batch` can be cut along its first dim into batch shards and microbatches.

    Args:
        batch: A tree of arrays; each process's own part if `processes` is more than 1.
        layout: Gives the batch axes.
        microbatches: Number of microbatches.
        processes: How many equal parts of the global batch there are.
    """
    named, _ = tree_flatten_with_path(batch)
    if not named:
        raise ValueError("batch has no array leaf, so there is nothing to split over the mesh.")
    parts = layout.batch_shards * microbatches
    for path, leaf in named:
        shape = np.shape(leaf)
        if not shape:
            raise ValueError(
                f"batch{keystr(path)} is a scalar; every batch leaf needs a first dim that counts examples. "
                f"Close over constants in loss_fn, or repeat the value for each example."
            )
        if (shape[0] * processes) % parts or not shape[0]:
            axes = " x ".join(f"{axis} {layout.mesh.shape[axis]}" for axis in layout.batch_axes)
            times = f" x {microbatches} microbatches" if microbatches > 1 else ""
            total = f"{shape[0]} x {processes} processes = " if processes > 1 else ""
            raise ValueError(
                f"batch{keystr(path)} {tuple(shape)}: {total}{shape[0] * processes} examples do not divide into "
                f"{parts} equal parts = {layout.batch_shards} batch shards (mesh axes {axes}){times}. "
                f"Use a batch of {max(1, round(shape[0] * processes / parts)) * parts} examples, "
                f"or other microbatches or mesh axes."
            )
