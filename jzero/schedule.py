"""When a compiled program communicates: each collective, what it is for, and the matmuls scheduled while it runs.

A collective runs between its start and its done; matmuls between the two hide it, and none can hide a synchronous one.
This is a schedule, not a time: whether they take long enough is not said here, but by `timeline`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax

from jzero.events import Window, events, windows_of
from jzero.layout import Layout


@dataclass(frozen=True)
class Share:
    """How many of the bytes of one kind and purpose have a matmul in their window, per call of the program.

    Attributes:
        kind: As in `Window`.
        purpose: As in `Window`.
        in_loops: Whether these are the bytes in loop bodies; False: none are, and these are all of the program.
        bytes: All of them.
        covered: Those with a matmul between start and done.
    """

    kind: str
    purpose: str
    in_loops: bool
    bytes: int
    covered: int

    @property
    def share(self) -> float:
        """Covered bytes over all bytes."""
        return self.covered / self.bytes


def windows(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh | None = None, layout: Layout | None = None
) -> tuple[Window, ...]:
    """Reads each collective of a scheduled program, in the order in which they start.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, on GPUs or ahead of time for a `target_mesh`.
        mesh: The mesh that it runs on, to name the axes; that of the layout if None.
        layout: The layout of the params, to tell by its shape which leaf an array is that XLA has left without a name.

    Returns:
        One `Window` for each collective; loops are numbered in the order in which they are entered.

    Raises:
        TypeError: `compiled` is not a compiled program.
        ValueError: The program is not scheduled, or runs on another mesh.

    Example:
        >>> mesh = target_mesh("h200x8", data=8)  # doctest: +SKIP
        >>> layout = jzero.zero(params, stage=3, mesh=mesh)  # doctest: +SKIP
        >>> compiled = jax.jit(jzero.value_and_grad(loss_fn, layout)).lower(params, batch).compile()  # doctest: +SKIP
        >>> for window in windows(compiled, layout=layout):  # doctest: +SKIP
        ...     print(window.loop, window.kind, window.purpose, [p.leaf for p in window.pieces], window.matmuls)
        (1,) all-gather forward ['blocks/norm1', 'blocks/qkv'] 0
        (1,) all-gather forward ['blocks/up'] 2
    """
    return windows_of(events(compiled, mesh, layout))


def shares(found: Iterable[Window]) -> tuple[Share, ...]:
    """Adds windows up: for each kind and purpose the bytes in loop bodies, or where none are, in the whole program.

    Example:
        >>> from jzero.events import Piece
        >>> piece = Piece("bfloat16", (2048, 8192), "forward", "blocks/up")
        >>> shares([Window("all-gather", (piece,), ("data",), True, matmuls=2, loop=(1,), passes=8)])[0].share
        1.0
    """
    groups: dict[tuple[str, str], list[Window]] = {}
    for window in found:
        groups.setdefault((window.kind, window.purpose), []).append(window)
    rows = []
    for (kind, purpose), group in groups.items():
        looped = [window for window in group if window.loop]
        counted = looped or group
        total = sum(window.bytes * window.passes for window in counted)
        covered = sum(window.bytes * window.passes for window in counted if window.matmuls)
        rows.append(Share(kind, purpose, bool(looped), total, covered))
    return tuple(rows)
