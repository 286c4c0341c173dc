"""States with random bits in every layout, and what they hold, read without jzero."""

import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jzero
from jzero.checkpoint import parts
from jzero.state import check_state

MESHES = {
    "8": {"data": 8},
    "4,2": {"data": 4, "model": 2},
    "2,2,2": {"replica": 2, "data": 2, "model": 2},
    "3": {"data": 3},
    "1": {"data": 1},
}
CONFIGS = list(itertools.product(range(4), MESHES))
TX = optax.adamw(1e-3)
KEY = jax.random.key(0)
MODEL_STATE = {"mean": jax.ShapeDtypeStruct((3,), jnp.float32), "count": jax.ShapeDtypeStruct((), jnp.int32)}
OTHERS = {"key": KEY, "model_state": MODEL_STATE, "loss_scale": jzero.DynamicLossScale()}

PARAMS = {
    "odd": (13, 7),
    "even": (16, 24),
    "ruled": (6, 10),
    "deep.er": {"n/ü": (5,), "": [(3, 5, 9), ()]},
    "none": (0, 4),
    "norm": (24,),
    "frozen": (11, 2),
}
"""Shapes; "frozen" is of int4 and "norm" is exempt from the compute dtype."""


def abstract_params():
    def leaf(path, shape):
        return jax.ShapeDtypeStruct(shape, jnp.int4 if "frozen" in str(path) else jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, PARAMS, is_leaf=lambda x: isinstance(x, tuple))


def layout_of(stage, mesh, precision=None):
    """A small one in which leaves are cut, padded, ruled and whole."""
    axes = MESHES[mesh]
    return jzero.zero(
        abstract_params(),
        stage=stage,
        mesh=jzero.make_mesh(devices=jax.devices()[: int(np.prod(list(axes.values())))], **axes),
        replica_axes=("replica",) if "replica" in axes else (),
        rules=[("ruled", P(None, "model"))] if "model" in axes else (),
        min_shard_size=4,
        precision=precision or jzero.Precision(exempt=("norm",)),
    )


def random_bits(rng, shape, dtype):
    """Any bits that an array of this dtype can hold: NaNs with payloads, infinities, subnormals and -0.0 among them."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if str(dtype) in ("int4", "uint4", "int2", "uint2"):
        info = jnp.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)
    data = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if str(dtype).startswith(("float6", "float4")):
        data &= 15
    return data.reshape(-1).view(dtype).reshape(shape)


def random_state(layout, seed=0):
    """A state of this layout with random bits everywhere; the copies of the params are their masters, rounded."""
    rng, wanted = np.random.default_rng(seed), parts.wants(TX, layout, **OTHERS)

    def array(want):
        if want.dtype.startswith("key:"):
            words = np.array([seed, 7], np.uint32)
            return jax.random.wrap_key_data(jax.make_array_from_callback((2,), want.sharding, lambda _: words))
        value = random_bits(rng, want.shape, jnp.dtype(want.dtype))
        if want.path[0] == "loss_scale":  # one that can be
            value = np.asarray({"scale": 2.0**seed, "clean": 3, "hysteresis": 2}[want.path[1]], want.dtype)
        padded = np.zeros(want.stored, value.dtype)
        padded[tuple(map(slice, want.shape))] = value
        return jax.make_array_from_callback(want.stored, want.sharding, lambda index: padded[index])

    trees = {part: treedef.unflatten(map(array, wants)) for part, (treedef, wants) in wanted.items()}
    trees["params"], trees["master"] = parts.params_of(jax.tree.leaves(trees["params"]), layout)
    return jzero.TrainState(**trees)


def held(state, layout):
    """The bytes of every leaf in its logical shape, by part and path; of params that have one, the master copy's."""
    masters = dict(jax.tree_util.tree_flatten_with_path(state.master)[0])
    shapes = {"params": [leaf.shape for leaf in layout.leaves]}
    shapes["opt_state"] = [leaf.shape for leaf in layout.opt_leaves(TX)[1]]
    found = {}
    for part in parts.PARTS:
        named = jax.tree_util.tree_flatten_with_path(getattr(state, part))[0]
        for (path, x), shape in zip(named, shapes.get(part, [None] * len(named)), strict=True):
            x = masters.get(path, x) if part == "params" else x
            value = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
            logical = value if shape is None else value[tuple(map(slice, shape))]
            padding = value.copy()
            padding[tuple(map(slice, logical.shape))] = 0
            assert not padding.tobytes().strip(b"\0"), f"{part}{path}: what is padded is not zero"
            found[part + jax.tree_util.keystr(path)] = (str(value.dtype), logical.shape, logical.tobytes())
    return found


def digest(state):
    """The bytes that this process's devices hold, all leaves together."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(state):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for shard in x.addressable_shards:
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()


def check_placed(state, layout):
    """The state is one that a training step of this layout takes, and the copies are the masters rounded."""
    check_state(state, TX, layout)
    masters = dict(jax.tree_util.tree_flatten_with_path(state.master)[0])
    for path, x in jax.tree_util.tree_flatten_with_path(state.params)[0]:
        if path in masters:
            whole = np.asarray(masters[path])[tuple(map(slice, x.shape))]
            with np.errstate(invalid="ignore"):
                rounded = whole.astype(x.dtype).astype(np.float32)
            np.testing.assert_array_equal(np.asarray(x).astype(np.float32), rounded)
    for x in jax.tree.leaves((state.step, state.key, state.model_state, state.loss_scale, state.skipped)):
        assert x.sharding.is_fully_replicated and x.sharding.device_set == set(layout.mesh.devices.flat)
