"""What `preflight` returns."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from jzero.accounts import LEAVES
from jzero.buffers import Buffer
from jzero.devices import Device
from jzero.events import Events, Window
from jzero.links import Link
from jzero.plain import plain
from jzero.preflight_tables import tables
from jzero.promise import Broken, Moved
from jzero.stage import STAGES, Stage
from jzero.tally import wire_factor
from jzero.timeline import Timeline


@dataclass(frozen=True)
class Room:
    """Bytes that the step takes on one device while it runs, and that the device has.

    Attributes:
        arguments: The state and the batch.
        outputs: The new state and the metrics.
        aliased: Of these, what is written over arguments, and so takes nothing.
        temporaries: What the step needs besides, at its largest.
        code: The program itself.
        limit: What the device has.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    limit: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether the device has as much. CUDA, NCCL and cuBLAS want one or two GB more."""
        return self.peak <= self.limit


@dataclass(frozen=True)
class Sent:
    """One collective of the compiled program, at the speed of its link.

    Attributes:
        window: The collective: kind, arrays, axes, whether it is asynchronous, and the matmuls that run beside it.
        link: What it goes over.
        wire_bytes: Bytes that each device sends in one run.
        seconds: Of one run, at the speed of the link and without latency.
        waits: Seconds of a step for which nothing can be multiplied because of it, all runs together.
    """

    window: Window
    link: Link
    wire_bytes: float
    seconds: float
    waits: float


@dataclass(frozen=True)
class Line:
    """What one kind of collective makes each device send in a step, in bytes.

    Attributes:
        what: As in `Moved`; "other" for what has no name of jzero's in the compiled program: what the partitioner put
            in (norms, what model shards exchange), what the loss runs by itself, and what XLA has taken the name from.
        kind: As in `Window`.
        axes: The mesh axes.
        theory: By the stage table and the params (`jzero.traffic`).
        program: In the lowered program, as jzero and the loss wrote it down.
        compiled: In the compiled program.
    """

    what: str
    kind: str
    axes: tuple[str, ...]
    theory: float
    program: float
    compiled: float


@dataclass(frozen=True)
class Bound:
    """What a step cannot be faster than: a model, and no measurement. See `jzero.timeline` for what it leaves out.

    Attributes:
        seconds: Of the schedule, with matmuls at the peak of the device and collectives at that of their links.
        compute: Of its matmuls alone.
        links: Seconds for which each link is busy.
        flops: Of all matmuls of a step, on one device.
        model_flops: Without those that recompute for the backward pass.
        peak: FLOPs per second of the device in the dtype of most of them.
    """

    seconds: float
    compute: float
    links: tuple[tuple[str, float], ...]
    flops: float
    model_flops: float
    peak: float

    @property
    def waiting(self) -> float:
        """Seconds for which nothing can be multiplied because of collectives."""
        return self.seconds - self.compute

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (PaLM, arXiv:2204.02311) that the step cannot exceed."""
        return self.model_flops / self.seconds / self.peak if self.seconds else 0.0


@dataclass(frozen=True)
class Preflight:
    """What a step will do on its target. Prints as tables.

    Attributes:
        target: As it was named.
        device: The GPU.
        axes: Size of each mesh axis.
        stage: The stage.
        microbatches: m.
        jax: The version that compiled it.
        memory: Bytes on one device.
        held: What stays between steps and the batch, largest first, by the paths of their leaves.
        temporaries: What lives besides where most does, largest first; None if XLA has not said.
        not_donated: Leaves of the state whose memory the new state does not take over.
        sent: The collectives of the compiled program, in the order in which they start.
        moved: What jzero and the loss move over the links, from the lowered program, against the ledger.
        bound: A bound on the time of a step.
        broken: The promises that are not kept. What may be meant is among the notes, and `Audit.check` raises for it:
            collectives that the loss runs by itself, and those of an optimizer that computes over whole leaves.
        notes: That, and what the figures leave out.
        events: The schedule.
        timeline: The schedule played at those speeds.
    """

    target: str
    device: Device
    axes: tuple[tuple[str, int], ...]
    stage: Stage
    microbatches: int
    jax: str
    memory: Room
    held: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...] | None
    not_donated: tuple[str, ...]
    sent: tuple[Sent, ...]
    moved: tuple[Moved, ...]
    bound: Bound
    broken: tuple[Broken, ...]
    notes: tuple[str, ...]
    events: Events = dataclasses.field(repr=False)
    timeline: Timeline = dataclasses.field(repr=False)

    @property
    def number(self) -> int | None:
        """0 to 3; None for a stage of one's own."""
        return STAGES.index(self.stage) if self.stage in STAGES else None

    @property
    def fits(self) -> bool:
        """Whether each device has the memory."""
        return self.memory.fits

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in a step, by the compiled program; in all branches of conditionals."""
        return sum(one.wire_bytes * one.window.passes for one in self.sent)

    @property
    def lines(self) -> tuple[Line, ...]:
        """What each device sends: by theory, as it was written down, and as XLA compiled it."""
        sums: dict[tuple[str, str, tuple[str, ...]], list[float]] = {}
        for one in self.moved:
            line = sums.setdefault((one.what, one.kind, one.axes), [0.0, 0.0, 0.0])
            line[0] += one.promised_wire_bytes
            line[1] += one.wire_bytes
        for one in self.sent:
            for piece in one.window.pieces:
                what = LEAVES.get(piece.purpose, piece.purpose) or "other"
                line = sums.setdefault((what, one.window.kind, one.window.axes), [0.0, 0.0, 0.0])
                line[2] += one.window.passes * piece.bytes * wire_factor(one.window.kind, one.window.group)
        return tuple(Line(*key, *sizes) for key, sizes in sums.items())

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it; sizes in bytes, times in seconds."""
        plain = dataclasses.asdict
        device = {"name": self.device.name, "memory": self.device.memory, "source": self.device.source}
        return {
            "target": self.target,
            "device": device | {"flops": dict(self.device.flops), "network": self.device.network},
            "axes": dict(self.axes),
            "stage": self.number,
            "microbatches": self.microbatches,
            "jax": self.jax,
            "fits": self.fits,
            "memory": plain(self.memory) | {"peak": self.memory.peak},
            "held": [plain(one) for one in self.held],
            "temporaries": None if self.temporaries is None else [plain(one) for one in self.temporaries],
            "not_donated": list(self.not_donated),
            "wire_bytes": self.wire_bytes,
            "collectives": [
                plain(one) | {"window": plain(one.window) | {"purpose": one.window.purpose, "bytes": one.window.bytes}}
                for one in self.sent
            ],
            "moved": [
                plain(one) | {"wire_bytes": one.wire_bytes, "promised_wire_bytes": one.promised_wire_bytes}
                for one in self.moved
            ],
            "lines": [plain(one) for one in self.lines],
            "bound": plain(self.bound) | {"links": dict(self.bound.links), "mfu": self.bound.mfu},
            "bound_is": "a model of the schedule at stated speeds, not a measurement",
            "broken": [plain(one) for one in self.broken],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Tables of text."""
        return plain(tables(self))

    def __rich__(self) -> RenderableType:
        """The same for a rich console."""
        return tables(self)
