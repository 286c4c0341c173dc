"""A checkpoint to read from, whoever wrote it: its leaves, and any region of each, checked if it has checksums."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jzero.checkpoint import orbax_reader, store
from jzero.checkpoint.chunks import Region, overlap
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CorruptCheckpoint
from jzero.checkpoint.manifest import FILE, Manifest
from jzero.checkpoint.names import shown
from jzero.checkpoint.place import OLD, TMP, stale, standing
from jzero.checkpoint.store import Piece
from jzero.wording import few

UNFINISHED = ".orbax-checkpoint-tmp"
"""Is in the name of what orbax has not finished."""


def find(folder: Path) -> Path:
    """The checkpoint that a folder is, or the latest one in it. One whose replacement was stopped is found as well.

    Raises:
        FileNotFoundError: Neither.
        ValueError: It is what a write has not finished.
    """
    check_finished(folder)
    folder = standing(folder)
    if is_checkpoint(folder):
        return folder
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there, or is no folder; wanted a checkpoint, or a folder of them.")
    names = {path.name.removesuffix(OLD) for path in folder.iterdir()}
    steps = {int(name): path for name in names if name.isdecimal() and is_checkpoint(path := standing(folder / name))}
    if not steps:
        found = ", ".join(path.name for path in left_behind(folder))
        inner = sorted({str(path.parents[1]) for path in folder.glob(f"*/*/{FILE}")})
        raise FileNotFoundError(
            f"{folder} is no checkpoint and holds none: it has neither {FILE} nor orbax's {orbax_reader.ITEM}, and no "
            f"numbered folder with one."
            + (f" Did you mean {few(inner)}?" if inner else "")
            + (f" It has what stopped saves left behind: {found}." if found else "")
        )
    return steps[max(steps)]


def check_finished(path: Path) -> None:
    """Raises if something that is to be read is, or is inside of, what a write has not finished.

    Raises:
        ValueError: It is.
    """
    if any(part.endswith(TMP) for part in path.parts):
        raise ValueError(f"{path} is not whole: {TMP} ends the name of what is still being written, or was stopped.")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, of jzero or of orbax."""
    return (folder / FILE).is_file() or orbax_reader.is_checkpoint(folder)


def left_behind(folder: Path) -> list[Path]:
    """What saves and other writes that were stopped have left in a folder."""
    orbax = [path for path in folder.iterdir() if UNFINISHED in path.name] if folder.is_dir() else []
    return sorted({*stale(folder), *orbax})


@dataclass(frozen=True)
class Origin:
    """A checkpoint to read from.

    Attributes:
        folder: Where it is.
        manifest: What it holds; of one that orbax wrote, made of its metadata, without files.
        specs: Of one that orbax wrote, how tensorstore opens each array, by the name of its leaf; None: jzero wrote it.
        others: What it holds beside arrays, and what that is.
    """

    folder: Path
    manifest: Manifest
    specs: Mapping[tuple[str, ...], dict[str, Any]] | None = None
    others: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> "Origin":
        """Reads what a checkpoint holds. No array is read.

        Raises:
            FileNotFoundError: There is none.
            CorruptCheckpoint: Its description is damaged.
        """
        folder = find(Path(folder))
        if (folder / FILE).is_file():
            manifest = Manifest.read(folder)
            manifest.check_small(folder)
            return cls(folder, manifest)
        found = orbax_reader.described(folder)
        step = int(folder.name) if folder.name.isdecimal() else None
        manifest = Manifest(found.leaves, step=step, metrics=found.metrics, saved_from=found.saved_from)
        specs = {leaf.path: spec for leaf, spec in zip(found.leaves, found.specs, strict=True)}
        return cls(folder, manifest, specs, found.others)

    @property
    def leaves(self) -> tuple[Entry, ...]:
        """Its leaves."""
        return self.manifest.leaves

    @property
    def has_checksums(self) -> bool:
        """Whether damage can be told from data."""
        return self.specs is None

    def array(self, leaf: Entry) -> Any:
        """The array of a leaf, as tensorstore opens it; its description is checked."""
        if self.specs is None:
            self.manifest.check_file(self.folder, leaf.file(), leaf.name)
            return store.open_array(self.folder, leaf)
        spec = self.specs[leaf.path]
        try:
            return ts.open(spec, open=True, read=True, context=_context()).result()
        except ValueError as error:
            raise self._corrupt(leaf, None, error) from error

    def job(
        self,
        leaf: Entry,
        array: Any,
        number: tuple[int, ...],
        region: Region,
        take: Callable[[Region, np.ndarray], Any],
    ) -> store.Job:
        """Reads a region inside of one chunk, for `store.windowed`; `take` gets it, once the chunk has been checked.

        Bytes count the whole chunk, for it is what is read and decoded.

        Raises:
            CorruptCheckpoint: The file is missing, or has not the size or the checksum that it was written with; its
                content is checked when `take` would get it.
        """
        if self.specs is None:
            self.manifest.check_file(self.folder, leaf.file(number), leaf.name)

        def done(future):
            try:
                found = future.result()
            except ValueError as error:
                raise self._corrupt(leaf, number, error) from error
            return take(region, found)

        return leaf.chunk_nbytes, lambda: array[tuple(slice(*ends) for ends in region)].read(), done

    def jobs(
        self, leaf: Entry, array: Any, region: Region, take: Callable[[Region, np.ndarray], None]
    ) -> Iterator[store.Job]:
        """Reads any region, chunk by chunk."""
        return (self.job(leaf, array, number, both, take) for number, both in _chunks(leaf, region))

    def chunks(
        self, wanted: Iterable[tuple[Entry, tuple[int, ...], Region]], limit: int = store.IN_FLIGHT
    ) -> Iterator[Piece]:
        """Reads whole chunks and yields them in order, each checked.

        Args:
            wanted: Leaf, number and region of each chunk.
            limit: Bytes of chunks that are read at once.

        Raises:
            CorruptCheckpoint: A chunk, or the description of an array, is missing or was changed.
        """

        def jobs() -> Iterator[store.Job]:
            leaf = array = None
            for entry, number, region in wanted:
                if entry is not leaf:
                    leaf, array = entry, self.array(entry)
                yield self.job(entry, array, number, region, functools.partial(Piece, entry, number))

        return store.results(jobs(), limit)

    def _corrupt(self, leaf: Entry, number: tuple[int, ...] | None, error: Exception) -> CorruptCheckpoint:
        file = self.folder / (shown(leaf.path) if self.specs is not None else leaf.file(number))
        text = str(error).split(" [tensorstore_spec")[0].split(" [source")[0]
        text = re.sub(r'^[A-Z_]+: Error reading local file "[^"]*": ', "", text)  # the file is named already
        return CorruptCheckpoint(file, f"cannot be read ({text})", leaf.name)


@functools.cache
def _context() -> ts.Context:
    """What tensorstore shares between arrays of orbax; one for the process, as `store` has it, for the same reason."""
    # OCDBT reads the nodes of its index again and again unless they fit; arrays are not kept.
    return ts.Context({"cache_pool": {"total_bytes_limit": 2**22}, "data_copy_concurrency": {"limit": 2}})


def _chunks(leaf: Entry, region: Region) -> Iterator[tuple[tuple[int, ...], Region]]:
    """Number of each chunk that a region overlaps, and what they share."""
    if not region:
        yield (), ()
        return
    numbers: list[tuple[int, ...]] = [()]
    for (begin, end), step in zip(region, leaf.chunk, strict=True):
        numbers = [(*number, n) for number in numbers for n in range(begin // step, -(-end // step))]
    for number in numbers:
        cell = tuple((n * step, (n + 1) * step) for n, step in zip(number, leaf.chunk, strict=True))
        both = overlap(cell, region)
        assert both is not None
        yield number, both
