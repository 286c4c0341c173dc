"""Where each leaf lives, and why."""

import io
from dataclasses import astuple, dataclass, fields

import numpy as np
from jax.sharding import PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

from jzero.layout import Layout
from jzero.memory import leaf_bytes


@dataclass(frozen=True)
class Row:
    """Placement of one of the params.

    Attributes:
        path: Where it is in the tree.
        shape: Its shape, as the loss sees it.
        stored_shape: Its shape as it is stored.
        dtype: Its dtype.
        params: PartitionSpec of the param.
        grads: PartitionSpec of its gradient.
        opt_state: PartitionSpec of a leaf of optimizer state with its shape.
        bytes_per_device: Bytes of the param on one device.
        reason: Why it is not placed as the stage asks; empty if it is.
    """

    path: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: np.dtype
    params: PartitionSpec
    grads: PartitionSpec
    opt_state: PartitionSpec
    bytes_per_device: int
    reason: str


class Explanation(tuple[Row, ...]):
    """A tuple of `Row`s that prints as a table."""

    def __str__(self) -> str:
        """The rows as an aligned table."""
        table = Table(box=box.SIMPLE_HEAD)
        for field in fields(Row):
            table.add_column(
                field.name,
                justify="right" if field.name == "bytes_per_device" else "left",
                no_wrap=True,
                min_width=len(field.name),
            )
        for row in self:
            table.add_row(*(_text(value) for value in astuple(row)))
        out = io.StringIO()
        console = Console(file=out, width=10_000)
        console.print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def _text(value) -> str:
    if isinstance(value, PartitionSpec):
        return f"P({', '.join(map(repr, value))})"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("[", r"\[")


def explain(layout: Layout) -> Explanation:
    """Says for each of the params where it, its gradient and its optimizer state live, and why not as asked.

    Args:
        layout: The layout from `zero`.

    Returns:
        `Row`s in tree order; `print` shows them as a table.

    Example:
        >>> params = {"b": jnp.ones(3), "w": jnp.ones((512, 64))}
        >>> print(explain(jzero.zero(params, stage=3, mesh=jzero.make_mesh(data=-1)))[0].reason)
        whole on every device: 3 elements are fewer than min_shard_size=4096
    """
    stage, wide = layout.stage, [axis for axis, size in layout.mesh.shape.items() if size > 1]
    idle = [axis for axis in wide if axis not in layout.batch_axes]

    def reasons(leaf):
        if leaf.reason and stage.opt_state == "sharded":
            yield f"whole on every device: {leaf.reason}"
        if idle:
            yield f"repeated along mesh axis {', '.join(map(repr, idle))}: not among data_axes or replica_axes"

    return Explanation(
        Row(
            path=leaf.path,
            shape=leaf.shape,
            stored_shape=leaf.shape,
            dtype=leaf.dtype,
            params=layout.spec(leaf, stage.params),
            grads=layout.spec(leaf, stage.grads),
            opt_state=layout.spec(leaf, stage.opt_state),
            bytes_per_device=leaf_bytes(leaf, stage.params, layout.shards),
            reason="; ".join(reasons(leaf)),
        )
        for leaf in layout.leaves
    )
