"""Rewriting a checkpoint: other chunks, other leaves, other dtypes, in bounded memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from jzero.checkpoint import encoding
from jzero.checkpoint.blocks import MEMORY, Budget, Progress, Reader, budget, regions, shape_of_blocks, side_by_side
from jzero.checkpoint.chunks import LARGEST, Region, grid, halved, inside
from jzero.checkpoint.compare import different
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.names import folders
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.patterns import Pattern, any_match
from jzero.checkpoint.placing import chunk_for, placed
from jzero.checkpoint.recipe import Made, same
from jzero.checkpoint.rename import Rule, applied
from jzero.checkpoint.room import check_apart, check_disk, check_free, is_of_checkpoint, target
from jzero.checkpoint.store import Piece
from jzero.checkpoint.write import write

BLOCK = 4096
"""Bytes of disk that are given out at a time: a file takes up to so many more than it has."""


@dataclass(frozen=True)
class Plan:
    """What a rewrite will do.

    Attributes:
        origin: The checkpoint that it reads.
        leaves: What it makes.
        manifest: What the new checkpoint holds, without files.
        budget: What memory is for.
        disk: Bytes that the new checkpoint takes on the disk, about.
    """

    origin: Origin
    leaves: tuple[Made, ...]
    manifest: Manifest
    budget: Budget
    disk: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements of the new checkpoint."""
        return sum(entry.nbytes for entry in self.manifest.leaves)

    def work(self) -> Iterator[tuple[Made, Entry, Region]]:
        """Each leaf with elements, how it is written, and each of its blocks."""
        for leaf, entry in zip(self.leaves, self.manifest.leaves, strict=True):
            if entry.stored is not None:
                for region in regions(leaf, shape_of_blocks(leaf, entry.chunk, self.budget.block)):
                    yield leaf, entry, region


def _plan(source, drop, only, rules, mesh, stage: int, chunk: int, memory: int) -> Plan:
    """Says what `reshard` will do with these options. Nothing is read but descriptions, and nothing is written."""
    if chunk < 1:
        raise ValueError(f"chunks of {chunk} bytes; wanted 1 or more.")
    origin = Origin.open(Path(source))
    what, leaves = str(origin.folder), [same(entry) for entry in origin.leaves]
    problems = [
        f"{option} {pattern.text} matches none of the {len(leaves)} leaves. `jzero inspect` lists them."
        for option, patterns in (("--drop", drop), ("--only", only))
        for pattern in patterns
        if not any(pattern.match(leaf.path) for leaf in leaves)
    ]
    if problems:
        raise CheckpointMismatch(what, problems)
    leaves = [leaf for leaf in leaves if not any_match(drop, leaf.path) and (not only or any_match(only, leaf.path))]
    if not leaves:
        raise CheckpointMismatch(what, ["--drop and --only leave no leaf."])
    leaves = applied(what, rules, leaves)
    chunks = _chunks(origin, leaves, mesh, stage, chunk)
    entries = tuple(
        Entry(leaf.path, ".".join(folder), leaf.shape, leaf.dtype, leaf.stored, leaf.stored_shape, shape, leaf.spec)
        for leaf, folder, shape in zip(leaves, folders([leaf.path for leaf in leaves]), chunks, strict=True)
    )
    shared = budget(
        f"reshard {what}",
        memory,
        max((part.source.chunk_nbytes for leaf in leaves for part in leaf.parts), default=0),
        max((entry.chunk_nbytes for entry in entries), default=0),
    )
    disk = sum(entry.chunk_count * (entry.chunk_nbytes + BLOCK) + 2 * BLOCK for entry in entries)
    manifest = replace(origin.manifest, leaves=entries, files={})
    return Plan(origin, tuple(leaves), manifest, shared, disk + len(manifest.to_json()) * 2)


def _chunks(origin: Origin, leaves: Sequence[Made], mesh, stage: int, largest: int) -> list[tuple[int, ...]]:
    """The shape of the chunks of each leaf: parts of a shard on a mesh, or as they are if that will do."""
    if mesh is not None:
        where = placed(leaves, origin.manifest.saved_from, mesh, stage)
        refused = [f"{one.leaf.name}: {one.leaf.described}, {one.note}." for one in where if one.refused]
        if refused:
            raise CheckpointMismatch(f"{origin.folder} on {dict(mesh)}", refused)
        return [chunk_for(one, largest) for one in where]
    return [_chunk(leaf, largest) for leaf in leaves]


def _chunk(leaf: Made, largest: int) -> tuple[int, ...]:
    if leaf.stored is None:
        return leaf.stored_shape
    whole = leaf.stored_shape
    if len(leaf.parts) == 1 and leaf.parts[0].source.stored_shape == whole:
        whole = leaf.parts[0].source.chunk  # parts of that are read at once
    return halved(whole, encoding.dtype_of(leaf.stored).itemsize, largest)


def reshard(
    source: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    drop: Sequence[Pattern] = (),
    only: Sequence[Pattern] = (),
    rules: Sequence[Rule] = (),
    mesh: Mapping[str, int] | None = None,
    stage: int = 3,
    chunk: int = LARGEST,
    memory: int = MEMORY,
    overwrite: bool = False,
    progress: Progress = lambda task, done, total: None,
) -> Plan:
    """Rewrites a checkpoint of jzero or of orbax as one of jzero, which plain orbax reads as well.

    It is read in blocks and written in chunks, in bounded memory. What was written is read back and compared with the
    source before the new checkpoint gets its name; until then nothing of it is there.

    Args:
        source: The checkpoint, or a folder of them, of which the latest is taken.
        folder: Where the new one will be.
        drop: Leaves to leave out.
        only: Leaves to keep; empty: all.
        rules: How leaves are renamed, stacked, unstacked, split, merged and cast, one rule after another.
        mesh: Size of each axis of the mesh that it will be read on: each device then reads whole chunks only. None:
            chunks stay as they are where they are not too large.
        stage: The stage at which it will be read on that mesh.
        chunk: Most bytes of a chunk.
        memory: Bytes of memory that it may take, over those of the process before.
        overwrite: Whether a checkpoint that is there is replaced, in the end.
        progress: Is told what is being done.

    Returns:
        What was done.

    Raises:
        FileNotFoundError: There is no checkpoint.
        FileExistsError: The new one is there already.
        CorruptCheckpoint: A file of the source is damaged, or one that was written.
        CheckpointMismatch: A pattern or a rule does not fit; all of them.
        LimitExceeded: Memory or disk are too small; nothing was written.
        SaveFailed: It could not be written; nothing of it is left.
        ValueError: An option that makes no sense.
    """
    where = target(folder)
    found = _plan(source, drop, only, rules, mesh, stage, chunk, memory)
    check_apart(found.origin.folder, where)
    check_free(where, overwrite, is_of_checkpoint, "a checkpoint of jzero")
    check_disk(where, found.disk, ", or --drop, --only or --cast more")

    def pieces() -> Iterator[Piece]:
        reader = Reader(found.origin, found.budget.reading, _counted(progress, "rewriting", found.nbytes))
        wanted = ((leaf, region) for leaf, _, region in found.work())
        for (_, entry, region), values in zip(found.work(), reader.blocks(wanted, found.budget.ahead), strict=True):
            for number, part in _within(entry, region):
                yield Piece(entry, number, part, values[inside(part, region)])
            del values  # or it would be there while the next but one is read

    def check(tmp: Path, manifest: Manifest) -> None:
        written = Origin(tmp, manifest)
        before = Reader(found.origin, found.budget.reading, _counted(progress, "verifying", found.nbytes))
        after = Reader(written, found.budget.reading)
        with side_by_side(before, after) as both:
            for leaf, entry, region in found.work():
                if different(*both(leaf, same(entry), region)).any():
                    raise CorruptCheckpoint(
                        where / entry.file(), "would not hold what was read; memory or disk of this machine", leaf.name
                    )

    write(where, found.manifest, pieces(), overwrite=overwrite, check=check)
    return found


def _within(entry: Entry, region) -> Iterator:
    """The chunks of a leaf that a block of whole chunks has."""
    begins = [begin // step for (begin, _), step in zip(region, entry.chunk, strict=True)]
    for number, part in grid([end - begin for begin, end in region], entry.chunk):
        yield (
            tuple(n + first for n, first in zip(number, begins, strict=True)),
            tuple((a + begin, b + begin) for (a, b), (begin, _) in zip(part, region, strict=True)),
        )


def _counted(progress: Progress, task: str, total: int) -> Callable[[int], None]:
    done = 0

    def more(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(task, done, total)

    return more
