"""Collectives and how often a program runs them: added up, in loops and in conditionals."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

import jax

# How often an array crosses each device's link in a ring algorithm, before the factor (n - 1) / n.
_RING = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective on one shape of array, and how often a call of the program runs it.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute" or "collective-broadcast".
      dtype: numpy's name of the dtype on the wire, such as "float32" or "bfloat16".
      shape: of the whole array: the gathered result, the scattered input, the reduced, exchanged or sent operand.
      axes: the mesh axes that it runs over, in the mesh's order, without those of size 1; () when they cannot be told.
      group: how many devices take part in each group.
      count: runs per call of the program, with the trip counts of the loops around it multiplied in.
      exact: False where the program does not tell `count`: in a `while` of unknown trip count, `count` is for one pass;
        in a conditional, what every branch runs is exact, and what some branch runs beyond that is not.

    Example:
      >>> row = Collective("all-reduce", "bfloat16", (1024,), axes=("data",), group=8, count=3)
      >>> row.bytes, row.wire_bytes
      (6144, 10752.0)
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    group: int
    count: int = 1
    exact: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of the whole array, times `count`."""
        bits = math.prod(self.shape) * jax.dtypes.itemsize_bits(jax.numpy.dtype(self.dtype))
        return self.count * -(-bits // 8)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends: `bytes` times (n - 1) / n in a group of n, twice that for an all-reduce.

        This is what ring algorithms send, and no all-reduce can do with less (Patarasuk and Yuan, "Bandwidth optimal
        all-reduce algorithms for clusters of workstations", 2009). A permute or a broadcast sends the array once.
        """
        return self.bytes * wire_factor(self.kind, self.group)


def wire_factor(kind: str, group: int) -> float:
    """Bytes that each device of a group sends in a collective, over the bytes of the whole array.

    Example:
      >>> wire_factor("all-reduce", 4), wire_factor("all-gather", 4), wire_factor("collective-permute", 4)
      (1.5, 0.75, 1.0)
    """
    return _RING[kind] * (group - 1) / group if kind in _RING else 1.0


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose a collective is.

    Attributes:
      purpose: What jzero does it for (`scopes.Purpose`); "loss" for one that the loss itself makes, "partitioner" for
        one that the partitioner has put in, "unnamed" where XLA has lost the name.
      leaf: Path of the leaf, if it is of one.
      name: Of those that are not jzero's, what jax calls the operation, as in "shard_map/psum" or "norm/reduce_sum".
    """

    purpose: str
    leaf: str = ""
    name: str = ""


Row = tuple[Origin, Collective]


def merged(rows: Iterable[Row]) -> list[Row]:
    """Equal rows as one, counts added up."""
    counts: dict[Row, int] = {}
    for row in rows:
        one = _run(row, 1)
        counts[one] = counts.get(one, 0) + row[1].count
    return [_run(one, n) for one, n in counts.items() if n]


def _run(row: Row, count: int, *, exact: bool = True) -> Row:
    """The same, run so often."""
    origin, one = row
    return origin, dataclasses.replace(one, count=count, exact=one.exact and exact)


def repeated(condition: list[Row], body: list[Row], trips: int | None) -> list[Row]:
    """What a loop runs; for one pass if it does not say how often."""
    if trips is None:
        return [_run(row, row[1].count, exact=False) for row in condition + body]
    # The condition runs once more than the body, to find that the loop is over.
    runs = [(row, trips + 1) for row in condition] + [(row, trips) for row in body]
    return [_run(row, row[1].count * n) for row, n in runs]


def either(branches: list[list[Row]]) -> list[Row]:
    """What a conditional runs: what every branch does, and what some branch does beyond that."""
    counts = [{_run(row, 1): row[1].count for row in branch} for branch in branches]
    rows = []
    for one in dict.fromkeys(itertools.chain(*counts)):
        n = [branch.get(one, 0) for branch in counts]
        rows.append(_run(one, min(n)))
        rows.append(_run(one, max(n) - min(n), exact=False))
    return rows
