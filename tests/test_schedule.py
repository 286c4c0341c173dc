"""Scheduled programs whose windows are known by construction, and what schedule reads in them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jzero
from experiments.schedule import cli
from experiments.schedule.config import Config, parse_option
from jzero import targets
from jzero.events import Piece, Window
from jzero.schedule import Share, shares, windows
from tests import gpus

D = "data"


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]), (D,), axis_types=(AxisType.Auto,))


class Text:
    """Stands for a program compiled elsewhere."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


def read(text, *args, **options):
    compiled: Any = Text(text)
    return windows(compiled, *args, **options)


# One program as XLA writes it for 8 H200s in jax 0.10 and in 0.12, cut to what is read. In the loop: a combined gather
# in front of the matmuls, one that is waited for at once, one over two matmuls and a fusion that only sounds like one,
# and a reduce-scatter over one matmul. Outside: a synchronous gather, and an all-reduce over the whole loop.
HEAD = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%gemm (l: bf16[64,64], r: bf16[64,64]) -> bf16[64,64] {
  %l = bf16[64,64]{1,0} parameter(0)
  %r = bf16[64,64]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,64]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%double (d: bf16[64,64]) -> bf16[64,64] {
  %d = bf16[64,64]{1,0} parameter(0)
  ROOT %two = bf16[64,64]{1,0} add(%d, %d), metadata={op_name="jit(f)/while/body/dot_general"}
}
"""

OLD = (
    HEAD
    + """
%scattered (s: bf16[64,64]) -> bf16[8,64] {
  %s = bf16[64,64]{1,0} parameter(0)
  ROOT %reduce-scatter = bf16[8,64]{1,0} reduce-scatter(%s), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}, \
dimensions={0}, to_apply=%add, metadata={op_name=\
"jit(f)/while/body/closed_call/jzero.scatter[blocks/up]/reduce_scatter"}
}

%body (p: (s32[], bf16[8,64], bf16[64,64], bf16[8])) -> (s32[], bf16[8,64], bf16[64,64], bf16[8]) {
  %p = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[8,64]{1,0} get-tuple-element(%p), index=1
  %x = bf16[64,64]{1,0} get-tuple-element(%p), index=2
  %n = bf16[8]{0} get-tuple-element(%p), index=3
  %all-gather-start.1 = ((bf16[8,64]{1,0}, bf16[8]{0}), (bf16[64,64]{1,0}, bf16[64]{0})) all-gather-start(%w, %n), \
channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true, metadata={op_name=\
"jit(f)/while/body/closed_call/jzero.gather.forward[blocks/(qkv]/all_gather:norm]/all_gather)" stack_frame_id=1}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %all-gather-done.1 = (bf16[64,64]{1,0}, bf16[64]{0}) all-gather-done(%all-gather-start.1)
  %qkv = bf16[64,64]{1,0} get-tuple-element(%all-gather-done.1), index=0
  %all-gather-start.2 = (bf16[8,64]{0,1}, bf16[8,512]{0,1}) all-gather-start(%w), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}, metadata={op_name=\
"jit(f)/while/body/closed_call/jzero.gather.forward[blocks/up]/all_gather"}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %fusion.1 = bf16[64,64]{1,0} fusion(%x, %qkv), kind=kCustom, calls=%gemm, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %fusion.2 = bf16[64,64]{1,0} fusion(%fusion.1), kind=kLoop, calls=%double, metadata={op_name="jit(f)/dot_general"}
  %gemm.2 = (bf16[64,64]{1,0}, s8[1024]{0}) custom-call(%fusion.2, %qkv), custom_call_target="__cublas$gemm"
  %y = bf16[64,64]{1,0} get-tuple-element(%gemm.2), index=0
  %all-gather-done.2 = bf16[8,512]{0,1} all-gather-done(%all-gather-start.2)
  %start = ((bf16[64,64]{1,0}), bf16[8,64]{1,0}) async-start(%y), calls=%scattered
  %last = bf16[64,64]{1,0} dot(%y, %qkv), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = bf16[8,64]{1,0} async-done(%start), calls=%scattered
  %after = bf16[64,64]{1,0} dot(%last, %qkv), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) tuple(%i, %done, %after, %n)
}

%cond (q: (s32[], bf16[8,64], bf16[64,64], bf16[8])) -> pred[] {
  %q = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) parameter(0)
  ROOT %lt = pred[] custom-call(%q), custom_call_target="test"
}

ENTRY %main (e: f32[8,16]) -> f32[] {
  %e = f32[8,16]{1,0} parameter(0)
  %init = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) custom-call(%e), custom_call_target="init"
  %all-gather-start = (f32[8,16]{1,0}, f32[64,16]{1,0}) all-gather-start(%e), channel_id=5, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name=\
"jit(f)/jzero.gather.backward[embedding]/all_gather"}, backend_config={"collective_backend_config":{"is_sync":true}}
  %start-x = bf16[64,64]{1,0} get-tuple-element(%init), index=2
  %before = bf16[64,64]{1,0} dot(%start-x, %start-x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-gather-done = f32[64,16]{1,0} all-gather-done(%all-gather-start)
  %all-reduce-start = f32[8,16]{1,0} all-reduce-start(%e), channel_id=6, replica_groups={{0,1,2,3,4,5,6,7}}, \
to_apply=%add, metadata={op_name="jit(f)/psum"}
  %while.1 = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %all-reduce-done = f32[8,16]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %r = f32[] constant(0)
}
"""
)

NEW = (
    HEAD
    + """
%body (p: (s32[], bf16[8,64], bf16[64,64], bf16[8])) -> (s32[], bf16[8,64], bf16[64,64], bf16[8]) {
  %p = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[8,64]{1,0} get-tuple-element(%p), index=1
  %x = bf16[64,64]{1,0} get-tuple-element(%p), index=2
  %n = bf16[8]{0} get-tuple-element(%p), index=3
  %all-gather-start.1 = ((bf16[8,64]{1,0}, bf16[8]{0}), (bf16[64,64]{1,0}, bf16[64]{0})) all-gather-start(%w, %n), \
channel_id=1, replica_groups=mesh['data'=8] {'data'}, dimensions={0}, use_global_device_ids=true, metadata={op_name=\
"jit(f)/while/body/eval_jaxpr/jzero.gather.forward[blocks/(qkv]/all_gather:norm]/all_gather)" stack_frame_id=1}
  %all-gather-done.1 = (bf16[64,64]{1,0}, bf16[64]{0}) all-gather-done(%all-gather-start.1)
  %qkv = bf16[64,64]{1,0} get-tuple-element(%all-gather-done.1), index=0
  %all-gather-start.2 = ((bf16[8,64]{0,1}), bf16[8,512]{0,1}) all-gather-start(%w), channel_id=1, \
replica_groups=mesh['data'=8] {'data'}, dimensions={1}, metadata={op_name=\
"jit(f)/while/body/eval_jaxpr/jzero.gather.forward[blocks/up]/all_gather"}
  %fusion.1 = bf16[64,64]{1,0} fusion(%x, %qkv), kind=kCustom, calls=%gemm, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %fusion.2 = bf16[64,64]{1,0} fusion(%fusion.1), kind=kLoop, calls=%double, metadata={op_name="jit(f)/dot_general"}
  %gemm.2 = (bf16[64,64]{1,0}, s8[1024]{0}) custom-call(%fusion.2, %qkv), custom_call_target="__cublas$lt$matmul"
  %y = bf16[64,64]{1,0} get-tuple-element(%gemm.2), index=0
  %all-gather-done.2 = bf16[8,512]{0,1} all-gather-done(%all-gather-start.2)
  %reduce-scatter-start = ((bf16[64,64]{1,0}), bf16[8,64]{1,0}) reduce-scatter-start(%y), channel_id=1, \
replica_groups=mesh['data'=8] {'data'}, dimensions={0}, to_apply=%add, metadata={op_name=\
"jit(f)/while/body/eval_jaxpr/jzero.scatter[blocks/up]/reduce_scatter"}
  %last = bf16[64,64]{1,0} dot(%y, %qkv), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduce-scatter-done = bf16[8,64]{1,0} reduce-scatter-done(%reduce-scatter-start), to_apply=%add
  %after = bf16[64,64]{1,0} dot(%last, %qkv), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) tuple(%i, %reduce-scatter-done, %after, %n)
}

%cond (q: (s32[], bf16[8,64], bf16[64,64], bf16[8])) -> pred[] {
  %q = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) parameter(0)
  ROOT %lt = pred[] custom-call(%q), custom_call_target="test"
}

ENTRY %main (e: f32[8,16]) -> f32[] {
  %e = f32[8,16]{1,0} parameter(0)
  %init = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) custom-call(%e), custom_call_target="init"
  %all_gather.2 = f32[64,16]{1,0} all-gather(%e), channel_id=1, replica_groups=mesh['data'=8] {'data'}, \
dimensions={0}, metadata={op_name="jit(f)/jzero.gather.backward[embedding]/all_gather" \
scheduling_name="all-gather-start"}, backend_config={"collective_backend_config":{"is_sync":true}}
  %start-x = bf16[64,64]{1,0} get-tuple-element(%init), index=2
  %before = bf16[64,64]{1,0} dot(%start-x, %start-x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-reduce-start = ((f32[8,16]{1,0}), f32[8,16]{1,0}) all-reduce-start(%e), channel_id=1, \
replica_groups=mesh['data'=8] {'data'}, to_apply=%add, metadata={op_name="jit(f)/psum"}
  %while.1 = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}, bf16[8]{0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %all-reduce-done = f32[8,16]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %r = f32[] constant(0)
}
"""
)


def forward(leaf, *shape):
    return Piece("bfloat16", shape, "forward", leaf)


@pytest.mark.parametrize("text", [OLD, NEW], ids=["jax_0_10", "jax_0_12"])
def test_windows_of_a_program_for_gpus(mesh, text):
    embedding = Piece("float32", (64, 16), "backward", "embedding")
    loss = Piece("float32", (8, 16), "", "")
    up = Piece("bfloat16", (64, 64), "scatter", "blocks/up")
    found = read(text, mesh)
    assert found == (
        Window("all-gather", (embedding,), (D,), asynchronous=False, matmuls=0, group=8),
        Window("all-reduce", (loss,), (D,), asynchronous=True, matmuls=4, group=8),
        Window("all-gather", (forward("blocks/qkv", 64, 64), forward("blocks/norm", 64)), (D,), True, 0, (1,), 7, 8),
        Window("all-gather", (forward("blocks/up", 8, 512),), (D,), True, 2, (1,), 7, 8),
        Window("reduce-scatter", (up,), (D,), True, 1, (1,), 7, 8),
    )
    assert [window.bytes for window in found] == [4096, 512, 8192 + 128, 8192, 8192]
    assert shares(found) == (
        Share("all-gather", "backward", in_loops=False, bytes=4096, covered=0),
        Share("all-reduce", "", in_loops=False, bytes=512, covered=512),
        Share("all-gather", "forward", in_loops=True, bytes=7 * (8192 + 128 + 8192), covered=7 * 8192),
        Share("reduce-scatter", "scatter", in_loops=True, bytes=7 * 8192, covered=7 * 8192),
    )


def test_shares_are_those_of_loop_bodies_where_there_are_any():
    """A gather that the compiler has peeled off its loop is left out, however it is covered; runs are multiplied."""

    def window(matmuls, loop, passes, *shape):
        return Window("all-gather", (forward("w", *shape),), (D,), True, matmuls, loop, passes)

    peeled, covered, bare = window(0, (), 1, 1000), window(3, (1,), 7, 10), window(0, (2, 1), 2, 15)
    assert shares([peeled, covered, bare]) == (Share("all-gather", "forward", True, bytes=200, covered=140),)
    assert shares([peeled, covered, bare])[0].share == 0.7
    assert shares([peeled]) == (Share("all-gather", "forward", False, bytes=2000, covered=0),)


def between(*lines, computations=""):
    """A program with these lines between the start and the done of an all-gather."""
    return f"""HloModule m, is_scheduled=true, num_partitions=8

%one (l: f32[8,8]) -> f32[8,8] {{
  %l = f32[8,8]{{1,0}} parameter(0)
  ROOT %dot = f32[8,8]{{1,0}} dot(%l, %l)
}}

%none (m: f32[8,8]) -> f32[8,8] {{
  %m = f32[8,8]{{1,0}} parameter(0)
  ROOT %add = f32[8,8]{{1,0}} add(%m, %m)
}}

%two (n: f32[8,8]) -> f32[8,8] {{
  %n = f32[8,8]{{1,0}} parameter(0)
  %f = f32[8,8]{{1,0}} fusion(%n), kind=kCustom, calls=%one
  ROOT %g = (f32[8,8]{{1,0}}, s8[99]{{0}}) custom-call(%f, %f), custom_call_target="__cublas$gemm"
}}

ENTRY %main (x: f32[8,8]) -> f32[64,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %in-front = f32[8,8]{{1,0}} dot(%x, %x)
  %start = (f32[8,8]{{1,0}}, f32[64,8]{{1,0}}) all-gather-start(%x), replica_groups={{}}, dimensions={{0}}
{chr(10).join("  " + line for line in lines)}
  ROOT %done = f32[64,8]{{1,0}} all-gather-done(%start)
}}
"""


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("%y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}", 1),
        ('%y = (f32[8,8]{1,0}, s8[9]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"', 1),
        ('%y = (f32[8,8]{1,0}, s8[9]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"', 1),
        ('%y = (f32[8,8]{1,0}, s8[9]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul$f8"', 1),
        ('%y = (f32[8,8]{1,0}, s8[9]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$groupedMatmul"', 1),
        ('%y = (f32[8,8]{1,0}, s8[9]{0}) custom-call(%x, %x), custom_call_target="__cublas$triangularSolve"', 0),
        ('%y = f32[8,8]{1,0} custom-call(%x), custom_call_target="Sharding"', 0),
        ("%y = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%one", 1),
        ("%y = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%two", 1),  # one kernel
        ('%y = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%none, metadata={op_name="jit(f)/dot_general"}', 0),
        ("%dot_general.7 = f32[8,8]{1,0} copy(%x)", 0),
        ("%y = f32[8,8]{1,0} fusion(%gemm_fusion_dot.120), kind=kInput, calls=%none", 0),  # takes a matmul's result
        ("%y = f32[8,8]{1,0} call(%x), to_apply=%two", 2),
        ("%y = f32[8,8]{1,0} while(%x), condition=%none, body=%two", 2),
        ("%y = f32[8,8]{1,0} conditional(%x, %x, %x), branch_computations={%one, %two}", 3),
        ("%other-done = f32[8,8]{1,0} all-gather-done(%other)", 0),
    ],
)
def test_what_counts_as_a_matmul(line, count):
    assert [window.matmuls for window in read(between(line))] == [count]
    assert [window.matmuls for window in read(between(line, "%z = f32[8,8]{1,0} dot(%x, %x)"))] == [count + 1]


def test_a_start_that_is_never_waited_for_covers_nothing():
    text = between("%y = f32[8,8]{1,0} dot(%x, %x)").replace("all-gather-done(%start)", "negate(%y)")
    assert [(window.asynchronous, window.matmuls) for window in read(text)] == [(True, 0)]


def test_nested_loops_and_unknown_trip_counts():
    text = """HloModule m, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %c = f32[] add(%a, %a)
}

%inner (i: f32[8]) -> f32[8] {
  %i = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%i), replica_groups={}, to_apply=%add
}

%outer (o: f32[8]) -> f32[8] {
  %o = f32[8]{0} parameter(0)
  %first = f32[8]{0} while(%o), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %second = f32[8]{0} while(%first), condition=%test, body=%inner
}

%test (t: f32[8]) -> pred[] {
  %t = f32[8]{0} parameter(0)
  ROOT %p = pred[] custom-call(%t), custom_call_target="test"
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} call(%x), to_apply=%inner
  %z = f32[8]{0} while(%y), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"2"}}
  ROOT %w = f32[8]{0} while(%z), condition=%test, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    assert [(window.loop, window.passes) for window in read(text)] == [
        ((), 1),
        ((1,), 2),
        ((2, 1), 15),
        ((2, 2), 5),
    ]


def named(op_name, operands="%x"):
    return f"""HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[8,64], y: f32[16,8]) -> f32[] {{
  %x = f32[8,64]{{1,0}} parameter(0)
  %y = f32[16,8]{{1,0}} parameter(1)
  %g = f32[64,64]{{1,0}} all-gather({operands}), replica_groups={{}}, dimensions={{0}}{op_name}
  ROOT %r = f32[] constant(0)
}}
"""


def metadata(name):
    return f', metadata={{op_name="{name}" stack_frame_id=3}}, backend_config={{"is_sync":true}}'


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("jit(f)/while/body/jzero.gather.forward[blocks/up]/all_gather", ("forward", "blocks/up")),
        ("jzero.gather.backward[w]/all_gather", ("backward", "w")),
        ("jit(f)/jzero.gather.update[layers/0/w[1]]/all_gather", ("update", "layers/0/w[1]")),
        ("jit(f)/jzero.scatter[w]/reduce_scatter", ("scatter", "w")),
        ("jit(f)/jzero.reduce[w]/psum", ("reduce", "w")),
        (r"jit(f)/jzero.scatter[a \'b\' \"c\" \303\251]/reduce_scatter", ("scatter", "a 'b' \"c\" é")),
        ("jit(f)/transpose(jvp(model))/all_gather", ("", "")),
        ("jit(f)/jzero.gather.forward[cut", ("", "")),  # MLIR cuts names at an @
    ],
)
def test_names(name, found):
    ((piece,),) = (window.pieces for window in read(named(metadata(name))))
    assert (piece.purpose, piece.leaf) == found


def test_names_of_combined_collectives(mesh):
    layout = jzero.zero({"a": jnp.ones((64, 64)), "b": jnp.ones((4, 128, 8))}, stage=3, mesh=mesh, min_shard_size=0)

    def pieces(name, **options):
        ((x, y),) = (window.pieces for window in read(named(name, "%x, %y"), **options))
        return (x.purpose, x.leaf), (y.purpose, y.leaf)

    combined = metadata("jit(f)/(jzero.gather.forward[a]/all_gather:jzero.gather.forward[b]/all_gather)")
    assert pieces(combined) == (("forward", "a"), ("forward", "b"))
    mixed = metadata("jit(f)/(jzero.gather.backward[a]/all_gather:psum/all_gather)")
    assert pieces(mixed) == (("backward", "a"), ("", ""))
    # A colon in a path gives three names for two arrays. What is common to all is known, and shapes tell the leaf.
    colon = metadata("jit(f)/(jzero.gather.forward[a:1]/all_gather:jzero.gather.forward[b]/all_gather)")
    assert pieces(colon) == (("forward", ""), ("forward", ""))
    assert pieces(colon, layout=layout) == (("forward", "a"), ("forward", "b"))
    assert pieces("", layout=layout) == (("", "a"), ("", "b"))


def test_shapes_tell_leaves_that_are_alike_apart_only_so_far(mesh):
    layout = jzero.zero({k: jnp.ones((64, 64)) for k in "ab"}, stage=3, mesh=mesh, min_shard_size=0)
    ((piece,),) = (window.pieces for window in read(named(""), layout=layout))
    assert piece.leaf == "a or b"


def test_several_leaves_in_one_array():
    name = "jit(f)/(psum:jzero.reduce[a]/psum:jzero.sum[]/psum:jzero.reduce[b]/psum)"
    ((piece,),) = (window.pieces for window in read(named(metadata(name))))
    assert (piece.purpose, piece.leaf) == ("reduce", "a + b")


def test_a_real_program(mesh):
    """Names, loops and trip counts as they come out of jax; on CPU all collectives are synchronous."""

    def layer(x, w):
        with jax.named_scope("jzero.gather.forward[layers/w]"):
            w = lax.all_gather(w.astype(jnp.bfloat16), D, tiled=True)
        return jnp.tanh(x @ w), None

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(None, D), P(D)), out_specs=P(D), check_vma=False)
    def f(ws, x):
        x, _ = lax.scan(layer, x, ws)
        with jax.named_scope("jzero.scatter[it's]"):
            return lax.psum_scatter(x, D, tiled=True)

    compiled = f.lower(jnp.ones((5, 64, 64)), jnp.ones((64, 64), jnp.bfloat16)).compile()
    gathered, scattered = windows(compiled, mesh)
    assert (gathered.kind, gathered.axes, gathered.loop, gathered.passes) == ("all-gather", (D,), (1,), 5)
    assert (gathered.pieces[0].shape, gathered.pieces[0].leaf, gathered.purpose) == ((64, 64), "layers/w", "forward")
    assert (scattered.kind, scattered.loop, scattered.purpose) == ("reduce-scatter", (), "scatter")
    assert scattered.pieces[0].leaf == "it's"
    assert not gathered.asynchronous
    assert shares([gathered])[0].share == 0


def test_wrong_arguments(mesh):
    lowered: Any = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(TypeError, match=r"wanted a compiled program.*got Lowered"):
        windows(lowered)
    with pytest.raises(ValueError, match="XLA has not scheduled this program"):
        read(between().replace("is_scheduled=true, ", ""))
    four = Mesh(np.array(jax.devices()[:4]), (D,))
    with pytest.raises(ValueError, match=r"runs on 8 devices, but the mesh \{'data': 4\} has 4"):
        read(between(), four)


@pytest.mark.parametrize("target", ["h200", "x8", "h200x", "h200x0", "v100x8", "h200x2x2x8", "h200 x8", ""])
def test_no_such_target(target):
    with pytest.raises(
        ValueError, match=r"wanted a GPU \(a100, h100, h200, b200, l40s\) and how many, for example h200x8"
    ):
        targets.target_mesh(target, data=8)


@pytest.mark.parametrize(
    ("installed", "advice"),
    [(False, r'pip install "jzero\[preflight\]"'), (True, "Set JAX_PLATFORMS=cpu before jax starts")],
)
def test_no_way_to_compile_for_gpus(monkeypatch, installed, advice):
    def refuse(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(targets, "has_pjrt", lambda: installed)
    with pytest.raises(RuntimeError, match=f"Cannot compile for h200x8 here: .*{advice}"):
        targets.target_mesh("h200x8", data=8)


def test_device_memory_is_checked():
    with pytest.raises(ValueError, match="device_memory=0; wanted a number of bytes"):
        targets.target_mesh("h200x8", device_memory=0, data=8)


def test_options():
    assert parse_option("a=true") == ("a", True)
    assert parse_option("a=b=12") == ("a", "b=12")
    with pytest.raises(ValueError, match="'foo' is no option; wanted NAME=VALUE"):
        parse_option("foo")
    with pytest.raises(ValueError, match="--layers 0: wanted 1 or more"):
        Config(layers=0)
    with pytest.raises(ValueError, match="--width 100: wanted a multiple of --heads 16"):
        Config(width=100)
    with pytest.raises(ValueError, match="--device-memory 0: wanted a positive number"):
        Config(device_memory=0)


def test_the_command_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--target", "v100x8"])
    assert stopped.value.code == 2
    assert "error: target 'v100x8'; wanted a GPU" in capsys.readouterr().err


SMALL = ("--layers", "3", "--width", "256", "--heads", "4", "--context", "64")
WEIGHTS = {"blocks/attn/qkv": 3 * 256**2, "blocks/attn/out": 256**2, "blocks/mlp/up": 4 * 256**2}
WEIGHTS |= {"blocks/mlp/down": 4 * 256**2}


def command(*args):
    """Runs the command in a process of its own: plugins for GPUs are to stay out of this one."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.schedule", *args],
        cwd=Path(__file__).parents[1],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def elements(found, kind, purpose):
    """Elements of each large leaf per call of the program, and the dtypes."""
    sizes, dtypes = dict.fromkeys(WEIGHTS, 0), set()
    for window in found["windows"]:
        for piece in window["pieces"]:
            if (window["kind"], piece["purpose"]) == (kind, purpose) and piece["leaf"] in WEIGHTS:
                sizes[piece["leaf"]] += int(np.prod(piece["shape"])) * window["passes"]
                dtypes.add(piece["dtype"])
    return sizes, dtypes


@gpus.needs_compiler
def test_stage_3_compiled_for_gpus():
    found = json.loads(command(*SMALL, "--no-ahead", "--json"))
    assert found["mesh"] == {"data": 8}
    assert found["temp_bytes"] > 0
    three_times = {leaf: 3 * size for leaf, size in WEIGHTS.items()}
    assert elements(found, "all-gather", "forward") == (three_times, {"bfloat16"})
    assert elements(found, "all-gather", "backward") == (three_times, {"bfloat16"})
    assert elements(found, "reduce-scatter", "scatter") == (three_times, {"bfloat16"})
    in_loops = {(row["kind"], row["purpose"]) for row in found["shares"] if row["in_loops"]}
    gathers = {("all-gather", "forward"), ("all-gather", "backward")}
    assert in_loops == gathers | {("reduce-scatter", "scatter")}


@gpus.needs_compiler
def test_a_step_of_stage_1_on_two_hosts():
    options = ("--stage", "1", "--what", "step", "--target", "h100x2x4", "--mesh", "replica=2,data=-1")
    combine = "xla_gpu_reduce_scatter_combine_threshold_bytes"
    found = json.loads(command(*SMALL, *options, "--json", "--options", f"{combine}=1"))
    assert found["mesh"] == {"replica": 2, "data": 4}
    scattered = [window for window in found["windows"] if window["kind"] == "reduce-scatter"]
    assert {tuple(window["axes"]) for window in scattered} == {("data",)}
    assert [len(window["pieces"]) for window in scattered] == [1] * len(scattered)
    assert len(scattered) >= len(WEIGHTS)
    stacked = {leaf: 3 * size for leaf, size in WEIGHTS.items()}
    assert elements(found, "all-gather", "update") == (stacked, {"float32"})
    over_replicas = [window for window in found["windows"] if window["axes"] == ["replica"]]
    assert {window["kind"] for window in over_replicas} == {"all-reduce"}


@gpus.needs_compiler
def test_tables():
    said = command(*SMALL, "--stage", "0", "--unrolled")
    assert "Outside of loops" in said
    assert "Body of loop" not in said
    assert "all-reduce" in said
    assert "temp " in said
