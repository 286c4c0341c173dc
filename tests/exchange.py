"""Checkpoints of params made of numpy arrays, without a training, and what is in them."""

import math
import zipfile
from pathlib import Path

import numpy as np

from jzero.checkpoint import Manifest, encoding
from jzero.checkpoint.chunks import grid, halved
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.names import folders
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.store import Piece
from jzero.checkpoint.write import write

DATA = Path(__file__).parent / "data"
RANDOM = np.random.default_rng(0)


def unpacked(name, folder):
    """What others have saved, of tests/data, in a folder of its own."""
    with zipfile.ZipFile(DATA / f"{name}.zip") as archive:
        archive.extractall(folder / name)
    return folder / name


def bits_of(dtype, *shape):
    """Random bits: NaNs with payloads, subnormals, infinities and all."""
    dtype = np.dtype(dtype)
    raw = RANDOM.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


def saved(folder, leaves, largest=400):
    """A checkpoint of params, by path, in chunks of at most `largest` bytes."""
    paths = [("params", *path) for path in leaves]
    entries, pieces = [], []
    for path, name, array in zip(paths, folders(paths), leaves.values(), strict=True):
        dtype = str(array.dtype)
        stored = encoding.stored_dtype(dtype)
        chunk = halved(array.shape, array.dtype.itemsize, largest) if array.size else array.shape
        entry = Entry(path, ".".join(name), array.shape, dtype, stored if array.size else None, array.shape, chunk)
        entries.append(entry)
        for number, region in grid(array.shape, chunk) if array.size else ():
            part = array[tuple(slice(*ends) for ends in region)]
            pieces.append(Piece(entry, number, region, encoding.bits(np.asarray(part), stored)))
    write(folder, Manifest(tuple(entries)), pieces)
    return folder


def held(folder):
    """The arrays of a checkpoint, by path below params."""
    origin, found = Origin.open(folder), {}
    for leaf in origin.leaves:
        array = np.empty(leaf.shape, encoding.dtype_of(leaf.dtype))
        chunks = [(leaf, *chunk) for chunk in grid(leaf.shape, leaf.chunk)] if leaf.stored else []
        for piece in origin.chunks(chunks):
            part = encoding.values(piece.array, leaf.dtype)
            array[tuple(slice(*ends) for ends in piece.region)] = part
        found[leaf.path[1:]] = array
    return found
