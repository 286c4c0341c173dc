"""A state from a checkpoint, in whatever layout is wanted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import optax

from jzero.checkpoint import parts, read
from jzero.checkpoint.errors import CheckpointMismatch
from jzero.checkpoint.fit import fit
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.names import shown
from jzero.checkpoint.parts import PARTS
from jzero.checkpoint.processes import Processes
from jzero.layout import Layout
from jzero.loss_scale import DynamicLossScale, as_loss_scale
from jzero.state import TrainState


def restored(
    folder: Path,
    manifest: Manifest,
    tx: optax.GradientTransformation,
    layout: Layout,
    processes: Processes,
    *,
    key: Any,
    model_state: Any,
    loss_scale: float | DynamicLossScale | None,
    only: Sequence[str],
    init: Callable[[], TrainState] | None,
    on_missing: Literal["error", "init"],
    on_extra: Literal["error", "ignore"],
    cast: bool,
) -> TrainState:
    """Reads a state; see `Checkpointer.restore`. Everything is checked before any array is read."""
    with processes.together(f"{folder}/fit"):
        wanted = parts.wants(tx, layout, only, key=key, model_state=model_state, loss_scale=loss_scale)
        entries = [entry for entry in manifest.leaves if entry.path[0] in only]
        options = {"on_missing": on_missing, "on_extra": on_extra, "cast": cast}
        pairs, missing = fit(str(folder), entries, list(parts.each(wanted)), **options)
        manifest.check_small(folder)
    found: dict[tuple[str, ...], jax.Array] = {}
    fields: dict[str, Any] = {}
    if init is not None and (missing or len(only) < len(PARTS)):
        # Before anything is read, and what is not needed of it goes at once: both are never there together.
        fresh = init()
        if not isinstance(fresh, TrainState):
            raise TypeError(f"restore: init() returns a {type(fresh).__name__}; wanted what jzero.init returns.")
        found, fields = _fresh(fresh, tx, layout, only, missing)
    with processes.together(f"{folder}/read"):
        for (_, want), array in zip(pairs, read.arrays(folder, manifest, pairs), strict=True):
            found[want.path] = array
    for part, (treedef, wants) in wanted.items():
        leaves = [found[want.path] for want in wants]
        if part == "params":
            fields["params"], fields["master"] = parts.params_of(leaves, layout)
        else:
            fields[part] = treedef.unflatten(leaves)
    state = TrainState(**fields)
    _check_scale(folder, state, loss_scale)
    return state


def restored_params(folder: Path, manifest: Manifest, layout: Layout, processes: Processes, *, cast: bool) -> Any:
    """Reads the params alone; see `Checkpointer.restore_params`."""
    with processes.together(f"{folder}/read"):
        wants = list(parts.each(parts.wants(None, layout, ("params",))))
        entries = [entry for entry in manifest.leaves if entry.path[0] == "params"]
        pairs, _ = fit(str(folder), entries, wants, cast=cast)
        manifest.check_small(folder)
        arrays = list(read.arrays(folder, manifest, pairs))
    return parts.params_of(arrays, layout)[0]


def _fresh(state, tx, layout, only, missing) -> tuple[dict[Any, jax.Array], dict[str, Any]]:
    """Of a fresh state the leaves that are missing, by path, and the parts that are not read."""
    fields = {part: getattr(state, part) for part in PARTS if part not in only}
    if "params" not in only:
        fields["master"] = state.master
    leaves = {item.path: item.array for item in parts.items(state, tx, layout, only)}
    absent = [want for want in missing if want.path not in leaves]
    if absent:
        raise CheckpointMismatch(
            "init()",
            [
                f"{shown(want.path)}: neither the checkpoint has it nor the state that init() makes. Make both "
                f"with the same key=, model_state= and loss_scale=."
                for want in absent
            ],
        )
    return {want.path: leaves[want.path] for want in missing}, fields


def _check_scale(folder, state, loss_scale) -> None:
    """Raises if the loss scale that was read is not one of the kind that was asked for."""
    if loss_scale is not None and not as_loss_scale(loss_scale).fits(state.loss_scale):
        raise CheckpointMismatch(
            str(folder),
            [
                f"loss_scale: the checkpoint stands at {float(state.loss_scale.scale):g}, saved by another loss scale "
                f"than {loss_scale}. Pass that one, or leave it out of only= to start with this one."
            ],
        )
