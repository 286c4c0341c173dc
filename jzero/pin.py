"""What a matmul with a weight that is cut over model axes asks of its other operand.

By columns: the activation whole over these axes. By rows: cut like the rows. These are the operators that Megatron-LM
puts around its parallel layers (arXiv:1909.08053, arXiv:2205.05198). The partitioner would choose by size, and for a
long batch gather the weight instead. Said for each matmul of the forward and the backward pass, what travels over the
model axes are activations, whatever their size.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.layout import Layout
from jzero.rules import Model


def pinned(layout: Layout, eqn: Any, ins: list[jax.Array], models: Sequence[Model | None]) -> list[jax.Array]:
    """The operands of a `dot_general`: beside one weight that is cut, the other one as it wants it."""
    weights = [side for side, model in enumerate(models) if model is not None]
    if len(weights) != 1:
        return ins
    (weight,) = weights
    model, other = models[weight] or (), 1 - weight
    contracting, batch = eqn.params["dimension_numbers"]
    beside = {
        theirs: model[own]
        for dims in (contracting, batch)
        for own, theirs in zip(dims[weight], dims[other], strict=True)
    }
    # What other model axes do with the activation is not this weight's business.
    rest = None if {axis for axes in model for axis in axes} == set(layout.model_axes) else P.UNCONSTRAINED
    spec = P(*(beside.get(dim) or rest for dim in range(ins[other].ndim)))
    ins[other] = lax.with_sharding_constraint(ins[other], spec)
    return ins
