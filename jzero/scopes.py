"""The names that jzero's work has in a program, and so in a trace and in a compiled program.

A collective has a name with its leaf in it, such as `jzero.gather.forward[blocks/up]`. What is around it is part of a
phase: `jzero.forward` and `jzero.backward` of the loss, `jzero.norm`, `jzero.update`. Both survive XLA, also where it
combines several collectives into one.
"""

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax

Purpose = Literal["forward", "backward", "update", "scatter", "reduce", "sum", "lookup", "agree"]
"""What a collective is for: the gathers of a leaf in the two passes, and of what the optimizer made of it; the two ways
to reduce a gradient; the sum of the loss, its weight, aux and model state; that of a lookup over model axes; whether
model state is the same on all batch shards."""

Phase = Literal["forward", "backward", "norm", "update"]
"""What runs around the collectives."""

_NAMES: dict[Purpose, str] = {
    "forward": "jzero.gather.forward",
    "backward": "jzero.gather.backward",
    "update": "jzero.gather.update",
    "scatter": "jzero.scatter",
    "reduce": "jzero.reduce",
    "sum": "jzero.sum",
    "lookup": "jzero.lookup",
    "agree": "jzero.agree",
}
_PURPOSES: dict[str, Purpose] = {name: purpose for purpose, name in _NAMES.items()}
_COLLECTIVE = re.compile(rf"({'|'.join(map(re.escape, _PURPOSES))})\[(.*)\](?:/|$)")


def collective(purpose: Purpose, leaf: str = "") -> AbstractContextManager:
    """Names the collectives inside: what for, and of which leaf; "" for what is of none, such as the loss.

    Example:
        >>> @jax.jit
        ... def f(x):
        ...     with collective("forward", "blocks/up"):
        ...         return x + 1
        >>> "jzero.gather.forward[blocks/up]/add" in f.lower(1.0).as_text(debug_info=True)
        True
    """
    return jax.named_scope(f"{_NAMES[purpose]}[{leaf}]")


def phase(name: Phase) -> Any:
    """Names what is computed inside: a context manager, and a decorator of functions."""
    return jax.named_scope(f"jzero.{name}")


def read(name: str) -> tuple[Purpose, str] | None:
    """Purpose and leaf of a collective with such a name in a program; None if it is not one of jzero's.

    Example:
        >>> read("jit(update)/jzero.update/shard_map/jzero.gather.update[blocks/up]/all_gather")
        ('update', 'blocks/up')
        >>> read("jit(update)/reduce_sum")
    """
    match = _COLLECTIVE.search(name)
    return None if match is None else (_PURPOSES[match[1]], match[2])


def common(purposes: Iterable[str]) -> str:
    """What several collectives are for that XLA has made one of; "" if that is not one thing.

    The loss goes along with gradients.

    Example:
        >>> common(["reduce", "sum"]), common(["sum"]), common(["reduce", "update"])
        ('reduce', 'sum', '')
    """
    found = set(purposes)
    found = found - {"sum"} or found
    return found.pop() if len(found) == 1 else ""
