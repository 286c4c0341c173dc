"""What is estimated: against the papers, against live arrays, and against what lowered programs hold."""

import functools
import itertools
import math
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from experiments.gpt.model import GPT, mean_loss
from jzero import memory
from jzero.advice import advise, gb
from jzero.devices import DEVICES, Device, as_device
from jzero.estimate import OPTIMIZERS, estimate
from jzero.figures import memory_bars, plan_bars, traffic_bars
from jzero.mesh import abstract_mesh
from jzero.papers import megatron_bytes, zero_bytes
from jzero.precision import PRECISIONS
from jzero.program import collectives
from jzero.state import compile_init
from jzero.targets import GPUS, target_mesh
from tests import gpus
from tests.models import STAGES

# Table 1 of the ZeRO paper, in GB: by params and number of devices, stages 1, 2 and 3. It rounds some figures down.
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


def last_digit(figure):
    """What one more in the last digit of a printed figure is."""
    return 10.0 ** -len(f"{figure}".partition(".")[2])


@pytest.mark.parametrize("params", TABLE_1)
def test_table_1_of_the_zero_paper(params):
    for shards, figures in TABLE_1[params].items():
        for stage, figure in enumerate(figures, start=1):
            plan = estimate(params, axes={"data": shards}, stage=stage)
            assert plan.papers is not None
            assert abs(plan.papers / 1e9 - figure) < last_digit(figure), (shards, stage)
        assert zero_bytes(0, params=params, shards=shards) == 16 * params


def test_worked_examples():
    def papers(params, devices):
        return [estimate(params, axes={"data": devices}, stage=stage).papers or 0 for stage in range(4)]

    assert [round(x / 1e9, 1) for x in papers(7.5e9, 64)] == [120, 31.4, 16.6, 1.9]  # figure 1
    assert papers(10e9, 8) == [160e9, 55e9, 37.5e9, 20e9]
    assert papers(175e9, 1024)[0] == 2800e9 and papers(175e9, 1024)[3] == 2800e9 / 1024
    # Table 2: the largest model in 32 GB on 64 devices, by formula.
    for stage, largest in enumerate((2e9, 7.6e9, 14.4e9, 128e9)):
        assert zero_bytes(stage, params=largest, shards=64) == pytest.approx(32e9, rel=6e-3)
    assert zero_bytes(3, params=2e12 / 16, shards=64) == pytest.approx(32e9, rel=0.03)  # 2T, with model 16


def test_sixteen_bytes_and_where_each_goes():
    """The paper's 16 bytes are 2 + 2 + 12; jzero has 4 for gradients, and at stage 3 the master shard alone."""
    ledger = {entry.kind: entry for entry in estimate(1e9, axes={"data": 8}, stage=1).ledger}
    assert {kind: entry.per_param for kind, entry in ledger.items()} == {
        "params": 2,
        "master": 4,
        "moments": 8,
        "gradients": 4,
    }
    assert [ledger[kind].bytes for kind in ("params", "master", "moments", "gradients")] == [2e9, 5e8, 1e9, 5e8]
    third = estimate(1e9, axes={"data": 8}, stage=3)
    assert [(entry.kind, entry.per_param, entry.bytes) for entry in third.ledger] == [
        ("params", 4, 5e8),
        ("master", 0, 0),
        ("moments", 8, 1e9),
        ("gradients", 4, 5e8),
    ]
    assert third.papers == 2e9 and third.stored.total == 1.5e9


@pytest.mark.parametrize(
    ("param", "grad", "whole", "cut"), [(2, 2, 4, 16), (2, 4, 6, 12), (4, 4, 8, 8)], ids=["fp16", "bf16", "fp32"]
)
def test_megatron(param, grad, whole, cut):
    """The table of Megatron-LM's documentation: 20, 18 and 16 bytes without the distributed optimizer."""
    for shards in (1, 4, 64):
        assert megatron_bytes(shards=shards, param=param, grad=grad) == whole + cut / shards
    assert megatron_bytes(shards=1, param=param, grad=grad) == {4: 20, 6: 18, 8: 16}[whole]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_stage_1_with_microbatches_takes_what_megatron_takes(precision):
    """Beside the last microbatch's own gradients and the reduced shard, which Megatron's formula leaves out."""
    plan = estimate(1e9, axes={"data": 8}, stage=1, precision=precision, microbatches=4)
    own = {"bf16": 2e9, "fp32": 4e9}[precision]
    assert plan.total - own - 0.5e9 == plan.megatron
    assert estimate(1e9, axes={"data": 8}, stage=2).megatron is None


def test_figures_of_the_readme_table():
    for precision, by_stage in {
        "fp32": (12, 4 + 8 / 8, 4 + 8 / 8, 12 / 8),
        "bf16": (14, 2 + 12 / 8, 2 + 12 / 8, 12 / 8),
        "fp16": (14, 2 + 12 / 8, 2 + 12 / 8, 12 / 8),
        "bf16-pure": (6, 2 + 4 / 8, 2 + 4 / 8, 6 / 8),
    }.items():
        plans = [estimate(1e6, axes={"data": 8}, stage=stage, precision=precision) for stage in range(4)]
        assert [plan.stored.total for plan in plans] == [x * 1e6 for x in by_stage]


SHAPES = {  # cut evenly, padded, cut by model axes, whole because small
    "embed": (96, 16),
    "odd": (41, 7),
    "stack": (3, 16, 64),
    "bias": (16,),
    "scale": (),
}
RULES = [("embed", P("model")), ("stack", P(None, None, "model"))]
MESHES = [{"data": 8}, {"replica": 2, "data": 4}, {"data": 4, "model": 2}, {"replica": 2, "data": 2, "model": 2}]


def init_params():
    return {path: jnp.ones(shape) for path, shape in SHAPES.items()}


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(axes))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_estimate_equals_live_bytes(precision, axes):
    """For every stage: what is estimated without devices is what `init` puts on them, to the byte."""
    params, rules = jax.eval_shape(init_params), RULES if "model" in axes else []
    replica_axes = tuple(axis for axis in axes if axis == "replica")
    for stage, name in zip((*STAGES.values(), 1), (*STAGES, "momentum"), strict=True):
        tx = OPTIMIZERS["momentum" if name == "momentum" else "adam"][1]
        settings = {"stage": stage, "precision": precision, "rules": rules, "min_shard_size": 100}
        layout = jzero.zero(params, mesh=jzero.make_mesh(**axes), replica_axes=replica_axes, **settings)
        plan = estimate(params, axes=axes, optimizer=tx, **settings)
        assert plan.stored == memory.stored_bytes(layout, tx)
        assert plan.ledger[3].bytes == memory.gradient_bytes(layout)
        if (name, precision) in (("1", "bf16"), ("3", "bf16-pure")):  # `init` is compiled: some are enough
            state = jzero.init(init_params, tx, layout)
            for tree, size in zip(
                (state.params, state.opt_state, state.master),
                (plan.stored.params, plan.stored.opt_state, plan.stored.master),
                strict=True,
            ):
                assert set(memory.live_bytes(tree).values()) == ({size} if size else set())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_the_names_and_the_state_of_those_of_optax(name):
    moments, tx = OPTIMIZERS[name]
    assert name == "momentum" or hasattr(optax, name) or hasattr(optax.contrib, name)
    params = {"w": jax.ShapeDtypeStruct((512, 256), "float32")}
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(tx.init, params))]
    by_count = 512 + 256 if name == "adafactor" else 512 * 256 * (1 if moments is None else moments)
    assert sum(size for size in sizes if size > 3) == by_count  # beside counts, and Muon's coefficients
    plan = estimate(params, axes={"data": 8}, optimizer=name, precision="fp32")
    assert plan.stored == memory.stored_bytes(jzero.zero(params, stage=3, mesh=abstract_mesh(data=8)), tx)


def test_a_thousand_devices_need_none():
    params = {"w": jax.ShapeDtypeStruct((12288, 4 * 12288), "float32"), "b": jax.ShapeDtypeStruct((12288,), "float32")}
    plan = estimate(params, axes={"replica": 4, "data": 1024}, precision="fp32")
    assert plan.devices == 4096
    assert plan.stored.total == 3 * (12288 * 4 * 12288 // 1024 + 12288 // 1024) * 4 + 4
    layout = jzero.zero(params, stage=3, mesh=abstract_mesh(data=1024))
    with pytest.raises(ValueError, match="has no devices, so nothing can run on it"):
        jzero.init(lambda: params, optax.sgd(0.1), layout)


def test_tree_and_count_agree_where_all_is_cut():
    params = {"w": jax.ShapeDtypeStruct((1024, 64), "float32"), "v": jax.ShapeDtypeStruct((64, 8), "float32")}
    for stage, precision, m in itertools.product(range(4), PRECISIONS, (1, 3)):
        same = {"axes": {"replica": 2, "data": 8}, "stage": stage, "precision": precision, "microbatches": m}
        tree, count = estimate(params, min_shard_size=0, **same), estimate(1024 * 64 + 64 * 8, **same)
        assert tree.stored.total == count.stored.total + 4, "Adam's count"
        assert tree.traffic == count.traffic
        assert tree.ledger[0] == count.ledger[0] and tree.ledger[3] == count.ledger[3]
        assert tree.papers == pytest.approx(count.papers, rel=1e-5) and tree.megatron == count.megatron


def counted(rows):
    """Elements by kind, axes and dtype."""
    sums = Counter()
    for row in rows:
        sums[row.kind, row.axes, row.dtype] += row.count * math.prod(row.shape)
    return sums


def loss_fn(params, x):
    """Of what is cut, the backward pass needs each value: the table is used twice, at both ends."""
    h = jnp.tanh(x.astype(params["embed"].dtype) @ params["embed"])
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w).reshape(-1, 4, 16).sum(1), None), h, params["stack"])
    h = h + params["bias"] + jnp.tanh((params["odd"] @ params["odd"].T) ** 2).sum()
    return ((h @ params["embed"].T) ** 2).mean().astype(jnp.float32) * params["scale"].astype(jnp.float32)


@pytest.mark.parametrize(
    ("stage", "axes", "precision"),
    [
        *((stage, MESHES[0], "bf16") for stage in ("1", "3", "deepspeed1")),
        ("3", MESHES[0], jzero.Precision(reduce=None)),
        *((stage, MESHES[1], "fp32") for stage in ("0", "2", "3", "by_block")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:batch .float32.. wider than the params")
def test_traffic_is_what_a_lowered_step_holds(stage, axes, precision):
    """Beside single numbers: kind, axes, dtype and elements of each collective of the whole step."""
    m = 4 if "replica" in axes else 1
    settings = {"stage": STAGES[stage], "precision": precision, "min_shard_size": 100}
    replica_axes = tuple(axis for axis in axes if axis == "replica")
    params, tx = jax.eval_shape(init_params), optax.adam(1e-3)
    layout = jzero.zero(params, mesh=jzero.make_mesh(**axes), replica_axes=replica_axes, **settings)
    state = jax.eval_shape(compile_init(init_params, tx, layout))
    lowered = jzero.train_step(loss_fn, tx, layout, microbatches=m).lower(
        state, jax.ShapeDtypeStruct((16 * m, 96), jnp.float32)
    )
    found = counted(row for row in collectives(lowered, layout.mesh) if row.shape)
    plan = estimate(params, axes=axes, microbatches=m, **settings)
    wanted = Counter()
    for row in plan.traffic:
        wanted[row.kind, row.axes, row.dtype] += round(row.elements)
    # The leaf that is a single number is among those left out above.
    wire = "float32" if isinstance(precision, str) else "bfloat16"
    wanted["all-reduce", tuple(axes), wire] -= m if stage == "by_block" else 1
    assert {key: n for key, n in found.items() if n} == {key: n for key, n in wanted.items() if n}


def test_traffic_of_the_stage_table():
    """2M; M + M; mM + M; 2mM + mM: the README's table, and ZeRO's section 7 for m = 1."""
    M, m, N = 10**6, 4, 8
    for microbatches, table in ((1, (2, 2, 2, 3)), (m, (2, 2, m + 1, 3 * m))):
        for stage, times in enumerate(table):
            plan = estimate(M, axes={"data": N}, stage=stage, microbatches=microbatches)
            assert sum(row.volume for row in plan.traffic) == times * M
            assert {row.wire_bytes / row.bytes for row in plan.traffic} == {(N - 1) / N}


def test_hybrid_and_model_axes_in_traffic():
    whole = estimate(1e6, axes={"data": 8}, stage=1)
    hybrid = estimate(1e6, axes={"replica": 4, "data": 8}, stage=1)
    (across,) = [row for row in hybrid.traffic if "replica" in row.axes]
    assert (across.kind, across.axes, across.group, across.elements) == ("all-reduce", ("replica",), 4, 1e6 / 8)
    assert [row for row in hybrid.traffic if row != across] == list(whole.traffic)
    assert hybrid.stored == whole.stored and hybrid.moved("data") == whole.moved()
    halved = estimate(1e6, axes={"data": 8, "model": 2}, stage=1)
    assert halved.moved() == whole.moved() / 2 and halved.stored.total == whole.stored.total / 2
    assert whole.papers and halved.papers == whole.papers / 2, "as table 2 of the paper does"
    assert estimate(1e6, axes={"data": 1}, stage=3).traffic == ()
    kept = estimate(1e6, axes={"data": 8}, microbatches=4, regather=False)
    assert sum(row.volume for row in kept.traffic) == 2 * 4e6


def test_advice():
    def ask(params, axes, device, **more):
        return advise(lambda stage, axes: estimate(params, stage=stage, axes=axes, **more), axes, device=device)

    roomy = ask(1e9, {"data": 8}, "h200")
    # As the table has it: the float32 all-reduce twice, against a reduce-scatter and a gather in bfloat16; 7/8 of each.
    assert roomy.lowest == 0
    assert "It moves 7 GB per step where stage 1 moves 5.25 GB, and stores 10.5 GB more." in roomy.reasons[0]
    for microbatches, stage, params, moved in ((1, 1, 7.5e9, 44.3), (4, 1, 7.5e9, 44.3), (1, 2, 20e9, 118)):
        lowest = ask(params, {"data": 64}, "h200", microbatches=microbatches)
        assert lowest.lowest == stage
        assert f"It moves {moved} GB per step where stage 0 moves {gb(8 * params * 63 / 64)}." in lowest.reasons[0]
    tight = ask(70e9, {"data": 64}, "h100", microbatches=8)
    assert tight.lowest == 3 and tight.smallest[:3] == (None, None, None)
    assert "moves 4,410 GB per step where stage 1 moves 413 GB" in tight.reasons[0]
    with_model = ask(7.5e9, {"data": 64}, "a100-40", microbatches=4)
    assert any("With model=" in reason and "keep it within a host" in reason for reason in with_model.reasons)
    hybrid = ask(7.5e9, {"data": 64}, "h200")
    assert any(reason.startswith("Hybrid sharding fits as well: replica=8,data=8") for reason in hybrid.reasons)
    none = ask(175e9, {"data": 8}, "h200")
    assert none.lowest is None and f"Stage 3 fits on {none.smallest[3]} devices." in none.reasons
    assert any("host memory" in reason and "not even that fits" in reason for reason in none.reasons)
    hopeless = ask(1e12, {"data": 1024}, "a100-40")
    assert hopeless.smallest[3] is None and any("A model axis cuts the blocks" in r for r in hopeless.reasons)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_smallest_number_is_the_smallest(stage):
    params = {"w": jax.ShapeDtypeStruct((1000, 130), "float32"), "v": jax.ShapeDtypeStruct((77,), "float32")}
    device = Device("small", 2_000_000, 1, "none", "made up")

    def plan(stage, axes):
        return estimate(params, stage=stage, axes=axes, min_shard_size=0, layers=8)

    advice = advise(plan, {"data": 4}, device=device, reserve=0.25)
    assert advice.budget == 1_500_000
    totals = {n: plan(stage, {"data": n}).total for n in range(1, 40)}
    assert advice.smallest[stage] == next((n for n, total in totals.items() if total <= advice.budget), None)
    assert advice.smallest[3] not in (None, 1)


def test_devices():
    assert as_device("H200").memory == GPUS["h200"].memory == 151_397_597_184
    for device in DEVICES.values():
        assert device.source and 30 * 2**30 < device.memory < 200 * 2**30
    assert as_device(DEVICES["l40s"]) is DEVICES["l40s"]
    with pytest.raises(ValueError, match="'h300' is not known; wanted one of a100-40, a100, h100, h200, b200, l40s"):
        as_device("h300")


@pytest.mark.slow
@gpus.needs_compiler
@pytest.mark.parametrize(
    ("stage", "precision", "m", "axes", "layers", "width"),
    [
        (0, "bf16", 4, {"data": 8}, 8, 1024),
        (0, "bf16-pure", 2, {"data": 8}, 8, 768),
        (1, "bf16", 1, {"replica": 2, "data": 4}, 12, 768),
        (1, "fp16", 4, {"data": 2}, 6, 768),
        (1, "fp32", 2, {"data": 8}, 12, 512),
        (2, "bf16", 8, {"data": 4}, 6, 1024),
        (2, "fp16", 1, {"data": 8}, 12, 768),
        (3, "bf16", 2, {"replica": 2, "data": 4}, 16, 512),
        (3, "bf16-pure", 1, {"data": 8}, 8, 1024),
        (3, "fp32", 1, {"data": 4}, 16, 640),
    ],
    ids=str,
)
def test_peak_of_a_compiled_step(stage, precision, m, axes, layers, width):
    """As near as `Inside` states, for a GPT on H200s with next to no activations; what is stored is exact."""
    model, tx = GPT(layers, width, 8, True), OPTIMIZERS["adam"][1]
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"], jax.random.key(0))
    mesh = target_mesh(f"h200x{math.prod(axes.values())}", **axes)
    replica_axes = tuple(axis for axis in axes if axis == "replica")
    layout = jzero.zero(params, stage=stage, mesh=mesh, replica_axes=replica_axes, precision=precision)
    state = jax.eval_shape(compile_init(lambda params: params, tx, layout), params)
    shape, sharding = (layout.batch_shards * m, 65), layout.sharding(layout.batch_spec)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    step = jzero.train_step(functools.partial(mean_loss, model), tx, layout, microbatches=m)
    memory_of = step.lower(state, batch).compile().memory_analysis()
    assert memory_of is not None
    plan = estimate(params, axes=axes, stage=stage, precision=precision, microbatches=m, layers=layers)
    inputs = m * 65 * 4 + 16  # the batch, and what is counted of steps
    assert memory_of.argument_size_in_bytes == plan.stored.total + inputs
    peak = memory_of.argument_size_in_bytes + memory_of.temp_size_in_bytes
    assert -0.045 < plan.total / peak - 1 < 0.11
    assert -0.085 < plan.inside.total / memory_of.temp_size_in_bytes - 1 < 0.21


def test_figure():
    plans = [estimate(7.5e9, axes={"data": 64}, stage=stage) for stage in range(4)]
    axes = memory_bars(plans, as_device("h200"), 0.3).axes[0]
    tops = [0.0] * 4
    for bars in axes.containers:
        tops = [max(top, bar.get_y() + bar.get_height()) for top, bar in zip(tops, list(bars), strict=True)]
    assert tops == pytest.approx([plan.total / 1e9 for plan in plans])
    lines = [np.asarray(line.get_ydata())[0] for line in axes.lines]
    assert lines == pytest.approx([151.397597184, 151.397597184 * 0.7])


def test_figure_of_traffic():
    """A bar for each stage and each set of axes that it sends over, as high as what is sent over them."""
    plans = [estimate(7.5e9, axes={"replica": 4, "data": 8}, stage=stage, microbatches=4) for stage in range(4)]
    axes = plan_bars(plans, as_device("h200"), 0.3).axes[1]
    tops: dict[float, float] = {}
    for bars in axes.containers:
        for bar in bars:  # pyright: ignore[reportGeneralTypeIssues]
            middle = round(bar.get_x() + bar.get_width() / 2, 6)
            tops[middle] = max(tops.get(middle, 0), bar.get_y() + bar.get_height())
    wanted = [
        sum(row.wire_bytes for row in plan.traffic if row.axes == over) / 1e9
        for plan in plans
        for over in dict.fromkeys(row.axes for row in plan.traffic)
    ]
    assert [tops[at] for at in sorted(tops)] == pytest.approx(wanted) and len(wanted) == 7
    names = [text.get_text() for text in axes.get_xticklabels(minor=True)]
    assert names == ["all axes", "data", "replica", "data", "replica", "data", "replica"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not traffic_bars([estimate(1e9, axes={"data": 1})]).axes[0].containers


def test_errors():
    for params in (0, -1, 7.55, math.inf, math.nan, True):
        with pytest.raises(ValueError, match="wanted a whole positive number such as"):
            estimate(params, axes={"data": 8})
    with pytest.raises(ValueError, match="has no axis 'data'"):
        estimate(1e9, axes={"model": 8})
    with pytest.raises(ValueError, match="axis 'data' has size 0"):
        estimate(1e9, axes={"data": 0})
    with pytest.raises(ValueError, match=r"optimizer='AdaGrad2'; wanted adam, adamw, .*, muon, or an optax optimizer"):
        estimate(1e9, axes={"data": 8}, optimizer="AdaGrad2")
    for name in ("muon", "adafactor"):
        with pytest.raises(ValueError, match=rf"no shapes for optimizer='{name}' to work.*name one of adam, .*sgd"):
            estimate(1e9, axes={"data": 8}, optimizer=name)
    with pytest.raises(ValueError, match=r"no shapes for rules to work on. Pass the abstract params \(--model\)\."):
        estimate(1e9, axes={"data": 8, "model": 2}, rules=RULES)
    with pytest.raises(ValueError, match="is a count, which has no shapes"):
        estimate(1e9, axes={"data": 8}, optimizer=optax.adam(1e-3))
    with pytest.raises(ValueError, match="microbatches=0; wanted an int of 1 or more"):
        estimate(1e9, axes={"data": 8}, microbatches=0)
    with pytest.raises(ValueError, match="the paper has 0, 1, 2 and 3"):
        zero_bytes(4, params=1, shards=1)
    with pytest.raises(ValueError, match=r"reserve=1.5; a share"):
        advise(lambda stage, axes: estimate(1e9, stage=stage, axes=axes), {"data": 8}, device="h200", reserve=1.5)
