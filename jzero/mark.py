"""What a model may say of where things are to be: `gather` for params, `hint` for activations."""

import math
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

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

    Where no mesh is in sight, or none of its automatic axes is named, it is the identity, so that the model also runs
    alone and on a mesh without the axis.

    Args:
        x: What the loss computes, from this device's part of the batch.
        spec: The model axes of each dim; not the data axes, which have cut the batch already.

    Returns:
        The same values.

    Raises:
        ValueError: The spec names a data axis or more dims than `x` has, or a dim does not divide.

    Example:
        >>> hint(jnp.ones((2, 8)), jax.sharding.PartitionSpec(None, "model")).shape
        (2, 8)
    """
    if len(spec) > x.ndim:
        raise ValueError(f"hint: {spec} names {len(spec)} dims, but the array has shape {x.shape}.")
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries: list[tuple[str, ...]] = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    for dim, axes in enumerate(entries):
        if manual := [axis for axis in axes if kinds.get(axis) == AxisType.Manual]:
            raise ValueError(
                f"hint: {spec} names {manual[0]!r}, but here each device has its own part of the batch over that axis "
                f"already. Name model axes only."
            )
        entries[dim] = tuple(axis for axis in axes if axis in kinds)
        parts = math.prod(mesh.shape[axis] for axis in entries[dim])
        if x.shape[dim] % parts:
            raise ValueError(
                f"hint: dim {dim} of {x.shape} does not divide by {parts}, the size of {', '.join(entries[dim])}, as "
                f"{spec} wants."
            )
    automatic = AxisType.Auto in kinds.values()
    return lax.with_sharding_constraint(x, PartitionSpec(*entries)) if automatic else x
