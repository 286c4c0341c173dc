"""`jzero.json`: what a checkpoint holds, and a checksum of each of its files. Written last, it makes it whole."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jzero.checkpoint import vetted
from jzero.checkpoint.entry import ARRAYS, Entry, Sum
from jzero.checkpoint.errors import CorruptCheckpoint

FILE = "jzero.json"
FORMAT = 1


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
            leaves = tuple(vetted.entry(leaf) for leaf in body["leaves"])
            files = {vetted.file(name): vetted.sum_of(name, sum) for name, sum in body["files"].items()}
            others = {name: body[name] for name in ("step", "data", "metrics", "saved_from")}
            vetted.check_about(others["step"], others["metrics"], others["saved_from"])
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
