"""The two kinds of run, at one stage, as results that know which targets they meet."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jzero
from experiments.bench_step.measure import Ratio, compile_seconds, error, interleaved, ratio_of_medians
from experiments.bench_step.model import Size
from experiments.bench_step.programs import WAYS, Arguments, Programs, make_arguments, make_inputs, make_layout

JZERO, HAND, PLAIN, ONE = *WAYS, "one device"
PROGRAMS = {"gradient": "forward and backward", "step": "whole step"}

GRADIENT_ERROR, CHANGE_ERROR = 1e-4, 1e-2
"""Of gradients and moments, and of the change of the params: Adam makes much of the rounding of small gradients."""
TEMP, WIDTH, PAIRS, COMPILE, FLAT, CPU = 1.02, 0.05, 50, 1.3, 1.1, 1.1
"""Targets: ratio of temp bytes; interval of the time ratio, and pairs behind it; the other ratios."""
DEEPER, TRIES = 3, 4
"""How many times as many layers the deeper model has, and how often each is compiled: the fastest counts."""

Progress = Callable[[str], None]


class Disagreement(Exception):
    """Programs that should compute the same do not."""


@dataclass(frozen=True)
class Target:
    """Something promised, and what was found."""

    what: str
    wanted: str
    found: str
    met: bool


@dataclass(frozen=True)
class Timed:
    """One program made in several ways.

    Attributes:
        program: "gradient" or "step".
        pairs: How many rounds were timed, each way once in each.
        seconds: Median of each way.
        ratios: Median of jzero over that of each other way.
        errors: Largest relative difference of a leaf from jzero's, for each other way.
        temp_bytes: What each needs on a device beside its arguments and results.
    """

    program: str
    pairs: int
    seconds: dict[str, float]
    ratios: dict[str, Ratio]
    errors: dict[str, float]
    temp_bytes: dict[str, int]


@dataclass(frozen=True)
class Compiled:
    """Seconds to trace and lower and to compile the gradient made in each way, at one depth."""

    layers: int
    trace: dict[str, float]
    compile: dict[str, float]

    def total(self, way: str) -> float:
        """Both together."""
        return self.trace[way] + self.compile[way]


@dataclass(frozen=True)
class Result:
    """What was found at one stage: `compiled` is empty where CPU time is compared."""

    stage: int
    timed: tuple[Timed, ...]
    compiled: tuple[Compiled, ...]
    targets: tuple[Target, ...]


def compare(size: Size, mesh: Mesh, stage: int, rounds: int, progress: Progress) -> Result:
    """jzero, sharding by hand and plain jit: time, temp bytes, seconds to compile."""
    layout = make_layout(size, mesh, stage)
    args = make_arguments(size, layout)
    ways = {way: (make(size, layout), args) for way, make in WAYS.items()}
    timed = [_time(program, ways, rounds, time.perf_counter, progress) for program in PROGRAMS]
    depths = [replace(size, layers=size.layers * times) for times in (1, DEEPER)]
    compiled = [_compile(depth, mesh, stage, progress) for depth in depths]
    targets = [target for found in timed for target in time_targets(stage, found)]
    return Result(stage, tuple(timed), tuple(compiled), (*targets, *compile_targets(*compiled)))


def compare_cpu_time(size: Size, mesh: Mesh, stage: int, rounds: int, progress: Progress) -> Result:
    """CPU time of jzero on all devices, and of one device that does the same work without it."""
    layout = make_layout(size, mesh, stage)
    alone = make_layout(size, jzero.make_mesh(devices=[mesh.devices.flat[0]], data=1), stage)
    ways = {
        JZERO: (WAYS[JZERO](size, layout), make_arguments(size, layout)),
        ONE: (WAYS[PLAIN](size, alone), make_arguments(size, alone)),
    }
    timed = [_time(program, ways, rounds, time.process_time, progress) for program in PROGRAMS]
    gradient = timed[0].ratios[ONE]
    what = f"{PROGRAMS['gradient']}: CPU time / {ONE}"
    return Result(stage, tuple(timed), (), (Target(what, f"at most {CPU}", f"{gradient}", gradient.value <= CPU),))


def _time(program, ways: Mapping[str, tuple[Programs, Arguments]], rounds, clock, progress) -> Timed:
    title = PROGRAMS[program]
    compiled, calls, results = {}, {}, {}
    for way, (programs, args) in ways.items():
        progress(f"{title}: compiling, {way}")
        compiled[way] = getattr(programs, program).lower(*args.of(program)).compile()
        calls[way] = _call(compiled[way], program, args)
        results[way] = _outcome(program, jax.block_until_ready(calls[way]()), args)
    others = [way for way in ways if way != JZERO]
    errors = {way: check_agreement(title, way, results[way], results[JZERO]) for way in others}
    times = {way: np.empty(rounds) for way in ways}
    for index, seconds in enumerate(interleaved(calls, rounds, clock)):
        progress(f"{title}: round {index + 1} of {rounds}")
        for way in ways:
            times[way][index] = seconds[way]
    return Timed(
        program,
        rounds,
        {way: float(np.median(times[way])) for way in ways},
        {way: ratio_of_medians(times[JZERO], times[way]) for way in others},
        errors,
        {way: compiled[way].memory_analysis().temp_size_in_bytes for way in ways},
    )


def _call(compiled, program, args):
    if program == "gradient":
        return functools.partial(compiled, *args.of(program))
    state = jax.tree.map(jnp.copy, (args.params, args.opt_state))

    def step():
        nonlocal state
        *state, loss = compiled(*state, args.tokens)
        return (*state, loss)

    return step


def _outcome(program, result, args) -> dict[float, Any]:
    """What must agree, by how far it may be apart: on the host, since the next step takes it away."""
    if program == "gradient":
        return {GRADIENT_ERROR: jax.device_get(result)}
    params, opt_state, loss = jax.device_get(result)
    change = jax.tree.map(lambda new, old: new - np.asarray(old), params, args.params)
    return {GRADIENT_ERROR: (opt_state, loss), CHANGE_ERROR: change}


def check_agreement(title: str, way: str, found: dict[float, Any], wanted: dict[float, Any]) -> float:
    """The largest relative difference of a leaf.

    Raises:
        Disagreement: It is larger than it may be.
    """
    errors = {limit: error(found[limit], wanted[limit]) for limit in wanted}
    for limit, apart in errors.items():
        if not apart <= limit:
            raise Disagreement(
                f"{title}: {way} and {JZERO} differ by {apart:.1e} in a leaf (relative, L2 norm); wanted at most "
                f"{limit:.0e}. Nothing is timed that does not compute the same."
            )
    return max(errors.values())


def _compile(size: Size, mesh: Mesh, stage: int, progress: Progress) -> Compiled:
    layout = make_layout(size, mesh, stage)
    shapes = jax.eval_shape(functools.partial(make_inputs, size))
    tries = {way: [] for way in WAYS}
    for number in range(TRIES):
        progress(f"compile times: {size.layers} layers, try {number + 1} of {TRIES}")
        for way, make in WAYS.items():
            tries[way].append(compile_seconds(lambda make=make: make(size, layout).gradient, shapes))
    fastest = {way: min(found, key=sum) for way, found in tries.items()}
    return Compiled(
        size.layers,
        {way: trace for way, (trace, _) in fastest.items()},
        {way: compiling for way, (_, compiling) in fastest.items()},
    )


def time_targets(stage: int, found: Timed) -> list[Target]:
    title = PROGRAMS[found.program]
    hand, plain = found.ratios[HAND], found.ratios[PLAIN]
    temp = found.temp_bytes[JZERO] / found.temp_bytes[HAND]
    enough = found.pairs >= PAIRS
    targets = [
        Target(f"{title}: temp bytes / {HAND}", f"at most {TEMP}", f"{temp:.3f}", temp <= TEMP),
        Target(
            f"{title}: time / {HAND}",
            f"from 1 or less, at most {WIDTH} wide, of {PAIRS} pairs or more",
            f"{hand}, {hand.width:.3f} wide, {found.pairs} pairs",
            hand.low <= 1 and hand.width <= WIDTH and enough,
        ),
    ]
    if stage == 3:
        what, wanted = f"{title}: time / {PLAIN}", f"all under 1, of {PAIRS} pairs or more"
        targets.append(Target(what, wanted, f"{plain}, {found.pairs} pairs", plain.high < 1 and enough))
    return targets


def compile_targets(shallow: Compiled, deep: Compiled) -> list[Target]:
    ratios = {found.layers: found.total(JZERO) / found.total(PLAIN) for found in (shallow, deep)}
    growth = deep.total(JZERO) / shallow.total(JZERO)
    return [
        *(
            Target(f"trace and compile, {layers} layers / {PLAIN}", f"at most {COMPILE}", f"{x:.2f}", x <= COMPILE)
            for layers, x in ratios.items()
        ),
        Target(
            f"trace and compile, {deep.layers} layers / {shallow.layers} layers",
            f"at most {FLAT}: flat in depth",
            f"{growth:.2f}",
            growth <= FLAT,
        ),
    ]
