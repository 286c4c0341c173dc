"""What a checkpoint holds, against what was asked for: every leaf that does not fit, at once."""

from collections.abc import Iterable, Sequence
from typing import Literal

from jzero.checkpoint.encoding import is_float
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CheckpointMismatch
from jzero.checkpoint.names import Path, shown
from jzero.checkpoint.parts import Want

NEEDED = {
    "key": "Pass key=, any random key, if the state is to have one",
    "model_state": "Pass model_state=, a tree of its shapes",
    "loss_scale": "Pass the loss_scale= of the training step",
}
"""What makes `restore` ask for a part that it does not ask for by itself."""

OTHER = "Make the layout from params of the same tree; restore(only=['params'], init=...) can read others."
"""The way out where there is no choice."""


def fit(
    what: str,
    entries: Sequence[Entry],
    wants: Iterable[Want],
    *,
    on_missing: Literal["error", "init"] | None = None,
    on_extra: Literal["error", "ignore"] | None = None,
    cast: bool,
) -> tuple[list[tuple[Entry, Want]], list[Want]]:
    """Finds for each leaf that is wanted the one to read.

    Args:
        what: The checkpoint, for messages.
        entries: The leaves that it has, of the parts that were asked for.
        wants: The leaves that were asked for.
        on_missing: Whether a leaf that it does not have is an error, or made afresh; None: there is no choice.
        on_extra: Whether a leaf that was not asked for is an error; None: there is no choice.
        cast: Whether floats may become other floats.

    Returns:
        Pairs of what is read and what it becomes; and what has to be made afresh.

    Raises:
        CheckpointMismatch: Leaves that do not fit, all of them.
    """
    for option, value, choices in (
        ("on_missing", on_missing, ("error", "init")),
        ("on_extra", on_extra, ("error", "ignore")),
    ):
        if value not in (None, *choices):
            raise ValueError(f"{option}={value!r}; wanted {choices[0]!r} or {choices[1]!r}.")
    have: dict[Path, Entry] = {entry.path: entry for entry in entries}
    pairs, missing, problems = [], [], []
    for want in wants:
        entry = have.pop(want.path, None)
        if entry is None:
            missing.append(want)
        elif problem := _problem(entry, want, cast):
            problems.append(problem)
        else:
            pairs.append((entry, want))
    if on_missing != "init":
        way_out = "To make it afresh, pass on_missing='init' and init=." if on_missing else OTHER
        problems += [
            f"{shown(want.path)}: the checkpoint has none; asked for {_described(want.dtype, want.shape)}. {way_out}"
            for want in missing
        ]
    if on_extra != "ignore":
        problems += [
            f"{entry.name}: the checkpoint has {_described(entry.dtype, entry.shape)}, which was not asked for. "
            f"{_left(entry.path[0]) if on_extra else OTHER}"
            for entry in have.values()
        ]
    if problems:
        raise CheckpointMismatch(what, problems, _way_out(entries, missing, have) if on_missing else "")
    return pairs, missing


def _way_out(entries: Sequence[Entry], missing: Sequence[Want], extra: Iterable[Path]) -> str:
    """What to do about all of it, where the params are there and the rest is another one."""
    parts = {*(want.path[0] for want in missing), *(path[0] for path in extra)}
    if "params" in parts:
        return ""
    afresh = "restore(..., only=['params'], init=lambda: jzero.init(...))"
    if missing and all(entry.path[0] == "params" for entry in entries):
        return f"It holds params alone. {afresh} starts from them, with all else afresh."
    if "opt_state" in parts:
        return (
            f"It was saved with another optimizer: pass the tx that it was saved with. To start this one afresh from "
            f"the params: {afresh}."
        )
    return ""


def _left(part: str) -> str:
    return (f"{NEEDED[part]}; to leave it, " if part in NEEDED else "To leave it, ") + "pass on_extra='ignore'."


def _problem(entry: Entry, want: Want, cast: bool) -> str:
    has, asked = _described(entry.dtype, entry.shape), _described(want.dtype, want.shape)
    if entry.shape != want.shape:
        return (
            f"{entry.name}: the checkpoint has {has}, asked for {asked}. Make the layout from params of the shapes "
            f"that were saved."
        )
    if entry.dtype == want.dtype:
        return ""
    if not (is_float(entry.dtype) and is_float(want.dtype)):
        return f"{entry.name}: the checkpoint has {has}, asked for {asked}, and only floats are cast to floats."
    if cast:
        return ""
    return (
        f"{entry.name}: the checkpoint has {has}, asked for {asked}. Pass cast=True to cast it, or use the precision "
        f"that it was saved with."
    )


def _described(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{shape}"
