"""Checkpoints: training states on the disk, whatever the layout that they come from or go to.

`Checkpointer` saves and restores. `inspection.inspect`, `verify.verify`, `compare.compare` and `reshard.reshard` are
what the command line calls. Below them, for tools that make or rewrite checkpoints: `Manifest` says what one holds,
`store.read` reads its chunks and checks them, and `write.write` writes one, all at once. The format is described in
`docs/checkpoints.md`.
"""

from jzero.checkpoint.checkpointer import Checkpointer, Restored
from jzero.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint, SaveFailed
from jzero.checkpoint.manifest import Entry, Manifest

__all__ = ["CheckpointMismatch", "Checkpointer", "CorruptCheckpoint", "Entry", "Manifest", "Restored", "SaveFailed"]
