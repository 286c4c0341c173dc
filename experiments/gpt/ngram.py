"""The yardstick: an order-2 byte model, which looks at the two bytes before and at nothing else."""

import numpy as np

STRENGTH = 32.0
CHUNK = 2**25


class ByteTrigrams:
    """Probability of a byte after two others, from counts, each order smoothed by the one below.

    p(c | a b) = (n(a b c) + s p(c | b)) / (n(a b) + s), p(c | b) and p(c) likewise, down to 1/256: a hierarchical
    Dirichlet model (MacKay and Peto, "A hierarchical Dirichlet language model", 1995).

    Args:
        text: uint8 bytes to count, three or more.
        strength: s above, how much the order below weighs, in counts.
    """

    def __init__(self, text: np.ndarray, strength: float = STRENGTH):
        counts = np.zeros(256**3, np.int64)
        for start in range(0, len(text) - 2, CHUNK):
            piece = text[start : start + CHUNK + 2].astype(np.int64)
            counts += np.bincount((piece[:-2] << 16) + (piece[1:-1] << 8) + piece[2:], minlength=256**3)
        self.counts = counts.reshape(256, 256, 256)
        self.strength = strength
        self.after_none = self._smooth(self.counts.sum((0, 1)), np.full(256, 1 / 256))
        self.after_one = self._smooth(self.counts.sum(0), self.after_none)
        self.totals = self.counts.sum(2)

    def _smooth(self, counts: np.ndarray, below: np.ndarray) -> np.ndarray:
        return (counts + self.strength * below) / (counts.sum(-1, keepdims=True) + self.strength)

    def probabilities(self, text: np.ndarray) -> np.ndarray:
        """Probability of each byte of `text` after the first two, float64 (len(text) - 2,)."""
        a, b, c = text[:-2], text[1:-1], text[2:]
        return (self.counts[a, b, c] + self.strength * self.after_one[b, c]) / (self.totals[a, b] + self.strength)

    def bits_per_byte(self, text: np.ndarray) -> float:
        """Mean of -log2 of the probabilities."""
        return float(-np.log2(self.probabilities(text)).mean())
