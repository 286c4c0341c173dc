"""Bits per byte on held-out text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from experiments.gpt.job import Job


def make_evaluate(job: Job, batch_size: int) -> Callable[[Any, np.ndarray], float]:
    """Makes `evaluate(params, windows) -> bits per byte`, each window's bytes after its first counting the same.

    The params come as the layout stores them, at any stage, and are gathered for each batch of windows, in the dtype
    that the loss computes in.
    """
    whole = job.layout.sharding(P())

    @jax.jit
    def total(params, windows, counts):
        params = jax.lax.with_sharding_constraint(job.layout.computed(params), whole)
        return jnp.sum(job.loss_per_byte(params, windows) * counts[:, None])

    def evaluate(params: Any, windows: np.ndarray) -> float:
        nats = 0.0
        for start in range(0, len(windows), batch_size):
            part = windows[start : start + batch_size]
            # The last batch is filled up with windows that do not count, so that one compiled program does for all.
            rows = np.minimum(np.arange(batch_size), len(part) - 1)
            counts = (np.arange(batch_size) < len(part)).astype(np.float32)
            nats += float(total(params, *job.layout.put_batch((part[rows], counts))))
        return nats / np.log(2) / (len(windows) * (windows.shape[1] - 1))

    return evaluate
