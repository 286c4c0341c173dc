"""Whether programs agree, how long each takes beside the others, and how sure that is."""

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians, and the interval that holds it with 95% confidence."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Length of the interval."""
        return self.high - self.low

    def __str__(self) -> str:
        """As in "0.993 [0.981, 1.004]"."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_medians(some: np.ndarray, others: np.ndarray) -> Ratio:
    """The ratio of two medians over the same rounds, with a percentile bootstrap that draws whole rounds.

    Example:
        >>> ratio_of_medians(np.full(50, 3.0), np.full(50, 2.0))
        Ratio(value=1.5, low=1.5, high=1.5)
    """
    if some.shape != others.shape or some.ndim != 1 or not some.size:
        raise ValueError(f"ratio_of_medians: {some.shape} and {others.shape}; wanted one time of each per round.")
    drawn = np.random.default_rng(0).integers(0, some.size, (RESAMPLES, some.size))
    ratios = np.median(some[drawn], axis=1) / np.median(others[drawn], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Ratio(float(np.median(some) / np.median(others)), float(low), float(high))


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, float]]:
    """Times each call once a round, in another order each round, and waits for each result; yields the rounds."""
    order, shuffle = list(calls), random.Random(0).shuffle
    with _no_collection():
        for number in range(-2, rounds):  # the first two warm up
            shuffle(order)
            seconds = {}
            for name in order:
                start = clock()
                jax.block_until_ready(calls[name]())
                seconds[name] = clock() - start
            if number >= 0:
                yield {name: seconds[name] for name in calls}


def compile_seconds(make: Callable[[], Any], args: tuple) -> tuple[float, float]:
    """Seconds to trace and lower what `make` jits, and to compile it, with nothing left from before."""
    jax.clear_caches()
    with _no_collection():
        start = time.perf_counter()
        lowered = make().lower(*args)
        traced = time.perf_counter()
        lowered.compile()
        return traced - start, time.perf_counter() - traced


def error(tree: Any, wanted: Any) -> float:
    """The largest relative difference of a leaf, in the L2 norm; infinite where something is not finite."""

    def one(x, y):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        apart = np.linalg.norm(x - y) / max(np.linalg.norm(y), np.finfo(np.float32).tiny)
        return float(apart) if np.isfinite(apart) else float("inf")

    return max(jax.tree.leaves(jax.tree.map(one, tree, wanted)))


@contextmanager
def _no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
