"""`preflight`: what a training step will do on GPUs that are not there, from compiling it for them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jzero import hlo
from jzero.buffers import Buffer
from jzero.check import check_batch
from jzero.compiling import compile_for
from jzero.devices import DEVICES, Device
from jzero.events import Branches, Events, Loop, Window, read, windows_of
from jzero.flops import convolutions
from jzero.held import Argument, arguments, broken_donation, not_donated
from jzero.layout import Layout
from jzero.links import Link, link_of
from jzero.mesh import check_names
from jzero.partitioner import of_partitioner
from jzero.preflight_report import Bound, Preflight, Room, Sent
from jzero.program import collectives_by_origin, compiled_collectives_by_origin
from jzero.promise import Broken, broken_in, compare
from jzero.rules import Leaf
from jzero.stage import Placement
from jzero.state import TrainState, check_state
from jzero.step import TrainStep
from jzero.targets import parse_target, target_mesh
from jzero.timeline import Timeline, play, wire_bytes

JAX_SHARE = 0.75
"""The share of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""


def preflight(
    step: TrainStep,
    state: Any,
    batch: Any,
    *,
    target: str = "h200x8",
    mesh: Mapping[str, int] | None = None,
    links: Mapping[str, float] | None = None,
) -> Preflight:
    """Compiles a training step for GPUs that are not there, and says what it will do on them.

    The step is made again for the target's mesh (`step.layout.on`, `step.on`), with the state cut for it and a global
    batch of the same size, and compiled ahead of time. Nothing is run, and no array is made.

    Args:
        step: From `train_step`, for any mesh: that of this machine, or the target's own (`targets.target_mesh`).
        state: Its state: arrays, or shapes, as from `jax.eval_shape(functools.partial(jzero.init, init_params, tx,
            layout), key)`. Only shapes count.
        batch: Its global batch, the same.
        target: The GPUs: "h200x8" is one host of 8, "h200x2x8" two hosts of 8; a100, h100, h200, b200 or l40s.
        mesh: Size of each mesh axis on the target, one of them perhaps -1. None: as the step's own mesh.
        links: Bytes per second that each device sends over an axis, as `jzero bandwidth` measures them (busbw); axes
            that are not named have what `jzero.devices` says of the GPU's links and of NVIDIA's servers with it.

    Returns:
        A `Preflight`; `print` shows it, `.as_dict()` is for JSON.

    Raises:
        TypeError: `step` is not a `TrainStep`.
        ValueError: An unknown target; a mesh that does not fit it, lacks an axis that the layout names, or has one of a
            name that no axis can have; a state that is not the step's; a batch that does not divide; an unknown or
            unpositive link.
        RuntimeError: jax cannot compile for GPUs here (its pjrt package is missing), or XLA refuses the program.
        Unsupported: A `RuntimeError`: the step calls cuDNN or cuSOLVER, with the way round.

    Example:
        >>> report = preflight(step, state, batch, target="h200x2x8", mesh={"data": 16})  # doctest: +SKIP
        >>> report.fits, report.memory.peak, report.not_donated, report.bound.mfu  # doctest: +SKIP
        (True, 37123456789, (), 0.61)
    """
    if not isinstance(step, TrainStep):
        raise TypeError(f"preflight: step is a {type(step).__name__}; wanted what jzero.train_step returns.")
    name, hosts, count = parse_target(target)
    device, there = DEVICES[name], _mesh_of(step, target, hosts * count, mesh)
    links = _checked(links or {}, there)
    check_state(state, step.tx, step.layout)
    step = step if step.layout.mesh == there else step.on(step.layout.on(there))
    layout = step.layout
    state, batch = _moved(state, step), jax.eval_shape(lambda batch: batch, batch)
    check_batch(batch, layout, microbatches=step.microbatches)
    lowered, compiled, program, found = compile_for(target, lambda: step.lower(state, batch))
    events = read(program, there, layout)
    over = {window.axes: link_of(there, window.axes, device, hosts, links) for window in windows_of(events)}
    timeline = play(events, device.peak, lambda window: over[window.axes])
    written = collectives_by_origin(lowered, there)
    moved = compare(layout, step.account(state, batch), written, microbatches=step.microbatches)
    wrong = broken_in(moved)
    ins = arguments(layout, step.tx, state, batch, compiled)
    lost = not_donated(ins, compiled)
    memory = _memory(compiled, device)
    return Preflight(
        target=target,
        device=device,
        axes=tuple(there.shape.items()),
        stage=layout.stage,
        microbatches=step.microbatches,
        jax=jax.__version__,
        memory=memory,
        held=_held(ins, layout),
        temporaries=found,
        not_donated=tuple(one.name for one in lost),
        sent=_sent(events, over, timeline),
        moved=moved,
        bound=_bound(timeline, device),
        broken=(*(one for one in wrong if one.subject != "loss"), *_of_memory(memory), *broken_donation(lost)),
        notes=(
            *(one.message for one in wrong if one.subject == "loss"),
            *_of_optimizer([*of_partitioner(compiled_collectives_by_origin(compiled, there), written, layout)]),
            *_notes(memory, program, found, device, over.values(), events),
        ),
        events=events,
        timeline=timeline,
    )


def _unknown(events: Events) -> Iterator[Loop]:
    """Loops that do something, of which XLA does not know how often they run."""
    for event in events:
        match event:
            case Loop(events=inner, known=known):
                if inner and not known:
                    yield event
                yield from _unknown(inner)
            case Branches(events=lists):
                for inner in lists:
                    yield from _unknown(inner)


def _mesh_of(step: TrainStep, target: str, count: int, axes: Mapping[str, int] | None) -> Mesh:
    own = dict(step.layout.mesh.shape)
    check_names("preflight", own if axes is None else axes)
    if axes is None and step.layout.mesh.size != count:
        given = ", ".join(f"{name!r}: {size}" for name, size in own.items())
        raise ValueError(
            f"preflight: {target} has {count} GPUs, and the step's own mesh, {{{given}}}, {step.layout.mesh.size} "
            f"devices. Say how large each axis is there, for example mesh={{'data': {count}}} (--mesh data={count})."
        )
    return target_mesh(target, **(own if axes is None else axes))


def _checked(links: Mapping[str, float], mesh: Mesh) -> dict[str, float]:
    for axis, speed in links.items():
        if axis not in mesh.shape:
            raise ValueError(f"preflight: links names {axis!r}, but the mesh has axes {mesh.axis_names}.")
        if not speed > 0:
            raise ValueError(f"preflight: links[{axis!r}]={speed!r}; wanted bytes per second, above 0.")
    return dict(links)


def _moved(state: TrainState, step: TrainStep) -> TrainState:
    """The shapes of a state of this step, with what is whole on every device as another state has it."""
    layout, tx = step.layout, step.tx

    def placed(leaves: Sequence[Leaf], placement: Placement) -> list[jax.ShapeDtypeStruct]:
        return [leaf.placed(placement) for leaf in leaves]

    (opt_tree, opt_leaves), (master_tree, masters) = layout.opt_leaves(tx), layout.masters
    return replace(
        jax.eval_shape(lambda state: state, state),
        params=layout.treedef.unflatten(placed(layout.leaves, layout.stage.params)),
        opt_state=opt_tree.unflatten(placed(opt_leaves, layout.stage.opt_state)),
        master=master_tree.unflatten(placed(masters, layout.stage.opt_state)),
    )


def _memory(compiled: jax.stages.Compiled, device: Device) -> Room:
    found: Any = compiled.memory_analysis()
    return Room(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
        limit=device.memory,
    )


def _held(ins: Sequence[Argument], layout: Layout) -> tuple[Buffer, ...]:
    def buffer(one: Argument) -> Buffer:
        if one.leaf is None:
            return Buffer(one.subject, one.what, "", (), one.compiled)
        placement = layout.stage.params if one.what == "params" else layout.stage.opt_state
        sharding = layout.sharding(layout.spec(one.leaf, placement))
        shape = sharding.shard_shape(one.leaf.placed(placement).shape)
        return Buffer(one.subject, one.what, str(one.leaf.dtype), shape, one.compiled)

    return tuple(sorted((buffer(one) for one in ins if one.number is not None), key=lambda one: -one.bytes))


def _sent(events: Events, over: Mapping[tuple[str, ...], Link], timeline: Timeline) -> tuple[Sent, ...]:
    def one(window: Window) -> Sent:
        link, sent = over[window.axes], wire_bytes(window)
        return Sent(window, link, sent, sent / link.bandwidth, timeline.waits[id(window)])

    return tuple(map(one, windows_of(events)))


def _bound(timeline: Timeline, device: Device) -> Bound:
    work: dict[str, float] = {}
    total = model = 0.0
    for matmul, times in timeline.matmuls.items():
        work[matmul.dtype] = work.get(matmul.dtype, 0.0) + matmul.flops * times
        total += matmul.flops * times
        model += 0.0 if matmul.again else matmul.flops * times
    peak = device.peak(max(work, key=lambda dtype: work[dtype]) if work else "bfloat16")
    return Bound(timeline.seconds, timeline.compute, tuple(timeline.links.items()), total, model, peak)


def _of_memory(memory: Room) -> Iterator[Broken]:
    if not memory.fits:
        yield Broken(
            "memory",
            f"does not fit: the step takes {memory.peak:,} bytes of the {memory.limit:,} that each device has.",
        )


def _of_optimizer(found: Sequence[Broken]) -> Iterator[str]:
    """What is no broken promise where it is meant, as the loss's own collectives are none; `audit` takes it for one."""
    if found:
        yield found[0].message + (f" There are {len(found) - 1} more such." if len(found) > 1 else "")


def _notes(
    memory: Room,
    program: hlo.Program,
    found: tuple[Buffer, ...] | None,
    device: Device,
    links: Iterable[Link],
    events: Events,
) -> Iterator[str]:
    if unknown := list(_unknown(events)):
        yield (
            f"XLA does not know the passes of some loops that multiply or communicate ({len(unknown)}): what is in "
            f"them is counted for one pass, and the bound is lower than it need be."
        )
    if memory.fits and memory.peak > JAX_SHARE * memory.limit:
        yield (
            f"JAX takes {JAX_SHARE:.0%} of a GPU's memory unless told otherwise, and this needs "
            f"{memory.peak / memory.limit:.0%}: set XLA_PYTHON_CLIENT_MEM_FRACTION."
        )
    if count := convolutions(program):
        yield f"{count} convolutions are not counted: their FLOPs are in neither the bound nor the MFU."
    if found is None:
        yield "XLA has not said what its temporaries are: the program came out of a compilation cache."
    if any(link.name == "between hosts" and not link.stated for link in links):
        yield f"Between hosts: {device.network_kind}."
