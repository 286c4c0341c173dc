"""FLOPs, sources, and the time of programs that are known by construction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import jzero
from jzero import hlo
from jzero.devices import DEVICES
from jzero.events import Branches, Done, Loop, Piece, Start, Window, read
from jzero.flops import Matmul, Matmuls, convolutions
from jzero.links import Link, link_of
from jzero.targets import GPUS
from jzero.timeline import play

LINES = {
    "%d = bf16[4,128,96]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
    'rhs_contracting_dims={1}, metadata={op_name="jit(f)/dot_general" stack_frame_id=2}': (
        2 * 4 * 128 * 96 * 64,
        "bfloat16",
        "jit(f)/dot_general",
    ),
    "%d = f32[128,96]{1,0} dot(%e, %g), lhs_contracting_dims={1,2}": (2 * 128 * 96 * 8 * 4, "tf32", ""),
    "%d = f32[128,96]{1,0} dot(%e, %g), lhs_contracting_dims={1,2}, operand_precision={highest,highest}": (
        2 * 128 * 96 * 8 * 4,
        "float32",
        "",
    ),
    '%d = (bf16[128,96]{1,0}, s8[33]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config='
    '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":'
    '["1"]}}}': (2 * 128 * 96 * 64, "bfloat16", ""),
    '%d = f32[128,96]{1,0} fusion(%a), kind=kCustom, calls=%two, metadata={op_name="x"}': (
        2 * 512 * 3,
        "bfloat16",
        "y",
    ),
    "%d = f32[128,96]{1,0} fusion(%a), kind=kLoop, calls=%none": None,
    "%d = bf16[4,128,64]{2,1,0} add(%a, %a)": None,
}


def program(line):
    return hlo.parse(f"""HloModule m, is_scheduled=true, num_partitions=8

FileNames
1 "/home/me/model.py"
2 "/lib/jzero/stream.py"

FunctionNames
1 "Model.__call__"
2 "evaluate"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=31 end_line=31 column=5 end_column=9}}
2 {{file_name_id=2 function_name_id=2 line=7 end_line=7 column=5 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=1}}


%two (p: bf16[8,8]) -> bf16[8,8] {{
  %p = bf16[8,8]{{1,0}} parameter(0)
  %s = bf16[8,8]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, metadata={{op_name="y"}}
  ROOT %t = bf16[8,16]{{1,0}} dot(%s, %s), lhs_contracting_dims={{1}}, metadata={{op_name="y"}}
}}

%none (q: bf16[8]) -> bf16[8] {{
  ROOT %q = bf16[8]{{0}} parameter(0)
}}

ENTRY %main (a: bf16[4,128,64], b: bf16[4,64,96], e: f32[128,8,4], g: f32[32,96]) -> f32[] {{
  %a = bf16[4,128,64]{{2,1,0}} parameter(0)
  %b = bf16[4,64,96]{{2,1,0}} parameter(1)
  %e = f32[128,8,4]{{2,1,0}} parameter(2)
  %g = f32[32,96]{{1,0}} parameter(3)
  {line}
}}
""")


@pytest.mark.parametrize(("line", "wanted"), LINES.items(), ids=range(len(LINES)))
def test_flops_of_one_kernel(line, wanted):
    found = program(line)
    one = Matmuls(found).of("%main", found.computations["%main"][-1])
    assert (None if one is None else (one.flops, one.dtype, one.name)) == wanted


def test_sources_skip_the_folders_of_libraries():
    found = program(next(iter(LINES)))
    dot = found.computations["%main"][-1]
    assert found.source(dot) == "evaluate (stream.py:7)"
    assert found.source(dot, ("/lib/jzero/",)) == "__call__ (model.py:31)"
    assert found.source(dot, ("/lib/", "/home/")) == ""
    assert found.source(found.computations["%main"][0]) == ""


def test_convolutions_are_told():
    line = '%c = (f32[8]{0}, u8[0]{0}) custom-call(%a, %b), custom_call_target="__cudnn$convForward"'
    assert convolutions(program(line)) == 1
    assert convolutions(program(next(iter(LINES)))) == 0


def test_flops_of_a_real_program_with_loops_and_remat():
    """XLA:CPU keeps dots as they are; trip counts are multiplied in, and what is recomputed is known as such."""

    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def loss(ws, x):
        return lax.scan(jax.checkpoint(layer), x, ws)[0].sum()

    ws, x = jnp.ones((5, 32, 32)), jnp.ones((16, 32))
    compiled = jax.jit(jax.grad(loss)).lower(ws, x).compile()
    found = play(
        read(hlo.parse(compiled.as_text() or ""), None, None), peak=lambda dtype: 1.0, link=lambda window: Link("", 1.0)
    ).matmuls.items()
    one = 2 * 16 * 32 * 32
    assert sum(matmul.flops * times for matmul, times in found if not matmul.again) == 5 * 6 * one
    assert sum(matmul.flops * times for matmul, times in found if matmul.again) in (5 * one, 5 * 2 * one)


def window(bytes_, axes=("data",)):
    return Window("all-gather", (Piece("int8", (bytes_,), "", ""),), axes, True, 0, group=2)


def played(*events):
    return play(
        events,
        peak=lambda dtype: {"bfloat16": 2.0, "float32": 1.0}[dtype],
        link=lambda window: Link("between hosts" if "replica" in window.axes else "within hosts", 0.5),
    )


MATMUL = Matmul(20.0, "bfloat16", "")  # 10 seconds


def test_a_covered_collective_costs_nothing_and_an_uncovered_one_its_rest():
    short, long = window(4), window(30)  # 4 and 30 seconds
    timeline = played(Start("a", short), MATMUL, Done("a"), Start("b", long), MATMUL, Done("b"))
    assert (timeline.seconds, timeline.compute) == (10 + 30, 20)
    assert (timeline.waits[id(short)], timeline.waits[id(long)]) == (0, 20)
    assert timeline.links == {"within hosts": 34}


def test_one_link_carries_one_collective_at_a_time_and_two_links_two():
    first, second, other = window(10), window(10), window(10, ("replica",))
    same = played(Start("a", first), Start("b", second), MATMUL, Done("a"), Done("b"))
    apart = played(Start("a", first), Start("b", other), MATMUL, Done("a"), Done("b"))
    assert (same.seconds, apart.seconds) == (20, 10)
    assert same.waits[id(second)] == 10


def test_synchronous_collectives_are_waited_for_in_full():
    assert played(MATMUL, Start("a", window(7)), Done("a"), MATMUL).seconds == 27


def test_loops_are_played_pass_by_pass_and_the_quickest_branch_counts():
    gather = window(14)
    body = (Start("a", gather), MATMUL, Done("a"))
    heavy = Matmul(100.0, "float32", "")
    timeline = played(Loop((1,), 3, body), Branches(((heavy,), (MATMUL,))))
    assert timeline.seconds == 3 * 14 + 10
    assert timeline.waits[id(gather)] == 12
    (matmul, sent) = timeline.spans[1,]
    assert (matmul.begin, sent.begin, sent.end, sent.wait) == (14, 14, 28, 4)
    assert [span.lane for span in timeline.spans[()]] == ["matmuls", "matmuls"]
    assert timeline.matmuls == {MATMUL: 4}


def test_the_quickest_branch_is_that_of_less_time_and_not_of_fewer_flops_and_bytes():
    sends = (Start("a", window(14)), Done("a"))  # 14 seconds, of fewer bytes than the matmul has FLOPs
    timeline = played(Branches((sends, (MATMUL,))))
    assert timeline.seconds == timeline.compute == 10
    assert played(Branches(((*sends, MATMUL), (MATMUL, MATMUL)))).matmuls == {MATMUL: 2}


@pytest.mark.parametrize(
    ("axes", "hosts", "name", "speed"),
    [
        (("data",), 1, "within hosts", 450e9),
        (("replica",), 2, "between hosts", 50e9),
        (("data",), 2, "within hosts", 450e9),
        (("replica", "data"), 2, "between hosts", 200e9),  # four devices on each host send at once
        ((), 4, "between hosts", 100e9),
        (("data",), 4, "between hosts", 100e9),
        (("data",), 8, "between hosts", 50e9),
    ],
)
def test_links(axes, hosts, name, speed):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    assert link_of(mesh, axes, DEVICES["h200"], hosts, {}) == Link(name, speed)
    assert link_of(mesh, axes, DEVICES["h200"], hosts, {"data": 3e9, "replica": 1e9}).bandwidth == (
        3e9 if axes == ("data",) else 1e9
    )


def test_a_fast_link_is_no_faster_than_the_device():
    mesh = jzero.make_mesh(data=-1)
    assert link_of(mesh, ("data",), DEVICES["l40s"], 2, {}).bandwidth == DEVICES["l40s"].link


def test_every_target_has_a_device_with_speeds_and_their_source():
    for name in GPUS:
        device = DEVICES[name]
        assert (device.name, device.memory) == (GPUS[name].name, GPUS[name].memory)
        assert device.network and device.network_kind
        assert device.peak("bfloat16") > device.peak("tf32") > device.peak("float32") > 1e13
        assert device.peak("float8_e4m3fn") >= 2 * device.peak("bfloat16")
        assert device.peak("int32") == device.peak("float32")
