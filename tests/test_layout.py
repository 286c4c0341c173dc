"""Where each leaf lives: the rule, the trees of specs, batches, the explanation, and bytes on live arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero import memory
from jzero.rules import MIN_SHARD_SIZE, place


def abstract(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# The rule


@pytest.mark.parametrize(
    ("shape", "shards", "min_shard_size", "dim"),
    [
        ((64, 32), 8, 0, 1),  # not the first dim, though it is larger
        ((64, 7), 8, 0, 0),  # the first where no other divides
        ((64,), 8, 0, 0),
        ((3, 16, 48), 8, 0, 2),  # the largest
        ((3, 48, 16), 8, 0, 1),
        ((4, 16, 16), 8, 0, 1),  # the earlier among equals
        ((48, 3, 8), 8, 0, 2),
        ((6, 9), 3, 0, 1),
        ((6, 8), 3, 0, 0),
        ((7, 9), 8, 0, None),
        ((), 8, 0, None),
        ((), 1, 0, None),
        ((0, 8), 8, 1, None),
        ((8, 0), 8, 0, 0),  # nothing divides into nothing: a dim of no length is never cut
        ((1, 1), 8, 0, None),
        ((5, 7), 1, 0, 1),  # one shard divides all
        ((64, 64), 8, 4096, 1),
        ((64, 64), 8, 4097, None),
        ((8,), 8, 8, 0),
        ((8,), 8, 9, None),
    ],
)
def test_dim_that_is_cut(shape, shards, min_shard_size, dim):
    leaf = place("['w']", abstract(*shape), shards, min_shard_size)
    assert leaf.dim == dim
    assert bool(leaf.reason) == (dim is None)
    wanted = tuple(size // shards if d == dim else size for d, size in enumerate(shape))
    assert leaf.shard_shape(shards) == wanted


def test_reasons_say_what_is_wrong_with_the_leaf():
    assert place("", abstract(), 8, 0).reason == "a scalar stays whole"
    assert place("", abstract(7, 9), 8, 0).reason == "no dim of (7, 9) divides by 8"
    assert place("", abstract(8, 2), 8, 17).reason == "16 elements are fewer than min_shard_size=17"


# The trees

PARAMS = {
    "embed": abstract(32, 8),
    "layers": [{"w": abstract(3, 8, 16), "b": abstract(3, 5)}],
    "scale": abstract(),
}
CUT = {"embed": P(None, "data"), "layers": [{"w": P(None, None, "data"), "b": P()}], "scale": P()}
WHOLE = {"embed": P(), "layers": [{"w": P(), "b": P()}], "scale": P()}


@pytest.mark.parametrize(
    ("stage", "params", "grads", "opt"),
    [(0, WHOLE, WHOLE, WHOLE), (1, WHOLE, CUT, CUT), (2, WHOLE, CUT, CUT), (3, CUT, CUT, CUT)],
)
def test_specs_of_each_stage(stage, params, grads, opt):
    mesh = jzero.make_mesh(replica=2, data=4)
    layout = jzero.zero(PARAMS, stage=stage, mesh=mesh, replica_axes=("replica",), min_shard_size=0)
    tx = optax.adam(1e-3)
    assert layout.param_specs == params
    assert layout.grad_specs == grads
    adam = layout.opt_specs(tx)[0]
    assert (adam.count, adam.mu, adam.nu) == (P(), opt, opt)

    def shardings(specs):
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    assert layout.param_shardings == shardings(params)
    assert layout.grad_shardings == shardings(grads)
    assert layout.opt_shardings(tx)[0].mu == shardings(opt)


def test_small_leaves_stay_whole_by_default():
    params = {"large": abstract(64, 64), "small": abstract(64, 63)}
    assert MIN_SHARD_SIZE == 64 * 64
    specs = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1)).param_specs
    assert specs == {"large": P(None, "data"), "small": P()}


def test_several_data_axes_cut_one_dim():
    mesh = jzero.make_mesh(node=2, gpu=2, model=2)
    layout = jzero.zero({"w": abstract(4, 6)}, stage=3, mesh=mesh, data_axes=("node", "gpu"), min_shard_size=0)
    assert layout.param_specs == {"w": P(("node", "gpu"))}
    assert (layout.shards, layout.batch_shards, layout.batch_axes) == (4, 4, ("node", "gpu"))


def test_one_axis_may_be_given_as_a_string():
    mesh = jzero.make_mesh(r=2, d=4)
    layout = jzero.zero({"w": abstract(8)}, stage=3, mesh=mesh, data_axes="d", replica_axes="r", min_shard_size=0)
    assert (layout.data_axes, layout.replica_axes, layout.batch_axes) == (("d",), ("r",), ("r", "d"))


def test_arrays_and_abstract_leaves_make_the_same_layout():
    mesh = jzero.make_mesh(data=-1)
    arrays = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), PARAMS)
    from_arrays, from_shapes = (jzero.zero(tree, stage=3, mesh=mesh, min_shard_size=0) for tree in (arrays, PARAMS))
    assert from_arrays == from_shapes
    assert from_arrays.abstract_params == PARAMS


def test_a_layout_cannot_be_changed_and_can_be_a_key():
    layout = jzero.zero(PARAMS, stage=3, mesh=jzero.make_mesh(data=-1))
    with pytest.raises(AttributeError):
        layout.min_shard_size = 0  # pyright: ignore[reportAttributeAccessIssue]
    assert {layout: 1}[jzero.zero(PARAMS, stage=3, mesh=jzero.make_mesh(data=-1))] == 1


def test_logical_and_stored_are_inverse_and_keep_the_values():
    layout = jzero.zero({"w": abstract(7, 9)}, stage=3, mesh=jzero.make_mesh(data=-1))
    tree = {"w": jnp.arange(63.0).reshape(7, 9)}
    for there_and_back in (layout.logical(layout.stored(tree)), layout.stored(layout.logical(tree))):
        np.testing.assert_array_equal(there_and_back["w"], tree["w"])


# Batches


def rows_by_device(array):
    return {shard.device: np.asarray(shard.data)[:, 0].tolist() for shard in array.addressable_shards}


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_batch_is_cut_over_replica_and_data_axes_in_the_meshs_order(kind):
    mesh = jzero.make_mesh(model=2, replica=2, data=2)
    layout = jzero.zero(PARAMS, stage=3, mesh=mesh, replica_axes=("replica",))
    tokens = np.arange(8 * 3, dtype=np.int32).reshape(8, 3)
    batch = layout.put_batch({"tokens": kind(tokens), "more": [kind(tokens[:4] * 10)]})
    np.testing.assert_array_equal(batch["tokens"], tokens)
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].sharding == NamedSharding(mesh, P(("replica", "data")))
    rows = rows_by_device(batch["tokens"])
    for (_, replica, data), device in np.ndenumerate(mesh.devices):
        start = 2 * (2 * replica + data)
        assert rows[device] == tokens[start : start + 2, 0].tolist()
    assert {len(rows) for rows in rows_by_device(batch["more"][0]).values()} == {1}


def test_batch_placed_once_stays_as_it_is():
    layout = jzero.zero(PARAMS, stage=0, mesh=jzero.make_mesh(data=-1))
    once = layout.put_batch(np.arange(16.0, dtype=np.float32).reshape(8, 2))
    again = layout.put_batch(once)
    assert again.sharding == once.sharding
    np.testing.assert_array_equal(again, once)


def test_batch_from_other_devices_is_moved():
    layout = jzero.zero(PARAMS, stage=0, mesh=jzero.make_mesh(devices=jax.devices()[:4], data=4))
    batch = layout.put_batch(jax.device_put(np.arange(8.0), jax.devices()[7]))
    assert batch.sharding == NamedSharding(layout.mesh, P("data"))
    np.testing.assert_array_equal(batch, np.arange(8.0))


# The explanation

EXPLAINED = {
    "block": [{"w": abstract(64, 128)}, {"w": abstract(63, 65, dtype="bfloat16")}],
    "scale": abstract(),
    "small": abstract(8),
}


def test_explanation_of_stage_3():
    rows = jzero.explain(jzero.zero(EXPLAINED, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=64))
    large, odd, scale, small = rows
    assert (large.path, large.shape, large.stored_shape) == ("['block'][0]['w']", (64, 128), (64, 128))
    assert (large.params, large.grads, large.opt_state) == (P(None, "data"),) * 3
    assert (large.dtype, large.bytes_per_device, large.reason) == (np.dtype("float32"), 64 * 128 * 4 // 8, "")
    assert (odd.path, odd.dtype) == ("['block'][1]['w']", jnp.dtype("bfloat16"))
    assert (odd.params, odd.grads, odd.opt_state, odd.bytes_per_device) == (P(), P(), P(), 63 * 65 * 2)
    assert odd.reason == "whole on every device: no dim of (63, 65) divides by 8"
    assert (scale.shape, scale.bytes_per_device) == ((), 4)
    assert scale.reason == "whole on every device: a scalar stays whole"
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
    assert bool(rows[1].reason) == (stage > 0)  # and at stage 0 whole optimizer state, too


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
    layout = jzero.zero({"bold": {"red": abstract(8)}}, stage=0, mesh=jzero.make_mesh(data=-1))
    assert "['bold']['red']" in str(jzero.explain(layout))


# Bytes

BLOCKS = {"embed": (64, 16), "layers": [(3, 16, 64), (3, 64, 16)], "norm": (16,)}  # all divide by 8


def random_params(shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda shape: rng.normal(size=shape).astype(dtype), shapes, is_leaf=lambda x: type(x) is tuple)


@pytest.mark.parametrize(
    ("axes", "shards"),
    [({"data": 8}, 8), ({"replica": 2, "data": 4}, 4)],
    ids=["8", "2x4"],
)
@pytest.mark.parametrize("stage", range(4))
def test_adams_bytes_on_live_arrays_are_those_of_the_formulas(axes, shards, stage):
    params = random_params(BLOCKS)
    replica_axes = tuple(axis for axis in axes if axis == "replica")
    mesh = jzero.make_mesh(**axes)
    layout = jzero.zero(params, stage=stage, mesh=mesh, replica_axes=replica_axes, min_shard_size=0)
    tx = optax.adam(1e-3)
    state = jzero.init(lambda p: p, tx, layout, params)
    n_params = 64 * 16 + 2 * 3 * 16 * 64 + 16
    wanted = {
        0: 12 * n_params,
        1: 4 * n_params + 8 * n_params // shards,
        2: 4 * n_params + 8 * n_params // shards,
        3: 12 * n_params // shards,
    }[stage]
    scalars = 4  # Adam's count
    assert memory.live_bytes((state.params, state.opt_state)) == dict.fromkeys(jax.devices(), wanted + scalars)
    assert memory.formula(stage, params=n_params, shards=shards) == wanted
    assert memory.stored_bytes(layout, tx).total == wanted + scalars
    assert memory.live_bytes(state.step) == dict.fromkeys(jax.devices(), 4)


def test_bytes_of_mixed_leaves_and_an_optimizer_with_other_shapes():
    """Leaves that stay whole, two dtypes, and Adafactor's means: the layout's bytes are still those of live arrays."""
    shapes = {"w": (16, 24), "odd": (7, 9), "scale": (), "b": (24,)}
    params = random_params(shapes) | {"half": jnp.ones((8, 8), jnp.bfloat16)}
    mesh = jzero.make_mesh(devices=jax.devices()[2:6], data=4)
    layout = jzero.zero(params, stage=3, mesh=mesh, min_shard_size=32)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    state = jzero.init(lambda p: p, tx, layout, params)
    stored = memory.stored_bytes(layout, tx)
    assert memory.live_bytes(state.params) == dict.fromkeys(jax.devices()[2:6], stored.params)
    assert memory.live_bytes(state.opt_state) == dict.fromkeys(jax.devices()[2:6], stored.opt_state)
    assert stored.params == 16 * 24 * 4 // 4 + 7 * 9 * 4 + 4 + 24 * 4 + 8 * 8 * 2 // 4
    assert stored.params == sum(row.bytes_per_device for row in jzero.explain(layout))


@pytest.mark.parametrize(("tx", "moments"), [(optax.sgd(0.1), 0), (optax.sgd(0.1, momentum=0.9), 1)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_formula_counts_the_moments(tx, moments, stage):
    layout = jzero.zero({"w": abstract(16, 16)}, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    stored = memory.stored_bytes(layout, tx)
    shares = {0: (1, 1), 2: (1, 8), 3: (8, 8)}[stage]
    assert stored.params == 256 * 4 / shares[0]
    assert stored.opt_state == 256 * 4 * moments / shares[1]
    assert memory.formula(stage, params=256, shards=8, moments=moments) == stored.total


def test_live_bytes_count_every_copy():
    mesh = jzero.make_mesh(devices=jax.devices()[:2], data=2)
    cut = jax.device_put(np.zeros((4, 4), np.float32), NamedSharding(mesh, P("data")))
    whole = jax.device_put(np.zeros(3, np.float32), NamedSharding(mesh, P()))
    alone = jax.device_put(np.zeros(5, np.float32), jax.devices()[4])
    first, second, last = jax.devices()[0], jax.devices()[1], jax.devices()[4]
    assert memory.live_bytes([cut, {"x": whole}, alone]) == {first: 44, second: 44, last: 20}
