"""Where each leaf lives, and why."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec
from rich import box
from rich.table import Table

from jzero.arguments import check_arguments
from jzero.grad import gradient_program
from jzero.layout import Layout
from jzero.memory import leaf_bytes
from jzero.plain import plain
from jzero.run import Account, Gathering


@dataclass(frozen=True)
class Row:
    """Placement of one leaf.

    Attributes:
        path: Where it is in the tree of params, as in "blocks/0/kernel".
        shape: Its shape, as the loss sees it.
        stored_shape: Its shape as it is stored.
        dtype: The dtype that it is stored in.
        params: PartitionSpec of the param; None for a master copy or a leaf of optimizer state.
        grads: PartitionSpec of its gradient; None if it has none.
        opt_state: PartitionSpec of its master copy and of optimizer state with its shape; None if it has none.
        bytes_per_device: Bytes of the leaf on one device.
        reason: Why it is not placed as the stage asks, or padded; empty if it is placed and shaped as asked.
        gathers: Where a loss gathers it, in the order of the program; None unless a loss was given.
    """

    path: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: Any
    params: PartitionSpec | None
    grads: PartitionSpec | None
    opt_state: PartitionSpec | None
    bytes_per_device: int
    reason: str
    gathers: tuple[Gathering, ...] | None = None


class Explanation(tuple[Row, ...]):
    """A tuple of `Row`s that prints as a table.

    Attributes:
        note: What is to be said of all of them together; empty if nothing.
    """

    note: str = ""

    def __str__(self) -> str:
        """The rows as an aligned table."""
        table = Table(box=box.SIMPLE_HEAD)
        # What says nothing new takes no column.
        same = {
            "gathers": all(row.gathers is None for row in self),
            "stored_shape": all(row.stored_shape == row.shape for row in self),
            "reason": not any(row.reason for row in self),
        }
        shown = [field for field in fields(Row) if not same.get(field.name, False)]
        for field in shown:
            table.add_column(
                field.name,
                justify="right" if field.name == "bytes_per_device" else "left",
                no_wrap=True,
                min_width=len(field.name),
            )
        for row in self:
            table.add_row(*(_text(getattr(row, field.name)) for field in shown))
        lines = [*plain(table, width=10_000).splitlines(), self.note]
        return "\n".join(line for line in lines if line)


def _text(value) -> str:
    if isinstance(value, PartitionSpec):
        return f"P({', '.join(map(repr, value))})"
    if value is None:
        return "-"
    if isinstance(value, Gathered):
        return "\n".join(map(str, value)) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("[", r"\[")


class Gathered(tuple[Gathering, ...]):
    """The places where one leaf is gathered."""


def _merged(gatherings: list[Gathering]) -> Gathered:
    """Gatherings of unrolled blocks, which differ in nothing, as one."""
    times: Counter[Gathering] = Counter()
    for gathering in gatherings:
        times[replace(gathering, times=1)] += gathering.times
    return Gathered(replace(gathering, times=count) for gathering, count in times.items())


def explain(
    layout: Layout,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = None,
    *,
    has_aux: bool = False,
    key: Any = None,
    model_state: Any = None,
    tx: optax.GradientTransformation | None = None,
) -> Explanation:
    """Says for each of the params where it, its gradient and its optimizer state live, and why not as asked.

    With a loss it also says where each leaf is gathered: in which function and line, how often, in which dtype and on
    how many bytes; and where it had to be gathered early, what was in the way. The loss is traced, and nothing is run.

    Args:
        layout: The layout from `zero`.
        loss_fn: A loss as for `value_and_grad`.
        batch: Its batch, of arrays or ShapeDtypeStructs.
        has_aux: As for `value_and_grad`.
        key: A random key, if the loss takes `key=`.
        model_state: Model state, if the loss takes `model_state=`.
        tx: With an optimizer, rows for the master copies and for each leaf of its state follow, with paths that begin
            with "master/" and "opt_state/".

    Returns:
        `Row`s in tree order; `print` shows them as a table.

    Example:
        >>> params = {"b": jnp.ones(3), "w": jnp.ones((512, 64))}
        >>> print(explain(jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1)))[0].reason)
        whole on every device: 3 elements are fewer than min_shard_size=4096
    """
    check_arguments("explain(layout, loss_fn, batch)", layout=layout)
    stage, found = layout.stage, list[Account]()
    if loss_fn is None and (batch is not None or has_aux or key is not None or model_state is not None):
        raise ValueError("explain: batch, has_aux, key and model_state say how to call a loss; pass loss_fn as well.")
    if loss_fn is not None and batch is None:
        raise ValueError("explain: to trace loss_fn it needs a batch as well, of arrays or ShapeDtypeStructs.")
    if loss_fn is not None:
        params = layout.treedef.unflatten([leaf.placed(stage.params) for leaf in layout.leaves])
        asked = {"has_aux": has_aux, "with_key": key is not None, "with_model_state": model_state is not None}
        program = gradient_program(loss_fn, layout, microbatches=1, **asked, found=found)
        jax.eval_shape(program, params, batch, key, model_state)

    def reasons(leaf):
        if leaf.reason and stage.opt_state == "sharded":
            yield leaf.reason
        if not leaf.trainable:
            yield "not trained: no gradient and no optimizer state"
        used = {axis for axes in leaf.model for axis in axes}
        if idle := [axis for axis in layout.model_axes if axis not in used]:
            yield f"repeated along mesh axis {', '.join(map(repr, idle))}: no rule cuts it there"

    def row(leaf, placement, path, params, grads, opt_state):
        return Row(
            path=path,
            shape=leaf.shape,
            stored_shape=leaf.placed(placement).shape,
            dtype=leaf.dtype,
            params=layout.spec(leaf, stage.params) if params else None,
            grads=layout.spec(leaf, stage.grads) if grads else None,
            opt_state=layout.spec(leaf, stage.opt_state) if opt_state else None,
            bytes_per_device=leaf_bytes(layout, leaf, placement),
            reason="; ".join(reasons(leaf)),
            gathers=_merged([g for g in found[0].gatherings if params and g.path == leaf.path]) if found else None,
        )

    rows = [row(leaf, stage.params, leaf.path, True, leaf.trainable, leaf.trainable) for leaf in layout.leaves]
    if tx is not None:
        for tree, (_, leaves) in (("master", layout.masters), ("opt_state", layout.opt_leaves(tx))):
            rows += [row(leaf, stage.opt_state, f"{tree}/{leaf.path}", False, False, True) for leaf in leaves]
    explanation = Explanation(rows)
    if stage.opt_state == "sharded" and layout.shards > 1 and all(leaf.dim is None for leaf in layout.leaves):
        explanation.note = (
            f"  Nothing is cut: every device holds all of it, as without ZeRO. A smaller min_shard_size than "
            f"{layout.min_shard_size} cuts smaller leaves."
        )
    return explanation
