"""The header of a safetensors file: which tensors it holds, and where. After the format's published description.

A file is eight bytes with the length of the header, the header in JSON, and the elements of all tensors, one after
another. The `safetensors` library is not used: it writes only what is whole in memory, and gives neither bfloat16 nor
float8 to numpy. Files may come from anywhere, so nothing of a header is believed before it is checked.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import Region
from jzero.checkpoint.errors import CorruptCheckpoint

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""The format's dtypes and those of JAX."""

PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of the format's dtypes whose elements are no whole bytes. They are known, but not read."""

LONGEST = 100_000_000
"""Most bytes of a header, as the format says."""

METADATA = "__metadata__"
"""The key of a header that is no tensor."""


class CorruptTensors(CorruptCheckpoint):
    """A safetensors file, or the index of several, is missing, cut short or contradicts itself."""

    kind = "tensor"
    way_out = "Download it again, or export it again."


@dataclass(frozen=True)
class Stretch:
    """Bytes of a file: from `begin`, `nbytes` of them."""

    file: Path
    begin: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, or of several.

    Attributes:
        name: Its name.
        code: Its dtype as the format names it.
        shape: Its shape.
        stretches: Where its elements lie, in rows, one stretch after another; in a safetensors file there is one.
        boxes: If it is kept in several boxes, what each covers of it, and each as a tensor of its own; then these say
            where its elements lie.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    boxes: "tuple[tuple[Region, Tensor], ...]" = ()

    @property
    def file(self) -> Path:
        """The file that it begins in."""
        return self.stretches[0].file

    @property
    def begin(self) -> int:
        """Where in that file it begins, in bytes."""
        return self.stretches[0].begin

    @property
    def dtype(self) -> str | None:
        """The name of its dtype in JAX; None if that has none."""
        return DTYPES.get(self.code)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return _nbytes(self.code, self.shape)


@dataclass(frozen=True)
class Found:
    """The tensors of a model, and what else is in its files.

    Attributes:
        tensors: The tensors.
        left_out: Names of what jzero does not take: no tensors of the model, or none that it could read.
        note: What has to be known of those that are there, a sentence or more; empty if nothing.
    """

    tensors: Sequence[Tensor]
    left_out: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Spec:
    """A tensor that is to be written: name, dtype as JAX names it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def code(self) -> str:
        """Its dtype as the format names it."""
        return CODES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return _nbytes(self.code, self.shape)


CODES = {dtype: code for code, dtype in DTYPES.items()}


def header(file: Path, specs: Sequence[Spec], metadata: Mapping[str, str]) -> tuple[bytes, list[Tensor]]:
    """The first bytes of a file that will hold these tensors, and where in it they will be.

    The tensors of the widest dtype come first, so that each begins at a multiple of its elements' size.
    """
    rows: dict[str, Any] = {METADATA: dict(metadata)}
    places, end = [], 0
    for spec in sorted(specs, key=lambda spec: (-encoding.dtype_of(spec.dtype).itemsize, spec.name)):
        begin, end = end, end + spec.nbytes
        rows[spec.name] = {"dtype": spec.code, "shape": list(spec.shape), "data_offsets": [begin, end]}
        places.append((spec, begin))
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST:
        raise ValueError(
            f"{file} would have a header of {len(text)} bytes; the format allows {LONGEST}. Make more files."
        )
    start = 8 + len(text)
    tensors = [
        Tensor(spec.name, spec.code, spec.shape, (Stretch(file, start + begin, spec.nbytes),)) for spec, begin in places
    ]
    return len(text).to_bytes(8, "little") + text, tensors


def read_header(file: Path) -> list[Tensor]:
    """The tensors of a file, in their order in it. Nothing else is read.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptTensors: It is no such file, was cut short, or what its header says cannot be.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST):
            says = f"is {size} bytes, and its header would be {length}" if size >= 8 else f"is {size} bytes"
            raise CorruptTensors(file, f"is no safetensors file, or was cut short: it {says}")
        text = opened.read(length)
    try:
        rows = json.loads(text.decode(), object_pairs_hook=_once)
        if not isinstance(rows, dict):
            raise ValueError("it is no dict")
        rows.pop(METADATA, None)
        tensors = [_tensor(file, name, row, 8 + length) for name, row in rows.items()]
    except (ValueError, RecursionError) as error:
        raise CorruptTensors(file, f"has a header that cannot be read: {error}") from error
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.nbytes))
    at = 8 + length
    for tensor in tensors:
        if tensor.begin != at:
            why = f"begins at byte {tensor.begin}, where the tensor before it ends at byte {at}"
            raise CorruptTensors(file, why, tensor.name)
        at += tensor.nbytes
    if at != size:
        why = "was cut short" if at > size else "has more than its tensors"
        raise CorruptTensors(file, f"{why}: its tensors end at byte {at}, the file at byte {size}")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    rows = dict(pairs)
    if len(rows) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice!r} is there twice")
    return rows


def _tensor(file: Path, name: str, row: Any, start: int) -> Tensor:
    try:
        code, shape, (begin, end) = row["dtype"], row["shape"], row["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"tensor {name!r} is {str(row)[:100]}; wanted dtype, shape and data_offsets") from None
    if not isinstance(code, str) or (code not in DTYPES and code not in PACKED):
        raise ValueError(f"tensor {name!r} has the dtype {code!r}, which the format does not know")
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in [*shape, begin, end]):
        raise ValueError(f"tensor {name!r} has shape {shape} and bytes {begin} to {end}; wanted ints from 0 on")
    if end - begin != _nbytes(code, shape):
        raise ValueError(f"tensor {name!r} has {end - begin} bytes, {code} of shape {shape} has {_nbytes(code, shape)}")
    return Tensor(name, code, tuple(shape), (Stretch(file, start + begin, end - begin),))


def _nbytes(code: str, shape: Sequence[int]) -> int:
    bits = PACKED[code] if code in PACKED else 8 * encoding.dtype_of(DTYPES[code]).itemsize
    return math.prod(shape) * bits // 8
