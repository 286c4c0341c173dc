"""What XLA reports of a program's buffers, read on a report and a program that are known by construction."""

from jzero import hlo
from jzero.buffers import Buffer, temporaries, tidy

PROGRAM = hlo.parse("""HloModule m, is_scheduled=true, num_partitions=8

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %y = f32[4,8]{1,0} add(%x, %x), metadata={op_name="jit(update)/while/body/blocks/stack"}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %y)
}

%cond (q: (s32[], f32[4,8])) -> pred[] {
  ROOT %q = pred[] constant(true)
}

%inner (r: f32[4,8]) -> f32[4,8] {
  %r = f32[4,8]{1,0} parameter(0)
  ROOT %tanh = f32[4,8]{1,0} tanh(%r), metadata={op_name="jit(update)/jvp(mlp)/tanh"}
}

ENTRY %main (w: f32[4,8], v: bf16[2,8]) -> f32[] {
  %w = f32[4,8]{1,0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %v = bf16[2,8]{1,0} parameter(1)
  %gather = ((bf16[2,8]{1,0}, bf16[2,8]{1,0}), (bf16[16,8]{1,0}, bf16[16,8]{1,0})) all-gather-start(%v, %v), \
metadata={op_name="jit(update)/(jzero.gather.forward[a]/all_gather:jzero.gather.forward[b]/all_gather)"}
  %done = (bf16[16,8]{1,0}, bf16[16,8]{1,0}) all-gather-done(%gather)
  %fused = f32[4,8]{1,0} fusion(%w), kind=kLoop, calls=%inner
  %copied = f32[4,8]{1,0} copy(%fused)
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]{1,0}) tuple(%zero, %copied)
  %loop = (s32[], f32[4,8]{1,0}) while(%init), condition=%cond, body=%body
  ROOT %r0 = f32[] constant(0)
}
""")

REPORT = """HloLiveRange (max 9):
  BufferLiveRange:
    gather{1,0}: 3-4
  Live ranges at 2:
    fused{}: 9999 bytes (cumulative: 9999 bytes)

  Live ranges at 7 (peak):
    gather{1,1}: 256 bytes (cumulative: 256 bytes)
    w{}: 128 bytes (cumulative: 384 bytes)
    copied{}: 128 bytes (cumulative: 512 bytes)
    p{1}: 300 bytes (cumulative: 640 bytes)
    fused{}: 127 bytes (cumulative: 768 bytes)
    unknown.7{}: 5 bytes (cumulative: 768 bytes)
"""


def test_buffers_at_the_peak_by_name(tmp_path):
    (tmp_path / "module_1.jit_f.live-range.txt").write_text("nothing")
    (tmp_path / "module_1.jit_update.sm_9.0_gpu_after_optimizations-live-range.txt").write_text(REPORT)
    assert temporaries(tmp_path, PROGRAM) == (
        Buffer("blocks/stack", "temporary", "float32", (4, 8), 300),  # carried by a loop: named by what makes it
        Buffer("jzero.gather.forward[b]/all_gather", "temporary", "bfloat16", (16, 8), 256),
        Buffer("jvp(mlp)/tanh", "temporary", "float32", (4, 8), 128),  # a copy, named by what it copies
        Buffer("jvp(mlp)/tanh", "temporary", "float32", (4, 8), 127),  # a fusion, by what is in it
    )


def test_no_report_is_not_no_buffers(tmp_path):
    assert temporaries(tmp_path, PROGRAM) is None


def test_tidy_names():
    assert tidy("jit(update)/jit(sharded)/shard_map/jvp()/mul") == "jvp()/mul"
    assert tidy("jit(update)/jit(_update)/jzero.update/add") == "jzero.update/add"
    assert tidy("jit(update)/while/body/eval_jaxpr/GPT/blocks/dot_general") == "GPT/blocks/dot_general"
