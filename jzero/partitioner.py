"""What the partitioner exchanges over the batch axes that no stage promises."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from jzero.layout import Layout
from jzero.promise import Broken
from jzero.tally import Row

NUMBERS = 8
"""Single numbers for each leaf that norms, trust ratios and their like may exchange."""

Key = tuple[str, tuple[str, ...]]  # kind, axes

_MEANT = (
    "If the optimizer computes over whole leaves (Muon, Adafactor), say check(allow=['partitioner']); else an array "
    "has lost its placement there."
)


def of_partitioner(compiled: Sequence[Row], lowered: Sequence[Row], layout: Layout) -> Iterator[Broken]:
    """What the partitioner exchanges over the batch axes beside single numbers, which norms are.

    XLA:GPU packs several arrays into one, which then has no name. Of these it is what is more than jzero and the loss
    wrote down, beyond a few numbers for each leaf.
    """
    unnamed, named, written = Counter[Key](), Counter[Key](), Counter[Key]()
    for origin, row in compiled:
        if not set(row.axes) & set(layout.batch_axes):
            continue
        if origin.purpose == "partitioner" and math.prod(row.shape) > 1:
            yield Broken(
                "partitioner",
                f"the partitioner has put {row.count} {row.kind} of {row.dtype}{list(row.shape)} over "
                f"{', '.join(row.axes)} into the program, for {origin.name or 'what has no name'}. {_MEANT}",
            )
        if origin.purpose != "partitioner":
            counts = unnamed if origin.purpose == "unnamed" else named
            counts[row.kind, row.axes] += row.count * math.prod(row.shape)
    for _, row in lowered:
        written[row.kind, row.axes] += row.count * math.prod(row.shape)
    for (kind, axes), elements in unnamed.items():
        more = elements - max(0, written[kind, axes] - named[kind, axes])
        if more > NUMBERS * len(layout.leaves):
            yield Broken(
                "partitioner",
                f"XLA has joined {kind}s over {', '.join(axes)} under no name, with {more:,} elements more than jzero "
                f"and the loss wrote down: the partitioner has put them into the program. {_MEANT}",
            )
