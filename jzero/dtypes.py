"""The dtypes of one leaf, by the precision of the run and the stage."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from jzero.precision import DTYPES, Precision
from jzero.stage import Stage


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one leaf, beside the one that it is stored in.

    Attributes:
        given: In the caller's tree.
        compute: As the loss gets it.
        grad: Of its reduced gradient.
        master: Of what the optimizer moves on: the master copy if that is not how the param is stored, else the param.
        update: As the optimizer sees that.
    """

    given: Any
    compute: Any
    grad: Any
    master: Any
    update: Any

    @classmethod
    def of(cls, dtype: Any) -> "Dtypes":
        """The same for all."""
        return cls(dtype, dtype, dtype, dtype, dtype)


def dtypes_of(precision: Precision, stage: Stage, path: str, given: Any, *, trainable: bool) -> tuple[Any, Dtypes]:
    """In which dtype a param is stored, and its other dtypes.

    A leaf that is not trained is stored in the dtype that the loss gets, or in its own if that is narrower: nothing
    updates it, so that a wider one would only take memory.
    """
    if str(given) not in DTYPES:
        return given, Dtypes.of(given)
    exempt = any(fnmatchcase(path, pattern) for pattern in precision.exempt)
    compute = given if exempt or precision.compute is None else precision.compute
    grad = compute if precision.accumulate is None else precision.accumulate
    if not trainable:
        stored = min(given, compute, key=lambda dtype: dtype.itemsize)
        return stored, Dtypes(given, compute, grad, stored, stored)
    master = compute if precision.master is None else precision.master
    plain = precision.master is None and precision.compute is None
    update = master if plain else jnp.promote_types(master, jnp.float32)
    stored = master if stage.params == "sharded" else compute
    return stored, Dtypes(given, compute, grad, master, update)


def moment_dtype(precision: Precision, made: Any, param: Dtypes) -> Any:
    """In which dtype optimizer state with the shape of a param is stored that the optimizer makes as `made`."""
    limit = precision.moments
    if limit is None:
        limit = param.master if param.update != param.master else made
    return limit if str(made) in DTYPES and limit.itemsize < made.itemsize else made
