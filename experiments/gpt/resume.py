"""Checkpoints of a run, and going on from the last one."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from experiments.gpt.config import Config, option_name
from experiments.gpt.data import Text
from experiments.gpt.job import Job
from jzero.checkpoint import Checkpointer, Restored

KEPT = 2
"""How many checkpoints stay."""

FREE = {
    "stage",
    "mesh",
    "devices",
    "min_shard_size",
    "remat",
    "microbatches",
    "eval_every",
    "save_every",
    "sample",
    "prompt",
    "temperature",
}
"""Options that may differ when a run goes on: with any of them the losses are the same, but for rounding."""


def checkpointer(folder: Path, config: Config) -> Checkpointer:
    """The checkpoints of the run in a folder."""
    return Checkpointer(folder / "checkpoints", keep=KEPT, every=config.save_every or 1)


def position(config: Config, text: Text, step: int) -> dict[str, Any]:
    """What a checkpoint says of the data: batches are a pure function of it."""
    return {"step": step, "seed": config.seed, "text": hashlib.sha256(text.train.tobytes()).hexdigest()}


def resume(saved: Checkpointer, job: Job, config: Config, text: Text) -> Restored | None:
    """The last checkpoint of a run, in the layout of this job; None if there is none yet.

    Raises:
        ValueError: The run was started with other options, or on another text.
    """
    if saved.latest is None:
        return None
    path = saved.directory.parent / "config.json"
    before, now = json.loads(path.read_text()), json.loads(json.dumps(dataclasses.asdict(config)))
    differ = [name for name in now if name not in FREE and before.get(name) != now[name]]
    if differ:
        described = ", ".join(f"{option_name(name)} {before.get(name)} (now {now[name]})" for name in differ)
        raise ValueError(f"--resume: the run in {path.parent} was started with {described}. Use the same.")
    restored = saved.restore(job.tx, job.layout, loss_scale=job.loss_scale)
    if restored.data != position(config, text, restored.step):
        raise ValueError(
            f"--resume: the run in {path.parent} was trained on another text than that of --data now, so its batches "
            f"could not go on where they were. Bring the text back, or start a new run."
        )
    return restored
