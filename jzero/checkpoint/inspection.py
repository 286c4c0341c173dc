"""What a checkpoint holds, from its descriptions alone: no array is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from jzero.checkpoint.origin import Origin, left_behind
from jzero.checkpoint.placing import Placed, idle, placed
from jzero.checkpoint.recipe import same


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        origin: The checkpoint.
        stale: What saves that were stopped have left behind beside it.
        fits: Where its leaves would lie, if that was asked.
        idle: Axes of that mesh that would cut no leaf, and what that means.
    """

    origin: Origin
    stale: tuple[Path, ...]
    fits: tuple[Placed, ...]
    idle: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return sum(leaf.nbytes for leaf in self.origin.leaves)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of the tree."""
        found: dict[str, int] = {}
        for leaf in self.origin.leaves:
            found[leaf.path[0]] = found.get(leaf.path[0], 0) + leaf.nbytes
        return found


def inspect(
    folder: str | PathLike[str], *, mesh: Mapping[str, int] | None = None, stage: int | None = None
) -> Inspection:
    """Looks at a checkpoint of jzero or of orbax.

    Args:
        folder: The checkpoint, or a folder of them, of which the latest is taken.
        mesh: Size of each axis of a mesh that it might go to; None: that is not asked.
        stage: The stage there; None: 3.

    Raises:
        FileNotFoundError: There is none.
        CorruptCheckpoint: Its description is damaged.
        ValueError: A mesh or stage that makes no sense.
    """
    origin = Origin.open(Path(folder))
    stale = {*left_behind(Path(folder)), *left_behind(origin.folder.absolute().parent)}
    fits: list[Placed] = []
    axes: dict[str, str] = {}
    if mesh is not None:
        leaves, saved_from = [same(leaf) for leaf in origin.leaves], origin.manifest.saved_from
        fits = placed(leaves, saved_from, mesh, 3 if stage is None else stage)
        axes = idle(fits, saved_from, mesh)
    return Inspection(origin, tuple(sorted(stale)), tuple(fits), axes)
