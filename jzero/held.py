"""What a device holds between steps, argument by argument: by theory, in a compiled program, and on live arrays."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from jzero import hlo
from jzero.layout import Layout
from jzero.memory import leaf_bytes, live_bytes
from jzero.promise import Broken
from jzero.rules import Leaf
from jzero.stage import Placement
from jzero.wording import few


@dataclass(frozen=True)
class Held:
    """Bytes on one device.

    Attributes:
        what: "params", "master" (copies), "optimizer state", "rest of the state" (counters, keys, model state, loss
            scale) or "batch".
        formula: If every element were cut that the stage cuts, as the papers count.
        promised: Leaf by leaf: with padding, and with what stays whole.
        compiled: Of these arguments of the compiled program; what it does not use is dropped.
        live: Of the arrays, on the device that holds most; None where shapes were given.
        reason: Why the columns differ; empty if they do not.
    """

    what: str
    formula: float
    promised: int
    compiled: int
    live: int | None
    reason: str


@dataclass(frozen=True)
class Argument:
    """One argument of a step's program, and its bytes on one device.

    Attributes:
        what: As in `Held`.
        name: As in "state.params['w']".
        subject: Path of its leaf, or its name.
        leaf: Its leaf, if it is of a layout.
        number: Which parameter of the compiled program it is; None if that does not use it.
        formula: As in `Held`, and so on.
        promised: As in `Held`.
        compiled: As in `Held`.
        live: As in `Held`.
        sharding: Where it lives, as text; in the program if no array was given.
    """

    what: str
    name: str
    subject: str
    leaf: Leaf | None
    number: int | None
    formula: float
    promised: int
    compiled: int
    live: int | None
    sharding: str

    @property
    def of_state(self) -> bool:
        """Whether it is of the state, and not of the batch."""
        return self.what != "batch"


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument, as jax takes it; without a placement."""
    is_typed = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype if is_typed else jnp.result_type(x))


def arguments(
    layout: Layout, tx: optax.GradientTransformation, state: Any, batch: Any, compiled: jax.stages.Compiled
) -> list[Argument]:
    """The arguments of a compiled training step, in its order."""
    placed = jax.tree.structure((state, batch)).flatten_up_to(compiled.input_shardings[0])
    shapes = jax.tree.leaves(jax.tree.map(abstract, (state, batch)))
    leaves: dict[str, tuple[Iterator[Leaf], str, Placement]] = {
        "params": (iter(layout.leaves), "params", layout.stage.params),
        "master": (iter(layout.masters[1]), "master", layout.stage.opt_state),
        "opt_state": (iter(layout.opt_leaves(tx)[1]), "optimizer state", layout.stage.opt_state),
    }
    found, number = [], 0
    for (path, x), shape, sharding in zip(tree_flatten_with_path((state, batch))[0], shapes, placed, strict=True):
        leaf, size = None, math.prod(shape.shape) * shape.dtype.itemsize
        name = ("state", "batch")[path[0].idx] + keystr(path[1:])
        field = getattr(path[1], "name", "") if path[0].idx == 0 else ""
        if field in leaves:
            of, what, placement = leaves[field]
            leaf = next(of)
            uncut = leaf_bytes(layout, leaf, "replicated")
            formula = uncut / layout.shards if placement == "sharded" else uncut
            promised = leaf_bytes(layout, leaf, placement)
        elif path[0].idx == 0:
            what, formula, promised = "rest of the state", size, size
        else:
            what, formula, promised = "batch", size // layout.batch_shards, size // layout.batch_shards
        is_live = isinstance(x, jax.Array)
        found.append(
            Argument(
                what=what,
                name=name,
                subject=leaf.path if leaf else name,
                leaf=leaf,
                number=None if sharding is None else number,
                formula=formula,
                promised=promised,
                compiled=0 if sharding is None else math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize,
                live=max(live_bytes(x).values(), default=0) if is_live else None,
                sharding=str(x.sharding if is_live else sharding),
            )
        )
        number += sharding is not None
    return found


def not_donated(found: Sequence[Argument], compiled: jax.stages.Compiled) -> list[Argument]:
    """Arguments of the state that the program uses, and writes no result over."""
    taken = hlo.donated(compiled.as_text() or "")
    return [one for one in found if one.of_state and one.number is not None and one.number not in taken]


def broken_donation(lost: Sequence[Argument]) -> list[Broken]:
    """The broken promise, if there are any such arguments."""
    if not lost:
        return []
    return [
        Broken(
            "donation",
            f"{few(one.name for one in lost)}: {sum(one.compiled for one in lost):,} bytes on each device are not "
            f"donated, so that the old and the new state exist together. jzero.train_step donates its state; a jit of "
            f"your own around it has to, with donate_argnums=0.",
        )
    ]


def held(found: Sequence[Argument]) -> tuple[tuple[Held, ...], list[Broken]]:
    """Adds arguments up by what they are, and says which take more or less than promised."""
    lines = []
    for what in dict.fromkeys(one.what for one in found):
        some = [one for one in found if one.what == what]
        live = [one.live for one in some if one.live is not None]
        lines.append(
            Held(
                what,
                sum(one.formula for one in some),
                sum(one.promised for one in some),
                sum(one.compiled for one in some),
                sum(live) if len(live) == len(some) else None,
                _reason(some),
            )
        )
    return tuple(lines), [broken for one in found for broken in _broken(one)]


def _reason(some: Sequence[Argument]) -> str:
    reasons = []
    for word in ("whole", "padded"):
        names = [
            one.subject
            for one in some
            if one.leaf and one.promised != one.formula and (word == "whole") == (one.leaf.dim is None)
        ]
        if names:
            reasons.append(f"{word}: {few(names)}")
    if unused := [one.name for one in some if one.number is None]:
        reasons.append(f"the program does not use {few(unused)}")
    return "; ".join(reasons)


def _broken(one: Argument) -> list[Broken]:
    found = []
    if one.number is not None and one.compiled != one.promised:
        found.append(
            Broken(
                one.subject,
                f"the program takes {one.name} as {one.compiled:,} bytes on each device, where the layout promises "
                f"{one.promised:,}.",
            )
        )
    if one.live is not None and one.live != one.promised and one.of_state:
        found.append(
            Broken(
                one.subject,
                f"{one.name} takes {one.live:,} bytes on a device, where the layout promises {one.promised:,}. It "
                f"lives with {one.sharding}. Move it with jax.device_put and the shardings that the layout gives "
                f"(param_shardings, opt_shardings(tx), master_shardings).",
            )
        )
    return found
