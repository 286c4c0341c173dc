"""Files of `torch.save`, read without PyTorch and without running anything: where in the file each tensor lies.

Such a file is a zip archive of a pickle and of the elements of each tensor, not compressed. A pickle names functions to
call, which is how a file can run code when it is opened. Here every name stands for something inert, but for the few
that make up tensors; nothing is imported and nothing that is named is called.
"""

import io
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jzero.checkpoint.exchange.format import CorruptTensors, Stretch

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}
"""PyTorch's names of dtypes, and those of safetensors."""

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Attributes:
        code: Its dtype as safetensors names it.
        shape: Its shape.
        stretch: Where its elements lie, in rows.
    """

    code: str
    shape: tuple[int, ...]
    stretch: Stretch

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError("it changes a tensor")

    def part(self, begin: int, count: int) -> Stretch:
        """Where some of its elements lie, counted in rows."""
        size = SIZES[self.code]
        return Stretch(self.stretch.file, self.stretch.begin + begin * size, count * size)


class Inert:
    """Stands for an object of any class: it takes what a pickle does to it, and does nothing.

    Attributes:
        named: The class that the pickle names.
        state: What the pickle says that the object holds; None if nothing.
    """

    named = ""
    state: Any = None

    def __init__(self, *_: Any, **__: Any):
        pass

    def __new__(cls, *_: Any, **__: Any) -> "Inert":  # noqa: D102
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _nothing(self, *_: Any) -> None:
        pass

    __setitem__ = append = extend = add = _nothing


class _Function:
    """One of the few functions that a pickle may call; it cannot be changed by it."""

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError("it changes a function")


def read(file: Path, begin: int = 0, length: int | None = None) -> Any:
    """What `torch.save` wrote, with a `Stored` for each tensor and an `Inert` for what is no plain container.

    Args:
        file: The file.
        begin: Where in it what was saved begins.
        length: How many bytes that is; None: all that follow.

    Raises:
        CorruptTensors: It is no such file, or damaged.
    """
    try:
        with file.open("rb") as opened, zipfile.ZipFile(_Window(opened, begin, length)) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
            return _Unpickler(archive.read(name), _Places(file, begin, archive, name.removesuffix("data.pkl"))).load()
    except zipfile.BadZipFile as error:
        raise CorruptTensors(file, f"cannot be read as torch.save writes files ({error})") from error
    except Exception as error:  # a pickle that was changed can raise any
        raise CorruptTensors(file, f"is not as torch.save writes files ({type(error).__name__}: {error})") from error


def read_pickle(file: Path) -> Any:
    """What a pickle without tensors holds, with an `Inert` for what is no plain container.

    Raises:
        CorruptTensors: It is none.
    """
    try:
        return _Unpickler(file.read_bytes(), None).load()
    except Exception as error:  # as above
        raise CorruptTensors(file, f"is no pickle ({type(error).__name__}: {error})") from error


class _Window(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int | None):
        self.file, self.begin, self.at = file, begin, 0
        rest = file.seek(0, io.SEEK_END) - begin
        if begin < 0 or rest < 0 or (length is not None and not 0 <= length <= rest):
            raise zipfile.BadZipFile(f"it has {rest + begin} bytes, and {length} from {begin} on are needed")
        self.length = rest if length is None else length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self.length - self.at)
        self.file.seek(self.begin + self.at)
        found = self.file.read(rest if size is None or size < 0 else min(size, rest))
        self.at += len(found)
        return found


class _Places:
    """Where in a file the elements of each storage lie."""

    def __init__(self, file: Path, begin: int, archive: zipfile.ZipFile, prefix: str):
        self.file, self.begin, self.archive, self.prefix = file, begin, archive, prefix
        byteorder = prefix + "byteorder"
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise ValueError("its numbers are not little-endian")

    def of(self, key: str) -> tuple[int, int]:
        """Begin and length in bytes."""
        info = self.archive.getinfo(f"{self.prefix}data/{key}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed")
        with self.file.open("rb") as opened:
            opened.seek(self.begin + info.header_offset)
            head = opened.read(30)
            size = opened.seek(0, io.SEEK_END)
        names, extra = struct.unpack("<HH", head[26:30])
        begin = self.begin + info.header_offset + 30 + names + extra
        if head[:4] != b"PK\3\4" or begin + info.file_size > size:
            raise ValueError(f"{info.filename} is not where the archive says")
        return begin, info.file_size


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, places: _Places | None):
        super().__init__(io.BytesIO(data))
        self.places = places
        for code, argument, _ in pickletools.genops(data):  # raises where one asks for more bytes than there are
            if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(data):
                raise pickle.UnpicklingError(f"it would fill the memory, with {argument} objects")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor),
            ("torch._utils", "_rebuild_parameter"): _Function(lambda tensor, *_: tensor),
            ("torch._tensor", "_rebuild_from_type_v2"): _Function(_with_attributes),
        }
        return known.get((module, name)) or type("Inert", (Inert,), {"named": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        kind, code, key, _, count = pid
        if kind != "storage" or not isinstance(code, str) or self.places is None:
            return Inert()
        begin, length = self.places.of(str(key))
        if count * SIZES[code] != length:
            raise ValueError(f"storage {key} has {length} bytes; wanted {count} elements of {code}")
        return code, Stretch(self.places.file, begin, length)


def _with_attributes(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """A tensor that had attributes of its own, which are left out."""
    return function(*arguments) if isinstance(function, _Function) else Inert()


def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> Any:
    """A tensor; something inert if jzero does not read it: another dtype, or elements that are not in rows."""
    if isinstance(storage, Inert) or any(type(size) is not int or size < 0 for size in (offset, *shape, *stride)):
        return Inert()
    (code, stretch), count = storage, 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != count:
            return Inert()
        count *= size
    begin = offset * SIZES[code]
    if begin + count * SIZES[code] > stretch.nbytes:
        raise ValueError(f"a tensor of shape {tuple(shape)} ends behind its storage")
    return Stored(code, tuple(shape), Stretch(stretch.file, stretch.begin + begin, count * SIZES[code]))
