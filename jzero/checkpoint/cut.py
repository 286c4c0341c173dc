"""Arrays on devices as chunks on the disk: which process writes which, and what is in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import LARGEST, Region, grid, halved, inside, overlap, region_of, volume
from jzero.checkpoint.manifest import Entry
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
        chunk = shape if stored is None else _chunk(words, shape, encoding.dtype_of(stored).itemsize)
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
    held, chunk = list(_held(array).values()), halved(shape, itemsize, LARGEST)
    if all(any(_covers(regions, region) for regions in held) for _, region in grid(shape, chunk)):
        return chunk
    shard = array.sharding.shard_shape(array.shape)
    return halved(shard, itemsize, LARGEST, cut=[a < b for a, b in zip(shard, array.shape, strict=True)])


def _held(array) -> dict[int, set[Region]]:
    """For each process the regions of an array that its devices hold."""
    held: dict[int, set[Region]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        held.setdefault(device.process_index, set()).add(region_of(index, array.shape))
    # An array that each process has for itself is the same in all of them; the first one writes it.
    return {0: held[jax.process_index()]} if jax.process_count() > 1 and array.is_fully_addressable else held


def _covers(regions, region) -> bool:
    """Whether regions that do not overlap contain another one."""
    return sum(volume(both) for one in regions if (both := overlap(one, region)) is not None) == volume(region)


def pieces(source: Source, process: int) -> Iterator[Piece]:
    """The chunks of a leaf that a process writes: those that several hold they share among them.

    On CPUs what they hold is the memory of the array itself.
    """
    entry, array, stored = source.entry, source.array, source.entry.stored
    if stored is None:
        return
    held = _held(array)
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
        holders = sorted(index for index, regions in held.items() if _covers(regions, region))
        if holders[turn % len(holders)] != process:
            continue
        parts = [(one, both) for one in held[process] if (both := overlap(one, region)) is not None]
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
