"""What a step holds on a device beside what is stored: gradients on their way, and params that are gathered."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jzero.precision import Precision
from jzero.stage import Stage
from jzero.traffic import Piece

LARGEST = 1 / 3
"""Share of a count that its largest leaf is taken to have: that of an MLP's kernels, stacked over all blocks."""


@dataclass(frozen=True)
class Inside:
    """Bytes on one device that live inside of a step only, beside activations.

    An approximation, from what XLA's programs for H200s were seen to hold. Against the peak of ten compiled steps of a
    scanned GPT (with a context so short that activations take nothing; stages 0 to 3, four precisions, 1 to 8
    microbatches, 2 to 8 shards, replicas; jax 0.10) the total of an `Estimate` was 4% too small to 11% too large, and
    this part 8% too small to 21% too large. `JAX_PLATFORMS=cpu pytest -m slow tests/test_estimate.py` measures them
    again; it needs `jzero[preflight]`, and no GPU.

    Attributes:
        gradients: The reduced gradients; twice where they are reduced and summed in each of several microbatches; at
            stage 3 the largest leaf's once more (a loop's are put together from its parts).
        local: Gradients that are not reduced yet. Reduced at the end: all of them, with several microbatches as a sum
            beside the last one's, else with a copy of the largest leaf, in the dtype and order of the reduction.
            Reduced by block: those of two blocks, and such a copy of one.
        gathered: Params that are gathered: two blocks at stage 3 (one is computed with, the next is on its way).
    """

    gradients: int
    local: int
    gathered: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.local + self.gathered


def inside(
    pieces: Sequence[Piece], reduced: int, stage: Stage, precision: Precision, *, microbatches: int, layers: int
) -> Inside:
    """What a step holds beside what is stored and activations.

    Args:
        pieces: The params of one model shard.
        reduced: Bytes of the reduced gradients on one device.
        stage: The stage.
        precision: The dtypes.
        microbatches: m.
        layers: How many blocks the params consist of.

    Example:
        >>> from jzero.traffic import piece_of_count
        >>> bf16, stage = jzero.Precision(), jzero.STAGES[2]
        >>> inside([piece_of_count(1000, stage, bf16)], 500, stage, bf16, microbatches=1, layers=10)
        Inside(gradients=500, local=800, gathered=0)
    """
    gradients, gathered = float(reduced), 0.0
    trained = [piece for piece in pieces if piece.trainable]
    born = sum(piece.elements * piece.compute.itemsize for piece in trained)
    summed = sum(piece.elements * precision.sum_dtype(piece.compute).itemsize for piece in trained)
    cast = [piece.elements * (precision.reduce or piece.compute).itemsize for piece in trained]
    largest = max(cast) if len(cast) > 1 else LARGEST * sum(cast)
    if stage.reduce == "block":
        gradients *= 2 if microbatches > 1 else 1  # those of all microbatches, and of this one
        local = (2 * born + sum(cast)) / layers
    elif microbatches > 1:
        local = born + summed - (gradients if stage.grads == "replicated" else 0)  # which are reduced in place
    elif stage.grads == "replicated":
        local = 2 * born / layers
    else:
        local = born + largest
    if stage.params == "sharded":
        gradients += reduced * largest / sum(cast)
        kept = ((piece, 2 / layers if piece.again else 1) for piece in pieces if piece.is_cut)
        gathered = sum(piece.elements * piece.compute.itemsize * share for piece, share in kept)
    return Inside(math.ceil(gradients), math.ceil(local), math.ceil(gathered))
