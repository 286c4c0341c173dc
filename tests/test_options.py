"""Compiler options: none on CPUs, and those of the user where there are any."""

import jax.numpy as jnp
import optax
import pytest

import jzero


def layout():
    return jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)


def test_none_on_cpus():
    assert jzero.compiler_options(layout(), bucket_bytes=1) == {}


@pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, True, "64MB"])
def test_buckets_that_cannot_be(bucket_bytes):
    with pytest.raises(ValueError, match=f"bucket_bytes={bucket_bytes!r}; wanted a number of bytes, 1 or more"):
        jzero.compiler_options(layout(), bucket_bytes=bucket_bytes)


def test_the_step_is_compiled_with_the_options_that_it_is_given():
    """An option that XLA does not know is refused, and so has arrived."""
    tx = optax.sgd(0.1)
    step = jzero.train_step(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx, layout(), compiler_options={"xla_no_such_option": True}
    )
    state = jzero.init(lambda: {"w": jnp.ones(8)}, tx, layout())
    with pytest.raises(Exception, match="xla_no_such_option"):
        step(state, layout().put_batch(jnp.ones((8, 8))))
