"""The stages of ZeRO, as a table of placements."""

from dataclasses import dataclass, fields
from typing import Literal

Placement = Literal["replicated", "sharded"]

_CHOICES = {
    "params": ("replicated", "sharded"),
    "grads": ("replicated", "sharded"),
    "opt_state": ("replicated", "sharded"),
    "reduce": ("end", "block"),
}


@dataclass(frozen=True)
class Stage:
    """Where parameters, gradients and optimizer state live, and when gradients are reduced.

    `STAGES` holds the four of the ZeRO paper (Rajbhandari et al. 2020, arXiv:1910.02054). Others that make sense:
    `Stage("replicated", "replicated", "sharded", "end")` is DeepSpeed's own stage 1 (all-reduce, keep a shard of
    the optimizer state); `Stage("sharded", "sharded", "sharded", "end")` is FSDP under `no_sync` (whole gradients
    are accumulated, one reduction per step); `Stage("replicated", "replicated", "replicated", "block")` is data
    parallelism that reduces in every microbatch.

    Attributes:
        params: "replicated" (whole on every device) or "sharded" (a 1/N part on each).
        grads: The same, for the reduced gradients.
        opt_state: The same, for the optimizer state.
        reduce: "end" (whole local gradients are accumulated and reduced once per step) or "block" (reduced in the
            backward pass of every microbatch, so that only the reduced gradients are accumulated).

    Raises:
        ValueError: A value that is not in the table above, or a combination that cannot be: what is built from
            shards must be sharded as well.
    """

    params: Placement
    grads: Placement
    opt_state: Placement
    reduce: Literal["end", "block"]

    def __post_init__(self):
        for field in fields(self):
            value, choices = getattr(self, field.name), _CHOICES[field.name]
            if value not in choices:
                raise ValueError(f"Stage: {field.name}={value!r}; wanted {choices[0]!r} or {choices[1]!r}.")
        if self.opt_state == "replicated" and "sharded" in (self.params, self.grads):
            which = "params" if self.params == "sharded" else "grads"
            raise ValueError(
                f"Stage: {which} are sharded while opt_state is whole. A whole optimizer state updates whole params "
                f"from whole grads, so every shard would be gathered again in every step. Shard opt_state as well."
            )
        if self.params == "sharded" and self.grads == "replicated":
            raise ValueError(
                "Stage: params are sharded while grads are whole. The update of a shard reads only its part of the "
                "gradient, so whole grads would cost memory that nothing uses. Shard grads as well."
            )


STAGES: tuple[Stage, ...] = (
    Stage(params="replicated", grads="replicated", opt_state="replicated", reduce="end"),
    Stage(params="replicated", grads="sharded", opt_state="sharded", reduce="end"),
    Stage(params="replicated", grads="sharded", opt_state="sharded", reduce="block"),
    Stage(params="sharded", grads="sharded", opt_state="sharded", reduce="block"),
)
"""Stage 0 to 3 of ZeRO; the index is the stage."""


def as_stage(stage: int | Stage) -> Stage:
    """Returns the `Stage` that a number of 0 to 3 stands for; a `Stage` comes back as it is."""
    if isinstance(stage, Stage):
        return stage
    if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage < len(STAGES):
        return STAGES[stage]
    raise ValueError(f"stage={stage!r}; wanted 0, 1, 2, 3 or a jzero.Stage.")
