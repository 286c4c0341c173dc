"""`explain` says where each leaf lives and why not as asked, and prints it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jzero


def abstract(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


EXPLAINED = {
    "block": [{"w": abstract(64, 128)}, {"w": abstract(63, 65, dtype="bfloat16")}],
    "scale": abstract(),
    "small": abstract(8),
}


def test_explanation_of_stage_3():
    rows = jzero.explain(jzero.zero(EXPLAINED, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=64))
    large, odd, scale, small = rows
    assert (large.path, large.shape, large.stored_shape) == ("block/0/w", (64, 128), (64, 128))
    assert (large.params, large.grads, large.opt_state) == (P(None, "data"),) * 3
    assert (large.dtype, large.bytes_per_device, large.reason) == (np.dtype("float32"), 64 * 128 * 4 // 8, "")
    assert (odd.path, odd.dtype) == ("block/1/w", jnp.dtype("bfloat16"))
    assert (odd.shape, odd.stored_shape, odd.bytes_per_device) == ((63, 65), (64, 65), 64 * 65 * 2 // 8)
    assert (odd.params, odd.grads, odd.opt_state) == (P("data"),) * 3
    assert odd.reason == "no dim of (63, 65) divides by 8: stored padded to (64, 65)"
    assert (scale.shape, scale.stored_shape, scale.bytes_per_device) == ((), (), 4)
    assert (scale.params, scale.grads, scale.opt_state) == (P(), P(), P())
    assert scale.reason == "whole on every device: a scalar"
    assert small.reason == "whole on every device: 8 elements are fewer than min_shard_size=64"


@pytest.mark.parametrize(
    ("stage", "specs"), [(0, (P(), P())), (1, (P(), P(None, "data"))), (2, (P(), P(None, "data")))]
)
def test_explanation_of_whole_params(stage, specs):
    rows = jzero.explain(jzero.zero(EXPLAINED, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=64))
    params, cut = specs
    assert (rows[0].params, rows[0].grads, rows[0].opt_state) == (params, cut, cut)
    assert rows[0].bytes_per_device == 64 * 128 * 4
    assert rows[0].reason == ""  # whole params are what these stages ask for
    # And at stage 0 whole optimizer state, too; at the others the gradient and the optimizer state are padded.
    padded = "no dim of (63, 65) divides by 8: stored padded to (64, 65)"
    assert rows[1].reason == (padded if stage else "")
    assert (rows[1].stored_shape, rows[1].bytes_per_device) == ((63, 65), 63 * 65 * 2)
    assert rows[1].opt_state == (P("data") if stage else P())


def test_explanation_names_axes_that_repeat_everything():
    mesh = jzero.make_mesh(replica=2, data=2, idle=2)
    rows = jzero.explain(jzero.zero(EXPLAINED, stage=3, mesh=mesh, replica_axes=("replica",)))
    assert all("mesh axis 'idle'" in row.reason for row in rows)
    assert not any("'replica'" in row.reason for row in rows)


def test_explanation_prints_as_an_aligned_table():
    rows = jzero.explain(jzero.zero(EXPLAINED, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=64))
    head, rule, *lines = (line for line in str(rows).splitlines() if line)
    columns = ["path", "shape", "stored_shape", "dtype", "params", "grads", "opt_state", "bytes_per_device", "reason"]
    assert head.split() == columns
    assert set(rule.strip()) == {"─"}
    assert len(lines) == len(rows)
    for line, row in zip((line.ljust(len(head)) for line in lines), rows, strict=True):
        for column in columns:
            value = getattr(row, column)
            text = {int: "{:,}"}.get(type(value), "{}").format(value)
            if isinstance(value, P):
                text = f"P({', '.join(map(repr, value))})"
            start = head.index(column)
            if column == "bytes_per_device":
                end = start + len(column)
                assert line[:end].endswith(f" {text}")
            else:
                assert line[start:].startswith(text)
                assert line[start - 1] == " "


def test_a_path_with_brackets_is_no_markup():
    layout = jzero.zero({"[bold]": {"[red]": abstract(8)}}, stage=0, mesh=jzero.make_mesh(data=-1))
    assert " [bold]/[red] " in str(jzero.explain(layout))


@pytest.mark.parametrize(
    ("stage", "size", "said"), [(3, 4096, True), (1, 4096, True), (0, 4096, False), (3, 0, False)], ids=str
)
def test_it_says_where_nothing_is_cut(stage, size, said):
    params = {"w": abstract(8, 16), "b": abstract(16)}
    text = str(jzero.explain(jzero.zero(params, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=size)))
    assert ("Nothing is cut: every device holds all of it" in text) == said
    assert ("A smaller min_shard_size than 4096 cuts" in text) == said


def test_a_lookup_is_named_by_the_line_that_looks_up():
    """`jnp.take`, which flax's and equinox's embeddings call, is jitted, and its equations know no line of the user."""
    layout = jzero.zero({"table": abstract(512, 64), "more": abstract(512, 64)}, stage=3, mesh=jzero.make_mesh(data=-1))

    def block(params, tokens):
        return jnp.take(params["table"], tokens, axis=0)

    def loss_fn(params, tokens):
        x = jax.checkpoint(block)(params, tokens)
        y = jnp.take(params["more"], tokens, axis=0)  # the same call as above, which JAX has traced once
        return jnp.mean((x - y) ** 2)

    more, table = (row.gathers or () for row in jzero.explain(layout, loss_fn, abstract(16, dtype="int32")))
    file, first = __file__.rsplit("/", 1)[-1], block.__code__.co_firstlineno
    assert [gathering.where for gathering in table] == [f"block ({file}:{first + 1})"]
    assert [gathering.where for gathering in more] == [f"loss_fn ({file}:{loss_fn.__code__.co_firstlineno + 2})"]
