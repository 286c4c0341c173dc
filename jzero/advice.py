"""What to choose for a run on a given device, and why."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jzero.devices import Device, as_device
from jzero.estimate import Estimate

RESERVE = 0.3
"""Share of memory that is left to activations, temporary buffers and fragmentation, unless told.

No count of params says what these take: they grow with batch, context and layers, and fall with remat. The ZeRO paper's
table 2 measured them: runs of up to 1.3 of 2, and 6.2 of 7.6 billion params that fit by formula, so 35% and 18%."""

HOST = 8
"""Devices of a host, between which links are fast: as in NVIDIA's HGX and DGX."""

MOST = 1 << 14
"""Devices on the data axis at which the search for a number of them ends."""

Plan = Callable[[int, Mapping[str, int]], Estimate]
"""Makes the estimate of a stage on mesh axes."""


@dataclass(frozen=True)
class Advice:
    """What to choose.

    Attributes:
        device: The device.
        budget: Bytes of its memory for what an `Estimate` counts.
        lowest: The lowest stage that fits on the mesh that was asked for; None if none does.
        smallest: For each stage the smallest number of devices that it fits on, with the model axes as they are and no
            replicas; None if no number does.
        reasons: Sentences, the most important first. What moves is in bytes that each device sends, `Estimate.moved`.
    """

    device: Device
    budget: int
    lowest: int | None
    smallest: tuple[int | None, ...]
    reasons: tuple[str, ...]


def advise(
    plan: Plan,
    axes: Mapping[str, int],
    *,
    device: str | Device,
    reserve: float = RESERVE,
) -> Advice:
    """Says which stage fits on a mesh, and what else would help: more devices, hybrid sharding, a model axis, offload.

    Args:
        plan: Makes the `Estimate` of a stage on mesh axes, all else as it is.
        axes: The mesh asked for, as for `estimate`.
        device: Short name of a device, or one of your own.
        reserve: Share of its memory to leave to activations and the like.

    Raises:
        ValueError: An unknown device; `reserve` is not between 0 and 1.

    Example:
        >>> from jzero.estimate import estimate
        >>> plan = lambda stage, axes: estimate(7.5e9, stage=stage, axes=axes)
        >>> advice = advise(plan, {"data": 64}, device="a100")
        >>> advice.lowest, advice.smallest
        (1, (None, 7, 3, 3))
    """
    device = as_device(device)
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve={reserve!r}; a share of the memory, so 0 or more and less than 1.")
    budget, axes = int(device.memory * (1 - reserve)), dict(axes)
    plans = [plan(stage, axes) for stage in range(4)]
    lowest = next((stage for stage, one in enumerate(plans) if one.total <= budget), None)
    smallest = tuple(_smallest(plan, stage, axes, budget) for stage in range(4))
    if lowest is None:
        reasons = _nothing_fits(plans[3], budget, smallest)
    else:
        reasons = [_why(plans, lowest, budget)]
        reasons += _hybrid(plan, plans[lowest], lowest, budget) + _model_axis(plan, plans[lowest], lowest, budget)
    return Advice(device, budget, lowest, smallest, tuple(reasons))


def _smallest(plan: Plan, stage: int, axes: dict[str, int], budget: int) -> int | None:
    """The smallest number of devices at which a stage fits; None if not even `MOST` are enough."""
    model = _model_axes(axes)

    def total(shards):
        return plan(stage, {"data": shards, **model}).total

    one, many = total(1), total(MOST)
    if many > budget:
        return None
    # What is cut falls as 1/n. Padding makes that inexact, so the answer is looked for around it.
    shards = max(math.ceil((one - many) / max(budget - many, 1)), 1)
    while total(shards) > budget:
        shards += 1
    while shards > 1 and total(shards - 1) <= budget:
        shards -= 1
    return shards * math.prod(model.values())


def _model_axes(axes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in axes.items() if name not in ("data", "replica")}


def _why(plans: list[Estimate], lowest: int, budget: int) -> str:
    one, microbatches = plans[lowest], plans[lowest].microbatches
    start = f"Stage {lowest} is the lowest that fits: {gb(one.total)} of {gb(budget)}, beside activations."

    def moves_beside(stage):
        return f"moves {gb(one.moved())} per step where stage {stage} moves {gb(plans[stage].moved())}"

    if lowest == 0:
        return f"{start} It {moves_beside(1)}, and stores {gb(one.stored.total - plans[1].stored.total)} more."
    if lowest == 1 or (lowest == 2 and microbatches == 1):
        return f"{start} It {moves_beside(0)}."
    if lowest == 2:
        return f"{start} It reduces in each of {microbatches} microbatches, and so {moves_beside(1)}."
    times = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}"
    return f"{start} It gathers params twice in each of {times}, and so {moves_beside(1)}."


def _hybrid(plan: Plan, one: Estimate, stage: int, budget: int) -> list[str]:
    """Whether the stage fits within a host, repeated over hosts."""
    axes = dict(one.axes)
    within = max(HOST // math.prod(_model_axes(axes).values()), 1)
    inside = max(size for size in range(1, within + 1) if axes["data"] % size == 0)
    if stage == 0 or axes.get("replica", 1) > 1 or axes["data"] <= within or inside == 1:
        return []
    hybrid = plan(stage, {"replica": axes["data"] // inside, **axes, "data": inside})
    if hybrid.total > budget:
        return [
            f"Hybrid sharding, replica={axes['data'] // inside},data={inside} to keep gathers within hosts of {HOST}, "
            f"does not fit: {gb(hybrid.total)}."
        ]
    return [
        f"Hybrid sharding fits as well: replica={axes['data'] // inside},data={inside} takes {gb(hybrid.total)}. "
        f"Gathers and reduce-scatters stay within hosts of {HOST}, and only reduced shards cross them: "
        f"{gb(hybrid.moved('replica'))} per device and step, and not {gb(one.moved('data'))}."
    ]


def _model_axis(plan: Plan, one: Estimate, stage: int, budget: int) -> list[str]:
    """Whether a model axis makes stage 1 fit, and saves traffic."""
    axes = dict(one.axes)
    if stage < 2 or _model_axes(axes):
        return []
    for size in (2, 4, 8):
        if axes["data"] % size:
            break
        other = plan(1, axes | {"data": axes["data"] // size, "model": size})
        if other.total <= budget and other.moved() < one.moved():
            return [
                f"With model={size},data={axes['data'] // size} stage 1 fits: {gb(other.total)}. It moves "
                f"{gb(other.moved())} per step and device over the data axis, and not {gb(one.moved())}; activations "
                f"on the model axis come on top, so keep it within a host."
            ]
    return []


def _nothing_fits(one: Estimate, budget: int, smallest: tuple[int | None, ...]) -> list[str]:
    reasons = [
        f"No stage fits: stage 3 takes {gb(one.total)} beside activations, {gb(one.stored.total)} of it between steps, "
        f"and {gb(budget)} are there for it."
    ]
    if smallest[3] is not None:
        reasons.append(f"Stage 3 fits on {smallest[3]} devices.")
    else:
        reasons.append(
            f"More devices alone do not help: what is gathered and reduced of whole blocks takes "
            f"{gb(one.inside.local + one.inside.gathered)} on each. A model axis cuts the blocks as well."
        )
    state = one.stored.opt_state + one.stored.master
    rest = one.total - state
    verdict = "that fits" if rest <= budget else "not even that fits"
    reasons.append(
        f"With optimizer state in host memory (ZeRO-Offload, arXiv:2101.06840; jzero has no offload) {gb(rest)} stay "
        f"on each device and {gb(state)} go to the host: {verdict}."
    )
    return reasons


def gb(size: float) -> str:
    """Bytes in GB of 10^9, three digits, as the papers count them.

    Example:
        >>> gb(31_406_250_000), gb(117_187_500), gb(2.048e12)
        ('31.4 GB', '0.117 GB', '2,048 GB')
    """
    size /= 1e9
    if size >= 100:
        return f"{size:,.0f} GB"
    return f"{size:.3g} GB" if size >= 1e-3 or not size else f"{size:.1e} GB"
