"""Arguments in the wrong order are named before anything looks inside of them."""

from typing import Any

from jzero.layout import Layout


def check_arguments(call: str, *, layout: Any, tx: Any = None) -> None:
    """Raises unless `layout` is a `Layout` and `tx`, if given, an optax optimizer.

    Args:
        call: How the function is called, such as "init(init_params, tx, layout)".
        layout: What came as the layout.
        tx: What came as the optimizer; None where there is none to check.

    Raises:
        TypeError: One of them is something else.
    """
    if tx is not None and not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"{call}: tx is a {type(tx).__name__}; wanted an optax optimizer, such as optax.adamw(3e-4).")
    if not isinstance(layout, Layout):
        raise TypeError(f"{call}: layout is a {type(layout).__name__}; wanted what jzero.zero returns.")
