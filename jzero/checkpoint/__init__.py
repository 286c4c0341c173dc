"""Checkpoints: training states on the disk, whatever the layout that they come from or go to.

`Checkpointer` saves and restores. `inspection.inspect`, `verify.verify`, `compare.compare` and `reshard.reshard` are
what the command line calls. `export_safetensors`, `import_params` and `load_safetensors` exchange params with the
Hugging Face world and with PyTorch; `Rules` give names and shapes. Below them, for tools that make or rewrite
checkpoints: `Manifest` says what one holds, `origin.Origin` reads its chunks and checks them, `write.write` writes
one, all at once. The formats are described in `docs/checkpoints.md` and `docs/safetensors.md`.
"""

from jzero.checkpoint.checkpointer import Checkpointer, Restored
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint, LimitExceeded, RestoreFailed, SaveFailed
from jzero.checkpoint.exchange.bring import Imported, import_params
from jzero.checkpoint.exchange.export import Exported, export_safetensors
from jzero.checkpoint.exchange.load import load_safetensors
from jzero.checkpoint.exchange.rules import Rules
from jzero.checkpoint.manifest import Manifest

__all__ = [
    "CheckpointMismatch",
    "Checkpointer",
    "CorruptCheckpoint",
    "Entry",
    "Exported",
    "Imported",
    "LimitExceeded",
    "Manifest",
    "RestoreFailed",
    "Restored",
    "Rules",
    "SaveFailed",
    "export_safetensors",
    "import_params",
    "load_safetensors",
]
