"""A schedule played at stated speeds: what a step cannot be faster than. A model, and no measurement.

Matmuls take their FLOPs over the peak of the device, collectives their bytes over that of their link, in the order of
the schedule; those over the same link wait for one another. All else takes no time: no launch, no latency, no memory
traffic, no elementwise work, no kernel that is slower than the data sheet. Of several branches the quickest is taken.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from jzero.events import Branches, Done, Events, Loop, Start, Window
from jzero.flops import Matmul
from jzero.links import Link
from jzero.tally import wire_factor


def wire_bytes(window: Window) -> float:
    """Bytes that each device sends in one run of a collective, as `Collective.wire_bytes` counts them."""
    return window.bytes * wire_factor(window.kind, window.group)


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Attributes:
        what: A matmul, a collective, or a loop as one.
        lane: "matmuls", or the name of the link.
        begin: Seconds.
        end: Seconds.
        wait: Of a collective, the seconds for which nothing was multiplied because of it.
    """

    what: Matmul | Window | Loop
    lane: str
    begin: float
    end: float
    wait: float = 0.0


@dataclass
class Timeline:
    """What playing a schedule gave.

    Attributes:
        seconds: From its begin to its end.
        compute: Seconds of matmuls.
        links: Seconds for which each link is busy.
        matmuls: How often each matmul runs.
        waits: By `id` of a window, the seconds of all its runs for which nothing was multiplied because of it.
        spans: By number of a loop, what its middle pass consists of; of (), the whole program, loops as one.
    """

    seconds: float = 0.0
    compute: float = 0.0
    links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    matmuls: Counter[Matmul] = field(default_factory=Counter)
    waits: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    spans: dict[tuple[int, ...], list[Span]] = field(default_factory=dict)


def play(events: Events, peak: Callable[[str], float], link: Callable[[Window], Link]) -> Timeline:
    """Plays a schedule.

    Args:
        events: As `jzero.events.events` reads them.
        peak: FLOPs per second of matmuls by dtype.
        link: The link of each collective.

    Example:
        >>> from jzero.events import Piece
        >>> gather = Window("all-gather", (Piece("bfloat16", (100,), "", ""),), ("data",), True, 1, group=2)
        >>> run = [Start("a", gather), Matmul(30.0, "bfloat16", ""), Done("a")]
        >>> timeline = play(run, peak=lambda dtype: 1.0, link=lambda window: Link("within hosts", 2.0))
        >>> timeline.seconds, timeline.compute, timeline.waits[id(gather)]
        (50.0, 30.0, 20.0)
    """
    timeline = Timeline()
    free: dict[str, float] = defaultdict(float)
    running: dict[str, tuple[Span, list[Span]]] = {}
    quickest: dict[int, Events] = {}

    def run(events: Events, spans: list[Span]) -> None:
        for event in events:
            now = timeline.seconds
            match event:
                case Matmul(flops=flops, dtype=dtype):
                    timeline.seconds += flops / peak(dtype)
                    timeline.compute += flops / peak(dtype)
                    timeline.matmuls[event] += 1
                    spans.append(Span(event, "matmuls", now, timeline.seconds))
                case Start(name=name, window=window):
                    over = link(window)
                    seconds = wire_bytes(window) / over.bandwidth
                    begin = max(now, free[over.name])
                    free[over.name] = begin + seconds
                    timeline.links[over.name] += seconds
                    running[name] = Span(window, over.name, begin, begin + seconds), spans
                case Done(name=name):
                    span, home = running.pop(name)
                    wait = max(0.0, span.end - now)
                    timeline.seconds += wait
                    timeline.waits[id(span.what)] += wait
                    home.append(Span(span.what, span.lane, span.begin, span.end, wait))
                case Loop(number=number, passes=passes, events=inner):
                    for n in range(passes):
                        found: list[Span] = []
                        run(inner, found)
                        if n == passes // 2:
                            timeline.spans[number] = found
                    spans.append(Span(event, "matmuls", now, timeline.seconds))
                case Branches(events=lists):
                    if id(event) not in quickest:
                        quickest[id(event)] = min(lists, key=lambda one: play(one, peak, link).seconds, default=())
                    run(quickest[id(event)], spans)

    timeline.spans[()] = []
    run(events, timeline.spans[()])
    return timeline
