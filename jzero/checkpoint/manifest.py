"""`jzero.json`: what a checkpoint holds, and a checksum of each of its files. Written last, it makes it whole."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jzero.checkpoint import encoding
from jzero.checkpoint.errors import CorruptCheckpoint
from jzero.checkpoint.names import is_safe, shown

FILE = "jzero.json"
FORMAT = 1
_FILE = re.compile(r"[A-Za-z0-9_%.-]+(/[A-Za-z0-9_%.-]+)*")

ARRAYS = "state"
"""The folder of the arrays inside of a checkpoint: the item of orbax."""


@dataclass(frozen=True)
class Entry:
    """One leaf of a checkpoint, in its logical shape.

    Attributes:
        path: Where it is in the tree, such as ("params", "blocks", "kernel").
        folder: The name of its folder: the keys that orbax shows, joined by dots.
        shape: Its shape in the tree; of random keys without the dim of their words.
        dtype: Name of its dtype, such as "bfloat16", or "key:" and the implementation of random keys.
        stored: Name of the dtype that it is stored in; None if it has no elements, and so no folder.
        stored_shape: The shape that it is stored in.
        chunk: Shape of a chunk; each is one file.
        spec: The mesh axes of each dim where it was saved from; None if that is not known.
    """

    path: tuple[str, ...]
    folder: str
    shape: tuple[int, ...]
    dtype: str
    stored: str | None
    stored_shape: tuple[int, ...]
    chunk: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...] | None = None

    @property
    def name(self) -> str:
        """Its path as messages and patterns have it."""
        return shown(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements as stored."""
        return 0 if self.stored is None else encoding.nbytes(self.stored_shape, self.stored)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk."""
        return 0 if self.stored is None else encoding.nbytes(self.chunk, self.stored)

    @property
    def chunk_count(self) -> int:
        """How many chunks it has."""
        if self.stored is None:
            return 0
        return math.prod(-(-size // step) for size, step in zip(self.stored_shape, self.chunk, strict=True))

    def file(self, chunk: tuple[int, ...] | None = None) -> str:
        """Name of the file of one chunk, by its number in each dim; without one, of zarr's description of the array."""
        inside = "zarr.json" if chunk is None else "/".join(["c", *map(str, chunk)])
        return f"{ARRAYS}/{self.folder}/{inside}"


@dataclass(frozen=True)
class Sum:
    """Size and checksum of a file.

    Attributes:
        size: Bytes.
        check: "sha256:" and the digest of the file; or, for a chunk, "crc32c:" and its last four bytes, which are the
            checksum of those before, as zarr's codec of that name writes and checks it.
    """

    size: int
    check: str

    @classmethod
    def of_chunk(cls, path: Path) -> "Sum":
        """That of a chunk which ends with its checksum. Only the last bytes are read."""
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 4))
            return cls(size, f"crc32c:{file.read()[::-1].hex()}")

    @classmethod
    def of(cls, path: Path) -> "Sum":
        """That of any other file."""
        data = path.read_bytes()
        return cls(len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        leaves: One entry for each leaf, in the order of the tree.
        files: By name, relative to the checkpoint, the sum of each of its other files.
        step: The step that it was saved at; None if it stands for none.
        data: What the caller saved as the position in the data.
        metrics: Numbers by which checkpoints can be chosen.
        saved_from: The mesh, stage, precision and processes that it was saved from; empty if it was made otherwise.
    """

    leaves: tuple[Entry, ...]
    files: Mapping[str, Sum] = field(default_factory=dict)
    step: int | None = None
    data: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_from: Mapping[str, Any] = field(default_factory=dict)

    def with_files(self, files: Mapping[str, Sum]) -> "Manifest":
        """The same with the sums of its files."""
        return replace(self, files=dict(sorted(files.items())))

    def to_json(self) -> str:
        """As it is written: the body, and its SHA-256."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "data": self.data,
            "metrics": dict(self.metrics),
            "saved_from": dict(self.saved_from),
            "leaves": [asdict(leaf) for leaf in self.leaves],
            "files": {name: [sum.size, sum.check] for name, sum in self.files.items()},
        }
        return json.dumps({"sha256": _digest(body), "body": body}, indent=None) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`.

        Raises:
            ValueError: It is not what `to_json` wrote, or of a format that this version does not know.
        """
        try:
            document = json.loads(text)
            body = document["body"]
            signed = _digest(body) == document["sha256"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"is no manifest ({error})") from error
        if not signed:
            raise ValueError("does not have the SHA-256 that it names")
        try:
            if body["format"] != FORMAT:
                raise ValueError(f"has format {body['format']}; this version of jzero reads {FORMAT}")
            leaves = tuple(_entry(leaf) for leaf in body["leaves"])
            files = {_safe_file(name): _sum(name, sum) for name, sum in body["files"].items()}
            others = {name: body[name] for name in ("step", "data", "metrics", "saved_from")}
            _check_about(others["step"], others["metrics"], others["saved_from"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is not as jzero writes it ({error!r})") from error
        for name in ("path", "folder"):
            count = Counter(getattr(leaf, name) for leaf in leaves)
            if twice := [each for each, times in count.items() if times > 1]:
                raise ValueError(f"has two leaves of the {name} {twice[0]!r}")
        if sum(leaf.chunk_count for leaf in leaves) > len(files):  # nobody is to count so far in vain
            raise ValueError(f"has leaves of more chunks than the {len(files)} files that it names")
        return cls(leaves, files, **others)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a checkpoint.

        Raises:
            FileNotFoundError: There is none: the folder is no checkpoint of jzero, or one that was not finished.
            CorruptCheckpoint: It was changed.
        """
        path = folder / FILE
        try:
            return cls.from_json(path.read_bytes().decode())
        except FileNotFoundError:
            there = (
                "holds no jzero.json: it is no checkpoint of jzero, or was not finished"
                if folder.is_dir()
                else ("is not there")
            )
            raise FileNotFoundError(f"{folder} {there}.") from None
        except ValueError as error:
            raise CorruptCheckpoint(path, str(error)) from error

    def check_file(self, folder: Path, name: str, leaf: str | None = None) -> None:
        """Raises unless a file is there in its size and with its checksum; of a chunk only the checksum at its end.

        Raises:
            CorruptCheckpoint: It is not.
            PermissionError: It may not be read.
        """
        path, wanted = folder / name, self.files.get(name)
        if wanted is None:
            raise CorruptCheckpoint(path, "is not in the manifest", leaf)
        try:
            found = Sum.of_chunk(path) if wanted.check.startswith("crc32c:") else Sum.of(path)
        except FileNotFoundError:
            raise CorruptCheckpoint(path, "is missing", leaf) from None
        except PermissionError:  # that says nothing about the file
            raise
        except OSError as error:
            raise CorruptCheckpoint(path, f"cannot be read ({error})", leaf) from error
        if found.size != wanted.size:
            raise CorruptCheckpoint(path, f"has {found.size} bytes; it was written with {wanted.size}", leaf)
        if found != wanted:
            raise CorruptCheckpoint(path, f"has {found.check}; it was written with {wanted.check}", leaf)

    @property
    def small(self) -> list[str]:
        """The files that belong to no single leaf."""
        inside = {f"{ARRAYS}/{leaf.folder}" for leaf in self.leaves if leaf.stored is not None}
        return [name for name in self.files if "/".join(name.split("/")[:2]) not in inside]

    def check_small(self, folder: Path) -> None:
        """Checks the files that belong to no single leaf.

        Raises:
            CorruptCheckpoint: One is missing or was changed.
        """
        for name in self.small:
            self.check_file(folder, name)


def as_json(data: Any) -> Any:
    """What JSON holds, as it gives it back: a copy, whose tuples are lists.

    Raises:
        TypeError: JSON cannot hold it, or would give a key back as another one, such as 1 as "1".
        ValueError: It holds itself.

    Example:
        >>> as_json({"epoch": 3, "files": ("a", "b")})
        {'epoch': 3, 'files': ['a', 'b']}
    """
    text = json.dumps(data)
    _check_keys(data)
    return json.loads(text)


def _check_keys(data: Any) -> None:
    if isinstance(data, dict):
        if odd := [key for key in data if not isinstance(key, str)]:
            raise TypeError(f"the key {odd[0]!r} is a {type(odd[0]).__name__}, and JSON has strings for keys only")
        data = list(data.values())
    if isinstance(data, list | tuple):
        for each in data:
            _check_keys(each)


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(leaf: dict[str, Any]) -> Entry:
    # What a manifest says is checked here once, for it may come from anywhere: names must stay inside of the folder.
    if not is_safe(leaf["folder"]):
        raise ValueError(f"has a leaf in a folder named {leaf['folder']!r}, which may not be one")
    spec = leaf["spec"]
    shape, stored, chunk = leaf["shape"], leaf["stored_shape"], leaf["chunk"]
    sizes = [*shape, *stored, *chunk]
    if not leaf["path"] or not all(isinstance(key, str) for key in leaf["path"]):
        raise ValueError(f"has a leaf of the path {leaf['path']!r}")
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or len(chunk) != len(stored):
        raise ValueError(f"has a leaf {shown(tuple(leaf['path']))!r} of shape {shape} in chunks of {chunk}")
    words = 1 if leaf["dtype"].startswith(encoding.KEY) else 0
    if stored[: len(shape)] != shape or len(stored) != len(shape) + words:
        raise ValueError(f"has a leaf {shown(tuple(leaf['path']))!r} of shape {shape}, stored as {stored} in {chunk}")
    # What has elements is on the disk; else memory would be handed out as it is.
    dtype = encoding.stored_dtype(leaf["dtype"])
    if leaf["stored"] != (None if 0 in stored else dtype) or (leaf["stored"] is not None and 0 in chunk):
        raise ValueError(
            f"has a leaf {shown(tuple(leaf['path']))!r} of {leaf['dtype']}{tuple(shape)}, stored in {leaf['stored']}"
        )
    if spec is not None and not (isinstance(spec, list) and len(spec) >= len(shape) and all(map(_texts, spec))):
        raise ValueError(f"has a leaf {shown(tuple(leaf['path']))!r} of shape {shape}, cut over {spec!r}")
    return Entry(
        path=tuple(leaf["path"]),
        folder=leaf["folder"],
        dtype=leaf["dtype"],
        stored=leaf["stored"],
        spec=None if spec is None else tuple(map(tuple, spec)),
        **{name: tuple(int(size) for size in leaf[name]) for name in ("shape", "stored_shape", "chunk")},
    )


def _safe_file(name: str) -> str:
    if _FILE.fullmatch(name) is None or any(part in (".", "..") for part in name.split("/")):
        raise ValueError(f"names a file {name!r}, which none of a checkpoint can be")
    return name


def _sum(name: str, values: Any) -> Sum:
    if not isinstance(values, list) or len(values) != 2 or type(values[0]) is not int or type(values[1]) is not str:
        raise ValueError(f"has {values!r} for the sum of the file {name!r}")
    return Sum(*values)


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _check_about(step: Any, metrics: Any, saved: Any) -> None:
    """Raises unless what a manifest says beside leaves and files is of the kinds that jzero writes."""
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"has the step {step!r}")
    if not isinstance(metrics, dict) or not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError(f"has the metrics {metrics!r}")
    if not isinstance(saved, dict) or not isinstance(mesh := saved.get("mesh", {}), dict):
        raise ValueError(f"was saved from {saved!r}")
    counts = [*mesh.values(), saved.get("processes", 1), saved.get("min_shard_size", 0) + 1]
    tables = [saved.get(name) or {} for name in ("stage", "precision")]
    if (
        not all(type(count) is int and count >= 1 for count in counts)
        or not all(_texts(saved.get(name, [])) for name in ("data_axes", "replica_axes"))
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise ValueError(f"was saved from {saved!r}")
