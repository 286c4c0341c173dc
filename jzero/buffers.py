"""Which arrays take the memory of a compiled program, by the names that jax gives them.

XLA:GPU says what lives at the moment of its largest use in a report that it writes on request, into a folder. The
report names instructions; the program's text says which operation of the traced program each came from.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jzero import hlo
from jzero.jaxprs import LIBRARIES

DUMP = {"xla_dump_hlo_as_text": True}
"""Compiler options that make XLA write the report; with `xla_dump_to` a folder."""

_LIVE = re.compile(r"\s+([\w.-]+)\{([\d,]*)\}: (\d+) bytes")
_NOISE = re.compile(
    r"(?:jit\((?:_?update|sharded|main)\)|shard_map|while|body|closed_call|eval_jaxpr|checkpoint|core_call)(?:/|$)"
)


@dataclass(frozen=True)
class Buffer:
    """An array on one device.

    Attributes:
        name: Path of a leaf, such as "blocks/up" or "0/mu/blocks/up"; or the operation that makes the array.
        kind: "params", "master", "optimizer state", "rest of the state", "batch", or "temporary".
        dtype: numpy's name; empty if not known.
        shape: On one device; () if not known.
        bytes: What it takes.
        where: The line of the model that it comes from, as in "block (model.py:31)"; empty if that is not known.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    where: str = ""


def tidy(name: str) -> str:
    """The name of an operation without what all have in common.

    Example:
        >>> tidy("jit(update)/jit(sharded)/shard_map/while/body/closed_call/rematted_computation/mlp/dot_general")
        'recomputed/mlp/dot_general'
    """
    return _NOISE.sub("", name).replace("rematted_computation", "recomputed").strip("/")


def temporaries(folder: Path, program: hlo.Program) -> tuple[Buffer, ...] | None:
    """What lives beside the arguments where most does, largest first.

    Args:
        folder: Into which XLA has dumped the program.
        program: The program.

    Returns:
        The buffers; None if there is no report, as for a program that came out of a cache.
    """
    reports = sorted(folder.glob("*-live-range.txt"))
    if not reports:
        return None
    largest: tuple[Buffer, ...] = ()
    for report in reports:
        found = tuple(_read(report.read_text(), program))
        if sum(one.bytes for one in found) > sum(one.bytes for one in largest):
            largest = found
    return tuple(sorted(largest, key=lambda one: -one.bytes))


def _read(text: str, program: hlo.Program) -> Iterable[Buffer]:
    by_name = {line.name: (name, line) for name, lines in program.computations.items() for line in lines}
    loops = {
        line.called[-1]: line for lines in program.computations.values() for line in lines if line.opcode == "while"
    }

    def carried(computation: str, line: hlo.Instruction, at: tuple[int, ...]) -> hlo.Instruction:
        """What makes the element of a loop's carry, where an instruction is one."""
        if line.opcode != "parameter" or computation not in loops or not at:
            return line
        operands = program.computations[computation][-1].operands
        return by_name[operands[at[0]]][1] if at[0] < len(operands) and operands[at[0]] in by_name else line

    def named(line: hlo.Instruction, part: int = 0, depth: int = 0) -> tuple[str, str]:
        """Name and source of an instruction, or of the first operand or inner instruction that has them."""
        names = line.op_names
        if names and tidy(names[part if part < len(names) else 0]):
            return tidy(names[part if part < len(names) else 0]), program.source(line, LIBRARIES)
        inner = [one for called in line.called for one in reversed(program.computations[called])]
        before = [by_name[name][1] for name in line.operands if name in by_name]
        for one in (*inner, *before) if depth < 8 else ():
            if found := named(one, depth=depth + 1)[0]:
                return found, program.source(one, LIBRARIES)
        return "", ""

    live = text.partition("(peak):")[2].partition("\n\n")[0]
    for name, index, size in _LIVE.findall(live):
        at = tuple(map(int, index.split(","))) if index else ()
        computation, line = by_name.get("%" + name, ("", None))
        if line is None or (computation == program.entry and line.opcode == "parameter"):
            continue
        # A start returns its operands and its results, (operands, results), where others return one flat tuple.
        flat = at[0] * (len(line.arrays) // 2) + at[1] if len(at) == 2 else at[0] if at else 0
        dtype, shape = line.arrays[flat] if flat < len(line.arrays) else ("", ())
        made = carried(computation, line, at)
        title, where = named(made, at[-1] if made is line and at else 0)
        yield Buffer(title or made.opcode, "temporary", dtype, shape, int(size), where)
