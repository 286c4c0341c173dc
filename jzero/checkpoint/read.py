"""Chunks on the disk as arrays on devices, in any layout: each process reads what its devices hold."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import Region, grid, inside, overlap, region_of
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.parts import Want
from jzero.checkpoint.store import Piece

ALIGNED = 64
"""Bytes; JAX takes host memory that is so aligned as it is, where devices are CPUs, and copies any other."""


def arrays(folder: Path, manifest: Manifest, pairs: Sequence[tuple[Entry, Want]]) -> Iterator[jax.Array]:
    """Reads leaves and places them, each chunk once, a bounded number of bytes at a time.

    What a layout pads is filled with zeros. Chunks and descriptions of arrays are checked as they are read.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        pairs: What to read, and what becomes of it.

    Raises:
        CorruptCheckpoint: A file is missing or was changed.
    """
    targets = [_Target(entry, want) for entry, want in pairs]
    found = Origin(folder, manifest).chunks((t.entry, *chunk) for t in targets for chunk in t.chunks)
    for target in targets:
        for _ in target.chunks:
            target.fill(next(found))
        yield target.array()


class _Target:
    """An array that is being read: the parts that this process's devices hold."""

    def __init__(self, entry: Entry, want: Want):
        self.entry, self.want = entry, want
        self.shape = want.stored + entry.stored_shape[len(entry.shape) :]  # with the words of random keys
        indices = want.sharding.addressable_devices_indices_map(self.shape)
        self.places = {device: region_of(index or (), self.shape) for device, index in indices.items()}
        self.regions = set(self.places.values())
        self.dtype = np.dtype("uint32") if want.dtype.startswith(encoding.KEY) else encoding.dtype_of(want.dtype)
        self.parts: dict[Region, np.ndarray] = {}
        self.chunks = (
            []
            if entry.stored is None
            else [
                (number, region)
                for number, region in grid(entry.stored_shape, entry.chunk)
                if any(overlap(region, part) is not None for part in self.regions)
            ]
        )

    def fill(self, piece: Piece) -> None:
        values = encoding.values(piece.array, self.entry.dtype)
        for part, memory in self._memory().items():
            both = overlap(piece.region, part)
            if both is not None:
                mine = values[inside(both, piece.region)]
                memory[inside(both, part)] = mine if mine.dtype == self.dtype else encoding.cast(mine, self.want.dtype)

    def _memory(self) -> dict[Region, np.ndarray]:
        """Host memory of each part, made when the first chunk is there."""
        if not self.parts:
            self.parts = {region: aligned([e - b for b, e in region], self.dtype) for region in self.regions}
            if self.want.stored != self.want.shape:
                for memory in self.parts.values():
                    memory[...] = np.zeros((), self.dtype)
        return self.parts

    def array(self) -> jax.Array:
        parts = self._memory()
        placed = [jax.device_put(parts[region], device) for device, region in self.places.items()]
        self.parts = {}
        x = jax.make_array_from_single_device_arrays(self.shape, self.want.sharding, placed)
        return encoding.wrapped(x, self.want.dtype)


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Host memory that JAX need not copy, its content undefined."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNED, np.uint8)
    begin = -raw.ctypes.data % ALIGNED
    return raw[begin : begin + size].view(dtype).reshape(shape)
