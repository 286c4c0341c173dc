"""`audit`: what the program of a training step does on this machine, against what was promised."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jax
from rich.console import RenderableType

from jzero.audit_tables import tables
from jzero.held import Held, abstract, arguments, broken_donation, held, not_donated
from jzero.layout import Layout
from jzero.memory import gradient_bytes
from jzero.padding import is_concrete
from jzero.partitioner import of_partitioner
from jzero.plain import plain
from jzero.program import collectives_by_origin, compiled_collectives_by_origin
from jzero.promise import WHOLE_STEP, Broken, Moved, broken_in, compare
from jzero.stage import STAGES, Stage
from jzero.step import TrainStep
from jzero.tally import Collective, Origin
from jzero.wording import few


class BrokenPromise(AssertionError):
    """What `Audit.check` raises.

    Attributes:
        broken: The promises that are not kept.
    """

    def __init__(self, broken: Sequence[Broken]):
        super().__init__("\n".join(f"{one.subject}: {one.message}" for one in broken))
        self.broken = tuple(broken)


@dataclass(frozen=True)
class Planned:
    """Bytes on one device that XLA plans for the compiled step.

    Attributes:
        arguments: The state and the batch.
        donated: Of these, what the results are written over.
        outputs: The new state and the metrics, with a table of pointers to them.
        temp: What the step needs besides: activations, gradients, gathered params, and what XLA copies.
        gradients: Of these, the reduced gradients, by the ledger (`memory.gradient_bytes`).
    """

    arguments: int
    donated: int
    outputs: int
    temp: int
    gradients: int


@dataclass(frozen=True)
class Audit:
    """What a step does, line by line against what was promised. Prints as tables.

    Attributes:
        stage: The stage.
        axes: Size of each mesh axis.
        microbatches: m.
        moved: What jzero and the loss move over the links, from the lowered program: a line for each leaf, purpose and
            kind of collective.
        compiled: Every collective of the compiled program, as XLA left it, with whose it is. XLA:CPU runs bfloat16 ones
            in float32; XLA moves them out of loops, joins them, and drops what it need not run.
        held: What a device holds between steps, and the batch: by theory, in the program, and on live arrays.
        memory: What XLA plans; None where the backend does not say.
        broken: The promises that are not kept.
        subjects: What promises are made of: paths of leaves and names of other arguments, "loss", "partitioner",
            "donation", "memory".
    """

    stage: Stage
    axes: tuple[tuple[str, int], ...]
    microbatches: int
    moved: tuple[Moved, ...]
    compiled: tuple[tuple[Origin, Collective], ...]
    held: tuple[Held, ...]
    memory: Planned | None
    broken: tuple[Broken, ...]
    subjects: tuple[str, ...] = field(repr=False)

    @property
    def number(self) -> int | None:
        """0 to 3; None for a stage of one's own."""
        return STAGES.index(self.stage) if self.stage in STAGES else None

    @property
    def partitioner(self) -> tuple[Collective, ...]:
        """What the partitioner has put into the compiled program: norms, and what model shards exchange."""
        return tuple(row for origin, row in self.compiled if origin.purpose == "partitioner")

    def sent(self, axis: str | None = None, *, promised: bool = False) -> float:
        """Bytes that each device sends in a step, in all or over collectives that an axis takes part in.

        Args:
            axis: One mesh axis; None for all.
            promised: By the ledger, and not in the lowered program.

        Raises:
            ValueError: The mesh has no such axis.
        """
        if axis is not None and axis not in (names := [name for name, _ in self.axes]):
            raise ValueError(f"sent: no axis {axis!r}; the mesh has {', '.join(names)}.")
        rows = [one for one in self.moved if axis is None or axis in one.axes]
        return sum(one.promised_wire_bytes if promised else one.wire_bytes for one in rows)

    def check(self, allow: Sequence[str] = ()) -> None:
        """Raises if a promise is broken; for tests of your own.

        Args:
            allow: Shell patterns on what may differ: paths of leaves, "loss" (the loss has collectives of its own),
                "partitioner" (the optimizer computes over whole leaves, as Muon and Adafactor do), "donation".

        Raises:
            BrokenPromise: An `AssertionError` that names leaf and axis.
            ValueError: A pattern matches nothing that a promise is made of.
            TypeError: `allow` is a string.
        """
        if isinstance(allow, str):
            raise TypeError(f"check: allow={allow!r}; wanted a list of patterns, such as [{allow!r}].")
        for pattern in allow:
            if not any(fnmatchcase(subject, pattern) for subject in self.subjects):
                raise ValueError(
                    f"check: allow has a pattern {pattern!r} that matches nothing; promises are made of "
                    f"{few(map(repr, self.subjects), 8)}."
                )
        left = [one for one in self.broken if not any(fnmatchcase(one.subject, pattern) for pattern in allow)]
        if left:
            raise BrokenPromise(left)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it; sizes in bytes."""

        def plain(one: Any, *names: str) -> dict[str, Any]:
            return dataclasses.asdict(one) | {name: getattr(one, name) for name in names}

        names = [axis for axis, _ in self.axes]
        return {
            "stage": self.number,
            "placements": dataclasses.asdict(self.stage),
            "axes": dict(self.axes),
            "microbatches": self.microbatches,
            "sent": {axis: {"promised": self.sent(axis, promised=True), "program": self.sent(axis)} for axis in names},
            "moved": [plain(one, "wire_bytes", "promised_wire_bytes") for one in self.moved],
            "compiled": [plain(origin) | plain(row, "bytes", "wire_bytes") for origin, row in self.compiled],
            "held": [plain(one) for one in self.held],
            "memory": None if self.memory is None else plain(self.memory),
            "broken": [plain(one) for one in self.broken],
        }

    def __str__(self) -> str:
        """Tables of text."""
        return plain(tables(self))

    def __rich__(self) -> RenderableType:
        """The same for a rich console."""
        return tables(self)


def audit(step: TrainStep, state: Any, batch: Any) -> Audit:
    """Says what a training step does on this machine, and holds it against what ZeRO promises.

    The step is lowered and compiled for these arguments, and not run; the state is neither changed nor donated. Its own
    collectives come from the lowered program, with the dtypes that they have, leaf by leaf; loops count with their
    trips. Those that the partitioner adds come from the compiled program, and are listed apart. Memory comes from the
    compiled program and, where the state is there, from the shards of its arrays.

    Each line stands against the ledger (`jzero.traffic`, `jzero.memory`: what the stage table and the params alone
    say), with the reason where the two differ: a leaf whose value the backward pass does not need is not gathered
    again; one that the loss casts travels in the dtype that it is cast to; small leaves are whole. What is more than
    the ledger, or other than the engine's own account of this loss, is a broken promise.

    Args:
        step: From `train_step`. For a function of your own there are `program.collectives` and `explain`.
        state: Its state: arrays, or ShapeDtypeStructs.
        batch: Its batch, the same.

    Returns:
        An `Audit`; `print` shows it, `.check()` raises if a promise is broken, `.as_dict()` is for JSON.

    Raises:
        TypeError: `step` is not a `TrainStep`.
        ValueError: The state or the batch do not fit the step, or the state was donated to a step before.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones((64, 8))}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
        >>> state = jzero.init(lambda: {"w": jnp.ones((64, 8))}, tx := optax.adam(1e-3), layout)
        >>> step = jzero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, layout)
        >>> report = audit(step, state, layout.put_batch(jnp.ones((16, 64))))
        >>> report.check()
        >>> [(one.what, one.count, one.bytes) for one in report.moved]
        [('gather, forward', 1, 2048), ('gather, backward', 0, 0), ('reduce', 1, 2048), ('sum', 1, 4)]
        >>> report.moved[1].reason
        'the backward pass does not need its value'
        >>> [(one.what, one.promised, one.live) for one in report.held][:2]
        [('params', 256, 256), ('optimizer state', 516, 516)]
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"audit: step is a {type(step).__name__}; wanted what jzero.train_step returns. For a function of your own "
            f"call jzero.program.collectives(jax.jit(f).lower(...), mesh)."
        )
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        if is_concrete(x) and x.is_deleted():
            raise ValueError(
                f"audit: state{jax.tree_util.keystr(path)} was deleted: this state was given to a step before, which "
                f"donated its memory. Audit the state that the step returned."
            )
    layout, tx = step.layout, step.tx
    # Without placements, so that a state that lives elsewhere is reported, and not refused.
    shapes = jax.tree.map(abstract, (state, batch))
    lowered = step.lower(*shapes)
    compiled = lowered.compile()
    written = collectives_by_origin(lowered, layout.mesh)
    moved = compare(layout, step.account(*shapes), written, microbatches=step.microbatches)
    rows = compiled_collectives_by_origin(compiled, layout.mesh)
    ins = arguments(layout, tx, state, batch, compiled)
    lines, broken = held(ins)
    return Audit(
        stage=layout.stage,
        axes=tuple(layout.mesh.shape.items()),
        microbatches=step.microbatches,
        moved=moved,
        compiled=rows,
        held=lines,
        memory=(memory := _memory(compiled, layout)),
        broken=(
            *broken_in(moved),
            *of_partitioner(rows, written, layout),
            *broken,
            *_of_arguments(memory, sum(one.compiled for one in lines)),
            *broken_donation(not_donated(ins, compiled)),
        ),
        subjects=tuple(dict.fromkeys((*WHOLE_STEP, *(one.subject for one in ins)))),
    )


def _memory(compiled: jax.stages.Compiled, layout: Layout) -> Planned | None:
    found: Any = compiled.memory_analysis()
    if found is None:
        return None
    return Planned(
        arguments=found.argument_size_in_bytes,
        donated=found.alias_size_in_bytes,
        outputs=found.output_size_in_bytes,
        temp=found.temp_size_in_bytes,
        gradients=gradient_bytes(layout),
    )


def _of_arguments(memory: Planned | None, expected: int) -> Iterator[Broken]:
    if memory is not None and memory.arguments != expected:
        yield Broken(
            "memory",
            f"XLA plans {memory.arguments:,} bytes for the arguments of the program on each device; the state and the "
            f"batch are {expected:,}.",
        )
