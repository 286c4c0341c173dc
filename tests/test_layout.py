"""Where each leaf lives: the rule, the trees of specs, batches, and bytes on live arrays."""

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
    ("shape", "shards", "min_shard_size", "dim", "stored"),
    [
        ((64, 32), 8, 0, 1, None),  # not the first dim, though it is larger
        ((64, 7), 8, 0, 0, None),  # the first where no other divides
        ((64,), 8, 0, 0, None),
        ((3, 16, 48), 8, 0, 2, None),  # the largest
        ((3, 48, 16), 8, 0, 1, None),
        ((4, 16, 16), 8, 0, 1, None),  # the earlier among equals
        ((48, 3, 8), 8, 0, 2, None),
        ((6, 9), 3, 0, 1, None),
        ((6, 8), 3, 0, 0, None),
        ((7, 9), 8, 0, 0, (8, 9)),  # where none divides, the one that grows least
        ((9, 7), 8, 0, 1, (9, 8)),
        ((3, 5, 5), 8, 0, 1, (3, 8, 5)),  # the earlier among equals
        ((7, 7), 8, 0, 1, (7, 8)),  # but not the first dim
        ((3,), 8, 0, 0, (8,)),
        ((), 8, 0, None, None),
        ((), 1, 0, None, None),
        ((0, 8), 8, 1, None, None),
        ((8, 0), 8, 0, None, None),
        ((1, 1), 8, 0, 1, (1, 8)),
        ((5, 7), 1, 0, 1, None),  # one shard divides all
        ((64, 64), 8, 4096, 1, None),
        ((64, 64), 8, 4097, None, None),
        ((8,), 8, 8, 0, None),
        ((8,), 8, 9, None, None),
        ((7,), 8, 7, 0, (8,)),  # the size that counts is without padding
        ((7,), 8, 8, None, None),
    ],
)
def test_dim_that_is_cut(shape, shards, min_shard_size, dim, stored):
    """`stored` is given where it is not `shape`."""
    leaf = place("w", abstract(*shape), shards, min_shard_size, padded=True)
    assert leaf.dim == dim
    assert bool(leaf.reason) == (dim is None or stored is not None)
    assert (leaf.shape, leaf.stored) == (shape, stored or shape)
    assert leaf.local("replicated", shards) == shape
    wanted = tuple(size // shards if d == dim else size for d, size in enumerate(stored or shape))
    assert leaf.local("sharded", shards) == wanted


@pytest.mark.parametrize("shape", [(7, 9), (3,), (1, 1), (3, 5, 5)])
def test_without_padding_a_leaf_that_does_not_divide_stays_whole(shape):
    leaf = place("w", abstract(*shape), 8, 0, padded=False)
    assert (leaf.dim, leaf.stored, leaf.local("sharded", 8)) == (None, shape, shape)
    assert leaf.reason == f"whole on every device: no dim of {shape} divides by 8"


def test_reasons_say_what_is_wrong_with_the_leaf():
    def reason(leaf, min_shard_size=0):
        return place("", leaf, 8, min_shard_size, padded=True).reason

    assert reason(abstract()) == "whole on every device: a scalar"
    assert reason(abstract(8, 0)) == "whole on every device: no elements"
    assert reason(abstract(7, 9)) == "no dim of (7, 9) divides by 8: stored padded to (8, 9)"
    assert reason(abstract(8, 2), 17) == "whole on every device: 16 elements are fewer than min_shard_size=17"
    assert reason(jax.random.key(0)) == "whole on every device: key<fry> has no elements that could be cut"


# The trees

PARAMS = {
    "embed": abstract(32, 8),
    "layers": [{"w": abstract(3, 8, 16), "b": abstract(3, 5)}],
    "scale": abstract(),
}
CUT = {"embed": P(None, "data"), "layers": [{"w": P(None, None, "data"), "b": P("data")}], "scale": P()}
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
    assert from_arrays.treedef.unflatten([leaf.placed("replicated") for leaf in from_arrays.leaves]) == PARAMS


def test_a_layout_cannot_be_changed_and_can_be_a_key():
    layout = jzero.zero(PARAMS, stage=3, mesh=jzero.make_mesh(data=-1))
    with pytest.raises(AttributeError):
        layout.min_shard_size = 0  # pyright: ignore[reportAttributeAccessIssue]
    assert {layout: 1}[jzero.zero(PARAMS, stage=3, mesh=jzero.make_mesh(data=-1))] == 1


@pytest.mark.parametrize(("min_shard_size", "rows"), [(0, 8), (64, 7)], ids=["padded", "whole"])
def test_logical_and_stored_are_inverse_and_keep_the_values(min_shard_size, rows):
    layout = jzero.zero({"w": abstract(7, 9)}, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=min_shard_size)
    tree = {"w": jnp.arange(63.0).reshape(7, 9)}
    stored = layout.stored(tree)
    np.testing.assert_array_equal(stored["w"], np.pad(tree["w"], [(0, rows - 7), (0, 0)]))
    logical = layout.logical(stored, replicate=True)
    np.testing.assert_array_equal(logical["w"], tree["w"])
    np.testing.assert_array_equal(layout.stored(logical)["w"], stored["w"])


def test_leaves_that_cannot_be_trained_are_kept_and_cut_like_others():
    params = {"ids": abstract(16, dtype="int32"), "mask": abstract(3, dtype="bool")}
    params["wave"] = abstract(8, 8, dtype="complex64")
    layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    assert layout.param_specs == {"ids": P("data"), "mask": P("data"), "wave": P(None, "data")}
    assert layout.grad_specs == {"ids": None, "mask": None, "wave": P(None, "data")}
    assert layout.opt_specs(optax.sgd(0.1, momentum=0.9))[0].trace == layout.grad_specs
    ids, mask, wave = jzero.explain(layout)
    assert ids.reason == "not trained: no gradient and no optimizer state"
    assert mask.reason == f"no dim of (3,) divides by 8: stored padded to (8,); {ids.reason}"
    assert wave.reason == ""


# Batches


def rows_by_device(array):
    return {shard.device: np.asarray(shard.data)[:, 0].tolist() for shard in array.addressable_shards}


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_batch_is_cut_over_replica_and_data_axes_in_the_meshs_order(kind):
    mesh = jzero.make_mesh(model=2, replica=2, data=2)
    layout = jzero.zero(PARAMS, stage=3, mesh=mesh, replica_axes=("replica",))
    tokens = np.arange(8 * 3, dtype=np.int32).reshape(8, 3)
    batch = layout.put_batch({"tokens": kind(tokens), "more": [kind(tokens * 10)]})
    np.testing.assert_array_equal(batch["tokens"], tokens)
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].sharding == NamedSharding(mesh, P(("replica", "data")))
    rows = rows_by_device(batch["tokens"])
    for (_, replica, data), device in np.ndenumerate(mesh.devices):
        start = 2 * (2 * replica + data)
        assert rows[device] == tokens[start : start + 2, 0].tolist()
    assert {len(rows) for rows in rows_by_device(batch["more"][0]).values()} == {2}


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
    assert memory.formula(stage, params=n_params, shards=shards).stored == wanted
    assert memory.stored_bytes(layout, tx).total == wanted + scalars
    assert memory.live_bytes(state.step) == dict.fromkeys(jax.devices(), 4)


def test_bytes_of_mixed_leaves_and_an_optimizer_with_other_shapes():
    """Leaves whole or padded, two dtypes, and Adafactor's means: the layout's bytes are still those of live arrays."""
    shapes = {"w": (16, 24), "odd": (7, 9), "scale": (), "b": (24,)}
    params = random_params(shapes) | {"half": jnp.ones((8, 8), jnp.bfloat16)}
    mesh = jzero.make_mesh(devices=jax.devices()[2:6], data=4)
    layout = jzero.zero(params, stage=3, mesh=mesh, min_shard_size=32)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    state = jzero.init(lambda p: p, tx, layout, params)
    stored = memory.stored_bytes(layout, tx)
    assert memory.live_bytes(state.params) == dict.fromkeys(jax.devices()[2:6], stored.params)
    assert memory.live_bytes(state.opt_state) == dict.fromkeys(jax.devices()[2:6], stored.opt_state)
    assert stored.params == 16 * 24 * 4 // 4 + 8 * 9 * 4 // 4 + 4 + 24 * 4 + 8 * 8 * 2 // 4
    assert stored.params == sum(row.bytes_per_device for row in jzero.explain(layout))


@pytest.mark.parametrize(("tx", "moments"), [(optax.sgd(0.1), 0), (optax.sgd(0.1, momentum=0.9), 1)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_formula_counts_the_moments(tx, moments, stage):
    layout = jzero.zero({"w": abstract(16, 16)}, stage=stage, mesh=jzero.make_mesh(data=-1), min_shard_size=0)
    stored = memory.stored_bytes(layout, tx)
    shares = {0: (1, 1), 2: (1, 8), 3: (8, 8)}[stage]
    assert stored.params == 256 * 4 / shares[0]
    assert stored.opt_state == 256 * 4 * moments / shares[1]
    assert memory.formula(stage, params=256, shards=8, moments=moments).stored == stored.total


def test_live_bytes_count_every_copy():
    mesh = jzero.make_mesh(devices=jax.devices()[:2], data=2)
    cut = jax.device_put(np.zeros((4, 4), np.float32), NamedSharding(mesh, P("data")))
    whole = jax.device_put(np.zeros(3, np.float32), NamedSharding(mesh, P()))
    alone = jax.device_put(np.zeros(5, np.float32), jax.devices()[4])
    first, second, last = jax.devices()[0], jax.devices()[1], jax.devices()[4]
    assert memory.live_bytes([cut, {"x": whole}, alone]) == {first: 44, second: 44, last: 20}


def test_a_layout_prints_in_one_line():
    params = {"w": jax.ShapeDtypeStruct((64, 128), "float32"), "b": jax.ShapeDtypeStruct((8,), "float32")}
    mesh = jzero.make_mesh(replica=2, data=4)
    text = repr(jzero.zero(params, stage=3, mesh=mesh, replica_axes=("replica",)))
    assert text == "<Layout: stage 3 on replica 2, data 4; 2 leaves, 1 of them large enough to be cut>"
    own = jzero.Stage("replicated", "replicated", "sharded", "end")
    assert f"stage {own} on" in repr(jzero.zero(params, stage=own, mesh=mesh))
