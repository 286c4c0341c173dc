"""What a weight that is cut over model axes asks of the activations around it.

Beside a matmul by columns: the activation whole over these axes; by rows: cut like the rows; behind a lookup in a table
that is cut along the vocabulary: summed where it is made. These are the operators that Megatron-LM puts around its
parallel layers (arXiv:1909.08053, arXiv:2205.05198). The partitioner would choose by size, and for a long batch gather
the weight instead. Said for each matmul of the forward and the backward pass, what travels over the model axes are
activations, whatever their size.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.layout import Layout
from jzero.rules import Model


def pin_operands(layout: Layout, eqn: Any, ins: list[jax.Array], models: Sequence[Model | None]) -> list[jax.Array]:
    """The operands of an equation. In a matmul with one cut weight the other one lies as the weight wants it."""
    weights = [side for side, model in enumerate(models) if model is not None]
    if eqn.primitive.name != "dot_general" or len(weights) != 1:
        return ins
    (weight,) = weights
    model, other = models[weight] or (), 1 - weight
    contracting, batch = eqn.params["dimension_numbers"]
    beside = {
        theirs: model[own]
        for dims in (contracting, batch)
        for own, theirs in zip(dims[weight], dims[other], strict=True)
    }
    rest = _rest(layout, model)
    spec = P(*(beside.get(dim) or rest for dim in range(ins[other].ndim)))
    ins[other] = lax.with_sharding_constraint(ins[other], spec)
    return ins


def pin_results(layout: Layout, eqn: Any, outs: list[jax.Array], models: Sequence[Model | None]) -> list[jax.Array]:
    """The results of an equation. What is looked up in a table along a cut dim is summed over the shards at once."""
    if eqn.primitive.name != "gather" or models[0] is None:
        return outs
    cut = {dim for dim, axes in enumerate(models[0]) if axes}
    if not cut <= set(eqn.params["dimension_numbers"].start_index_map):
        return outs
    rest = _rest(layout, models[0])
    return [lax.with_sharding_constraint(x, P(*[rest] * x.ndim)) for x in outs]


def _rest(layout: Layout, model: Model) -> Any:
    """How dims lie of which a weight says nothing: whole, unless other model axes may have a say in them."""
    return None if {axis for axes in model for axis in axes} == set(layout.model_axes) else P.UNCONSTRAINED
