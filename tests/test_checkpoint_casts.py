"""Floats become other floats by one rounding: against the nearest of all numbers of a dtype, told by fractions."""

import bisect
from fractions import Fraction

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jzero
from jzero.checkpoint import encoding, export_safetensors, load_safetensors
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.parts import Want
from jzero.checkpoint.read import arrays
from jzero.checkpoint.rename import Cast
from jzero.checkpoint.reshard import reshard
from tests.exchange import held, saved

NARROW = [
    name
    for name in sorted(encoding.NATIVE | encoding.BITS)
    if encoding.is_float(name) and encoding.dtype_of(name).itemsize <= 2 and name != "float8_e8m0fnu"
]


def table(name):
    """All finite numbers of a dtype from 0 up, in their order, which is that of their bits."""
    dtype = encoding.dtype_of(name)
    count = 2**3 if name == "float4_e2m1fn" else 2 ** (8 * dtype.itemsize - 1)
    found = np.arange(count).astype(f"u{dtype.itemsize}").view(dtype)
    return found[np.isfinite(found.astype(np.float32))]


def nearest(x, numbers, fractions):
    """The number next to x; of two as near the one with even bits."""
    x = Fraction(x)
    above = bisect.bisect_left(fractions, x)
    if above == 0:
        return numbers[0]
    low, high = fractions[above - 1], fractions[above]
    if x - low != high - x:
        return numbers[above - 1] if x - low < high - x else numbers[above]
    return numbers[above - 1] if (above - 1) % 2 == 0 else numbers[above]


@pytest.mark.filterwarnings("error")
def test_every_float_becomes_every_other_without_a_word():
    """Signalling NaNs among them, and the pairs for which numpy has no cast."""
    names = [name for name in sorted(encoding.NATIVE | encoding.BITS) if encoding.is_float(name)]
    for name in names:
        dtype = encoding.dtype_of(name)
        raw = np.random.default_rng(0).integers(0, 2**4 if "float4" in name else 2**8, (512, dtype.itemsize), np.uint8)
        array = raw.view(dtype).reshape(-1)
        for other in names:
            with np.errstate(over="ignore"):
                found = encoding.cast(array, other)
            if dtype.itemsize <= 2:  # float32 has all of these
                with np.errstate(over="ignore", invalid="ignore"):
                    want = array.astype(np.float32).astype(encoding.dtype_of(other))
                    np.testing.assert_array_equal(found.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("name", NARROW)
def test_float64_is_rounded_once(name):
    numbers = table(name)
    fractions = [Fraction(float(x)) for x in numbers]
    assert fractions == sorted(set(fractions))
    wide, random = numbers.astype(np.float64), np.random.default_rng(0)
    at = np.arange(len(wide) - 1)[:: max(1, len(wide) // 500)]  # some of each exponent
    middle = (wide[at] + wide[at + 1]) / 2
    assert all(2 * Fraction(m) == fractions[i] + fractions[i + 1] for m, i in zip(middle, at, strict=True))
    share = random.uniform(0, 1, len(at))
    # In the middle, the next numbers of float64 on both sides of it, some within an ulp of float32, and any.
    near = [np.nextafter(middle, 0), np.nextafter(middle, np.inf), middle * (1 + (share - 0.5) * 2.0**-24)]
    x = np.concatenate([middle, *near, wide[at], wide[at] + share * (wide[at + 1] - wide[at])])
    wanted = np.array([nearest(each, numbers, fractions) for each in x], numbers.dtype)
    for sign in (1, -1):
        found = encoding.cast(sign * x, name)
        assert found.dtype == numbers.dtype
        assert np.array_equal(found.astype(np.float32), sign * wanted.astype(np.float32))
    assert encoding.cast(x[:, None][::2], name).tobytes() == np.ascontiguousarray(wanted[:, None][::2]).tobytes()


@pytest.mark.parametrize("name", NARROW)
def test_what_has_no_neighbours_is_as_from_float32(name):
    special = np.array([0.0, -0.0, np.inf, -np.inf, 1e300, -1e300, 1e-300, -1e-300, 5e-324, np.nan], np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wanted = special.astype(np.float32).astype(encoding.dtype_of(name))
        found = encoding.cast(special, name)
    assert found.tobytes() == wanted.tobytes()


# Just over the middle of two numbers of bfloat16; float32 has the middle alone, and would round it to even, downwards.
OVER = 1 + 2.0**-8 + 2.0**-40
ROUNDED = 1 + 2.0**-7


def test_every_way_to_another_dtype_rounds_once(tmp_path):
    w = np.full((8, 4), OVER)
    assert np.all(w.astype(ml_dtypes.bfloat16) == 1), "numpy rounds twice"
    folder = saved(tmp_path / "1", {("w",): w})
    reshard(folder, tmp_path / "2", rules=[Cast.parse("params/w=bfloat16")])
    assert np.all(held(tmp_path / "2")["w",] == ROUNDED)
    export_safetensors(folder, tmp_path / "hf", dtype="bfloat16")
    sharding = jax.NamedSharding(jzero.make_mesh(data=-1), jax.P("data"))
    loaded = load_safetensors(tmp_path / "hf", {"w": sharding})["w"]
    assert loaded.dtype == np.dtype(ml_dtypes.bfloat16) and np.all(np.asarray(loaded) == ROUNDED)
    save_file({"w": w}, tmp_path / "x.safetensors")
    target = {"w": jax.ShapeDtypeStruct(w.shape, ml_dtypes.bfloat16, sharding=sharding)}
    assert np.all(np.asarray(load_safetensors(tmp_path / "x.safetensors", target, cast=True)["w"]) == ROUNDED)
    manifest = Manifest.read(folder)
    want = Want(("params", "w"), w.shape, "bfloat16", w.shape, sharding)
    [restored] = arrays(folder, manifest, [(manifest.leaves[0], want)])
    assert np.all(np.asarray(restored) == ROUNDED)
