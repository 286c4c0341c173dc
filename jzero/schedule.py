"""When a compiled program communicates: each collective, what it is for, and the matmuls scheduled while it runs.

The text of a program that XLA has scheduled is its order of execution. A collective runs between its start and its
done; matmuls between the two hide it, and none can hide a synchronous one. This is a schedule, not a time: whether
they take long enough is not said. What a collective is for is read from the names that jzero gives to its own
(`jzero.gather.forward[blocks/up]`), which survive XLA's combining of several into one.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax

from jzero import hlo, scopes
from jzero.layout import Layout
from jzero.rules import Leaf

_MATMUL = re.compile(r'custom_call_target="__cublas\$\S*(?:gemm|matmul)', re.IGNORECASE)


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
    """

    kind: str
    pieces: tuple[Piece, ...]
    axes: tuple[str, ...]
    asynchronous: bool
    matmuls: int
    loop: tuple[int, ...] = ()
    passes: int = 1

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
class Share:
    """How many of the bytes of one kind and purpose have a matmul in their window, per call of the program.

    Attributes:
        kind: As in `Window`.
        purpose: As in `Window`.
        in_loops: Whether these are the bytes in loop bodies; False: none are, and these are all of the program.
        bytes: All of them.
        covered: Those with a matmul between start and done.
    """

    kind: str
    purpose: str
    in_loops: bool
    bytes: int
    covered: int

    @property
    def share(self) -> float:
        """Covered bytes over all bytes."""
        return self.covered / self.bytes


def windows(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh | None = None, layout: Layout | None = None
) -> tuple[Window, ...]:
    """Reads each collective of a scheduled program, in the order in which they start.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, on GPUs or ahead of time for a `target_mesh`.
        mesh: The mesh that it runs on, to name the axes; that of the layout if None.
        layout: The layout of the params, to tell by its shape which leaf an array is that XLA has left without a name.

    Returns:
        One `Window` for each collective; loops are numbered in the order in which they are entered.

    Raises:
        TypeError: `compiled` is not a compiled program.
        ValueError: The program is not scheduled, or runs on another mesh.

    Example:
        >>> mesh = target_mesh("h200x8", data=8)  # doctest: +SKIP
        >>> layout = jzero.zero(params, stage=3, mesh=mesh)  # doctest: +SKIP
        >>> compiled = jax.jit(jzero.value_and_grad(loss_fn, layout)).lower(params, batch).compile()  # doctest: +SKIP
        >>> for window in windows(compiled, layout=layout):  # doctest: +SKIP
        ...     print(window.loop, window.kind, window.purpose, [p.leaf for p in window.pieces], window.matmuls)
        (1,) all-gather forward ['blocks/norm1', 'blocks/qkv'] 0
        (1,) all-gather forward ['blocks/up'] 2
    """
    text = compiled.as_text() if hasattr(compiled, "as_text") else None
    if not text or not text.startswith("HloModule"):
        raise TypeError(
            f"windows: wanted a compiled program, which jax.jit(f).lower(...).compile() returns; got "
            f"{type(compiled).__name__}."
        )
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("windows: XLA has not scheduled this program, so the order of its text says nothing.")
    mesh = layout.mesh if mesh is None and layout is not None else mesh
    return tuple(_read(hlo.parse(text), mesh, layout))


def shares(found: Iterable[Window]) -> tuple[Share, ...]:
    """Adds windows up: for each kind and purpose the bytes in loop bodies, or where none are, in the whole program.

    Example:
        >>> piece = Piece("bfloat16", (2048, 8192), "forward", "blocks/up")
        >>> shares([Window("all-gather", (piece,), ("data",), True, matmuls=2, loop=(1,), passes=8)])[0].share
        1.0
    """
    groups: dict[tuple[str, str], list[Window]] = {}
    for window in found:
        groups.setdefault((window.kind, window.purpose), []).append(window)
    rows = []
    for (kind, purpose), group in groups.items():
        looped = [window for window in group if window.loop]
        counted = looped or group
        total = sum(window.bytes * window.passes for window in counted)
        covered = sum(window.bytes * window.passes for window in counted if window.matmuls)
        rows.append(Share(kind, purpose, bool(looped), total, covered))
    return tuple(rows)


def _read(program: hlo.Program, mesh: jax.sharding.Mesh | None, layout: Layout | None) -> Iterator[Window]:
    by_groups = None if mesh is None else hlo.axes_by_groups(mesh, program.n_devices)
    entered: dict[tuple[int, ...], int] = {}

    def inside(name: str, loop: tuple[int, ...], passes: int) -> Iterator[Window]:
        lines = program.computations[name]
        for index, line in enumerate(lines):
            if line.opcode.endswith(("-done", "-update")):
                continue
            if line.collective:
                yield window(name, line, lines[index:], loop, passes)
            elif line.opcode == "async-start":
                for name_of in line.called:
                    for one in program.computations[name_of]:
                        if one.collective:
                            yield window(name_of, one, lines[index:], loop, passes)
            elif line.opcode == "while":
                entered[loop] = entered.get(loop, 0) + 1
                body, times = (*loop, entered[loop]), passes * (line.trip_count or 1)
                for called in line.called:
                    yield from inside(called, body, times)
            else:
                for called in line.called:
                    yield from inside(called, loop, passes)

    def window(name: str, line: hlo.Instruction, after: list[hlo.Instruction], loop, passes) -> Window:
        axes, _ = hlo.participants(line.collective, program.groups(line), by_groups)
        pieces = _pieces(program.exchanged(name, line), line.op_names or after[0].op_names, layout)
        runs = after[0].opcode.endswith("-start") and not (after[0].is_sync or line.is_sync)
        return Window(line.collective, pieces, axes, runs, under(after) if runs else 0, loop, passes)

    def under(lines: list[hlo.Instruction]) -> int:
        """Matmuls behind the first of these lines, up to where its result is waited for."""
        count = 0
        for line in lines[1:]:
            if line.opcode.endswith("-done") and lines[0].name in line.operands:
                return count
            count += matmuls(line)
        return 0

    def matmuls(line: hlo.Instruction) -> int:
        if line.opcode == "dot" or _MATMUL.search(line.attributes):
            return 1
        count = sum(map(matmuls_inside, line.called))
        return min(count, 1) if line.opcode == "fusion" else count

    @functools.cache
    def matmuls_inside(name: str) -> int:
        return sum(map(matmuls, program.computations[name]))

    return inside(program.entry, (), 1)


def _pieces(arrays: list[tuple[str, tuple[int, ...]]], names: list[str], layout: Layout | None) -> tuple[Piece, ...]:
    found = [scopes.read(name) or ("", "") for name in names]
    if len(found) == len(arrays):
        return tuple(Piece(*array, *scope) for array, scope in zip(arrays, found, strict=True))
    own = [scope for scope in found if scope != ("", "")]
    purposes = {purpose for purpose, _ in own} - {"sum"} or {purpose for purpose, _ in own}  # the loss goes along
    purpose = purposes.pop() if len(purposes) == 1 else ""
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
