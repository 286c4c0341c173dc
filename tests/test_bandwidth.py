"""`jzero.bandwidth`: the programs that it times, and what it makes of the times. Nothing here depends on a time."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero import bandwidth
from jzero.bandwidth import DTYPES, KINDS, measure, program, sizes_between
from jzero.bandwidth_plot import plot
from jzero.cli import main, options
from jzero.cli.bandwidth import _sizes
from jzero.program import Collective, collectives, compiled_collectives
from jzero.sweep import Sweep, Timing
from jzero.targets import target_mesh
from tests import gpus

HLO: dict[str, str] = dict(
    zip(KINDS, ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"), strict=True)
)


def mesh_of(**axes):
    return jzero.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)


def timing(kind="all-reduce", size=1 << 20, seconds=1e-3, n=8):
    return Timing(Collective(HLO[kind], "float32", (size // 4,), ("data",), n), seconds, (seconds, seconds))


def sweep(*busbw, kind="permute", platform="gpu"):
    """Of doubling sizes with these bus bandwidths."""
    sizes = [1024 << i for i in range(len(busbw))]
    timings = tuple(timing(kind, size, size / speed) for size, speed in zip(sizes, busbw, strict=True))
    return Sweep(kind, "float32", "data", 8, platform, timings)


# --- programs


@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_program_is_one_collective(kind, axis):
    mesh = mesh_of(data=4, model=2)
    f, operand, collective = program(mesh, axis, kind, 1 << 12, "float32")
    lowered = f.lower(operand)
    assert collectives(lowered, mesh) == (collective,)
    (row,) = compiled_collectives(lowered.compile(), mesh)
    found = (row.kind, row.dtype, row.bytes, row.axes, row.group, row.count, row.exact)
    assert found == (HLO[kind], "float32", 1 << 12, (axis,), mesh.shape[axis], 1, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_collective_has_the_dtype(kind, dtype):
    mesh = mesh_of(data=8)
    f, operand, collective = program(mesh, "data", kind, 1 << 12, dtype)
    assert collectives(f.lower(operand), mesh) == (collective,)
    assert (collective.kind, collective.dtype, collective.bytes) == (HLO[kind], dtype, 1 << 12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_that_of_nccl_tests(kind):
    """Bytes on each device, before and after: doc/PERFORMANCE.md, and the byte counts in src/*.cu."""
    f, operand, _ = program(mesh_of(data=8), "data", kind, 1 << 12, "int8")
    (result,) = jax.tree.leaves(f.lower(operand).out_info)
    before, after = operand.shape[0] // 8, result.shape[0] // 8
    whole, part = 1 << 12, 1 << 9
    wanted = {"reduce-scatter": (whole, part), "all-gather": (part, whole)}
    assert (before, after) == wanted.get(kind, (whole, whole))


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_what_its_name_says(kind):
    n = 4
    f, operand, _ = program(mesh_of(data=n), "data", kind, 16 * n, "int32")
    x = np.arange(operand.shape[0], dtype=np.int32).reshape(n, -1)  # one row for each device
    wanted = {
        "all-reduce": np.tile(x.sum(0), (n, 1)),
        "reduce-scatter": x.sum(0),
        "all-gather": np.tile(x.reshape(-1), (n, 1)),
        "all-to-all": x.reshape(n, n, -1).swapaxes(0, 1),
        "permute": np.roll(x, 1, axis=0),
    }
    found = f(jax.device_put(x.reshape(-1), operand.sharding))
    np.testing.assert_array_equal(found, wanted[kind].reshape(-1))


@gpus.compiles
@pytest.mark.parametrize("kind", KINDS)
def test_on_gpus_it_is_one_collective_in_its_dtype_and_no_copy(kind):
    mesh = target_mesh("h200x8", data=4, model=2)
    f, operand, collective = program(mesh, "data", kind, 1 << 20, "bfloat16")
    compiled = f.lower(operand).compile()
    assert compiled_collectives(compiled, mesh) == (collective,)
    text = compiled.as_text()
    assert not [word for word in (" copy(", " fusion(", " copy-start(") if text and word in text]


def test_the_all_reduce_is_in_place():
    f, operand, _ = program(mesh_of(data=8), "data", "all-reduce", 1 << 12, "float32")
    memory: Any = f.lower(operand).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 1 << 12


# --- numbers


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_bus_bandwidth_has_the_factors_of_nccl_tests(n):
    factors = {kind: timing(kind, 12288, n=n).busbw / timing(kind, 12288, n=n).algbw for kind in KINDS}
    wanted = {"all-reduce": 2 * (n - 1) / n, "permute": 1.0}
    assert factors == pytest.approx({kind: wanted.get(kind, (n - 1) / n) for kind in KINDS})
    assert timing(size=1 << 20, seconds=0.5).algbw == 2 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_at_its_bound_fills_the_link(kind):
    bound = timing(kind).ring_seconds(link=5e9)
    assert timing(kind, seconds=bound).busbw == pytest.approx(5e9)


@pytest.mark.parametrize(("n", "times"), [(2, 1), (3, 1.5), (4, 2), (8, 2), (64, 2)])
def test_tree_bound(n, times):
    """By hand: two devices send a half each way in both trees; inside of larger trees there are four neighbours."""
    assert timing(n=n).tree_seconds(link=1 << 20) == times
    assert times >= timing(n=n).ring_seconds(link=1 << 20)
    assert timing("all-gather", n=n).tree_seconds(link=1 << 20) is None


def test_plateau_and_latency():
    found = sweep(1e9, 1e9, 1e9, 3e9, 5e9, 4e9)
    assert found.plateau == pytest.approx(4e9), "the median of the three largest, not of all"
    assert found.latency == found.timings[0].seconds
    assert sweep(2e9).plateau == pytest.approx(2e9)
    assert sweep(1e9, 1.2e9).rising
    assert not sweep(1e9, 1.05e9).rising
    assert not sweep(1e9).rising


def test_verdict():
    assert "reaches 80% of 5 GB/s" in sweep(4e9, 4e9).verdict(link=5e9)
    assert "memory" not in sweep(4e9, 4e9).verdict(link=5e9)
    assert "reaches" not in sweep(4e9).verdict()
    assert "plateau 4 GB/s" in sweep(4e9).verdict()
    assert "faster than stated" in sweep(6e9).verdict(link=5e9)
    assert "Still rising" in sweep(1e9, 4e9).verdict()
    on_cpu = sweep(6e9, platform="cpu").verdict(link=5e9)
    assert "memory, not links" in on_cpu
    assert "faster than stated" not in on_cpu
    with pytest.raises(ValueError, match="link=0; wanted bytes per second"):
        sweep(4e9).verdict(link=0)


# --- measuring


def test_warm_up_is_not_timed_and_a_time_is_of_one_call(monkeypatch):
    clock = iter([0, 90, 100, 180, 200, 204, 300, 308, 400, 402])  # two to warm up, then 4, 8 and 2 seconds
    monkeypatch.setattr(bandwidth, "perf_counter", lambda: next(clock))
    calls = []

    def f(x):
        calls.append(x)
        return x + 1

    operand = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert bandwidth._times(f, operand, repeats=3, calls=2) == [2, 4, 1]
    assert len(calls) == 2 * (2 + 3)


def test_measure_takes_the_median(monkeypatch):
    monkeypatch.setattr(bandwidth, "_times", lambda f, operand, repeats, calls: [3.0, 100.0, 1.0, 2.0, 4.0])
    found = measure(mesh_of(data=8), "data", "permute", [2048, 1024, 2048], jnp.bfloat16, repeats=5)
    assert [(t.collective.bytes, t.seconds, t.quartiles) for t in found.timings] == [
        (1024, 3.0, (2.0, 4.0)),
        (2048, 3.0, (2.0, 4.0)),
    ]
    assert (found.kind, found.dtype, found.axis, found.devices, found.measures) == (
        "permute",
        "bfloat16",
        "data",
        8,
        "memory",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_measure_runs(kind):
    mesh = jax.make_mesh((2, 4), ("replica", "data"))  # jax's own way to make one, whatever its axis types
    found = measure(mesh, "data", kind, [1024, 4096], "bfloat16", repeats=1)
    assert [t.collective.bytes for t in found.timings] == [1024, 4096]
    assert found.devices == 4
    assert all(0 < t.seconds < math.inf and t.quartiles == (t.seconds, t.seconds) for t in found.timings)


def test_sizes_between():
    assert sizes_between(1 << 10, 1 << 30) == tuple(1 << i for i in range(10, 31))
    assert sizes_between(8, 32, multiple=24) == (24, 48), "rounded up, and none twice"
    with pytest.raises(ValueError, match="sizes from 2048 to 1024 bytes"):
        sizes_between(2048, 1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": "model"}, "axis 'model'; wanted one of the mesh's: 'data', 'replica'"),
        ({"axis": "replica"}, r"axis 'replica' has one device.*Name another \('data'\)"),
        ({"kind": "broadcast"}, "collective 'broadcast'; wanted one of all-reduce, .*permute"),
        ({"dtype": "float64"}, "dtype 'float64'; wanted one of float32, bfloat16"),
        ({"dtype": "brain"}, "dtype 'brain'; wanted one of float32, bfloat16"),
        ({"sizes": []}, "sizes is empty"),
        ({"sizes": [1024, 1000]}, r"size 1000: 8 devices.*multiple of 32 bytes. Near it: 992 or 1024"),
        ({"sizes": [0]}, "size 0: .*Near it: 32"),
        ({"sizes": [-64]}, "size -64: .*Near it: 32"),
        ({"repeats": 0}, "repeats=0; wanted 1 or more"),
    ],
)
def test_bad_input(change, message):
    given = {"mesh": mesh_of(data=8, replica=1), "axis": "data", "kind": "all-reduce", "sizes": [1024]} | change
    with pytest.raises(ValueError, match=message):
        measure(**given)


# --- command line and plot

TINY = ["bandwidth", "--sizes", "1KiB..2KiB", "--repeats", "1"]


def test_json(capsys):
    options = ["--collective", "all-reduce", "permute", "--mesh", "data=4,model=2", "--link", "400Gb/s", "--json"]
    assert main([*TINY, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mesh"], found["axis"], found["measures"], found["link"]) == (
        {"data": 4, "model": 2},
        "data",
        "memory",
        5e10,
    )
    assert [s["collective"] for s in found["sweeps"]] == ["all-reduce", "permute"]
    for one in found["sweeps"]:
        assert [row["bytes"] for row in one["sizes"]] == [1024, 2048]
        assert "memory, not links" in one["verdict"]
        assert one["of_link"] == one["plateau"] / 5e10
        factor = 2 * 3 / 4 if one["collective"] == "all-reduce" else 1
        for row in one["sizes"]:
            assert row["busbw"] == pytest.approx(factor * row["bytes"] / row["seconds"])
            assert row["ring_seconds"] == pytest.approx(factor * row["bytes"] / 5e10)
            assert row["tree_seconds"] == (2 * row["bytes"] / 5e10 if one["collective"] == "all-reduce" else None)


def test_table_and_plot(capsys, tmp_path):
    path = tmp_path / "bandwidth.svg"
    kinds = ["all-reduce", "all-gather"]
    options = ["--link", "450GB/s", "--dtype", "bfloat16", "float32", "--plot", str(path), "--collective", *kinds]
    assert main([*TINY, *options]) == 0
    text = capsys.readouterr().out
    assert "memory, not links" in text
    for kind in kinds:
        assert f"{kind}, bfloat16" in text
        assert f"{kind} float32 over data=8: reaches" in text
    assert text.count("ring bound") == text.count("tree bound") == 2, "of all-reduce only"
    assert path.read_text().startswith("<?xml")


def test_a_range_is_rounded_up_to_what_the_axis_divides(capsys):
    assert main([*TINY, "--mesh", "data=3", "--collective", "all-gather", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["bytes"] for row in found["sweeps"][0]["sizes"]] == [1032, 2052]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--axis", "model"], "axis 'model'; wanted one of the mesh's: 'data'"),
        (["--mesh", "data=1"], "axis 'data' has one device"),
        (["--mesh", "data=9"], "--mesh asks for 9 devices; there are 8 (cpu)"),
        (["--mesh", "data=-1,model=-1"], "only one axis can take the devices left over"),
        (["--mesh", "data:8"], "'data:8' is not a name and a positive size (or -1); wanted for example"),
        (["--mesh", "data=2,data=4"], "axis 'data' is named twice"),
        (["--sizes", "1000"], "size 1000: 8 devices cannot share it out"),
        (["--sizes", "many"], "'many'; wanted whole bytes"),
        (["--sizes", "2KiB..1KiB"], "wanted one size, or a range from a smaller to a larger"),
        (["--dtype", "float64"], "invalid choice: 'float64'"),
        (["--collective", "broadcast"], "invalid choice: 'broadcast'"),
        (["--repeats", "0"], "--repeats 0; wanted 1 or more"),
        (["--mesh", "devices=8"], "--mesh: no mesh axis can be named 'devices'"),
        (["--link", "450"], "'450'; wanted a speed, as 450GB/s"),
        (["--plot", "busbw.xyz"], "busbw.xyz: cannot write .xyz; "),
        (["--plot", "/nowhere/busbw.png"], "No such file or directory: '/nowhere/busbw.png'"),
    ],
)
def test_bad_options(options, message, capsys, monkeypatch):
    monkeypatch.setattr(bandwidth, "measure", lambda *args: pytest.fail("measured, before all was checked"))
    try:
        code = main(["bandwidth", *options])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_out_of_memory(capsys, monkeypatch):
    def fail(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(bandwidth, "measure", fail)
    assert main(TINY) == 1
    text = capsys.readouterr().err
    assert "all-reduce float32: RESOURCE_EXHAUSTED" in text
    assert "end --sizes at a smaller one" in text


def test_units():
    assert [options.nbytes(text) for text in ("64", "1KiB", "1.5MiB", "64KB", "1GiB", "8B")] == [
        64,
        1024,
        3 << 19,
        64000,
        1 << 30,
        8,
    ]
    assert _sizes("1KiB..1GiB") == (1 << 10, 1 << 30)
    assert _sizes("4KiB") == (4096,)
    assert [options.speed(text) for text in ("450GB/s", "400Gb/s", "0.9TB/s", "1GiB/s")] == [
        450e9,
        50e9,
        0.9e12,
        1 << 30,
    ]


def test_plot():
    figure = plot([sweep(1e9, 3e9), sweep(2e9, 4e9, kind="all-gather")], link=450e9)
    (axes,) = figure.axes
    lines: Any = axes.lines
    permute, gather, link = lines
    assert list(permute.get_xdata()) == [1024, 2048]
    assert list(permute.get_ydata()) == pytest.approx([1, 3])
    assert permute.get_color() != gather.get_color()
    assert (link.get_linestyle(), link.get_ydata()[0], link.get_label()) == ("--", 450, "link: 450 GB/s")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len(plot([sweep(1e9)]).axes[0].lines) == 1
    assert "memory, not links" in plot([sweep(1e9, platform="cpu")]).axes[0].get_title()
    with pytest.raises(ValueError, match="no sweeps"):
        plot([])
