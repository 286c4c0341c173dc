"""Bytes per device as others count them, to hold jzero's own against. They count gradients with what is stored."""

from jzero.memory import formula
from jzero.precision import Precision


def zero_bytes(
    stage: int, *, params: float, shards: int, precision: str | Precision = "bf16", moments: int = 2
) -> float:
    """Bytes per device of the ZeRO paper (arXiv:1910.02054, section 5): 16P, 4P + 12P/N, 2P + 14P/N and 16P/N.

    Params and gradients take the compute dtype, 2 bytes each, and what the paper calls K (float32 params and Adam's
    moments) 12. jzero differs in two places: gradients are reduced and accumulated in float32, and stage 3 stores the
    float32 shard alone, and no 2-byte one beside it.

    Args:
        stage: 0 to 3.
        params: P, number of params.
        shards: N, number of devices over which they are cut.
        precision: As for `zero`.
        moments: Elements of optimizer state per param.

    Raises:
        ValueError: Another stage.

    Example:
        >>> [round(zero_bytes(stage, params=7.5e9, shards=64) / 1e9, 1) for stage in range(4)]
        [120.0, 31.4, 16.6, 1.9]
    """
    if stage not in range(4):
        raise ValueError(f"zero_bytes: stage={stage!r}; the paper has 0, 1, 2 and 3.")
    whole = formula(0, params=params, shards=1, precision=precision, moments=moments)
    return zero_cut(stage, params=whole.params, state=whole.master + whole.opt_state, shards=shards)


def zero_cut(stage: int, *, params: float, state: float, shards: int) -> float:
    """The same from bytes: of the params, as many of gradients, and of the optimizer's state with its master weights.

    Example:
        >>> zero_cut(2, params=2, state=12, shards=4)
        5.5
    """
    by_state, by_grads, by_params = (shards if stage >= first else 1 for first in (1, 2, 3))
    return state / by_state + params / by_grads + params / by_params


def megatron_bytes(*, shards: int, param: float = 2, grad: float = 4) -> float:
    """Bytes per parameter of Megatron-LM's distributed optimizer with Adam; stage 1 with whole gradients.

    From its documentation (docs/source/api-guide/dist_optimizer.md), by the dtypes of params and of the gradient
    buffer: 4 + 16/d for 2-byte params and gradients, 6 + 12/d for 2-byte params and float32 gradients, and 8 + 8/d for
    float32. What is divided by d is what is not in float32 already, main gradients and main params of 4 bytes each, and
    Adam's two moments of 8. With d = 1 these are 20, 18 and 16.

    Args:
        shards: d, the data parallel size.
        param: Bytes of a param: 2 or 4.
        grad: Bytes of a gradient: 2 or 4.

    Example:
        >>> megatron_bytes(shards=4), megatron_bytes(shards=4, grad=2), megatron_bytes(shards=4, param=4)
        (9.0, 8.0, 10.0)
    """
    return param + grad + (4 * (param < 4) + 4 * (grad < 4) + 8) / shards
