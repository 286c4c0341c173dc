"""The processes of a run, and how they wait for each other and hear what went wrong."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed

TIMEOUT = 600.0
"""Seconds that a process waits for the others."""

_times: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""How often processes have met under each name. Not over all names: threads meet in another order in each process."""


@dataclass(frozen=True)
class Processes:
    """This process among all.

    Attributes:
        index: Its number.
        count: How many there are.
        timeout: Seconds that it waits for the others.
    """

    index: int = 0
    count: int = 1
    timeout: float = TIMEOUT

    @classmethod
    def of_jax(cls, timeout: float = TIMEOUT) -> "Processes":
        """Those of `jax.distributed`."""
        return cls(jax.process_index(), jax.process_count(), timeout)

    def meet(self, name: str, failure: BaseException | None = None) -> dict[int, str]:
        """Waits until all processes have come here.

        They do so through the coordinator of `jax.distributed`, not on devices and not through files: threads beside a
        training step may do so as well, and a full disk stops nobody.

        Args:
            name: A name that all processes use here, and each as often as the others.
            failure: What went wrong in this process.

        Returns:
            What went wrong, by the number of the process; the same everywhere.

        Raises:
            RuntimeError: Some did not come in time.
        """
        failed = {} if failure is None else {self.index: f"{type(failure).__name__}: {failure}"}
        if self.count == 1:
            return failed
        client: Any = distributed.global_state.client  # JAX has no public name for it
        name = f"{name}/{next(_times[name])}"
        for index, text in failed.items():
            client.key_value_set(f"jzero/{name}/failed/{index}", text)
        client.wait_at_barrier(f"jzero/{name}", round(self.timeout * 1000))
        found = client.key_value_dir_get(f"jzero/{name}/failed/")
        return {int(key.rpartition("/")[2]): text for key, text in found}
