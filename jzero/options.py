"""What XLA is told about a program's collectives on GPUs."""

from jzero.collectives import wide
from jzero.layout import Layout
from jzero.mesh import platform_of

BUCKET_BYTES = 32 * 2**20
"""Bytes of whole gradients that are reduced together at most, by default."""
SHARD_BYTES = 256 * 2**20
"""Bytes of shards that are summed over replicas together at most: more than a block has."""


def compiler_options(layout: Layout, *, bucket_bytes: int = BUCKET_BYTES) -> dict[str, int]:
    """XLA's options for the step of a layout, as `jax.jit(..., compiler_options=)` takes them; `train_step` uses them.

    On GPUs there are two. Reductions of neighbouring gradients are combined up to `bucket_bytes` (DeepSpeed's
    `reduce_bucket_size`, Megatron-LM's `ddp-bucket-size`): small leaves ride along with large ones, while XLA's own
    limit, hundreds of megabytes, joins those of several blocks, which then wait for the last of them in full size. And
    where blocks are gathered or reduced one by one, up to three collectives may be on the way at a time: with one,
    which is XLA's default, a gather of the next block waits for a reduction of the one before, with hardly a matmul
    left to run beside it. With a model axis they are two, and one where that axis is wide: its sums would take their
    place, and gathers run beside sums and not beside matmuls. The sums of a block's shards over replicas then go
    together, whatever `bucket_bytes` is: they are slow between hosts, and several at a time would leave no place to the
    rest. Where all is reduced once, at the end, XLA would leave the last three until there is no matmul left, and so
    keeps its default. On other devices there is no option.

    Args:
        layout: The layout of the params.
        bucket_bytes: Bytes of whole gradients that are reduced together at most; 1 combines nothing.

    Returns:
        Options by name, valid in all versions of jax that jzero supports.

    Raises:
        ValueError: `bucket_bytes` is not positive.

    Example:
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))
        >>> compiler_options(layout)  # on CPUs
        {}
    """
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"compiler_options: bucket_bytes={bucket_bytes!r}; wanted a number of bytes, 1 or more.")
    if platform_of(layout.mesh) != "gpu":
        return {}
    by_block = layout.stage.reduce == "block"
    of_shards = by_block and layout.stage.grads == "sharded" and wide(layout, layout.replica_axes)
    options = {
        "xla_gpu_all_reduce_combine_threshold_bytes": max(bucket_bytes, SHARD_BYTES) if of_shards else bucket_bytes,
        # XLA counts the bytes of the shard here.
        "xla_gpu_reduce_scatter_combine_threshold_bytes": max(1, bucket_bytes // layout.shards),
    }
    if by_block or layout.stage.params == "sharded":
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = _at_a_time(layout)
    return options


def _at_a_time(layout: Layout) -> int:
    """How many collectives may be on the way together; docs/overlap.md has what each number gives on each mesh."""
    model = layout.size(layout.model_axes)
    if model >= 4:
        return 1
    return 2 if model > 1 and not wide(layout, layout.replica_axes) else 3
