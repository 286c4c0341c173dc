"""What the times of a collective say: bandwidths, bounds, and a verdict on the link. See `jzero.bandwidth`."""

import statistics
from dataclasses import dataclass

from jzero.tally import Collective

PLATEAU = 3
"""The plateau is the median over so many of the largest sizes."""

_RISING = 1.1


@dataclass(frozen=True)
class Timing:
    """The time of one collective on one size of array.

    Attributes:
        collective: What ran, as `jzero.program.collectives` reads it from the program; its `bytes` are the size.
        seconds: Median over the repeats.
        quartiles: The first and the third, in seconds.

    Example:
        >>> ran = Collective("all-reduce", "float32", (250_000_000,), ("data",), group=8)
        >>> timing = Timing(ran, 0.005, (0.0049, 0.0051))
        >>> timing.algbw / 1e9, timing.busbw / 1e9
        (200.0, 350.0)
        >>> timing.ring_seconds(link=437.5e9), timing.tree_seconds(link=500e9)
        (0.004, 0.004)
    """

    collective: Collective
    seconds: float
    quartiles: tuple[float, float]

    @property
    def algbw(self) -> float:
        """Size over time, in bytes per second."""
        return self.collective.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """What each device sends over time, in bytes per second."""
        return self.collective.wire_bytes / self.seconds

    def ring_seconds(self, link: float) -> float:
        """The least time in a ring of links of so many bytes per second in each direction, latency left out.

        It takes busbw to the speed of the link. Without help of the network no algorithm can do with less, in any
        topology (Patarasuk and Yuan, 2009). For all-to-all and permute it is the time at each device's own port.
        """
        return self.collective.wire_bytes / link

    def tree_seconds(self, link: float) -> float | None:
        """The least time of an all-reduce in a double binary tree, latency left out; None for other collectives.

        Each of the two trees sums and returns half of the array. A device inside of one is a leaf of the other, and so
        has four neighbours, each of which it sends half of the array: 2S (Sanders, Speck and Träff, "Two-tree
        algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL's src/graph/tuning.cc has the same
        ratio). That is more than a ring sends, but in 2 log2(n) steps in place of 2(n - 1): better for small arrays.
        """
        if self.collective.kind != "all-reduce":
            return None
        neighbours = min(self.collective.group, 4)
        return neighbours / 2 * self.collective.bytes / link


@dataclass(frozen=True)
class Sweep:
    """One collective in one dtype over an axis, on arrays of growing size.

    Attributes:
        kind: Of `jzero.bandwidth.KINDS`.
        dtype: Of `jzero.bandwidth.DTYPES`.
        axis: The mesh axis.
        devices: How many devices the axis has.
        platform: What they are: "cpu", "gpu" or "tpu".
        timings: One for each size, the smallest first.
    """

    kind: str
    dtype: str
    axis: str
    devices: int
    platform: str
    timings: tuple[Timing, ...]

    @property
    def plateau(self) -> float:
        """Median busbw of the `PLATEAU` largest sizes, in bytes per second."""
        return statistics.median(timing.busbw for timing in self.timings[-PLATEAU:])

    @property
    def latency(self) -> float:
        """Seconds that the smallest size takes."""
        return self.timings[0].seconds

    @property
    def rising(self) -> bool:
        """Whether busbw still grows by more than a tenth at the largest size: no plateau yet."""
        return len(self.timings) > 1 and self.timings[-1].busbw > _RISING * self.timings[-2].busbw

    @property
    def measures(self) -> str:
        """What was measured: "links", or "memory" where the devices are simulated on a CPU."""
        return "memory" if self.platform == "cpu" else "links"

    def verdict(self, link: float | None = None) -> str:
        """What was found, in words, and against a link of so many bytes per second in each direction if one is stated.

        Raises:
            ValueError: A link speed that is not positive.

        Example:
            >>> ran = Collective("all-gather", "bfloat16", (500_000_000,), ("data",), group=8)
            >>> sweep = Sweep("all-gather", "bfloat16", "data", 8, "gpu", (Timing(ran, 0.0025, (0.0024, 0.0026)),))
            >>> print(sweep.verdict(link=450e9))
            all-gather bfloat16 over data=8: reaches 77.8% of 450 GB/s; plateau 350 GB/s, smallest size 2.5 ms.
        """
        found = f"plateau {_speed(self.plateau)}, smallest size {_time(self.latency)}."
        notes = []
        if link is not None:
            if not link > 0:
                raise ValueError(f"link={link}; wanted bytes per second in one direction, for example 450e9.")
            found = f"reaches {100 * self.plateau / link:.3g}% of {_speed(link)}; {found}"
        if self.measures == "memory":
            notes.append("This measures memory, not links: the devices are CPUs.")
        elif link is not None and self.plateau > link:
            notes.append(
                "More than such a link carries: it is faster than stated, or the network itself sums or copies, as "
                "NVLink SHARP does."
            )
        if self.rising:
            notes.append("Still rising at the largest size: measure larger ones.")
        return " ".join([f"{self.kind} {self.dtype} over {self.axis}={self.devices}: {found}", *notes])


def _speed(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s" if speed < 999.5e9 else f"{speed / 1e12:.3g} TB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
