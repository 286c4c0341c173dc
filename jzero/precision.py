"""`Precision`: in which dtypes params are stored, used, reduced, accumulated and updated."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from jzero.check import path_name
from jzero.wording import few

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run: mixed precision (Micikevicius et al. 2018, arXiv:1710.03740), or one for all.

    `Precision()` is what `zero(..., precision="bf16")` stands for. Dtypes are names ("bfloat16") or dtypes. None leaves
    each as the model and the optimizer have it.

    Attributes:
        master: Dtype of the weights that the optimizer moves on. Where the loss is given another one, they are a copy
            of their own, placed as the optimizer state; where params are sharded (stage 3) they are the params
            themselves, and each shard is cast before it is gathered. None: there is no such copy.
        compute: Dtype in which the loss gets its params, and in which they are gathered. Leaves that are no floats of
            16 bits or more stay as they are.
        reduce: Dtype in which gradients are reduced; None: that of the gradient where it is born.
        accumulate: Dtype of the reduced gradients, and in which those of microbatches are summed; None: they are summed
            in float32 or wider, and come in the compute dtype, or in float32 under a loss scale.
        moments: Dtype in which optimizer state with the shape of a param is stored; the optimizer still computes in
            that of the master weights, in at least float32. None: as the optimizer makes it, but no wider than what it
            moves on.
        exempt: Shell patterns on paths; leaves that one matches (norms, routers) reach the loss in their own dtype.
        divide: Whether gradients are divided by the number of devices and microbatches "before" they are reduced or
            "after". None: before in float16, whose sums overflow; else after, where a shard takes a fraction of the
            time.
        stochastic_rounding: Whether bfloat16 state is rounded up or down at random, as near as each is, so that updates
            smaller than half its last bit are not lost (Gupta et al. 2015, arXiv:1502.02551). The bits depend on the
            step and the place in the tree alone.
        cast_batch: Shell patterns on paths of the batch, such as "*": floating leaves that one matches are cast to the
            compute dtype. A float32 input that is not makes float32 of the params that it meets; a mask or a target is
            better left alone. None: no leaf is cast, and a warning names those that are wider than the params.

    Raises:
        ValueError: An unknown dtype; float64 without JAX's x64 mode; `compute` or `moments` wider than `master`;
            stochastic rounding where nothing is stored in bfloat16; `exempt` or `cast_batch` without a `compute`.
        TypeError: `exempt` or `cast_batch` is no list of patterns, or `stochastic_rounding` no bool.

    Warns:
        UserWarning: State that the optimizer moves on is rounded to the nearest number of 16 bits.

    Example:
        >>> Precision(exempt=("*norm*",)).compute
        dtype(bfloat16)
    """

    master: Any = "float32"
    compute: Any = "bfloat16"
    reduce: Any = "float32"
    accumulate: Any = "float32"
    moments: Any = None
    exempt: Sequence[str] = ()
    divide: Literal["before", "after"] | None = None
    stochastic_rounding: bool = False
    cast_batch: Sequence[str] | None = None

    def __post_init__(self):
        for name in ("master", "compute", "reduce", "accumulate", "moments"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        for name in ("exempt", "cast_batch"):
            patterns = getattr(self, name)
            if patterns and self.compute is None:
                raise ValueError(
                    f"Precision: {name}={patterns!r} with compute=None, where nothing is cast. Leave it out."
                )
            if patterns is None and name == "cast_batch":
                continue
            if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(f"Precision: {name}={patterns!r}; wanted a list of path patterns, such as ('*norm*',).")
            object.__setattr__(self, name, tuple(patterns))
        if self.divide not in ("before", "after", None):
            raise ValueError(f"Precision: divide={self.divide!r}; wanted 'before', 'after' or None.")
        if not isinstance(self.stochastic_rounding, bool):
            raise TypeError(f"Precision: stochastic_rounding={self.stochastic_rounding!r}; wanted True or False.")
        owner = "compute" if self.master is None else "master"
        for name in ("compute", "moments"):
            dtype, widest = getattr(self, name), getattr(self, owner)
            if dtype is not None and widest is not None and dtype.itemsize > widest.itemsize:
                raise ValueError(
                    f"Precision: {name}={dtype} is wider than {owner}={widest}, which it is made from or updates; make "
                    f"{owner} as wide, or {name} narrower."
                )
        stored = {name: getattr(self, name) for name in (owner, "moments") if getattr(self, name) is not None}
        for name, dtype in stored.items():
            if dtype.itemsize < 4 and not (self.stochastic_rounding and dtype == jnp.bfloat16):
                way_out = "pass stochastic_rounding=True" if dtype == jnp.bfloat16 else "use bfloat16 with rounding"
                warnings.warn(
                    f"Precision: {name}={dtype} keeps what the optimizer moves in 16 bits, rounded to nearest: small "
                    f"updates, and Adam's second moment, stay where they are. Choose float32, or {way_out}.",
                    stacklevel=3,
                )
        if self.stochastic_rounding and "bfloat16" not in (getattr(self, owner), self.moments):
            raise ValueError(
                f"Precision: stochastic_rounding=True, but neither {owner}={getattr(self, owner)} nor "
                f"moments={self.moments} is bfloat16, which is what it rounds to. Leave it out."
            )

    def sum_dtype(self, dtype: Any) -> Any:
        """In which dtype gradients of this dtype are summed over microbatches."""
        if self.accumulate is None or not jnp.issubdtype(dtype, jnp.floating):
            return jnp.promote_types(dtype, jnp.float32)
        return self.accumulate

    def cast_to_compute(self, batch: Any) -> Any:
        """The batch, with what `cast_batch` matches in the compute dtype."""
        return tree_map_with_path(lambda path, x: x.astype(self.compute) if self._casts(path, x) else x, batch)

    def check_batch(self, batch: Any) -> None:
        """Warns of leaves that are wider than the params and not cast; raises where a pattern matches none."""
        named = tree_flatten_with_path(batch)[0]
        for pattern in self.cast_batch or ():
            if not any(fnmatchcase(path_name(path), pattern) for path, _ in named):
                raise ValueError(
                    f"Precision: cast_batch has a pattern {pattern!r} that matches none of the paths of the batch, "
                    f"{few(repr(path_name(path)) for path, _ in named)}."
                )
        if self.cast_batch is not None or self.compute is None:
            return
        wide = [
            (path, dtype)
            for path, x in named
            if str(dtype := jnp.result_type(x)) in DTYPES and dtype.itemsize > self.compute.itemsize
        ]
        if wide:
            names = ", ".join(f"batch{keystr(path)} ({dtype})" for path, dtype in wide)
            patterns = tuple(path_name(path) or "*" for path, _ in wide)
            warnings.warn(
                f"{names}: wider than the params in {self.compute}, and where they meet JAX computes in the wider "
                f"dtype. To cast what is an input, pass zero(..., precision={self._written(cast_batch=patterns)}), "
                f"without those that are to stay, such as targets and masks; cast_batch=() casts none.",
                stacklevel=3,
            )

    def _written(self, **changes: Any) -> str:
        """As a call, with these fields changed; what is as by default is left out."""
        plain = Precision()
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        options = {name: x for name, x in options.items() if x != getattr(plain, name)} | changes
        text = (f"{name}={(str(x) if isinstance(x, jnp.dtype) else x)!r}" for name, x in options.items())
        return f"jzero.Precision({', '.join(text)})"

    def _casts(self, path: Any, x: Any) -> bool:
        matches = any(fnmatchcase(path_name(path), pattern) for pattern in self.cast_batch or ())
        return matches and jnp.issubdtype(jnp.result_type(x), jnp.floating)

    def divides_before(self, wire: Any) -> bool:
        """Whether a gradient that is reduced in the dtype `wire` is divided before."""
        return wire == jnp.float16 if self.divide is None else self.divide == "before"


def _dtype(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if str(dtype) not in DTYPES:
        long = str(value).replace("bf", "bfloat").replace("fp", "float")
        hint = f" Did you mean {long!r}?" if long in DTYPES else ""
        raise ValueError(
            f"Precision: {name}={value!r} is no dtype to train in; wanted one of {', '.join(DTYPES)}.{hint}"
        )
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"Precision: {name}=float64, which JAX would make float32; set jax.config.update('jax_enable_x64', True)."
        )
    return dtype


AS_IT_IS = Precision(master=None, compute=None, reduce=None, accumulate=None)
"""Dtypes as the model and the optimizer have them."""

PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(master=None, compute="float32"),
    "bf16": Precision(),
    "fp16": Precision(compute="float16"),
    "bf16-pure": Precision(master=None, moments="bfloat16", stochastic_rounding=True),
}
"""What short names stand for."""

MEANT = {
    "fp32": ("float32", "f32", "32", "single", "full"),
    "bf16": ("bfloat16", "bf16-mixed", "mixed_bfloat16", "mixed", "amp"),
    "fp16": ("float16", "f16", "16", "half", "16-mixed", "mixed_float16"),
}
"""What others, and dtypes, call them."""


def as_precision(precision: str | Precision | None) -> Precision:
    """The `Precision` that a short name stands for; None is as the model has it, and a `Precision` stays."""
    if precision is None:
        return AS_IT_IS
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, str) and precision in PRECISIONS:
        return PRECISIONS[precision]
    said = str(getattr(precision, "__name__", precision)).lower()  # a scalar type is called as its dtype
    meant = next((name for name in PRECISIONS if said in (name, *MEANT.get(name, ()))), None)
    hint = "" if meant is None else f" Did you mean {meant!r}?"
    hint += " 'bf16' as well computes in 16 bits, and needs no loss scale." if meant == "fp16" else ""
    raise ValueError(f"precision={precision!r}; wanted one of {', '.join(PRECISIONS)}, or a jzero.Precision.{hint}")
