"""The processes of a run, and how they wait for each other."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

TIMEOUT = 600.0
"""Seconds that a process waits for the others."""


@dataclass(frozen=True)
class Processes:
    """This process among all.

    Attributes:
        index: Its number.
        count: How many there are.
        barrier: Waits until all have called it with the same name, which is used once; raises after a time.
    """

    index: int = 0
    count: int = 1
    barrier: Callable[[str], None] = lambda name: None

    @classmethod
    def of_jax(cls, timeout: float = TIMEOUT) -> "Processes":
        """Those of `jax.distributed`. They wait through its coordinator, not on devices: threads beside a training
        step may do so as well.
        """
        if jax.process_count() == 1:
            return cls()
        from orbax.checkpoint import multihost  # a quarter of a second, for runs that need it

        wait = multihost.get_barrier_sync_fn()
        return cls(
            jax.process_index(),
            jax.process_count(),
            lambda name: wait(key=f"jzero/{name}", timeout_ms=round(timeout * 1000)),
        )
