"""Programs whose collectives are known by construction, and what is counted in them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import hlo
from jzero.program import Collective, collectives, compiled_collectives

D, M = "data", "model"


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), (D, M), axis_types=(AxisType.Auto,) * 2)


def lower(mesh, f, *args, **specs):
    specs = {"in_specs": P(), "out_specs": P(), "check_vma": False, **specs}
    return jax.jit(jax.shard_map(f, mesh=mesh, **specs)).lower(*args)


def gather(x):
    return lax.all_gather(x, D, tiled=True)


ROWS = jnp.ones((8, 16))


@pytest.mark.parametrize(
    ("f", "row", "n_bytes", "wire"),
    [
        (lambda x: lax.psum(x, D), Collective("all-reduce", "float32", (8, 16), (D,), 4), 512, 768),
        (lambda x: lax.pmax(x, M), Collective("all-reduce", "float32", (8, 16), (M,), 2), 512, 512),
        (lambda x: lax.pmean(x, (D, M)), Collective("all-reduce", "float32", (8, 16), (D, M), 8), 512, 896),
        (lambda x: lax.psum(x, (M, D)), Collective("all-reduce", "float32", (8, 16), (D, M), 8), 512, 896),
        (gather, Collective("all-gather", "float32", (32, 16), (D,), 4), 2048, 1536),
        (
            lambda x: lax.all_gather(x, (D, M), axis=1, tiled=True),
            Collective("all-gather", "float32", (8, 128), (D, M), 8),
            4096,
            3584,
        ),
        (
            lambda x: lax.psum_scatter(x, D, tiled=True),
            Collective("reduce-scatter", "float32", (8, 16), (D,), 4),
            512,
            384,
        ),
        (
            lambda x: lax.psum_scatter(x.astype(jnp.bfloat16), (D, M), scatter_dimension=1, tiled=True),
            Collective("reduce-scatter", "bfloat16", (8, 16), (D, M), 8),
            256,
            224,
        ),
        (
            lambda x: lax.all_to_all(x, D, 0, 1, tiled=True),
            Collective("all-to-all", "float32", (8, 16), (D,), 4),
            512,
            384,
        ),
        (
            lambda x: lax.ppermute(x, D, [(i, (i + 1) % 4) for i in range(4)]),
            Collective("collective-permute", "float32", (8, 16), (D,), 4),
            512,
            512,
        ),
        (
            lambda x: lax.psum(x[:7] > 0, (D,), axis_index_groups=[[0, 1], [2, 3]]),
            Collective("all-reduce", "int32", (7, 16), (), 2),
            448,
            448,
        ),
    ],
)
def test_one_collective(mesh, f, row, n_bytes, wire):
    lowered = lower(mesh, f, ROWS)
    assert collectives(lowered, mesh) == (row,)
    assert (row.bytes, row.wire_bytes) == (n_bytes, wire)
    (compiled,) = compiled_collectives(lowered.compile(), mesh)
    assert (compiled.kind, compiled.axes, compiled.group) == (row.kind, row.axes, row.group)
    assert np.prod(compiled.shape) == np.prod(row.shape)
    (unnamed,) = compiled_collectives(lowered.compile())
    assert unnamed == dataclasses.replace(compiled, axes=())


def test_bytes_of_small_dtypes():
    row = Collective("all-gather", "int4", (3,), (D,), 3, count=2)
    assert row.bytes == 4
    assert dataclasses.replace(row, dtype="bool").bytes == 6
    assert dataclasses.replace(row, dtype="float8_e4m3fn").bytes == 6
    assert dataclasses.replace(row, dtype="complex128").bytes == 96


def test_small_dtypes_have_numpy_names(mesh):
    lowered = lower(
        mesh, lambda x: (gather(x.astype(jnp.float8_e4m3fn)), gather(x > 0), gather(x.astype("uint8"))), ROWS
    )
    assert [row.dtype for row in collectives(lowered, mesh)] == ["float8_e4m3fn", "bool", "uint8"]


def test_each_leaf_of_a_tree_counts_and_equal_rows_are_added_up_in_order(mesh):
    lowered = lower(mesh, lambda x: lax.psum({"a": x, "b": x[0], "c": 2 * x}, D), ROWS)
    assert collectives(lowered, mesh) == (
        Collective("all-reduce", "float32", (8, 16), (D,), 4, count=2),
        Collective("all-reduce", "float32", (16,), (D,), 4),
    )
    # XLA combines them; the arrays in the combined one are still counted one by one.
    assert set(compiled_collectives(lowered.compile(), mesh)) == set(collectives(lowered, mesh))


def scan(f, x, length, **options):
    return lax.scan(lambda c, _: (f(c), None), x, None, length=length, **options)[0]


def mix(x):
    return jnp.sin(lax.psum(x, D))


@pytest.mark.parametrize(
    ("f", "count"),
    [
        (lambda x: scan(mix, x, 5), 5),
        (lambda x: scan(mix, x, 5, reverse=True), 5),
        (lambda x: scan(mix, x, 6, unroll=2), 6),
        (lambda x: scan(lambda c: scan(mix, mix(c), 4), x, 3), 15),
        (lambda x: scan(jax.jit(lambda c: mix(mix(c))), jax.jit(mix)(x), 3), 7),
        (lambda x: scan(jax.checkpoint(mix), x, 5), 5),
        (lambda x: scan(lax.composite(mix, name="test.mix"), x, 5), 5),
        (lambda x: lax.fori_loop(2, 7, lambda i, c: mix(c) + i, x), 5),
        (lambda x: lax.while_loop(lambda c: c[0] < 8, lambda c: (c[0] + 3, mix(c[1])), (1, x))[1], 3),
        (lambda x: lax.while_loop(lambda c: c[0] < c[2], lambda c: (2 + c[0], mix(c[1]), c[2]), (1, x, 9))[1], 4),
    ],
    ids=["scan", "reverse", "unroll", "nested", "jit", "checkpoint", "composite", "fori", "stride", "carried_limit"],
)
def test_trip_counts(mesh, f, count):
    lowered = lower(mesh, f, ROWS)
    expected = (Collective("all-reduce", "float32", (8, 16), (D,), 4, count=count),)
    assert collectives(lowered, mesh) == expected
    assert compiled_collectives(lowered.compile(), mesh) == expected


def test_a_loop_that_never_runs(mesh):
    lowered = lower(
        mesh, lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, mix(c[1])), (1, x))[1], ROWS
    )
    assert collectives(lowered, mesh) == ()


@pytest.mark.parametrize(
    ("f", "known_to_xla"),
    [
        (lambda x, n: lax.fori_loop(0, n, lambda i, c: mix(c), x), None),
        (lambda x, n: lax.while_loop(lambda c: c.sum() < 9, mix, x), None),
        (lambda x, n: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + n, mix(c[1])), (1, x))[1], None),
        (
            lambda x, n: lax.while_loop(lambda c: c[0] < c[2], lambda c: (c[0] + 2, mix(c[1]), c[2] + 1), (1, x, 9))[1],
            None,
        ),
        # XLA finds these out by running the counter. A float taken for an integer would give 1 / 1 passes here.
        (lambda x, n: lax.while_loop(lambda c: c[0] < 1.9, lambda c: (c[0] + 1.5, mix(c[1])), (0.0, x))[1], 2),
        (lambda x, n: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2, mix(c[1])), (1, x))[1], 4),
    ],
    ids=[
        "bound_is_an_argument",
        "data_dependent",
        "stride_is_an_argument",
        "moving_limit",
        "float_counter",
        "doubling",
    ],
)
def test_unknown_trip_counts_are_marked(mesh, f, known_to_xla):
    lowered = lower(mesh, f, ROWS, 3)
    expected = Collective("all-reduce", "float32", (8, 16), (D,), 4, exact=False)
    assert collectives(lowered, mesh) == (expected,)
    if known_to_xla:
        expected = dataclasses.replace(expected, count=known_to_xla, exact=True)
    assert compiled_collectives(lowered.compile(), mesh) == (expected,)


@pytest.mark.parametrize("stride", [0, -1])
def test_a_loop_that_never_ends(mesh, stride):
    lowered = lower(
        mesh, lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + stride, mix(c[1])), (1, x)), ROWS
    )
    assert collectives(lowered, mesh) == (Collective("all-reduce", "float32", (8, 16), (D,), 4, exact=False),)


def test_a_loop_that_tests_the_counter_of_another(mesh):
    def inner(i, x):
        return lax.while_loop(lambda c: i < 3, lambda c: (c[0] + 1, mix(c[1])), (0, x))[1]

    lowered = lower(mesh, lambda x: lax.fori_loop(0, 5, inner, x), ROWS)
    assert collectives(lowered, mesh) == (Collective("all-reduce", "float32", (8, 16), (D,), 4, 5, exact=False),)


def test_collectives_in_the_condition_of_a_while(mesh):
    lowered = lower(mesh, lambda x: lax.while_loop(lambda c: lax.psum(c.sum(), D) < 9, jnp.sin, x), ROWS)
    expected = Collective("all-reduce", "float32", (), (D,), 4, exact=False)
    assert collectives(lowered, mesh) == compiled_collectives(lowered.compile(), mesh) == (expected,)


def test_branches(mesh):
    def f(x):
        x = scan(lambda c: lax.cond(c[0, 0] > 1, mix, lambda y: jnp.cos(lax.psum(y, D)), c), x, 3)
        return lax.switch(x[0, 0].astype(int), [mix, lambda y: mix(mix(y)), lambda y: mix(lax.pmax(y, M))], x)

    lowered = lower(mesh, f, ROWS)
    both = Collective("all-reduce", "float32", (8, 16), (D,), 4, count=4)
    maybe = dataclasses.replace(both, count=1, exact=False)
    over_model = dataclasses.replace(maybe, axes=(M,), group=2)
    assert set(collectives(lowered, mesh)) == {both, maybe, over_model}
    assert set(compiled_collectives(lowered.compile(), mesh)) == {both, maybe, over_model}


def test_a_conditional_may_run_nothing(mesh):
    lowered = lower(mesh, lambda x: lax.cond(x[0, 0] > 1, mix, jnp.sin, x), ROWS)
    expected = (Collective("all-reduce", "float32", (8, 16), (D,), 4, exact=False),)
    assert collectives(lowered, mesh) == compiled_collectives(lowered.compile(), mesh) == expected


def test_gradient_of_scanned_gathers(mesh):
    """Five layers: weights gathered for the forward, and again for the backward under remat; gradients scattered."""

    def layer(x, w):
        return jnp.tanh(x @ gather(w.astype(jnp.bfloat16))), None

    def loss(ws, x, remat):
        return jnp.mean(lax.scan(jax.checkpoint(layer) if remat else layer, x, ws)[0].astype(jnp.float32))

    ws, x = jnp.ones((5, 32, 32)), jnp.ones((16, 32), jnp.bfloat16)
    specs = {"in_specs": (P(None, D), P(D)), "out_specs": P(None, D)}
    for remat in (False, True):
        lowered = lower(mesh, lambda ws, x, remat=remat: jax.grad(loss)(ws, x, remat), ws, x, **specs)
        assert collectives(lowered, mesh) == (
            Collective("all-gather", "bfloat16", (32, 32), (D,), 4, count=10 if remat else 5),
            Collective("reduce-scatter", "bfloat16", (32, 32), (D,), 4, count=5),
        )
        assert [(row.kind, row.count, row.axes) for row in compiled_collectives(lowered.compile(), mesh)] == [
            ("all-gather", 10 if remat else 5, (D,)),
            ("reduce-scatter", 5, (D,)),
        ]


def test_axes_left_automatic_and_nested_shard_maps(mesh):
    """Manual over data only: shapes are whole over the model axis, until a nested shard_map makes that manual too."""

    def nested(w):
        inside = jax.shard_map(
            gather,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=P(None, M),
            out_specs=P(None, M),
            axis_names={M},
            check_vma=False,
        )
        return gather(w), scan(lambda c: inside(c)[:2], w, 3)

    w = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P(D, M)))
    lowered = lower(mesh, nested, w, in_specs=P(D), out_specs=(P(), P(D)), axis_names={D})
    assert collectives(lowered, mesh) == (
        Collective("all-gather", "float32", (8, 16), (D,), 4),
        Collective("all-gather", "float32", (8, 8), (D,), 4, count=3),
    )
    # The partitioner puts a gather over model in front of the first; the nested one stays in its model shard.
    rows = compiled_collectives(lowered.compile(), mesh)
    assert Collective("all-gather", "float32", (8, 8), (D,), 4, count=3) in rows
    assert {row.axes for row in rows} == {(D,), (M,)}


def test_the_partitioner_shows_in_the_compiled_program_only(mesh):
    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=place(None, D))
    w = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=place(D, M))
    lowered = jax.jit(lambda x, w: x @ w, out_shardings=place(None, M)).lower(x, w)
    assert collectives(lowered, mesh) == ()
    assert compiled_collectives(lowered.compile(), mesh) == (Collective("all-reduce", "float32", (8, 8), (D,), 4),)

    lowered = jax.jit(lambda w: 2 * w, out_shardings=place()).lower(w)
    assert collectives(lowered, mesh) == ()
    rows = compiled_collectives(lowered.compile(), mesh)
    assert {row.kind for row in rows} == {"all-gather"}
    assert {axis for row in rows for axis in row.axes} == {D, M}


def test_devices_in_another_order():
    mesh = Mesh(np.array(jax.devices())[[3, 1, 2, 0, 7, 6, 5, 4]].reshape(2, 4), (D, M))
    lowered = lower(mesh, lambda x: lax.psum(x, M), ROWS)
    expected = (Collective("all-reduce", "float32", (8, 16), (M,), 4),)
    assert collectives(lowered, mesh) == compiled_collectives(lowered.compile(), mesh) == expected


def test_axes_of_size_one_are_not_named():
    mesh = Mesh(np.array(jax.devices()).reshape(1, 8, 1), ("replica", D, M))
    lowered = lower(mesh, lambda x: (lax.psum(x, M), lax.psum(x, ("replica", D))), ROWS)
    one, all_eight = collectives(lowered, mesh)
    assert one == Collective("all-reduce", "float32", (8, 16), (), 1)
    assert one.wire_bytes == 0
    assert all_eight == Collective("all-reduce", "float32", (8, 16), (D,), 8)
    alone = Mesh(np.array(jax.devices()[:1]), (D,))
    assert collectives(lower(alone, mix, ROWS), alone) == (one,)
    assert collectives(lower(alone, jnp.sin, ROWS), alone) == ()


def test_wrong_arguments(mesh):
    lowered: Any = lower(mesh, mix, ROWS)
    compiled: Any = lowered.compile()
    number: Any = jnp.int32(3)
    with pytest.raises(TypeError, match=r"wanted a jax.stages.Lowered.*got Compiled"):
        collectives(compiled, mesh)
    with pytest.raises(TypeError, match=r"wanted a compiled program.*got Lowered"):
        compiled_collectives(lowered, mesh)
    with pytest.raises(TypeError, match=r"wanted a compiled program.*got "):
        compiled_collectives(number)
    four = Mesh(np.array(jax.devices()[:4]), (D,))
    with pytest.raises(ValueError, match=r"runs on 8 devices, but the mesh \{'data': 4\} has 4"):
        collectives(lowered, four)
    with pytest.raises(ValueError, match=r"runs on 8 devices, but the mesh \{'data': 4\} has 4"):
        compiled_collectives(lowered.compile(), four)


class Text:
    """Stands for a program compiled elsewhere."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


def test_the_condition_of_a_loop_runs_once_more_than_its_body(mesh):
    text: Any = Text("""HloModule m, num_partitions=8

%test (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %n = s32[] all-reduce(%i), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %lt = pred[] custom-call(%n), custom_call_target="test"
}

%step (j: s32[]) -> s32[] {
  %j = s32[] parameter(0)
  ROOT %k = s32[] all-reduce(%j), replica_groups={}
}

ENTRY %main (x: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  ROOT %y = s32[] while(%x), condition=%test, body=%step, backend_config={"known_trip_count":{"n":"4"}}
}
""")
    assert compiled_collectives(text, mesh) == (
        Collective("all-reduce", "int32", (), (M,), 2, count=5),
        Collective("all-reduce", "int32", (), (D, M), 8, count=4),
    )


# As XLA writes programs for 8 H200s, cut to what communicates; all-gather-start as in jax 0.10, the rest as in 0.12.
GPU = """HloModule jit_g, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[64,256], bf16[256,256])) -> (s32[], bf16[64,256], bf16[256,256]) {
  %p = (s32[], bf16[64,256]{1,0}, bf16[256,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[64,256]{1,0} get-tuple-element(%p), index=1
  %g = bf16[256,256]{1,0} get-tuple-element(%p), index=2
  %all-gather-start = (bf16[64,256]{1,0}, bf16[256,256]{1,0}) all-gather-start(%w), channel_id=1, \
replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(g)/transpose(jvp())/all_gather"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %all-gather-done = bf16[256,256]{1,0} all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((bf16[256,256]{1,0}), bf16[64,256]{1,0}) reduce-scatter-start(%g), channel_id=3, \
replica_groups=mesh['data'=4,'model'=2] {'data'}, use_global_device_ids=true, dimensions={0}, to_apply=%add
  %reduce-scatter-done = bf16[64,256]{1,0} reduce-scatter-done(%reduce-scatter-start), to_apply=%add
  ROOT %t = (s32[], bf16[64,256]{1,0}, bf16[256,256]{1,0}) tuple(%i, %reduce-scatter-done, /*index=2*/%all-gather-done)
}

%cond (q: (s32[], bf16[64,256], bf16[256,256])) -> pred[] {
  %q = (s32[], bf16[64,256]{1,0}, bf16[256,256]{1,0}) parameter(0)
  ROOT %lt = pred[] fusion(%q), kind=kLoop, calls=%add
}

%async (r: f32[16]) -> f32[16] {
  %r = f32[16]{0} parameter(0)
  ROOT %permute = f32[16]{0} collective-permute(%r), channel_id=1, source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
}

ENTRY %main (x: f32[257]) -> f32[] {
  %x = f32[257]{0} parameter(0)
  %y = f32[16]{0} slice(%x), slice={[0:16]}
  %z = bf16[64,256]{1,0} broadcast(%x), dimensions={}
  %init = (s32[], bf16[64,256]{1,0}, bf16[256,256]{1,0}) custom-call(%x), custom_call_target="init"
  %while.36 = (s32[], bf16[64,256]{1,0}, bf16[256,256]{1,0}) while(%init), condition=%cond, body=%body, \
metadata={scheduling_name="while.36"}, backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"1"}}
  %peeled = bf16[256,256]{1,0} all-gather(%z), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, \
use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":true}}
  %all-reduce-start.2 = ((f32[257]{0}), f32[257]{0}) all-reduce-start(%x), channel_id=1, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}
  %all-reduce-done.2 = f32[257]{0} all-reduce-done(%all-reduce-start.2)
  %combined = (f32[257]{0}, f32[16]{0:S(1)}) all-reduce(%x, /*index=1*/%y), replica_groups={}, to_apply=%add
  %start = ((f32[16]{0}), f32[16]{0}, u32[]) async-start(%y), calls=%async
  %done = f32[16]{0} async-done(%start), calls=%async
  %pieces = (f32[16]{0}, f32[16]{0}) all-to-all(%y, %done), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %result = f32[] constant(0)
}
"""


def test_a_program_for_gpus(mesh):
    text: Any = Text(GPU)
    assert compiled_collectives(text, mesh) == (
        Collective("all-gather", "bfloat16", (256, 256), (D,), 4, count=5),
        Collective("reduce-scatter", "bfloat16", (256, 256), (D,), 4, count=4),
        Collective("all-reduce", "float32", (257,), (M,), 2),
        Collective("all-reduce", "float32", (257,), (D, M), 8),
        Collective("all-reduce", "float32", (16,), (D, M), 8),
        Collective("collective-permute", "float32", (16,), (D,), 4),
        Collective("all-to-all", "float32", (2, 16), (M,), 2),
    )


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,0,1)", [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ("mesh['data'=4,'model'=2] {'data'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['data'=4,'model'=2] {'data','model'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['b'=2,'c'=4], device_ids=(0,1,2,3,7,6,5,4) {'b'}", [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_every_way_that_xla_writes_groups(groups, expected):
    text = f"""HloModule m, num_partitions=8

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true
}}
"""
    program = hlo.parse(text)
    assert program.groups(program.computations["%main"][1]) == expected


def test_a_mesh_of_other_sizes_is_refused():
    mesh, other = (jax.sharding.Mesh(np.array(jax.devices()).reshape(s), ("data", "model")) for s in ((8, 1), (4, 2)))
    f = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
    lowered = f.lower(jnp.ones(8))
    assert collectives(lowered, mesh)
    with pytest.raises(ValueError, match=r"a mesh with data=8, but the mesh given has data=4"):
        collectives(lowered, other)
