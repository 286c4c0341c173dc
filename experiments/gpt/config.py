"""Every option of a run and its default, and the checks that need nothing but the options."""

from dataclasses import dataclass
from typing import Literal, get_args

import jzero
from jzero.cli.options import mesh_axes

Precision = Literal["fp32", "bf16", "fp16", "bf16-pure"]


@dataclass(frozen=True)
class Config:
    """One training run.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        mesh: Size of each mesh axis by name, in order; -1 takes the devices that are left over.
        devices: How many devices to use; None: what `mesh` needs, else all accelerators or 8 simulated devices.
        min_shard_size: Leaves with fewer elements stay whole on every device.
        precision: Short name of the dtypes, as for `jzero.zero`.
        loss_scale: A number; "dynamic"; 0 for none; None: dynamic for fp16, else none.
        layers: Number of transformer blocks.
        width: Size of the residual stream.
        heads: Attention heads per block.
        context: Bytes that the model sees at once.
        remat: Whether blocks are recomputed in the backward pass instead of storing their activations.
        data: File or folder to train on; None: the source of the running interpreter's standard library.
        steps: Optimizer steps.
        batch_size: Windows of `context` bytes per step, over all devices and microbatches.
        microbatches: Into how many parts each device splits its share of the batch.
        optimizer: Which optax optimizer.
        lr: Peak learning rate: linear warmup, then a cosine down to a tenth.
        warmup: Share of the steps that the warmup takes.
        weight_decay: Decoupled weight decay (adamw and lamb).
        clip: Largest norm of the gradients; 0 turns clipping off.
        seed: Seeds the params, the batches and the sample.
        eval_every: Steps between validations on a part of the held-out text; 0: only at the end.
        save_every: Steps between checkpoints, beside those at the end and when a run is stopped; 0: none at all.
        sample: Bytes of text to generate at the end; 0: none.
        prompt: What the generated text goes on from.
        temperature: Of the generated text; 0 takes the likeliest byte.
    """

    stage: int = 3
    mesh: tuple[tuple[str, int], ...] = (("data", -1),)
    devices: int | None = None
    min_shard_size: int = 4096
    precision: Precision = "fp32"
    loss_scale: float | Literal["dynamic"] | None = None
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    remat: bool = True
    data: str | None = None
    steps: int = 500
    batch_size: int = 32
    microbatches: int = 1
    optimizer: Literal["adamw", "sgd", "lamb", "adafactor"] = "adamw"
    lr: float = 3e-3
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 100
    save_every: int = 100
    sample: int = 400
    prompt: str = "def "
    temperature: float = 0.8

    def __post_init__(self):
        for name in ("layers", "width", "heads", "context", "steps", "batch_size", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{option_name(name)} {getattr(self, name)}: wanted 1 or more.")
        for name in (
            "min_shard_size",
            "weight_decay",
            "clip",
            "seed",
            "eval_every",
            "save_every",
            "sample",
            "temperature",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{option_name(name)} {getattr(self, name)}: wanted 0 or more.")
        if self.precision not in get_args(Precision):
            raise ValueError(f"--precision {self.precision}: wanted one of {', '.join(get_args(Precision))}.")
        if not (self.loss_scale in ("dynamic", None) or 0 <= self.loss_scale < float("inf")):
            raise ValueError(f"--loss-scale {self.loss_scale}: wanted a positive number, 'dynamic', or 0 for none.")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"--devices {self.devices}: wanted 1 or more.")
        if not self.lr > 0:
            raise ValueError(f"--lr {self.lr}: wanted a positive number.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"--warmup {self.warmup}: the share of the steps, so 0 or more and less than 1.")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} --heads {self.heads}: each head needs an even number of channels, "
                f"so a width that is a multiple of 2 x {self.heads} = {2 * self.heads}."
            )
        for name in ("heads", "context"):
            if self.model_shards > 0 and getattr(self, name) % self.model_shards:
                raise ValueError(
                    f"{option_name(name)} {getattr(self, name)} does not divide over the model axis of size "
                    f"{self.model_shards}; use a multiple, or another --mesh."
                )
        if self.sample and not self.prompt:
            raise ValueError("--prompt is empty: give at least one character, or --sample 0 for no sample.")

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The replica axis, if the mesh has one."""
        return tuple(name for name, _ in self.mesh if name == "replica")

    @property
    def model_shards(self) -> int:
        """Size of the model axis; 1 if the mesh has none."""
        return dict(self.mesh).get("model", 1)

    @property
    def scaling(self) -> float | jzero.DynamicLossScale | None:
        """The loss scale as jzero takes it."""
        if self.loss_scale == "dynamic" or (self.loss_scale is None and self.precision == "fp16"):
            return jzero.DynamicLossScale()
        return self.loss_scale or None


def parse_loss_scale(text: str) -> float | Literal["dynamic"]:
    """Reads "dynamic" or a number.

    Raises:
        ValueError: Neither.
    """
    if text == "dynamic":
        return "dynamic"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number nor 'dynamic'.") from None


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Reads "replica=2,data=4".

    Returns:
        Pairs of axis name and size, in order.

    Raises:
        ValueError: As `mesh_axes`; an axis that this run knows nothing to do with, or no data axis.

    Example:
        >>> parse_mesh("replica=2,data=-1")
        (('replica', 2), ('data', -1))
    """
    axes = mesh_axes(text)
    for name in axes:
        if name not in ("replica", "data", "model"):
            raise ValueError(
                f"no axis {name!r} here; wanted 'data' (params, gradients and optimizer state are cut "
                f"over it) and perhaps 'replica' (they are repeated over it) or 'model' (tensor parallelism)."
            )
    if "data" not in axes:
        raise ValueError(f"no data axis in {text!r}; wanted for example {text},data=-1.")
    return tuple(axes.items())


def option_name(name: str) -> str:
    """A field of `Config` as it is written on the command line."""
    return "--" + name.replace("_", "-")
