"""Slices of a tensor in a file, read and written where they are: of the rest of the file nothing comes into memory.

The file is not mapped: pages of a mapping count as this process's memory, and a full disk would end the process.
"""

import bisect
import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import Region, inside, overlap
from jzero.checkpoint.exchange.format import CorruptTensors, Tensor

SHORT = 4096
"""Bytes. Rows that are not longer are read whole where a part of each is wanted: disks read no less, in fewer calls."""

OPEN = 256
"""Most files that are open at once."""

GROUP = 2**20
"""Bytes of rows that are read at once for parts of them."""


def runs(shape: Sequence[int], region: Region) -> tuple[np.ndarray, int]:
    """A region as runs of elements that lie behind one another: where each begins, and how long all are.

    Example:
        >>> runs((4, 6), ((1, 3), (2, 4)))
        (array([ 8, 14]), 2)
        >>> runs((4, 6), ((1, 3), (0, 6)))
        (array([6]), 12)
    """
    inner = _inner(shape, region)
    step = math.prod(shape[inner + 1 :])
    if inner < 0:
        return np.zeros(1, np.int64), math.prod(shape)
    begin, end = region[inner]
    starts = np.array([begin * step], np.int64)
    for dim in reversed(range(inner)):
        step *= shape[dim + 1]
        starts = (np.arange(*region[dim])[:, None] * step + starts).reshape(-1)
    return starts, (end - begin) * math.prod(shape[inner + 1 :])


class Files:
    """Files that are read, opened when they are first needed. Use it in a `with` statement, which closes them."""

    def __init__(self):
        self._handles: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def read(self, file: Path, at: int, into: memoryview, name: str) -> None:
        """Reads bytes of a file.

        Args:
            file: The file.
            at: Where in it, in bytes.
            into: Where they come; as many as fit are read.
            name: The tensor, for messages.

        Raises:
            CorruptTensors: The file ends before.
        """
        handle = self._handle(file)
        while into:
            done = os.preadv(handle, [into], at)
            if done == 0:
                raise CorruptTensors(file, f"was cut short while it was read: it ends before byte {at}", name)
            into, at = into[done:], at + done

    def _handle(self, file: Path) -> int:
        if file in self._handles:
            self._handles.move_to_end(file)
        else:
            if len(self._handles) >= OPEN:
                os.close(self._handles.popitem(last=False)[1])
            self._handles[file] = os.open(file, os.O_RDONLY)
        return self._handles[file]


def read(files: Files, tensor: Tensor, region: Region) -> np.ndarray:
    """A slice of a tensor.

    Args:
        files: The files.
        tensor: The tensor.
        region: The slice.

    Raises:
        CorruptTensors: The file ends before.
    """
    dtype = encoding.dtype_of(str(tensor.dtype))
    out = np.empty([end - begin for begin, end in region], dtype)
    if out.size == 0:
        return out
    if tensor.boxes:
        for box, part in tensor.boxes:
            both = overlap(box, region)
            if both is not None:
                there = tuple((begin - start, end - start) for (begin, end), (start, _) in zip(both, box, strict=True))
                out[inside(both, region)] = read(files, part, there)
        return out
    data, size = out.reshape(-1).view(np.uint8), dtype.itemsize
    ends = list(itertools.accumulate(stretch.nbytes for stretch in tensor.stretches))
    inner = _inner(tensor.shape, region)
    row = math.prod(tensor.shape[inner:]) * size if inner >= 0 else 0
    starts, length = runs(tensor.shape, region)
    if inner > 0 and row <= SHORT:
        widened = (*region[:inner], *((0, length) for length in tensor.shape[inner:]))
        skip = region[inner][0] * math.prod(tensor.shape[inner + 1 :]) * size
        parts, at = data.reshape(-1, length * size), 0
        starts, length = runs(tensor.shape, widened)
        for start in map(int, starts):
            for begin in range(0, length * size, step := max(1, GROUP // row) * row):
                rows = np.empty(min(step, length * size - begin), np.uint8)
                _read(files, tensor, ends, rows, start * size + begin)
                some = rows.reshape(-1, row)[:, skip : skip + parts.shape[1]]
                parts[at : at + len(some)] = some
                at += len(some)
        return out
    for number, start in enumerate(map(int, starts)):
        _read(files, tensor, ends, data[number * length * size : (number + 1) * length * size], start * size)
    return out


def write(handle: int, tensor: Tensor, region: Region, array: np.ndarray) -> None:
    """Puts a slice of a tensor where it belongs in its file.

    Args:
        handle: The tensor's file, open for writing.
        tensor: The tensor.
        region: The slice.
        array: What it holds, C-contiguous, in the tensor's dtype.
    """
    if array.size == 0:
        return
    data, size = raw(array), array.dtype.itemsize
    starts, length = runs(tensor.shape, region)
    for number, start in enumerate(map(int, starts)):
        rest, at = data[number * length * size : (number + 1) * length * size], tensor.begin + start * size
        while rest:
            done = os.pwrite(handle, rest, at)
            rest, at = rest[done:], at + done


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array. Nothing is copied."""
    return array.reshape(-1).view(np.uint8).data


def _inner(shape: Sequence[int], region: Region) -> int:
    """The last dim of which a region does not cover all; -1 if there is none."""
    return max(
        (dim for dim, (part, size) in enumerate(zip(region, shape, strict=True)) if part != (0, size)), default=-1
    )


def _read(files: Files, tensor: Tensor, ends: Sequence[int], into: np.ndarray, at: int) -> None:
    """Reads bytes of a tensor, from the stretches that they lie in, whose ends are counted from its beginning."""
    rest = into.data
    number = bisect.bisect_right(ends, at)
    while rest:
        stretch, skip = tensor.stretches[number], at - ends[number]
        some = min(len(rest), -skip)
        files.read(stretch.file, stretch.begin + stretch.nbytes + skip, rest[:some], tensor.name)
        rest, at, number = rest[some:], at + some, number + 1
