"""Checkpoints of `torch.distributed.checkpoint`: tensors in boxes, where they lie.

Its file `.metadata`, a pickle, says which box of which tensor is where in which file; a box is what `torch.save` wrote.
"""

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jzero.checkpoint.chunks import Region, overlap
from jzero.checkpoint.exchange import torch_file
from jzero.checkpoint.exchange.format import CorruptTensors, Found, Tensor
from jzero.checkpoint.exchange.torch_file import Inert, Stored

METADATA = ".metadata"

_FILE = re.compile(r"[\w-]+\.distcp")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return (folder / METADATA).is_file()


def find(folder: Path) -> Found:
    """All its tensors, those of the optimizer too, by their names. What else it holds is left out.

    Raises:
        CorruptTensors: A file is missing or damaged.
    """
    description = describe(folder)
    return Found([description.tensor(name) for name in description.shapes], description.others)


@dataclass(frozen=True)
class Description:
    """What a checkpoint says that it holds.

    Attributes:
        folder: Where it is.
        shapes: Its tensors, by their names.
        others: Names of what is no tensor: pickles, which are not opened.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    others: tuple[str, ...]
    _boxes: dict[str, Any]
    _places: dict[Any, dict[str, Any]]

    def tensor(self, name: str) -> Tensor:
        """Where one of its tensors lies.

        Raises:
            CorruptTensors: A file is missing or damaged.
        """
        with _as_written(self.folder / METADATA):
            return _tensor(self.folder, name, self.shapes[name], self._boxes[name], self._places)


def describe(folder: Path) -> Description:
    """Reads what a checkpoint says that it holds, and none of its tensors.

    Raises:
        CorruptTensors: It is damaged.
    """
    file = folder / METADATA
    state = _state(file, torch_file.read_pickle(file), "state_dict_metadata", "storage_data")
    places, shapes, boxes, others = {}, {}, {}, []
    with _as_written(file):
        for index, info in state["storage_data"].items():
            key, where = (_state(file, one, *names) for one, names in ((index, ["fqn"]), (info, ["relative_path"])))
            offset = key.get("offset")
            places[key["fqn"], None if offset is None else tuple(offset)] = where
        for name, value in state["state_dict_metadata"].items():
            if not _is_tensor(value):
                others.append(str(name))
                continue
            row = _state(file, value, "size", "chunks")
            shapes[str(name)], boxes[str(name)] = _sizes(folder, str(name), row["size"]), row["chunks"]
    return Description(folder, shapes, tuple(others), boxes, places)


@contextmanager
def _as_written(file: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError, KeyError) as error:
        raise CorruptTensors(file, f"is not as PyTorch writes it ({type(error).__name__}: {error})") from error


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Inert) and value.named.endswith(".TensorStorageMetadata")


def _state(file: Path, value: Any, *names: str) -> dict[str, Any]:
    state = value.state if isinstance(value, Inert) else None
    if not isinstance(state, dict) or not all(name in state for name in names):
        raise CorruptTensors(file, f"has something else where {', '.join(names)} should be")
    return state


def _tensor(folder: Path, name: str, shape: tuple[int, ...], chunks: Any, places: dict) -> Tensor:
    file = folder / METADATA
    boxes: list[tuple[Region, Tensor]] = []
    for chunk in chunks:
        row = _state(file, chunk, "offsets", "sizes")
        begin, sizes = _sizes(folder, name, row["offsets"]), _sizes(folder, name, row["sizes"])
        where = places.get((name, begin)) or places.get((name, None))
        if where is None:
            raise CorruptTensors(file, f"does not say where the part of it from {begin} on is", name)
        box = tuple((first, first + size) for first, size in zip(begin, sizes, strict=True))
        boxes.append((box, _box(folder, name, sizes, where)))
    whole = tuple((0, size) for size in shape)
    if any(len(box) != len(shape) or (_volume(box) and overlap(box, whole) != box) for box, _ in boxes):
        raise CorruptTensors(file, f"has parts of it that lie outside of its shape {shape}", name)
    if sum(_volume(box) for box, _ in boxes) != _volume(whole) or _overlapping([box for box, _ in boxes]):
        raise CorruptTensors(file, f"has parts of it that do not make up its shape {shape}", name)
    codes = {tensor.code for _, tensor in boxes}
    if len(codes) != 1:
        raise CorruptTensors(file, f"has parts of it of dtypes {', '.join(sorted(codes)) or 'that are none'}", name)
    return Tensor(name, codes.pop(), shape, boxes[0][1].stretches, tuple(boxes))


def _sizes(folder: Path, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or any(type(size) is not int or size < 0 for size in value):
        raise CorruptTensors(folder / METADATA, f"has {str(value)[:100]} where a shape should be", name)
    return tuple(value)


def _volume(box: Region) -> int:
    return math.prod(end - begin for begin, end in box)


def _overlapping(boxes: list[Region]) -> bool:
    return any(overlap(one, two) is not None for one, two in itertools.combinations(boxes, 2))


def _box(folder: Path, name: str, sizes: tuple[int, ...], where: dict[str, Any]) -> Tensor:
    path, begin, length = where["relative_path"], where["offset"], where["length"]
    if not isinstance(path, str) or not _FILE.fullmatch(path):
        raise CorruptTensors(folder / METADATA, f"names a file {path!r}, which is none of such a checkpoint", name)
    if where.get("transform_descriptors"):
        raise CorruptTensors(folder / path, "is compressed or encrypted, which jzero does not read", name)
    if not (folder / path).is_file():
        raise CorruptTensors(folder / path, f"is missing; {METADATA} names it", name)
    if any(type(size) is not int or size < 0 for size in (begin, length)):
        raise CorruptTensors(folder / METADATA, f"has {begin!r} and {length!r} where bytes should be", name)
    found = torch_file.read(folder / path, begin, length)
    if not isinstance(found, Stored) or found.shape != sizes:
        has = f"one of shape {found.shape}" if isinstance(found, Stored) else "something else"
        raise CorruptTensors(folder / path, f"has at byte {begin} no tensor of shape {sizes}, but {has}", name)
    return Tensor(name, found.code, sizes, (found.stretch,))
