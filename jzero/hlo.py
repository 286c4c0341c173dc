"""Reads the text of a compiled program, which is all that JAX gives of it.

Who calls whom, how often loops run, which arrays come out, which devices talk to one another, and what jax called the
operations, as XLA:CPU and XLA:GPU write it in jax 0.10 and 0.12.
"""

import dataclasses
import functools
import re
from typing import Any

import numpy as np

from jzero.groups import Groups, mesh_groups

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
class Exchange:
    """A collective where it starts.

    Attributes:
        kind: One of `COLLECTIVES`.
        arrays: Dtypes and shapes of the whole arrays.
        groups: As `Program.groups` has them.
        names: What jax calls it: a name for each array, or one for several; or none.
        asynchronous: Whether other work may run until it is done.
    """

    kind: str
    arrays: list[tuple[str, tuple[int, ...]]]
    groups: Groups
    names: list[str]
    asynchronous: bool


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

    def started(self, computation: str, line: Instruction) -> list[Exchange]:
        """The collectives that an instruction is or starts; a generic start calls a computation that holds one."""
        found = [(computation, line)] if line.collective else []
        if line.opcode == "async-start":
            found = [(name, one) for name in line.called for one in self.computations[name] if one.collective]
        return [
            Exchange(
                one.collective,
                self.exchanged(name, one),
                self.groups(one),
                one.op_names or line.op_names,  # what such a computation is called stands where it starts
                line.opcode.endswith("-start") and not (line.is_sync or one.is_sync),
            )
            for name, one in found
        ]


def text_of(what: str, compiled: Any, way_out: str = "") -> str:
    """The text of a compiled program; raises a TypeError if it is none."""
    text = compiled.as_text() if hasattr(compiled, "as_text") else None
    if not text or not text.startswith("HloModule"):
        raise TypeError(
            f"{what}: wanted a compiled program, which jax.jit(f).lower(...).compile() returns; got "
            f"{type(compiled).__name__}.{way_out}"
        )
    return text


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
