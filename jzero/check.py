"""What came, against what a layout wants: every message about trees, shapes, placements and batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path

from jzero.padding import is_concrete
from jzero.wording import few

if TYPE_CHECKING:
    from jzero.layout import Layout
    from jzero.rules import Leaf
    from jzero.stage import Placement


def path_name(path: Any) -> str:
    """A path as patterns match it, such as "blocks/0/kernel"."""
    return keystr(path, simple=True, separator="/")


def check_structure(what: str, tree: Any, treedef: PyTreeDef, way_out: str = "") -> list[tuple[Any, Any]]:
    """Returns the paths and leaves of `tree`; raises unless its structure is `treedef`, naming what differs."""
    named, came = tree_flatten_with_path(tree)
    if came == treedef:
        return named
    has = [keystr(path) for path, _ in named]
    wants = [keystr(path) for path, _ in tree_flatten_with_path(treedef.unflatten(range(treedef.num_leaves)))[0]]
    sides = (("missing", sorted(set(wants) - set(has))), ("not expected", sorted(set(has) - set(wants))))
    parts = [f"{side} {few(paths)}" for side, paths in sides if paths]
    detail = "; ".join(parts) or f"the same leaves in other containers: got {came}, wanted {treedef}"
    raise ValueError(
        f"{what} has another structure than wanted ({len(has)} leaves, wanted {len(wants)}): {detail}. "
        + (way_out or "Use the params and the tx that this layout and this state were made with.")
    )


def check_tree(
    what: str,
    tree: Any,
    layout: Layout,
    treedef: PyTreeDef,
    leaves: Sequence[Leaf],
    placement: Placement,
    *,
    logical: bool = False,
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
        logical: Whether a padded leaf may come in its logical shape as well, then with any placement on the mesh.
    """
    for (path, x), leaf in zip(check_structure(what, tree, treedef), leaves, strict=True):
        wanted = leaf.placed(placement)
        shape = tuple(np.shape(x))
        unpadded = logical and shape == leaf.shape != wanted.shape
        if (shape != wanted.shape and not unpadded) or getattr(x, "dtype", None) != leaf.dtype:
            padded = f" (padded from {leaf.shape})" if wanted.shape != leaf.shape else ""
            raise ValueError(
                f"{what}{keystr(path)} is {getattr(x, 'dtype', type(x).__name__)}{shape}, but the layout "
                f"was made for {leaf.dtype}{wanted.shape}{padded}. Make the layout from these params, or init a fresh "
                f"state."
            )
        if not is_concrete(x):
            continue
        if x.is_deleted():
            raise ValueError(
                f"{what}{keystr(path)} was deleted: this state was given to a step before, and the step donated its "
                f"memory. Go on with the state that the step returned (state, metrics = step(state, batch))."
            )
        sharding = layout.sharding(layout.spec(leaf, placement))
        foreign = x.sharding.device_set != sharding.device_set
        if x.committed and (foreign if unpadded else not x.sharding.is_equivalent_to(sharding, x.ndim)):
            raise ValueError(
                f"{what}{keystr(path)} {_elsewhere(x, layout)}; wanted {sharding.spec} on {dict(layout.mesh.shape)}. "
                f"Move it with jax.device_put(tree, shardings), with the shardings that the layout gives "
                f"(param_shardings, grad_shardings, opt_shardings(tx))."
            )


def _elsewhere(x: jax.Array, layout: Layout) -> str:
    """How an array lives that does not live where the layout wants it."""
    if x.sharding.device_set != set(layout.mesh.devices.flat):
        return f"lives on other devices than the mesh of the layout, with {x.sharding}"
    order = x.sharding.mesh.devices if isinstance(x.sharding, NamedSharding) else None
    if order is not None and list(order.flat) != list(layout.mesh.devices.flat):
        return f"lives on the devices of the mesh of the layout in another order, with {x.sharding}"
    return f"lives on the mesh of the layout with {x.sharding}"


def warn_shared(what: str, tree: Any) -> None:
    """Warns where one array stands at several paths: jzero, like JAX, takes it for as many params."""
    first: dict[int, str] = {}
    for path, x in tree_flatten_with_path(tree)[0]:
        other = first.setdefault(id(x), keystr(path))
        if other != keystr(path) and isinstance(x, jax.Array | np.ndarray):
            warnings.warn(
                f"{what}{keystr(path)} is the same array as {what}{other}: they are trained as two params and will "
                f"drift apart. To tie them, keep one leaf and use it twice in the loss.",
                stacklevel=3,
            )
            return


def check_batch(batch: Any, layout: Layout, *, microbatches: int = 1, processes: int = 1, placed: bool = True) -> None:
    """Raises unless the leaves of `batch` have one first dim, which can be cut into batch shards and microbatches.

    Args:
        batch: A tree of arrays; each process's own part if `processes` is more than 1.
        layout: Gives the batch axes.
        microbatches: Number of microbatches.
        processes: How many equal parts of the global batch there are.
        placed: Whether arrays that are committed to devices must be placed as `layout.put_batch` places them.
    """
    named, _ = tree_flatten_with_path(batch)
    if not named:
        raise ValueError("batch has no array leaf, so there is nothing to split over the mesh.")
    by_length: dict[int, list[str]] = {}
    for path, leaf in named:
        if not np.shape(leaf):
            raise ValueError(
                f"batch{keystr(path)} is a scalar; every batch leaf needs a first dim that counts examples. "
                f"Close over constants in loss_fn, or repeat the value for each example."
            )
        by_length.setdefault(np.shape(leaf)[0], []).append(f"batch{keystr(path)}")
    if len(by_length) > 1:
        said = [f"{n} in {few(names)}" for n, names in by_length.items()]
        raise ValueError(
            f"batch has leaves with different numbers of examples, which the first dim counts: {'; '.join(said)}. Give "
            f"each as many, and close over what does not belong to single examples in loss_fn."
        )
    parts = layout.batch_shards * microbatches
    for path, leaf in named:
        shape = np.shape(leaf)
        if (shape[0] * processes) % parts or not shape[0]:
            axes = " x ".join(f"{axis} {layout.mesh.shape[axis]}" for axis in layout.batch_axes)
            times = f" x {microbatches} microbatches" if microbatches > 1 else ""
            more = "" if placed else f", and with microbatches a multiple of {parts} times as many"
            total = f"{shape[0]} x {processes} processes = " if processes > 1 else ""
            raise ValueError(
                f"batch{keystr(path)} {tuple(shape)}: {total}{shape[0] * processes} examples do not divide into "
                f"{parts} equal parts = {layout.batch_shards} batch shards (mesh axes {axes}){times}. "
                f"Use a batch of {max(1, round(shape[0] * processes / parts)) * parts} examples{more}, "
                f"or other {'' if not placed else 'microbatches or '}mesh axes."
            )
        wanted = layout.sharding(layout.batch_spec)
        if placed and is_concrete(leaf) and leaf.committed and not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
            raise ValueError(
                f"batch{keystr(path)} {_elsewhere(leaf, layout)}; wanted {wanted.spec} on {dict(layout.mesh.shape)}. "
                f"Pass the batch through layout.put_batch."
            )
