"""`gather`: to place a gather by hand."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

MARK = "jzero.gather"


def gather(tree: Any) -> Any:
    """Marks the place where leaves are to be gathered.

    By default a leaf is gathered at its first real use. Inside of a loss under `value_and_grad` this asks for it here,
    in the forward pass. On plain arrays it is the identity, so that a model with it also runs alone.

    Args:
        tree: Arrays, such as some of the params.

    Returns:
        The same tree.

    Example:
        >>> loss_fn = lambda params, x: jnp.mean(x @ jzero.gather(params["w"]))
        >>> float(loss_fn({"w": jnp.ones(2)}, jnp.ones((4, 2))))
        2.0
    """
    return jax.tree.map(lambda x: checkpoint_name(x, MARK), tree)
