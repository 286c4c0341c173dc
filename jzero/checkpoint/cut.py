"""Arrays on devices as chunks on the disk: which process writes which, and what is in them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import LARGEST, Region, grid, halved, inside, overlap, region_of
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.names import folders
from jzero.checkpoint.parts import Item
from jzero.checkpoint.store import Piece
from jzero.rules import axes_of


@dataclass(frozen=True)
class Source:
    """An array, and the leaf that it is saved as."""

    entry: Entry
    array: jax.Array


def sources(items: Sequence[Item]) -> list[Source]:
    """How each leaf is saved: its name, its encoding and its chunks, the same in every process."""
    found = []
    for item, folder in zip(items, folders([item.path for item in items]), strict=True):
        dtype, words = encoding.name_of(item.array), encoding.words(item.array)
        shape = tuple(item.shape) + tuple(words.shape[len(item.shape) :])
        empty = 0 in shape
        stored = None if empty else encoding.stored_dtype(dtype)
        chunk = _chunk(words, shape, 1 if stored is None else encoding.dtype_of(stored).itemsize)
        entry = Entry(item.path, ".".join(folder), tuple(item.shape), dtype, stored, shape, chunk, _spec(item.array))
        found.append(Source(entry, words))
    return found


def _spec(array):
    if not isinstance(array.sharding, NamedSharding):
        return None
    axes = axes_of(array.sharding.spec)
    return (*axes, *[()] * (array.ndim - len(axes)))[: array.ndim]


def _chunk(array, shape, itemsize) -> tuple[int, ...]:
    """The shape of chunks, each of which one process holds whole."""
    holders, chunk = Holders(array), halved(shape, itemsize, LARGEST)
    if all(holders.of(region) for _, region in grid(shape, chunk)):
        return chunk
    shard = array.sharding.shard_shape(array.shape)
    return halved(shard, itemsize, LARGEST, cut=[a < b for a, b in zip(shard, array.shape, strict=True)])


class Holders:
    """Which processes hold which part of an array: JAX cuts it into equal cells, each on some devices."""

    def __init__(self, array: jax.Array):
        self.cell = [max(1, size) for size in array.sharding.shard_shape(array.shape)]
        self.processes: dict[tuple[int, ...], set[int]] = {}
        # An array that each of several processes has for itself is the same in all; the first one writes it.
        own = jax.process_count() > 1 and array.is_fully_addressable
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            begins = [begin for begin, _ in region_of(index, array.shape)]
            cell = tuple(begin // size for begin, size in zip(begins, self.cell, strict=True))
            self.processes.setdefault(cell, set()).add(0 if own else device.process_index)

    def of(self, region: Region) -> list[int]:
        """The processes that hold all of a region, in order."""
        cells = [range(b // size, (e - 1) // size + 1) for (b, e), size in zip(region, self.cell, strict=True)]
        return sorted(set.intersection(*(self.processes[cell] for cell in itertools.product(*cells))))


def pieces(source: Source, process: int) -> Iterator[Piece]:
    """The chunks of a leaf that a process writes: those that several hold they share among them.

    On CPUs what they hold is the memory of the array itself.
    """
    entry, array, stored = source.entry, source.array, source.entry.stored
    if stored is None:
        return
    holders = Holders(array)
    data = {region_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    on_host: dict[Region, np.ndarray] = {}

    def host(region):
        if region not in on_host:
            shard = data[region]
            # A copy on the host stays with the array that it was made of; this one goes when it has been written.
            own = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
            on_host[region] = encoding.bits(np.asarray(own), stored)
        return on_host[region]

    for turn, (number, region) in enumerate(grid(entry.stored_shape, entry.chunk)):
        able = holders.of(region)
        if able[turn % len(able)] != process:
            continue
        parts = [(one, both) for one in data if (both := overlap(one, region)) is not None]
        if len(parts) == 1:
            [(one, both)] = parts
            yield Piece(entry, number, region, host(one)[inside(both, one)])
        else:
            whole = np.empty([end - begin for begin, end in region], encoding.dtype_of(stored))
            for one, both in parts:
                whole[inside(both, region)] = host(one)[inside(both, one)]
            yield Piece(entry, number, region, whole)


def snapshot(piece: Piece) -> Piece:
    """The same in memory of its own, which lasts when the array is gone."""
    return piece if piece.array.flags.owndata else replace(piece, array=piece.array.copy())
