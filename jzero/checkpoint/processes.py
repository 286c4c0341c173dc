"""The processes of a run, and how they wait for each other and hear what went wrong."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed
from jax.sharding import Mesh

from jzero.checkpoint.errors import RestoreFailed

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

    @classmethod
    def of_mesh(cls, mesh: Mesh, timeout: float = TIMEOUT) -> "Processes":
        """Those that have devices of a mesh, if these are all there are; else this one, which then waits for none."""
        there = {device.process_index for device in mesh.devices.flat}
        return cls.of_jax(timeout) if len(there) == jax.process_count() else cls()

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """What goes wrong in here in one process stops all at its end. Nothing in here may wait for other processes.

        Raises:
            RestoreFailed: It went wrong in another one.
        """
        try:
            yield
        except Exception as error:
            self.meet(name, error)
            raise
        if failed := self.meet(name):
            raise RestoreFailed("; ".join(f"process {index}: {text}" for index, text in sorted(failed.items())))

    def first(self, name: str, work: Callable[[], int]) -> int:
        """What the first process finds; folders on other hosts may be seen there later.

        Raises:
            RestoreFailed: It went wrong there.
        """
        found = 0
        with self.together(name):
            if self.index == 0:
                found = work()
                if self.count > 1:
                    _client().key_value_set(f"jzero/{name}/found", str(found), True)
        if self.count > 1:
            found = int(_client().key_value_try_get(f"jzero/{name}/found"))
            self.meet(f"{name}/heard")  # only then may it be another one
        return found

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
        client = _client()
        name = f"{name}/{next(_times[name])}"
        for index, text in failed.items():
            client.key_value_set(f"jzero/{name}/failed/{index}", text)
        client.wait_at_barrier(f"jzero/{name}", round(self.timeout * 1000))
        found = client.key_value_dir_get(f"jzero/{name}/failed/")
        return {int(key.rpartition("/")[2]): text for key, text in found}


def _client() -> Any:
    return distributed.global_state.client  # JAX has no public name for it
