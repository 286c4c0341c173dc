"""What goes wrong with a checkpoint: it is damaged, it is not the one that was asked for, or it was not saved."""

import errno
import itertools
import os
from collections.abc import Iterator, Sequence

SHOWN = 20
"""How many problems a message spells out; all are in the exception's `problems`."""


class CorruptCheckpoint(Exception):
    """A file of a checkpoint is missing, cut short or changed.

    Attributes:
        file: Path of the file.
        leaf: Path of the leaf that it belongs to, such as "params/w"; None if it belongs to all.
    """

    kind = "leaf"
    way_out = "Restore an earlier step, or bring this file back from a copy."

    def __init__(self, file: object, reason: str, leaf: str | None = None):
        self.file, self.leaf = str(file), leaf
        whose = f"{self.kind} {leaf}: " if leaf is not None else ""
        super().__init__(f"{whose}{file} {reason}. {self.way_out}")


class CheckpointMismatch(ValueError):
    """A checkpoint does not hold what was asked for.

    Attributes:
        problems: For each leaf that does not fit what is wrong, and what to do about it.
    """

    def __init__(self, what: str, problems: Sequence[str], way_out: str = ""):
        self.problems = tuple(problems)
        count = f"{len(problems)} leaves do" if len(problems) > 1 else "1 leaf does"
        lines = [f"{what}: {count} not fit.", *_listed(problems[:SHOWN])]
        if len(problems) > SHOWN:
            lines.append(f"  and {len(problems) - SHOWN} more; all are in the error's `problems`.")
        super().__init__("\n".join([*lines, way_out] if way_out else lines))


def _listed(problems: Sequence[str]) -> Iterator[str]:
    """Problems, one in a line; what to do about several, the sentences behind the first, is said once below them."""
    for advice, several in itertools.groupby((problem.partition(". ") for problem in problems), lambda parts: parts[2]):
        several = list(several)
        if not advice or len(several) < 3:
            yield from (f"  {''.join(parts)}" for parts in several)
        else:
            yield from (f"  {parts[0]}." for parts in several)
            yield f"    For each of these {len(several)}: {advice}"


class SaveFailed(RuntimeError):
    """A checkpoint was not saved; those before it are as they were."""

    @property
    def full(self) -> bool:
        """Whether it was for a full disk."""
        return disk_full(self.__cause__)


class RestoreFailed(RuntimeError):
    """Another process of the run could not read its part of a checkpoint, and says why in an error of its own."""


class BeingWritten(SaveFailed):
    """Another process is writing at the same place."""

    def __init__(self, folder: object, who: str):
        super().__init__(
            f"{folder} is being written by {who or 'another process'}. Wait for it or stop it, or choose another place."
        )


class InTheWay(FileExistsError):
    """Something is there, and may not be replaced."""

    def __init__(self, folder: object):
        super().__init__(
            f"{folder} is there already. Pass overwrite=True (--overwrite) to replace it, or choose another place."
        )


def disk_full(error: BaseException | None) -> bool:
    """Whether an error says that a disk is full; tensorstore's are ValueErrors with the text of the system's."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


class LimitExceeded(RuntimeError):
    """Something cannot be done within the memory or the disk that there is; nothing was written.

    Attributes:
        needed: Bytes that would do.
        limit: Bytes that there are.
    """

    def __init__(self, message: str, needed: int, limit: int):
        self.needed, self.limit = needed, limit
        super().__init__(message)
