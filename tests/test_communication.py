"""What runs over the links: exact counts and bytes, of jzero's collectives and of the partitioner's.

The params are small enough to count by hand: two leaves that are cut, in two dtypes, and two that stay whole.
"""

import math
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jzero
from jzero import hlo
from jzero.program import collectives, compiled_collectives
from jzero.state import compile_init
from tests.models import STAGES

PARAMS = {"a": ("float32", (16, 8)), "b": ("bfloat16", (8, 24)), "odd": ("float32", (7,)), "scale": ("float32", ())}
CUT, WHOLE = [PARAMS["a"], PARAMS["b"]], [PARAMS["odd"], PARAMS["scale"]]
M = 16 * 8 * 4 + 8 * 24 * 2  # bytes of the leaves that are cut

OPTIMIZERS = {"adamw": optax.adamw(1e-3), "sgd": optax.sgd(0.1, momentum=0.9)}
AGAIN = 8 * 24 * 2  # of these, bytes of "b", whose value the backward pass needs; that of "a" it does not need
# How often the cut leaves cross the links in a step of m microbatches: "again" are the gathers of the backward pass,
# and "whole" the gradients of the other leaves.
TABLE: dict[str, Callable[[int], dict[str, int]]] = {
    "0": lambda m: {"all-reduce": 1, "whole": 1},
    "1": lambda m: {"reduce-scatter": 1, "all-gather": 1, "whole": 1},
    "2": lambda m: {"reduce-scatter": m, "all-gather": 1, "whole": 1},
    "3": lambda m: {"reduce-scatter": m, "all-gather": m, "again": m, "whole": 1},
    "deepspeed1": lambda m: {"all-reduce": 1, "all-gather": 1, "whole": 1},
    "no_sync": lambda m: {"reduce-scatter": 1, "all-gather": m, "again": m, "whole": 1},
    "by_block": lambda m: {"all-reduce": m, "whole": m},
}
SCALAR = ("float32", ())


def abstract_params():
    return {path: jax.ShapeDtypeStruct(shape, dtype) for path, (dtype, shape) in PARAMS.items()}


def init_params():
    return {path: jnp.full(shape, 0.1, dtype) for path, (dtype, shape) in PARAMS.items()}


def mean_loss(params, x):
    h = x @ params["a"] @ params["b"].astype(jnp.float32)
    return jnp.mean(h**2) * params["scale"] + (params["odd"] ** 2).sum()


def weighted_loss(params, x):
    return jzero.Weighted(mean_loss(params, x) * len(x), len(x)), {"size": (x**2).mean(), "top": x.max(0)}


def make_layout(stage, **axes):
    return jzero.zero(
        abstract_params(),
        stage=STAGES[stage],
        mesh=jzero.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes),
        replica_axes=("replica",) if "replica" in axes else (),
        min_shard_size=16,
    )


def lower(layout, microbatches, loss_fn=mean_loss, optimizer="adamw", has_aux=False, clip_norm=None):
    """Lowers a training step; no array is needed for that."""
    tx = OPTIMIZERS[optimizer]

    def state():
        params = init_params()
        return jzero.TrainState(params, tx.init(params), jnp.zeros((), jnp.int32))

    step = jzero.train_step(loss_fn, tx, layout, microbatches=microbatches, has_aux=has_aux, clip_norm=clip_norm)
    return step.lower(jax.eval_shape(state), jax.ShapeDtypeStruct((64, 16), jnp.float32))


def shard(leaf, shards):
    """Both leaves are cut along their last dim: the larger, and of equal length none."""
    dtype, (rows, columns) = leaf
    return dtype, (rows, columns // shards)


def counted(rows):
    """Counts by kind, dtype, number of elements, axes and group size: a collective may see a leaf transposed."""
    assert all(row.exact for row in rows)
    counts = Counter()
    for row in rows:
        counts[row.kind, row.dtype, math.prod(row.shape), row.axes, row.group] += row.count
    return counts


def expected(times, scalars, data, replica=1):
    """The collectives that `times`, a row of the table, means on a mesh of `replica` x `data` devices."""
    everywhere = (("replica", "data"), replica * data) if replica > 1 else (("data",), data)
    counts = Counter()

    def add(kind, leaf, axes, group, n):
        dtype, shape = leaf
        counts[kind, dtype, math.prod(shape), axes, group] += n

    for leaf in CUT:
        add("all-reduce", leaf, *everywhere, times.get("all-reduce", 0))
        add("all-gather", leaf, ("data",), data, times.get("all-gather", 0))
        add("reduce-scatter", leaf, ("data",), data, times.get("reduce-scatter", 0))
        if replica > 1:
            add("all-reduce", shard(leaf, data), ("replica",), replica, times.get("reduce-scatter", 0))
    add("all-gather", PARAMS["b"], ("data",), data, times.get("again", 0))
    for leaf in WHOLE:
        add("all-reduce", leaf, *everywhere, times["whole"])
    for leaf in scalars:
        add("all-reduce", leaf, *everywhere, 1)
    return +counts


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_step(stage, microbatches):
    layout = make_layout(stage, data=8)
    rows = collectives(lower(layout, microbatches), layout.mesh)
    times = TABLE[stage](microbatches)
    assert counted(rows) == expected(times, [SCALAR], data=8)
    moved = Counter()
    for row in rows:
        moved[row.kind] += row.bytes
    whole = 7 * 4 + 4
    assert moved["reduce-scatter"] == times.get("reduce-scatter", 0) * M
    assert moved["all-gather"] == times.get("all-gather", 0) * M + times.get("again", 0) * AGAIN
    assert moved["all-reduce"] == times.get("all-reduce", 0) * M + times["whole"] * whole + 4


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_step_with_replicas(stage, microbatches):
    """Cut inside of a replica, and only the reduced shard is all-reduced across."""
    layout = make_layout(stage, replica=2, data=4)
    rows = collectives(lower(layout, microbatches), layout.mesh)
    times = TABLE[stage](microbatches)
    assert counted(rows) == expected(times, [SCALAR], data=4, replica=2)
    across = sum(row.bytes for row in rows if row.axes == ("replica",))
    assert across == times.get("reduce-scatter", 0) * M // 4


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_alone(stage):
    """The gather of the new params belongs to the update; the gather for the loss is the gradient's."""
    layout = make_layout(stage, data=8)
    f = jax.jit(jzero.value_and_grad(mean_loss, layout, microbatches=4))
    rows = collectives(f.lower(abstract_params(), jax.ShapeDtypeStruct((64, 16), jnp.float32)), layout.mesh)
    times = TABLE[stage](4)
    if layout.stage.params == "replicated":
        times.pop("all-gather", None)
    assert counted(rows) == expected(times, [SCALAR], data=8)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_weights_and_aux_are_summed_once(stage):
    layout = make_layout(stage, data=8)
    rows = collectives(lower(layout, 4, loss_fn=weighted_loss, has_aux=True), layout.mesh)
    sums = [SCALAR, SCALAR, SCALAR, ("float32", (16,))]  # total, weight, and the two of aux
    assert counted(rows) == expected(TABLE[stage](4), sums, data=8)


@pytest.mark.parametrize("stage", STAGES)
def test_one_device_communicates_nothing(stage):
    layout = make_layout(stage, data=1)
    lowered = lower(layout, 4, clip_norm=1.0)
    assert collectives(lowered, layout.mesh) == ()


def test_one_device_still_has_the_axis_names():
    layout = make_layout("3", replica=1, data=1)

    def loss_fn(params, x):
        return lax.psum(mean_loss(params, x), layout.batch_axes)

    (row,) = collectives(lower(layout, 1, loss_fn=loss_fn), layout.mesh)
    assert (row.kind, row.shape, row.group) == ("all-reduce", (), 1), "the loss's own"
    loss, _ = jzero.value_and_grad(loss_fn, layout)(init_params(), jnp.ones((4, 16)))
    assert loss == pytest.approx(float(mean_loss(init_params(), jnp.ones((4, 16)))))


def test_axes_of_size_one_are_left_out():
    inside = make_layout("3", replica=1, data=8)
    assert counted(collectives(lower(inside, 4), inside.mesh)) == expected(TABLE["3"](4), [SCALAR], data=8)
    across = make_layout("3", replica=8, data=1)
    rows = collectives(lower(across, 4), across.mesh)
    assert {(row.kind, row.axes, row.group) for row in rows} == {("all-reduce", ("replica",), 8)}
    assert sum(row.bytes for row in rows) == 4 * M + 7 * 4 + 4 + 4


@pytest.mark.parametrize(
    ("stage", "microbatches", "optimizer"),
    [
        ("0", 1, "adamw"),
        ("0", 4, "sgd"),
        ("1", 1, "sgd"),
        ("1", 4, "adamw"),
        ("2", 1, "adamw"),
        ("2", 4, "sgd"),
        ("3", 1, "sgd"),
        ("3", 4, "adamw"),
        ("deepspeed1", 1, "adamw"),
        ("no_sync", 4, "adamw"),
        ("by_block", 4, "sgd"),
    ],
)
def test_the_partitioner_adds_the_norm_alone(stage, microbatches, optimizer):
    """One all-reduce of a scalar for each leaf that is cut, all in one instruction, over the data axis alone.

    That tells them apart from the loss, which runs over both axes. XLA may move a collective out of a loop, so counts
    are at most those that jzero wrote.
    """
    layout = make_layout(stage, replica=2, data=4)
    lowered = lower(layout, microbatches, optimizer=optimizer, clip_norm=1.0)
    compiled = lowered.compile()
    written, ran = collectives(lowered, layout.mesh), compiled_collectives(compiled, layout.mesh)

    def count(rows):  # without the dtype: XLA:CPU sums bfloat16 in float32
        counts = Counter()
        for row in rows:
            counts[row.kind, row.shape, row.axes] += row.count
        return counts

    norm = ("all-reduce", (), ("data",))
    added = count(ran) - count(written)
    cut = len(CUT) if layout.stage.grads == "sharded" else 0
    assert added == Counter({norm: cut} if cut else {})
    assert set(count(written)) <= set(count(ran)), "XLA has dropped what jzero promises"

    program = hlo.parse(compiled.as_text() or "")
    instructions = [
        instruction
        for computation in program.computations.values()
        for instruction in computation
        if instruction.opcode == "all-reduce" and [len(group) for group in program.groups(instruction)] == [4, 4]
    ]
    assert len(instructions) == (1 if cut else 0)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_the_partitioner_leaves_another_axis_alone(stage):
    layout = make_layout(stage, data=4, model=2)
    assert counted(collectives(lower(layout, 4), layout.mesh)) == expected(TABLE[stage](4), [SCALAR], data=4)

    # In float32: beside an automatic axis XLA:CPU cannot compile a sum in bfloat16.
    wide = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, (_, shape) in PARAMS.items()}
    f = jzero.value_and_grad(mean_loss, jzero.zero(wide, stage=STAGES[stage], mesh=layout.mesh, min_shard_size=16))
    lowered = jax.jit(f).lower(wide, jax.ShapeDtypeStruct((64, 16), jnp.float32))
    ran = counted(compiled_collectives(lowered.compile(), layout.mesh))
    written = counted(collectives(lowered, layout.mesh))
    # Nothing that jzero did not write. (XLA:CPU makes one gather of the two of a leaf in a program as small as this.)
    assert set(ran) == set(written) and ran <= written


@pytest.mark.parametrize("stage", ["0", "3"])
def test_init_communicates_no_more_than_its_result(stage):
    layout = make_layout(stage, replica=2, data=4)

    def random_params(key):
        return {path: jax.random.normal(key, shape).astype(dtype) for path, (dtype, shape) in PARAMS.items()}

    compiled = compile_init(random_params, OPTIMIZERS["adamw"], layout).lower(jax.random.key(0)).compile()
    rows = compiled_collectives(compiled, layout.mesh)
    # Random numbers are made by shards at every stage; where the params are whole they are gathered then.
    whole = {math.prod(shape): 1 for _, shape in CUT} if stage == "0" else {}
    assert {math.prod(row.shape): row.count for row in rows if row.kind == "all-gather"} == whole
    assert {row.kind for row in rows} <= {"all-gather"}
