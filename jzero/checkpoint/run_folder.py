"""The checkpoints in the folder of a run: one for each step that was saved, under its number."""

import math
import re
import warnings
from pathlib import Path
from typing import Literal

from jzero.checkpoint import place
from jzero.checkpoint.errors import CorruptCheckpoint
from jzero.checkpoint.manifest import FILE, Manifest

_STEP = re.compile("0|[1-9][0-9]*")


def path(directory: Path, step: int) -> Path:
    """The folder of one checkpoint; where its replacement was stopped, that of the one before."""
    return place.standing(directory / str(step))


def is_step(name: str) -> bool:
    """Whether a checkpoint can have this name in the folder of a run."""
    return _STEP.fullmatch(name) is not None


def steps(directory: Path) -> list[int]:
    """The steps of which there is a whole checkpoint, in order.

    Warns:
        UserWarning: A folder has the name of a step, and is none: it was made by something else, or damaged.
    """
    if not directory.is_dir():
        return []
    names = {entry.name.removesuffix(place.OLD) for entry in directory.iterdir() if entry.is_dir()}
    found = []
    for step in sorted(int(name) for name in names if is_step(name)):
        folder = path(directory, step)
        if (folder / FILE).is_file():
            found.append(step)
        elif folder.exists():
            warnings.warn(
                f"{folder} has no {FILE}, and so is no whole checkpoint of jzero; it is passed over.", stacklevel=4
            )
    return found


def best_step(directory: Path, metric: str, end: Literal["min", "max"]) -> int | None:
    """The step whose metric is best; the later one of equals. None if none has it.

    Warns:
        UserWarning: The manifest of a checkpoint was changed; it is passed over.
    """
    values = {}
    for step in steps(directory):
        try:
            values[step] = Manifest.read(path(directory, step)).metrics.get(metric, math.nan)
        except CorruptCheckpoint as error:
            warnings.warn(f"It is not known how good step {step} is: {error}", stacklevel=4)
    values = {step: value if end == "max" else -value for step, value in values.items() if not math.isnan(value)}
    return max(values, key=lambda step: (values[step], step), default=None)


def manifest(directory: Path, step: int) -> Manifest:
    """What a checkpoint holds.

    Raises:
        FileNotFoundError: There is none of this step.
        CorruptCheckpoint: Its manifest was changed.
    """
    try:
        return Manifest.read(path(directory, step))
    except FileNotFoundError as error:
        there = steps(directory)
        has = f"has steps {', '.join(map(str, there))}" if there else "has none"
        raise FileNotFoundError(f"{error} {directory} {has}.") from None


def nothing(directory: Path, metric: str | None) -> str:
    """Why there is no latest checkpoint, or none that is best by a metric, and what to do."""
    if metric is not None and (latest := max(steps(directory), default=None)) is not None:
        have = ", ".join(manifest(directory, latest).metrics) or "none"
        return (
            f"{directory} has no checkpoint with the metric {metric!r} of best=; the metrics of step {latest} are: "
            f"{have}. Name one of these, or pass it to save(..., metrics={{{metric!r}: ...}})."
        )
    if not (directory / FILE).is_file():
        return f"{directory} has no checkpoint. Save one first, or name another folder."
    if is_step(directory.name):
        return (
            f"{directory} is one checkpoint. Make the Checkpointer of its folder, {directory.parent}: "
            f"step={directory.name}."
        )
    return f"{directory} is one checkpoint, and no folder of them. Move it to {directory}/0, say, where it is step 0."
