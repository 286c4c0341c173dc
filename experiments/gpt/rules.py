"""Tensor parallelism for the GPT: which dim of which weight the model axis cuts (Megatron-LM, arXiv:1909.08053).

Each path is that of a param as `jzero.explain` prints it; the first dim of what is in "blocks" counts the layers.
"""

from jax.sharding import PartitionSpec as P

RULES = [
    ("embedding/embedding", P("model")),  # vocabulary: each shard knows some bytes, and makes their logits
    ("blocks/qkv/kernel", P(None, None, "model")),  # heads: by columns, which hold one head after another
    ("blocks/out/kernel", P(None, "model")),  # rows: what the heads make is summed over the shards
    ("blocks/up/kernel", P(None, None, "model")),  # columns
    ("blocks/down/kernel", P(None, "model")),  # rows
]
