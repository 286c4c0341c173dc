"""Reads XLA's programs: trip counts of a lowered one, and the text of an optimised one.

JAX gives the lowered program as MLIR operations, and the optimised one as text only. Of the text this reads who calls
whom, how often loops run, which arrays come out, which devices talk to one another, and what jax called the operations,
as XLA:CPU and XLA:GPU write it in jax 0.10 and 0.12.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

Groups = Sequence[Sequence[int]]  # devices that talk to one another, as positions in the program's device order
AxesByGroups = dict[frozenset[frozenset[int]], tuple[str, ...]]

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"(ENTRY )?(%[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)(.*)$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_CALLED = (
    r"(?:condition|body|calls|to_apply|called_computations|branch_computations|true_computation|false_computation)"
)
_LETTERS = {"bf": "bfloat", "f": "float", "i": "int", "s": "int", "ui": "uint", "u": "uint", "c": "complex"}
_NAMED = {"i1": "bool", "pred": "bool", "complex<f32>": "complex64", "complex<f64>": "complex128"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `arrays` are what it returns, `attributes` what follows the operands."""

    name: str
    opcode: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def collective(self) -> str:
        """Which of `COLLECTIVES` it is or starts; empty for any other instruction."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""

    @property
    def is_sync(self) -> bool:
        """Whether it is marked as synchronous, although it may be a start: jax 0.10 writes all collectives so."""
        return '"is_sync":true' in self.attributes

    @property
    def op_names(self) -> list[str]:
        """What jax calls it: its place in the traced program. One name for each part where XLA has combined several.

        XLA writes combined names as `common/start/(rest of one:rest of another)`.
        """
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        name = match[1].encode().decode("unicode_escape").encode("latin-1").decode() if match else ""
        if combined := re.fullmatch(r"(|.*?/)\((.*)\)", name):
            return [combined[1] + rest for rest in combined[2].split(":")]
        return [name] if name else []

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; of a `while`, the condition and the body."""
        lists = re.findall(_CALLED + r"=\{?((?:%[\w.-]+(?:, )?)+)", self.attributes)
        return [name for names in lists for name in re.findall(r"%[\w.-]+", names)]

    @property
    def trip_count(self) -> int | None:
        """How often a `while` runs its body, if XLA knows."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(match[1]) if match else None

    @property
    def dim(self) -> int | None:
        """The dim that an all-gather, a reduce-scatter or an all-to-all works on."""
        match = re.search(r", dimensions=\{(\d+)\}", self.attributes)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A program as its text has it.

    Attributes:
        computations: Their instructions, by name.
        entry: Name of the one that runs first.
        n_devices: How many devices run it.
        frames: Where instructions come from: by id, function, file, line and the id of the caller.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    n_devices: int
    frames: dict[int, tuple[str, str, int, int]] = dataclasses.field(default_factory=dict)

    def source(self, instruction: Instruction, libraries: tuple[str, ...] = ()) -> str:
        """The innermost line outside of some folders that an instruction comes from: "block (model.py:31)", or ""."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        at, seen = int(match[1]) if match else 0, set()
        while at in self.frames and at not in seen:
            function, file, line, caller = self.frames[at]
            if not file.startswith(libraries):
                return f"{function.split('.')[-1]} ({file.rsplit('/', 1)[-1]}:{line})"
            seen.add(at)
            at = caller
        return ""

    def groups(self, instruction: Instruction) -> Groups:
        """The devices that a collective runs over; of a permute, its (source, target) pairs."""
        text = instruction.attributes.partition("replica_groups=")[2] or instruction.attributes.partition("pairs=")[2]
        if match := re.match(r"\[([\d,]+)\]<=(\[\S+?)(?:, |$)", text):
            return _iota(match[2]).reshape(_ints(match[1])).tolist()
        if match := re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", text):
            sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
            ids = np.arange(self.n_devices)
            if match[2]:
                ids = _iota(match[2]) if match[2].startswith("[") else np.array(_ints(match[2]))
            axes = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[3])
            return mesh_groups(ids, sizes, [(a, int(pre or 1), int(size or sizes[a])) for a, pre, size in axes])
        listed = re.findall(r"\{([\d,]+)\}", re.match(r"\{(?:\{[\d,]+\},?)*\}", text)[0])  # pyright: ignore[reportOptionalSubscript]
        return [_ints(group) for group in listed] or [list(range(self.n_devices))]

    @functools.cached_property
    def arrays(self) -> dict[str, dict[str, tuple[tuple[str, tuple[int, ...]], ...]]]:
        """What each instruction of each computation returns."""
        return {name: {one.name: one.arrays for one in lines} for name, lines in self.computations.items()}

    def exchanged(self, computation: str, instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
        """Dtypes and shapes of the whole arrays of a collective: gathered results, or else operands.

        An all-to-all of n separate pieces is one array, its shape (n, *piece).
        """
        operands = [array for operand in instruction.operands for array in self.arrays[computation][operand]]
        at = instruction.dim
        if instruction.collective == "all-gather" and at is not None:
            group = max(map(len, self.groups(instruction)))
            return [(dtype, (*s[:at], s[at] * group, *s[at + 1 :])) for dtype, s in operands]
        if instruction.collective == "all-to-all" and at is None:
            return [(dtype, (len(operands), *s)) for dtype, s in operands[:1]]
        return operands


def parse(text: str) -> Program:
    """Reads what `compiled.as_text()` returns."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = match[2]
            computations[current] = []
            entry = current if match[1] else entry
        elif match := _INSTRUCTION.match(line):
            name, types, opcode, operands, attributes = match.groups()
            arrays = tuple(
                (dtype_name(t), tuple(_ints(shape))) for t, shape in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types)
            )
            computations[current].append(
                Instruction(name, opcode, arrays, tuple(re.findall(r"%[\w.-]+", operands)), attributes)
            )
    devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    return Program(computations, entry, int(devices[1]) if devices else 1, _frames(text))


def _frames(text: str) -> dict[int, tuple[str, str, int, int]]:
    """The tables of files, functions, lines and callers in front of the computations."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    rows: dict[int, str] = {}
    for line in text.splitlines()[1:]:
        if line in tables:
            rows = tables[line]
        elif match := re.match(r"(\d+) (.*)$", line):
            rows[int(match[1])] = match[2]
        elif line:
            break
    files, functions = ({n: row.strip('"') for n, row in tables[name].items()} for name in _TABLES[:2])
    places, frames = ({n: _numbers(row) for n, row in tables[name].items()} for name in _TABLES[2:])

    def frame(row: dict[str, int]) -> tuple[str, str, int, int]:
        place = places[row["file_location_id"]]
        names = functions[place["function_name_id"]], files[place["file_name_id"]]
        return *names, place["line"], row.get("parent_frame_id", 0)

    return {number: frame(row) for number, row in frames.items()}


def _numbers(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}


def mesh_groups(ids: np.ndarray, sizes: dict[str, int], axes: Iterable[tuple[str, int, int]]) -> Groups:
    """Groups of a collective over mesh axes, each given as (name, pre, size).

    A whole axis is (name, 1, its size). XLA also splits an axis, into `pre` times `size` times what is left, and names
    the middle part.
    """
    coords = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, pre, size in axes:
        stride = sizes[name] // (pre * size)
        coords[name] = coords[name] - coords[name] // stride % size * stride
    first = np.ravel_multi_index(tuple(coords.values()), tuple(sizes.values())).ravel()
    return [ids.ravel()[first == n].tolist() for n in np.unique(first)]


def axes_by_groups(mesh: jax.sharding.Mesh, n_devices: int) -> AxesByGroups:
    """Every set of axes of a mesh, fewest first, by the groups that a collective over them has.

    Raises:
        ValueError: The program runs on another number of devices than the mesh.
    """
    if n_devices != mesh.size:
        raise ValueError(
            f"The program runs on {n_devices} devices, but the mesh {dict(mesh.shape)} has {mesh.size}: pass the mesh "
            "that the program runs on."
        )
    names = [name for name, size in mesh.shape.items() if size > 1]
    subsets = [axes for n in range(len(names) + 1) for axes in itertools.combinations(names, n)]
    return {frozenset(map(frozenset, groups_over(mesh, axes))): axes for axes in subsets}


def groups_over(mesh: jax.sharding.Mesh, axes: Iterable[str]) -> Groups:
    """Groups of a collective over whole axes of a mesh."""
    return mesh_groups(np.arange(mesh.size), dict(mesh.shape), [(axis, 1, mesh.shape[axis]) for axis in axes])


def participants(kind: str, groups: Groups, by_groups: AxesByGroups | None) -> tuple[tuple[str, ...], int]:
    """Mesh axes and group size. Linked pairs of a permute are one group; its axes, the fewest that hold all."""
    linked: list[frozenset[int]] = []
    for group in map(frozenset, groups):
        apart = [other for other in linked if not other & group]
        linked = [*apart, group.union(*(other for other in linked if other & group))]
    size = max(map(len, linked))
    if by_groups is None:
        return (), size
    if kind != "collective-permute":
        return by_groups.get(frozenset(linked), ()), size
    return next(axes for known, axes in by_groups.items() if all(any(s <= k for k in known) for s in linked)), size


def dtype_name(name: str) -> str:
    """The numpy name of a dtype: MLIR writes `ui8` and `f8E4M3FN`, HLO `u8` and `f8e4m3fn`. Others stay."""
    match = re.fullmatch(r"(bf|f|i|s|ui|u|c)(\d+)(\w*)", name.lower())
    if name in _NAMED or not match:
        return _NAMED.get(name, name)
    letters, bits, suffix = match.groups()
    return _LETTERS[letters] + bits + (f"_{suffix}" if suffix else "")


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _iota(text: str) -> np.ndarray:
    """Ids counted up in one shape and read transposed: `[4,2]T(1,0)`."""
    shape, _, order = text.partition("T")
    dims = _ints(shape.strip("[]"))
    ids = np.arange(np.prod(dims)).reshape(dims)
    return ids.transpose(_ints(order.strip("()"))) if order else ids


def donated(text: str) -> set[int]:
    """Which parameters of a compiled program its results are written over, by the first line of its text."""
    aliases = text.partition("\n")[0].partition("input_output_alias={")[2]
    return {int(number) for number in re.findall(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, \w+-alias\)", aliases)}


def location_name(op: Any) -> str:
    """What jax calls an operation of a lowered program: its scopes, and what it is; "" if it does not say."""
    match = re.match(r'loc\("((?:[^"\\]|\\.)*)"', str(op.location))
    if match is None:
        return ""
    raw = re.sub(rb"\\([0-9A-Fa-f]{2})", lambda code: bytes([int(code[1], 16)]), match[1].encode())
    return raw.replace(b'\\"', b'"').replace(b"\\\\", b"\\").decode(errors="replace")


def stablehlo_trip_count(loop: Any) -> int | None:
    """Trip count of a `while` that counts a carry up by a constant until it reaches another; None for any other."""
    condition, body = (region.blocks[0] for region in loop.regions)
    test = _producer(_returned(condition, 0), "stablehlo.compare")
    if test is None or "LT" not in str(test.attributes["comparison_direction"]):
        return None
    counter, limit = map(_unwrapped, test.operands)
    if not isinstance(counter, ir.BlockArgument) or counter.owner != condition:
        return None
    n = counter.arg_number
    step = _producer(_returned(body, n), "stablehlo.add")
    addends = [_unwrapped(value) for value in step.operands] if step else []
    if body.arguments[n] not in addends:
        return None
    addends.remove(body.arguments[n])
    start, stop, stride = map(_constant, (loop.operands[n], limit, addends[0]))
    if start is None or stop is None or stride is None or stride <= 0:
        return None
    return max(0, -((start - stop) // stride))


def _constant(value: Any) -> int | None:
    """The integer that a value always is, also where loops carry it unchanged."""
    value = _unwrapped(value)
    if not isinstance(value.type.element_type, ir.IntegerType):
        return None
    if constant := _producer(value, "stablehlo.constant"):
        return int(np.array(constant.attributes["value"]))
    loop = value.owner.owner.operation if isinstance(value, ir.BlockArgument) else None
    if loop is None or loop.name != "stablehlo.while":
        return None
    n, body = value.arg_number, loop.regions[1].blocks[0]
    return _constant(loop.operands[n]) if _returned(body, n) == body.arguments[n] else None


def _returned(block: Any, n: int) -> Any:
    return _unwrapped(block.operations[len(block.operations) - 1].operands[n])


def _unwrapped(value: Any) -> Any:
    # In a shard_map that leaves axes automatic, jax constrains the placement of every value, loop counters as well.
    while constraint := _producer(value, "sdy.sharding_constraint"):
        value = constraint.operands[0]
    return value


def _producer(value: Any, name: str) -> Any:
    """The operation that makes a value, if it has that name; a block's argument has none."""
    if isinstance(value, ir.BlockArgument):
        return None
    operation = value.owner.operation
    return operation if operation.name == name else None
