"""The matmuls of a compiled program: which kernels do them, and how many FLOPs each takes.

Two for each multiplication and addition of a `dot`, of a call of cuBLAS, and of the dots inside of a fusion. Where XLA
splits a sum into parts that are added up later, the parts are counted. Convolutions are not counted, nor is anything
that is no matmul: elementwise work, softmax, norms and the optimizer.
"""

import functools
import math
import re
from dataclasses import dataclass

from jzero import hlo

_CALL = re.compile(r'custom_call_target="__cublas\$\S*(?:gemm|matmul)', re.IGNORECASE)
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)((?:"?\d+"?,?)+)')
_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv')


@dataclass(frozen=True)
class Matmul:
    """One kernel that multiplies matrices.

    Attributes:
        flops: On one device, in one run.
        dtype: What it multiplies: numpy's name, but "tf32" for float32 of the precision that JAX has by default.
        name: Its place in the traced program, as jax calls it.
    """

    flops: float
    dtype: str
    name: str

    @property
    def again(self) -> bool:
        """Whether it recomputes for the backward pass what the forward pass had computed (`jax.checkpoint`)."""
        return "rematted_computation" in self.name


class Matmuls:
    """Finds them in a program."""

    def __init__(self, program: hlo.Program):
        self.program = program
        self.inside = functools.cache(self._inside)

    def of(self, computation: str, line: hlo.Instruction) -> Matmul | None:
        """The matmuls of one instruction, if it is one kernel that has any."""
        if line.opcode == "dot" or _CALL.search(line.attributes):
            return Matmul(self._flops(computation, line), self._dtype(computation, line), (line.op_names or [""])[0])
        if line.opcode != "fusion":
            return None
        found = [one for name in line.called for one in self.inside(name)]
        if not found:
            return None
        largest = max(found, key=lambda one: one.flops)
        name = (line.op_names or [largest.name])[0]
        return Matmul(sum(one.flops for one in found), largest.dtype, largest.name or name)

    def _inside(self, computation: str) -> list[Matmul]:
        lines = self.program.computations[computation]
        return [one for line in lines if (one := self.of(computation, line)) is not None]

    def _operand(self, computation: str, line: hlo.Instruction) -> tuple[str, tuple[int, ...]]:
        return self.program.arrays[computation][line.operands[0]][0]

    def _flops(self, computation: str, line: hlo.Instruction) -> float:
        _, shape = self._operand(computation, line)
        match = _CONTRACTED.search(line.attributes)
        dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else []
        return 2.0 * math.prod(line.arrays[0][1]) * math.prod(shape[dim] for dim in dims)

    def _dtype(self, computation: str, line: hlo.Instruction) -> str:
        dtype, _ = self._operand(computation, line)
        exact = re.search(r'operand_precision"?[=:][{\[]"?highest', line.attributes, re.IGNORECASE)
        return "tf32" if dtype == "float32" and not exact else dtype


def convolutions(program: hlo.Program) -> int:
    """How many convolutions a program has, which `Matmuls` leaves out."""
    lines = [line for lines in program.computations.values() for line in lines]
    return sum(line.opcode == "convolution" or bool(_CONVOLUTION.search(line.attributes)) for line in lines)
