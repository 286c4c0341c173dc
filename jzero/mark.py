"""What a model may say of where things are to be: `gather` for params, `hint` for activations."""

import math
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from jzero.rules import axes_of, is_plain

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


def hint(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Asks for an activation, and its cotangent, to be cut over model axes: sequence parallelism in one line.

    With `x = hint(x, P(None, "model"))` between blocks, activations (batch, time, width) are cut along time where
    tensor parallelism would repeat them, as Megatron-LM's sequence parallelism does (arXiv:2205.05198). The partitioner
    adds what this takes: an all-gather of the activation in front of a weight that is cut by columns, a reduce-scatter
    behind one that is cut by rows, and a sum over the model axes for the gradients of norms and biases between.

    Outside of `value_and_grad`, and on a mesh that has none of the axes named, it is the identity, so that the model
    also runs alone and on other meshes. A spec that names nothing asks for an activation that is whole over the model
    axes.

    Args:
        x: What the loss computes, from this device's part of the batch.
        spec: The model axes of each dim; not the data axes, which have cut the batch already.

    Returns:
        The same values.

    Raises:
        ValueError: The spec names a data axis or more dims than `x` has, or a dim does not divide.
        TypeError: The spec is no PartitionSpec, or leaves a dim unconstrained.

    Example:
        >>> hint(jnp.ones((2, 8)), jax.sharding.PartitionSpec(None, "model")).shape
        (2, 8)
    """
    if not is_plain(spec):
        raise TypeError(f"hint: spec={spec!r}; wanted a PartitionSpec of axis names and None.")
    if len(spec) > x.ndim:
        raise ValueError(f"hint: {spec} names {len(spec)} dims, but the array has shape {x.shape}.")
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    named = axes_of(spec)
    cut: list[tuple[str, ...]] = []
    for dim, axes in enumerate(named):
        if manual := [axis for axis in axes if kinds.get(axis) == AxisType.Manual]:
            raise ValueError(
                f"hint: {spec} names {manual[0]!r}, but here each device has its own part of the batch over that axis "
                f"already. Name model axes only."
            )
        cut.append(tuple(axis for axis in axes if kinds.get(axis) == AxisType.Auto))
        parts = math.prod(mesh.shape[axis] for axis in cut[dim])
        if x.shape[dim] % parts:
            raise ValueError(
                f"hint: dim {dim} of {x.shape} does not divide by {parts}, the size of {', '.join(cut[dim])}, as "
                f"{spec} wants."
            )
    # Under jit without a data shard of one's own the batch must not be made whole: that is not what a hint asks for.
    inside = AxisType.Manual in kinds.values() and AxisType.Auto in kinds.values()
    asked = any(cut) or not any(named)
    return lax.with_sharding_constraint(x, PartitionSpec(*cut)) if inside and asked else x
