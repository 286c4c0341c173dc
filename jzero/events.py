"""What a scheduled program multiplies and communicates, event by event.

The text of a program that XLA has scheduled is its order of execution. A collective runs between its start and its
done; what is between the two runs beside it. What a collective is for is read from the names that jzero gives to its
own (`jzero.gather.forward[blocks/up]`), which survive XLA's combining of several into one.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from jzero import hlo, scopes
from jzero.flops import Matmul, Matmuls
from jzero.groups import axes_by_groups, participants
from jzero.layout import Layout
from jzero.rules import Leaf


@dataclass(frozen=True)
class Piece:
    """One array of a collective.

    Attributes:
        dtype: numpy's name of the dtype on the wire.
        shape: Of the whole array: the gathered result, or else the operand.
        purpose: What jzero does it for: "forward", "backward" or "update" (gathers), "scatter" or "reduce" (gradients),
            or another of `scopes.Purpose`; empty for what is not jzero's own.
        leaf: Path of the leaf, or "a + b" where one array holds several; "a or b" where only the shape tells; empty if
            that tells nothing either.
    """

    dtype: str
    shape: tuple[int, ...]
    purpose: str
    leaf: str

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return -(-math.prod(self.shape) * jax.dtypes.itemsize_bits(jax.numpy.dtype(self.dtype)) // 8)


@dataclass(frozen=True)
class Window:
    """One collective of a compiled program, perhaps of several arrays, and what runs while it does.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce" or another of `hlo.COLLECTIVES`.
        pieces: What it exchanges.
        axes: The mesh axes that it runs over; () when they cannot be told.
        asynchronous: Whether other work may run between its start and its done.
        matmuls: How many matmuls are scheduled between the two; a loop in between counts those of its body once.
        loop: The loop whose body it is in: () in none, (2,) in the program's second, (2, 1) in the first of that.
        passes: How often it runs per call of the program; for one pass of those loops whose number XLA does not know.
        group: How many devices take part in each group.
        where: Where it stands in the traced program, as jax calls it: names of transformations, scopes and primitive.
    """

    kind: str
    pieces: tuple[Piece, ...]
    axes: tuple[str, ...]
    asynchronous: bool
    matmuls: int
    loop: tuple[int, ...] = ()
    passes: int = 1
    group: int = 1
    where: str = field(default="", compare=False)

    @property
    def purpose(self) -> str:
        """What it is for: that of most of its bytes."""
        sizes: dict[str, int] = {}
        for piece in self.pieces:
            sizes[piece.purpose] = sizes.get(piece.purpose, 0) + piece.bytes
        return max(sizes, key=lambda purpose: sizes[purpose])

    @property
    def bytes(self) -> int:
        """Bytes of its whole arrays, of one pass."""
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True)
class Start:
    """A collective starts, and runs until the `Done` of the same name."""

    name: str
    window: Window


@dataclass(frozen=True)
class Done:
    """What follows waits for the collective of this name."""

    name: str


@dataclass(frozen=True)
class Loop:
    """Events that are repeated.

    Attributes:
        number: As in `Window.loop`.
        passes: How often; 1 where XLA does not know.
        events: Of one pass.
        known: Whether XLA knows how often.
    """

    number: tuple[int, ...]
    passes: int
    events: "Events"
    known: bool = True


@dataclass(frozen=True)
class Branches:
    """Events of which one list happens."""

    events: tuple["Events", ...]


Event = Start | Done | Matmul | Loop | Branches
Events = Sequence[Event]
"""What a program does, in the order of its schedule, as far as it multiplies and communicates."""


def events(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh | None = None, layout: Layout | None = None
) -> Events:
    """Reads what a scheduled program multiplies and communicates, in order; arguments and errors as for `windows`."""
    text = hlo.text_of("windows", compiled)
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("windows: XLA has not scheduled this program, so the order of its text says nothing.")
    mesh = layout.mesh if mesh is None and layout is not None else mesh
    return read(hlo.parse(text), mesh, layout)


def windows_of(found: Events) -> tuple[Window, ...]:
    """The collectives among events, in the order in which they start."""
    return tuple(_windows_of(found))


def _windows_of(found: Events) -> Iterator[Window]:
    for event in found:
        match event:
            case Start(window=window):
                yield window
            case Loop(events=inner):
                yield from _windows_of(inner)
            case Branches(lists):
                for inner in lists:
                    yield from _windows_of(inner)


def read(program: hlo.Program, mesh: jax.sharding.Mesh | None, layout: Layout | None) -> Events:
    """The same of the text of a program that has been read."""
    by_groups = None if mesh is None else axes_by_groups(mesh, program.n_devices)
    kernels = Matmuls(program)
    entered: dict[tuple[int, ...], int] = {}

    def inside(name: str, loop: tuple[int, ...], passes: int) -> Iterator[Event]:
        lines, running = program.computations[name], set()
        for index, line in enumerate(lines):
            if line.opcode.endswith(("-done", "-update")):
                yield from (Done(by) for by in line.operands if by in running)
            elif started := program.started(name, line):
                for one in started:
                    yield Start(line.name, window(one, name, lines[index:], loop, passes))
                    if one.asynchronous:
                        running.add(line.name)
                    else:
                        yield Done(line.name)
            elif line.opcode == "while":
                entered[loop] = entered.get(loop, 0) + 1
                number, times = (*loop, entered[loop]), line.trip_count or 1
                body = (event for called in line.called for event in inside(called, number, passes * times))
                yield Loop(number, times, tuple(body), line.trip_count is not None)
            elif matmul := kernels.of(name, line):
                yield matmul
            elif line.opcode == "conditional":
                yield Branches(tuple(tuple(inside(called, loop, passes)) for called in line.called))
            else:
                for called in line.called:
                    yield from inside(called, loop, passes)

    def window(one: hlo.Exchange, name: str, lines: list[hlo.Instruction], loop, passes) -> Window:
        axes, group = participants(one.kind, one.groups, by_groups)
        count, where = under(name, lines) if one.asynchronous else 0, one.names[0] if one.names else ""
        pieces = _pieces(one.arrays, one.names, layout)
        return Window(one.kind, pieces, axes, one.asynchronous, count, loop, passes, group, where)

    def under(name: str, lines: list[hlo.Instruction]) -> int:
        """Matmuls behind the first of these lines, up to where its result is waited for."""
        count = 0
        for line in lines[1:]:
            if line.opcode.endswith("-done") and lines[0].name in line.operands:
                return count
            count += matmuls(name, line)
        return 0

    def matmuls(name: str, line: hlo.Instruction) -> int:
        if kernels.of(name, line):
            return 1
        return sum(map(matmuls_inside, line.called))

    @functools.cache
    def matmuls_inside(name: str) -> int:
        return sum(matmuls(name, line) for line in program.computations[name])

    return tuple(inside(program.entry, (), 1))


def _pieces(arrays: list[tuple[str, tuple[int, ...]]], names: list[str], layout: Layout | None) -> tuple[Piece, ...]:
    found = [scopes.read(name) or ("", "") for name in names]
    if len(found) == len(arrays):
        return tuple(Piece(*array, *scope) for array, scope in zip(arrays, found, strict=True))
    own = [scope for scope in found if scope != ("", "")]
    purpose = scopes.common(purpose for purpose, _ in own)
    if len(arrays) == 1 and own:
        return (Piece(*arrays[0], purpose, " + ".join(leaf for _, leaf in own if leaf)),)
    return tuple(Piece(*array, purpose, _by_shape(array[1], layout)) for array in arrays)


def _by_shape(shape: tuple[int, ...], layout: Layout | None) -> str:
    """The leaves that have this shape, whole or without a first dim that a loop takes apart."""
    if layout is None or not shape:
        return ""

    def of_device(leaf: Leaf) -> tuple[int, ...]:
        model = leaf.model or ((),) * len(leaf.stored)
        return tuple(size // layout.size(axes) for size, axes in zip(leaf.stored, model, strict=True))

    return " or ".join(leaf.path for leaf in layout.leaves if shape in (of_device(leaf), of_device(leaf)[1:]))
