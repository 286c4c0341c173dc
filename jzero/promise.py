"""What a step should move over the links, leaf by leaf, against what its program moves.

Three accounts of the same. The ledger (`jzero.traffic`) knows the stage table and the params alone. The engine's own
(`run.Account`) knows where it has gathered each leaf of this loss, and where it has reduced each gradient. The lowered
program is what runs. It must hold what the engine says, to the byte. Where that is less than the ledger there is a
reason; where it is more, a promise is broken.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

from jzero.accounts import LEAVES, Key, of_engine, of_ledger, of_program, ordered
from jzero.layout import Layout
from jzero.rules import Leaf
from jzero.run import Account
from jzero.tally import Collective, Origin, wire_factor

WHOLE_STEP = ("loss", "partitioner", "donation", "memory")
"""What is promised of a step as a whole, and not of a leaf."""


@dataclass(frozen=True)
class Broken:
    """A promise that is not kept.

    Attributes:
        subject: Path of the leaf or name of the argument, or one of `WHOLE_STEP`.
        message: What was promised, what the program does, and what to do about it.
    """

    subject: str
    message: str


@dataclass(frozen=True)
class Moved:
    """What one kind of collective moves for one leaf and purpose: on each device, in a step.

    Attributes:
        what: As in `Traffic`; "sum", "lookup" and "agree" as in `scopes`; "loss" for what the loss exchanges by itself.
        leaf: Path of the leaf; of what is of none, its name in the program, if it has one.
        kind: As in `Collective`.
        axes: The mesh axes that it runs over; () where they cannot be told.
        group: How many devices these are.
        dtypes: On the wire, in the program.
        count: How many collectives.
        exact: False where the program does not tell how often they run: they are counted for one pass.
        promised: Bytes of the whole arrays by the ledger.
        bytes: Bytes of the whole arrays in the program.
        reason: Why the two differ, or why the leaf is not cut as the stage asks; empty if neither.
        broken: What is wrong with it; empty if nothing is.
    """

    what: str
    leaf: str
    kind: str
    axes: tuple[str, ...]
    group: int
    dtypes: tuple[str, ...]
    count: int
    exact: bool
    promised: int
    bytes: int
    reason: str = ""
    broken: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends."""
        return self.bytes * wire_factor(self.kind, self.group)

    @property
    def promised_wire_bytes(self) -> float:
        """The same by the ledger."""
        return self.promised * wire_factor(self.kind, self.group)


def compare(
    layout: Layout, account: Account, rows: Iterable[tuple[Origin, Collective]], *, microbatches: int
) -> tuple[Moved, ...]:
    """Holds the collectives of a lowered training step against what ZeRO promises.

    Args:
        layout: The layout of the step.
        account: What the engine says of the step's gradient: `step.account(state, batch)`.
        rows: From `program.collectives_by_origin(step.lower(state, batch), layout.mesh)`.
        microbatches: m.

    Returns:
        What moves, in the order of the params; then what is of no leaf.

    Example:
        >>> from jzero.program import collectives_by_origin
        >>> params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
        >>> layout = jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1), min_shard_size=16)
        >>> state = jzero.init(lambda: params, tx := optax.sgd(0.1), layout)
        >>> step = jzero.train_step(lambda p, x: jnp.mean(x @ p["w"] + p["b"]), tx, layout)
        >>> rows = collectives_by_origin(step.lower(state, x := jnp.ones((16, 8))), layout.mesh)
        >>> for one in compare(layout, step.account(state, x), rows, microbatches=1):
        ...     print(one.what, [one.leaf], one.promised, one.bytes, [one.reason])
        reduce ['b'] 32 32 ['whole on every device: 8 elements are fewer than min_shard_size=16']
        gather, forward ['w'] 256 256 ['']
        gather, backward ['w'] 256 0 ['the backward pass does not need its value']
        reduce ['w'] 256 256 ['']
        sum [''] 0 4 ['the loss, its weight, aux and model state, which the ledger leaves out']
    """
    rows = list(rows)
    leaves = {leaf.path: leaf for leaf in layout.leaves}
    ledger = of_ledger(layout, microbatches)
    engine = of_engine(layout, account, ledger, microbatches)
    program, counts, inexact = of_program(layout, rows)

    def line(key: Key) -> Moved:
        what, path, kind, axes = key
        promised, wanted, found = (sizes.get(key, Counter()) for sizes in (ledger, engine, program))
        leaf = leaves.get(path)
        reason = "" if leaf is None else _reason(layout, leaf, what, promised, wanted, account)
        dtypes = tuple(dict.fromkeys((*found, *(wanted or promised))))
        return Moved(
            what=what,
            leaf=path,
            kind=kind,
            axes=axes,
            group=layout.size(axes),
            dtypes=tuple(found) or dtypes,
            count=counts[key],
            exact=key not in inexact,
            promised=promised.total(),
            bytes=found.total(),
            reason=reason,
            broken=_broken(key, promised, wanted, found, reason) if key not in inexact else _unknown(key),
        )

    order = {path: index for index, path in enumerate(leaves)}
    keys = dict.fromkeys((*ledger, *engine, *program))
    of_leaves = sorted(keys, key=lambda key: (order.get(key[1], len(order)), _ORDER.index(key[0])))
    return (*map(line, of_leaves), *_of_none(layout, rows))


_ORDER: tuple[str, ...] = ("gather, forward", "gather, backward", "reduce", "gather, update")


def _reason(
    layout: Layout, leaf: Leaf, what: str, promised: Counter[str], wanted: Counter[str], account: Account
) -> str:
    """Why the engine does not do with a leaf what the ledger says; or why the ledger does not cut it."""
    gathers = [one for one in account.gatherings if one.path == leaf.path]
    used_in = {one.phase for one in gathers}
    unused = any(zero for other, zero in zip(layout.trainable, account.unused, strict=True) if other.path == leaf.path)
    parts = sorted({name for name in wanted if name not in promised})
    if not wanted:
        if unused or (what.startswith("gather") and not used_in):
            return "the loss does not use it"
        return "the backward pass does not need its value" if what == "gather, backward" else ""
    if parts and wanted.total() <= promised.total():
        how = "its gradient is born so" if what == "reduce" else "the loss casts it before it uses it"
        return f"in {', '.join(parts)}: {how}"
    if wanted.total() < promised.total():
        return "the loss uses only parts of it"
    if wanted.total() > promised.total():
        if len(wanted) > 1:
            return f"the loss uses it in {' and in '.join(wanted)}"
        places = sorted({one.where for one in gathers if f"gather, {one.phase}" == what})
        return "it is taken more than once" + (f", in {', '.join(places)}" if places else "")
    return leaf.reason if layout.stage.opt_state == "sharded" else ""


def _broken(key: Key, promised: Counter[str], wanted: Counter[str], found: Counter[str], reason: str) -> str:
    what, path, kind, axes = key
    where = f"{what} of {path!r} over {', '.join(axes)}"
    if found != wanted:
        return (
            f"{where}: the program has {kind}s of {_sizes(found)}, where jzero's own account of this loss has "
            f"{_sizes(wanted)}. Something else than jzero has changed the step, or jzero has a bug; please report it."
        )
    if found.total() > promised.total():
        return (
            f"{where}: the program has {kind}s of {_sizes(found)}, where the stage promises {_sizes(promised)}: "
            f"{reason}. jzero.explain(layout, loss_fn, batch) says where it is used; take it once, outside of loops "
            f"that do not run over it."
        )
    widest = max((jnp.dtype(dtype).itemsize for dtype in promised), default=0)
    if wider := [dtype for dtype in found if jnp.dtype(dtype).itemsize > widest]:
        return f"{where}: travels in {', '.join(wider)}, where {', '.join(promised)} is promised."
    return ""


def _unknown(key: Key) -> str:
    return f"{key[0]} of {key[1]!r}: it runs in a loop whose trip count the program does not tell."


def _sizes(of: Counter[str]) -> str:
    return " and ".join(f"{size:,} bytes of {dtype}" for dtype, size in of.items()) or "none"


def _of_none(layout: Layout, rows: list[tuple[Origin, Collective]]) -> list[Moved]:
    """What is of no leaf, and so in no ledger."""
    found: dict[tuple[str, str, str, tuple[str, ...], str, int, bool], list[Collective]] = {}
    for origin, row in rows:
        if origin.purpose not in LEAVES:
            key = origin.purpose, origin.name, row.kind, ordered(layout, row.axes), row.dtype, row.group, row.exact
            found.setdefault(key, []).append(row)

    def line(key, some: list[Collective]) -> Moved:
        what, name, kind, axes, dtype, group, exact = key
        size, single = sum(row.bytes for row in some), all(math.prod(row.shape) == 1 for row in some)
        reason, broken = _REASONS.get(what, "the loss exchanges this by itself"), ""
        if not exact:
            reason += "; in a loop whose trip count the program does not tell, counted for one pass"
        if what == "loss" and not single and (not axes or set(axes) & set(layout.batch_axes)):
            broken = (
                f"the loss itself runs {kind}s of {size:,} bytes of {dtype} over {', '.join(axes) or 'unknown axes'} "
                f"({name}), which no stage has. If it sums a gradient or a param, leave that to jzero; if it is meant "
                f"(batch norm, a contrastive loss), say check(allow=['loss'])."
            )
        count = sum(row.count for row in some)
        return Moved(what, name, kind, axes, group, (dtype,), count, exact, 0, size, reason, broken)

    return [line(key, some) for key, some in found.items()]


_REASONS = {
    "sum": "the loss, its weight, aux and model state, which the ledger leaves out",
    "agree": "whether integers of the model state are the same on all batch shards",
    "lookup": "activations of a lookup in a table that is cut over model axes",
}


def broken_in(moved: Iterable[Moved]) -> list[Broken]:
    """The promises that are not kept in these."""
    return [Broken("loss" if one.what == "loss" else one.leaf, one.broken) for one in moved if one.broken]
