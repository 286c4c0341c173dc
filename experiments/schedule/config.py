"""Every option and its default, and the checks that need nothing but the options."""

from dataclasses import dataclass
from typing import Literal

from jzero.options import BUCKET_BYTES


@dataclass(frozen=True)
class Config:
    """One program.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        target: The GPUs that it is compiled for, as for `target_mesh`.
        mesh: Size of each mesh axis by name, in order; one named replica repeats what data cuts, one named model
            cuts heads and the MLP (tensor parallelism).
        device_memory: GiB of memory of each GPU; None: the real thing's.
        regather: Whether leaves are gathered again in the backward pass, as for `zero`.
        ahead: Whether blocks are gathered one ahead, as for `zero`; None: as it sees fit.
        bucket_bytes: Bytes of gradients that are reduced together at most, as for `jzero.compiler_options`.
        xla_defaults: Whether to leave out what `jzero.compiler_options` gives.
        options: More compiler options of XLA.
        what: The gradient alone, or the training step with AdamW.
        model: Which model.
        layers: Number of blocks.
        width: Size of the residual stream; the MLP is four times as wide.
        heads: Attention heads per block.
        context: Tokens per sequence.
        batch: Sequences per data shard.
        remat: Whether blocks are recomputed in the backward pass.
        unrolled: Whether the blocks are written out one after the other, instead of a scan over stacked ones.
    """

    stage: int = 3
    target: str = "h200x8"
    mesh: tuple[tuple[str, int], ...] = (("data", -1),)
    device_memory: float | None = None
    regather: bool = True
    ahead: bool | None = None
    bucket_bytes: int = BUCKET_BYTES
    xla_defaults: bool = False
    options: tuple[tuple[str, bool | str], ...] = ()
    what: Literal["value_and_grad", "step"] = "value_and_grad"
    model: Literal["gpt"] = "gpt"
    layers: int = 8
    width: int = 2048
    heads: int = 16
    context: int = 2048
    batch: int = 1
    remat: bool = True
    unrolled: bool = False

    def __post_init__(self):
        for name in ("layers", "width", "heads", "context", "batch", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: wanted 1 or more.")
        if self.width % self.heads:
            raise ValueError(f"--width {self.width}: wanted a multiple of --heads {self.heads}.")
        if self.device_memory is not None and not self.device_memory > 0:
            raise ValueError(f"--device-memory {self.device_memory}: wanted a positive number of GiB.")


def parse_option(text: str) -> tuple[str, bool | str]:
    """Reads "xla_gpu_all_gather_combine_threshold_bytes=1"; true and false are bools, XLA reads the rest."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is no option; wanted NAME=VALUE, as in xla_gpu_enable_while_loop_unrolling=true.")
    return name, value == "true" if value in ("true", "false") else value
