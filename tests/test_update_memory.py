"""Temp memory of `apply_gradients` with a donated state: no more than is worked on at a time."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.targets import target_mesh
from tests import gpus
from tests.compiled_update import WITH_BARRIERS, lower_update, temp_bytes

TREES = {
    "alike": [(512, 1024)] * 8,
    "different": [(512 + 64 * i, 1024 - 64 * i) for i in range(8)],
    "padded": [(511, 1021)] * 8,
}
OPTIMIZERS = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(1e-3)}

SMALL = 2**14  # scalars, tables of pointers, what alignment adds


def temp_and_limit(tx, shapes, stage, mesh, options):
    """Temp bytes of the update, and what it may take: two shards, and where params are whole two gathered leaves."""
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    layout = jzero.zero(params, stage=stage, mesh=mesh)
    whole = max(4 * math.prod(leaf.stored) for leaf in layout.leaves)
    limit = 2 * whole // layout.shards + (2 * whole if stage < 3 else 0) + SMALL
    return temp_bytes(lower_update(tx, layout), options), limit


# XLA:CPU keeps the shards of padded leaves; XLA:GPU does not, as the next test sees.
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tree", ["alike", "different"])
def test_an_update_takes_two_shards_and_two_gathered_leaves(tree, name, stage):
    temp, limit = temp_and_limit(OPTIMIZERS[name], TREES[tree], stage, jzero.make_mesh(data=8), WITH_BARRIERS)
    assert temp <= limit


@pytest.mark.slow
@gpus.compiles
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tree", TREES)
def test_so_it_does_in_the_program_for_eight_h200(tree, name, stage):
    temp, limit = temp_and_limit(OPTIMIZERS[name], TREES[tree], stage, target_mesh("h200x8", data=8), {})
    assert temp <= limit
