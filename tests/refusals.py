"""A small model with its layout, step and state, and `refuses`: what the tests of errors share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

SGD = optax.sgd(0.1, momentum=0.9)


def make_params():
    return {"body": {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}, "head": [jnp.ones((16, 8))]}


def loss_fn(params, batch):
    h = jnp.tanh(batch["x"] @ params["body"]["w"] + params["body"]["b"])
    return jnp.mean((h @ params["head"][0]) ** 2)


def make_batch(examples=16):
    return {"x": np.ones((examples, 8), np.float32)}


def make_layout(stage=3, mesh=None, **options):
    mesh = mesh or jzero.make_mesh(data=-1)
    return jzero.zero(make_params(), stage=stage, mesh=mesh, min_shard_size=0, **options)


def make_state(layout, tx=SGD):
    return jzero.init(lambda p: p, tx, layout, make_params())


def refuses(call, *parts, error: type[Exception] = ValueError):
    """Runs `call`, which must raise `error` with all of `parts` in its message."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    return message


@pytest.fixture(scope="module")
def layout():
    return make_layout()


@pytest.fixture(scope="module")
def step(layout):
    """One compiled step for all tests of this module."""
    return jzero.train_step(loss_fn, SGD, layout)


@pytest.fixture(scope="module")
def source(layout):
    """A state that no test may donate."""
    return make_state(layout)


@pytest.fixture
def state(source):
    """A state of one's own, which must be alive and whole when the test is over."""
    state = jax.tree.map(jnp.copy, source)
    yield state
    for leaf, original in zip(jax.tree.leaves(state), jax.tree.leaves(source), strict=True):
        np.testing.assert_array_equal(leaf, original)
