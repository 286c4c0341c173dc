"""The leaves of a checkpoint, and the files that they are in."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from jzero.checkpoint import encoding
from jzero.checkpoint.names import shown

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
