"""The training run."""

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.panel import Panel
from rich.text import Text as Styled

import jzero
from experiments.gpt import report
from experiments.gpt.config import Config
from experiments.gpt.data import Text, sample_batch, windows
from experiments.gpt.evaluate import make_evaluate
from experiments.gpt.job import Job
from experiments.gpt.plot import plot_loss
from experiments.gpt.record import Record
from experiments.gpt.resume import position
from experiments.gpt.sample import generate, printable
from jzero.checkpoint import Checkpointer, Restored, SaveFailed

QUICK_WINDOWS = 512
"""Held-out windows of the validations on the way, evenly spaced; the last validation takes all."""


def batch_of(config: Config, text: Text, step: int) -> np.ndarray:
    """The batch of one step: windows of the training text."""
    return sample_batch(text.train, batch_size=config.batch_size, context=config.context, seed=config.seed, step=step)


class Stopped(Exception):
    """A signal has asked the run to stop.

    Attributes:
        signal: Which one.
        step: The step after which it did.
    """

    def __init__(self, signum: int, step: int):
        self.signal, self.step = signum, step


def train(
    config: Config,
    job: Job,
    text: Text,
    yardstick: float,
    record: Record,
    saved: Checkpointer,
    restored: Restored | None,
    console: Console,
    *,
    auditing: bool = False,
) -> int:
    """Trains, validates, draws a sample; records and plots what came of it, also when it is stopped on the way.

    With `auditing` it audits the step after the first one.

    Returns:
        An exit code: 0; 1 if the loss is no longer a number, or the last checkpoint could not be saved; 128 and the
        signal's number if one has stopped it.
    """
    began = time.perf_counter()
    held_out = windows(text.held_out, config.context)
    bits, code, status = None, 0, "finished"
    state, start = (job.init(config.seed), 0) if restored is None else (restored.state, restored.step)
    report.show_bytes(console, config, job, state)
    if start == config.steps:
        console.print(f"All {start} steps are made; {saved.path(start)} is the last of them.", soft_wrap=True)
    elif start:
        console.print(f"Goes on after step {start}, from {saved.path(start)}.", soft_wrap=True)
    try:
        evaluate = make_evaluate(job, config.batch_size)
        if start < config.steps:
            state = _steps(config, job, text, state, start, evaluate, held_out, record, saved, console, auditing)
        with console.status(f"Validation on all {len(text.held_out):,} held-out bytes"):
            bits = evaluate(state.params, held_out)
        record.add("validation", step=config.steps, bits_per_byte=bits, windows=len(held_out))
        console.print(
            f"Held-out text: [bold]{bits:.3f}[/] bits per byte after {config.steps} steps in "
            f"{(time.perf_counter() - began) / 60:.1f} minutes, {abs(yardstick - bits):.3f} "
            f"{'under' if bits < yardstick else 'over'} the order-2 byte model's {yardstick:.3f}."
        )
        if config.sample:
            _show_sample(config, job, state, console)
    except Stopped as stopped:
        there = f" Saved; go on with --out {record.folder} --resume." if config.save_every else ""
        console.print(f"Interrupted after step {stopped.step}.{there}", soft_wrap=True)
        code, status = 128 + stopped.signal, "interrupted"
    except KeyboardInterrupt:
        console.print("Interrupted.")
        code, status = 128 + signal.SIGINT, "interrupted"
    except SaveFailed as error:
        console.print(f"[red]Stopped:[/] {error}")
        code, status = 1, "not saved"
    except FloatingPointError as error:
        console.print(f"[red]Stopped:[/] {error}")
        code, status = 1, "diverged"
    steps, minutes = len(record.of("train")), (time.perf_counter() - began) / 60
    record.add("summary", status=status, steps=steps, bits_per_byte=bits, yardstick=yardstick, minutes=minutes)
    console.print(f"{steps} steps. Metrics in {record.path}, plot in {plot_loss(record, yardstick)}.", soft_wrap=True)
    return code


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Notes the first Ctrl-C or SIGTERM, so that no step is cut in two; the second one stops the run at once."""
    asked: list[int] = []

    def ask(signum, frame):
        asked.append(signum)
        restore()

    def restore():
        for signum, handler in before.items():
            signal.signal(signum, handler)

    before = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        restore()


def _steps(config, job, text, state, start, evaluate, held_out, record, saved, console, auditing) -> jzero.TrainState:
    some = held_out[:: math.ceil(len(held_out) / QUICK_WINDOWS)]
    tokens, recent = config.batch_size * config.context, deque(maxlen=20)
    with report.progress_bar(console) as progress, interrupts() as asked:
        bar = progress.add_task(
            "", total=config.steps, completed=start, loss=math.nan, bits=math.nan, speed=0, norm=math.nan, scale=""
        )
        for step in range(start, config.steps):
            began = time.perf_counter()
            batch = job.layout.put_batch(batch_of(config, text, step))
            state, metrics = job.step(state, batch)
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            seconds, bits = time.perf_counter() - began, loss / math.log(2)
            record.add(
                "train",
                step=step + 1,
                loss=loss,
                bits_per_byte=bits,
                grad_norm=norm,
                clipped=bool(metrics["clipped"]),
                loss_scale=float(metrics["loss_scale"]),
                skipped=bool(metrics["skipped"]),
                lr=float(job.schedule(step)),
                tokens_per_second=tokens / seconds,
                seconds=seconds,
            )
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss of step {step + 1} is {loss}; try a lower --lr or a lower --clip.")
            if step > start:
                recent.append(seconds)
            else:
                console.print(f"Compiled, and made the first step, in {seconds:.1f} s.")
                if auditing:
                    found = jzero.audit(job.step, state, batch)
                    console.print(found)
                    record.add("audit", **found.as_dict())
            speed = tokens * len(recent) / sum(recent) if recent else 0
            scale = report.scale_and_skips(state) if job.loss_scale else ""
            progress.update(bar, completed=step + 1, loss=loss, bits=bits, norm=norm, speed=speed, scale=scale)
            if config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
                quick = evaluate(state.params, some)
                record.add("validation", step=step + 1, bits_per_byte=quick, windows=len(some))
                console.print(
                    f"step {step + 1}: batch {bits:.3f}, held out {quick:.3f} bits per byte "
                    f"({len(some)} of {len(held_out)} windows)"
                )
            stopped = asked[0] if asked else None
            if config.save_every and (stopped or step + 1 == config.steps or saved.due(step + 1)):
                saved.save(step + 1, state, job.tx, job.layout, data=position(config, text, step + 1))
            if stopped:
                saved.wait()
                raise Stopped(stopped, step + 1)
        saved.wait()
    return state


def _show_sample(config: Config, job: Job, state: jzero.TrainState, console: Console) -> None:
    whole = jax.jit(job.layout.computed, out_shardings=job.layout.sharding(P()))(state.params)
    drawn = generate(
        job.apply,
        jax.tree.map(lambda leaf: leaf.addressable_data(0), whole),
        config.prompt.encode(),
        count=config.sample,
        context=config.context,
        temperature=config.temperature,
        seed=config.seed,
    )
    body = Styled(config.prompt, style="bold").append(printable(drawn), style="not bold")
    console.print(Panel(body, title=f"A sample at temperature {config.temperature}"))
