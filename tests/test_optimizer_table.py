"""docs/optimizers.md says of every optimizer what it costs, as it is measured here."""

import math
import os
import pathlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero import memory, program
from tests.compiled_update import FOR_MEMORY, lower_update, scalar, temp_bytes
from tests.optax_constructors import CASES, REFUSED, gradient_of_objective, objective

FILE = pathlib.Path(__file__).parent.parent / "docs" / "optimizers.md"
COMMAND = "WRITE_DOCS=1 pytest -m slow tests/test_optimizer_table.py"
VERSIONS = f"jax {jax.__version__} and optax {optax.__version__}"
EVEN, PADDED = (512, 1024), (511, 1021)
MATRICES = 8
DEVICES = 8
SMALL = 1024  # bytes of a state that holds only counters, keys and numbers

EXTRA = {"grad": True, "value_fn": objective, "obj_fn": objective, "grad_fn": gradient_of_objective}


@dataclass(frozen=True)
class Cost:
    """What one optimizer costs: bytes, counts, and temp memory in shards of one matrix."""

    state_per_param: float
    share: float | None
    collectives: int
    exact: bool
    bytes: int
    temp: float


def measure(name: str, shape: tuple[int, int] = EVEN) -> Cost:
    case = CASES[name]
    params: Any = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(MATRICES)}
    if name == "lookahead":
        params = optax.LookaheadParams(params, params)
    tx: Any = case.make()
    extra = {need: EXTRA.get(need) or scalar() for need in case.extra}
    mesh = jzero.make_mesh(data=DEVICES)
    layouts = [jzero.zero(params, stage=stage, mesh=mesh) for stage in range(4)]
    whole, part = (memory.stored_bytes(layouts[stage], tx).opt_state for stage in (0, 2))

    lowered = lower_update(tx, layouts[2], **extra)
    written = Counter({replace(row, count=1): row.count for row in program.collectives(lowered, mesh)})
    compiled = program.compiled_collectives(lowered.compile(FOR_MEMORY), mesh)
    gathers = {replace(row, count=1): row.count for row in compiled}
    assert all(gathers.get(row) == count for row, count in written.items()), "jzero's own gathers are all there"
    added = [replace(row, count=row.count - written[replace(row, count=1)]) for row in compiled]

    temp = temp_bytes(lower_update(tx, layouts[3], **extra), FOR_MEMORY)
    matrix = layouts[3].leaves[0]
    return Cost(
        state_per_param=whole / (len(layouts[0].leaves) * math.prod(shape)),
        share=part / whole if whole > SMALL else None,
        collectives=sum(row.count for row in added),
        exact=all(row.exact for row in added),
        bytes=sum(row.bytes for row in added),
        temp=temp / (4 * math.prod(matrix.local("sharded", DEVICES))),
    )


def table() -> str:
    costs = {name: measure(name) for name in CASES}
    params = 4 * MATRICES * math.prod(EVEN)
    muon, padded = costs["contrib.muon"], measure("contrib.muon", PADDED)
    rows = [
        f"| {name} | {', '.join(CASES[name].extra) or '-'} | {cost.state_per_param:.2f} | "
        f"{'-' if cost.share is None else f'{cost.share:.3f}'} | {cost.collectives:,}{'' if cost.exact else '+'} | "
        f"{cost.bytes:,}{'' if cost.exact else '+'} | {cost.temp:.1f} |"
        for name, cost in costs.items()
    ]
    uses = [f"- {name}: {case.how}." for name, case in CASES.items() if case.how]
    no_scalars = [name for name, case in CASES.items() if not case.scalars]
    stored_padded = padded.bytes / (4 * MATRICES * math.prod(PADDED))
    return f"""# Optimizers

Every constructor of a gradient transformation in `optax` and `optax.contrib`, and what it costs. All of them run at
stages 0 to 3 on params of any shape, and the params and the state after five steps are those of one device, to 1e-9 of
the largest number in float64 (`tests/test_every_optimizer.py`). The few that are refused stand at the end.

Made with {VERSIONS} by

    {COMMAND}

All numbers are for {MATRICES} float32 matrices of {EVEN[0]} x {EVEN[1]} ({params:,} bytes) on {DEVICES} devices, read
from compiled programs; nothing is timed. The columns:

- *extra arguments*: what it needs beside gradients; pass it as
  `jzero.apply_gradients(state, grads, tx, layout, value=..., grad=..., value_fn=...)`.
- *state*: bytes of optimizer state for each element of the params, on one device or at stage 0.
- *share*: the part of the state that each of the {DEVICES} devices holds at stages 1 to 3, if there is more to it than
  counters and keys. What is above {1 / DEVICES} is of other shapes than the params, and smaller than `min_shard_size`.
- *collectives* and *bytes*: what the partitioner adds to the update at stage 2, for norms, means and products of whole
  matrices; jzero's own gather of the updated params is not counted. A "+" marks a loop whose number of passes the
  program does not tell, counted once.
- *temp*: memory that the update takes beside its inputs and outputs at stage 3, in shards of one matrix. XLA:CPU was
  told to order the program for memory, as XLA does on accelerators, rather than for parallel work on the CPU's cores
  (`xla_cpu_scheduler_type`).

Muon multiplies whole matrices: in every step its update moves {muon.bytes:,} bytes in {muon.collectives} collectives,
{muon.bytes / params:.1f} times the params; where no dim divides and the matrices are stored padded
({PADDED[0]} x {PADDED[1]}), {stored_padded:.1f} times the params in {padded.collectives} collectives.

Inner products, as `optax.tree.vdot` makes them, flatten each leaf, and one that is cut along another dim than its first
is gathered for it: so do dadapt_adamw, mechanize, momo, momo_adam, prodigy, L-BFGS and the line searches. `flatten`
joins all leaves to one, and moves every element on the way there and back.

| optimizer | extra arguments | state | share | collectives | bytes | temp |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Used in another way than the rest:

{chr(10).join(uses)}
- {", ".join(no_scalars)}: optax itself cannot update a scalar with these.

Refused:

{chr(10).join(f"- {name}: {reason}." for name, reason in REFUSED.items())}
"""


def test_every_optimizer_is_in_the_table():
    lines = FILE.read_text().splitlines()
    rows = {line.split("|")[1].strip() for line in lines if line.startswith("| ")} - {"optimizer"}
    assert rows == CASES.keys()
    assert all(any(line.startswith(f"- {name}: ") for line in lines) for name in REFUSED)


@pytest.mark.slow
def test_the_table_is_what_is_measured():
    if os.environ.get("WRITE_DOCS"):
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(table())
    text = FILE.read_text()
    if VERSIONS not in text:
        pytest.skip(f"the table was made with other versions than {VERSIONS}, and compilers differ")
    assert text == table(), f"docs/optimizers.md is out of date: {COMMAND}"
