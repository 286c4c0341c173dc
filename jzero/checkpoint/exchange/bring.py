"""Safetensors files, or checkpoints of PyTorch, as a checkpoint of params, a few chunks at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from jzero.checkpoint import encoding, store
from jzero.checkpoint.blocks import BASE, COPIES, MEMORY, Progress, budget
from jzero.checkpoint.chunks import LARGEST, grid, halved
from jzero.checkpoint.compare import different
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CorruptCheckpoint
from jzero.checkpoint.exchange.rules import Rules
from jzero.checkpoint.exchange.source import Source
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.names import folders
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.room import check_disk, check_free, is_of_checkpoint, on_disk, target
from jzero.checkpoint.write import write

LEAST = 2**20
"""Bytes of a chunk that there must be memory for; smaller ones would be too many files."""


@dataclass(frozen=True)
class Imported:
    """What `import_params` wrote.

    Attributes:
        leaves: How many leaves.
        nbytes: Bytes of them.
        ignored: Names of tensors that were left out, as the map says.
        left_out: Names of what else was left out: states of an optimizer, pickles of other things.
        note: What has to be known of the leaves, a sentence or more; empty if nothing.
    """

    leaves: int
    nbytes: int
    ignored: tuple[str, ...]
    left_out: tuple[str, ...]
    note: str


def import_params(
    source: str | PathLike[str],
    checkpoint: str | PathLike[str],
    *,
    map: str | PathLike[str] | Rules | None = None,
    memory: int = MEMORY,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Imported:
    """Makes a checkpoint of params, to start a training from, of safetensors files or checkpoints of PyTorch.

    `Checkpointer(dir).restore(tx, layout, step=0, only=("params",), init=...)` then starts from `dir/0`. Files are
    read slice by slice where they are needed, and nothing in them is run. The checkpoint appears when all of it is
    written.

    Args:
        source: A safetensors file; a folder of them, with an index or without; or a checkpoint that DeepSpeed saved
            with ZeRO at stage 1, 2 or 3, Megatron-LM as `torch_dist`, or torch.distributed.checkpoint. They are read
            without PyTorch. Of DeepSpeed's and Megatron-LM's the float32 master weights are taken.
        checkpoint: Where the checkpoint will be, such as "checkpoints/0".
        map: Which tensor becomes which leaf, as for `export_safetensors`. None: its name, split at dots, is the path.
        memory: Bytes of memory that it may take, over those of the process before.
        overwrite: Whether a checkpoint that is there is replaced.
        progress: Is told what is being done.

    Raises:
        FileNotFoundError: There is no such file or map.
        FileExistsError: Something is where the checkpoint will be.
        CorruptTensors: A file is damaged or missing.
        CheckpointMismatch: Tensors that no leaf can be made of; all of them are named.
        LimitExceeded: Memory or disk are too small; nothing was written.
        SaveFailed: It could not be written.

    Example:
        >>> import tempfile
        >>> from safetensors.numpy import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"layer.weight": np.ones((4, 2), np.float32)}, f"{folder}/model.safetensors")
        ...     imported = import_params(folder, f"{folder}/0")
        ...     [leaf.name for leaf in jzero.checkpoint.Manifest.read(Path(folder, "0")).leaves]
        ['params/layer/weight']
    """
    rules = Rules.read(map) if isinstance(map, str | PathLike) else map
    folder = target(checkpoint)
    check_free(folder, overwrite, is_of_checkpoint, "a checkpoint of jzero")
    with Source(Path(source), rules) as model:
        largest = min(LARGEST, max(LEAST, (memory - BASE - COPIES * store.IN_FLIGHT) // 2))
        budget(f"import {source}", memory, 0, largest)
        entries = []
        for link, name in zip(model.links, folders([link.path for link in model.links]), strict=True):
            stored = None if 0 in link.shape else encoding.stored_dtype(link.dtype)
            size = encoding.dtype_of(link.dtype).itemsize
            chunk = link.shape if stored is None else halved(link.shape, size, largest)
            entries.append(Entry(link.path, ".".join(name), link.shape, link.dtype, stored, link.shape, chunk))
        nbytes = sum(entry.nbytes for entry in entries)
        check_disk(folder, on_disk(nbytes, sum(entry.chunk_count for entry in entries)))
        model.check_copies()
        links = {entry.path: link for entry, link in zip(entries, model.links, strict=True)}
        chunks = [(e, *chunk) for e in entries if e.stored for chunk in grid(e.stored_shape, e.chunk)]

        def read(task: str) -> Iterator[store.Piece]:
            done = 0
            for entry, number, region in chunks:
                array = encoding.bits(model.slice(links[entry.path], region), str(entry.stored))
                yield store.Piece(entry, number, region, array)
                done += array.nbytes
                progress(task, done, nbytes)

        def check(place: Path, manifest: Manifest) -> None:
            for piece, written in zip(read("checking"), Origin(place, manifest).chunks(chunks, 0), strict=True):
                if different(np.ascontiguousarray(piece.array), written.array).any():
                    file = folder / piece.leaf.file(piece.chunk)
                    raise CorruptCheckpoint(file, "does not hold what was written to it", piece.leaf.name)

        write(folder, Manifest(tuple(entries)), read("writing"), overwrite=overwrite, check=check)
        return Imported(len(entries), nbytes, tuple(model.ignored), model.left_out, model.note)
