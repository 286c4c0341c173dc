"""Options in, exit code out."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from experiments.gpt import data, devices, report
from experiments.gpt.compare import compare
from experiments.gpt.config import Config, Precision, parse_loss_scale, parse_mesh
from experiments.gpt.job import build
from experiments.gpt.ngram import ByteTrigrams
from experiments.gpt.record import Record
from experiments.gpt.resume import checkpointer, resume
from experiments.gpt.train import train
from jzero.checkpoint import CorruptCheckpoint
from jzero.cli.help import Help
from jzero.cli.options import parsed

COMPARE_STEPS = 5

DESCRIPTION = """\
Train a byte-level GPT on real text, at any ZeRO stage.

Without options it trains for a few minutes at stage 3 on the source of Python's standard library, over 8 devices, which
are simulated on the CPU if this machine has no accelerator. It shows where each leaf lives, what each device stores,
and at the end a sample of what the model writes; metrics and a loss plot stay in a folder."""

EXAMPLES = """\
examples:
  python -m experiments.gpt --compare-stages           losses, bytes and collectives of stages 0 to 3, side by side
  python -m experiments.gpt --plan                     what it would take, at each stage, without training
  python -m experiments.gpt --audit                    what the step's program moves, against what ZeRO promises
  python -m experiments.gpt --stage 1 --devices 4      another stage, on four devices
  python -m experiments.gpt --mesh replica=2,data=4    hybrid sharding: sharded in groups of 4, repeated over 2
  python -m experiments.gpt --mesh data=4,model=2      tensor parallelism within pairs, beside the stage
  python -m experiments.gpt --precision bf16           float32 master weights, all else in bfloat16
  python -m experiments.gpt --data ~/my/notes          your own text: a file, or every text file of a folder
  python -m experiments.gpt --out runs/a --resume      begins, and whenever it was stopped goes on where it was
  JAX_PLATFORMS=cpu python -m experiments.gpt          simulated devices, even where there are accelerators"""


def parser() -> argparse.ArgumentParser:
    """The command line. Its defaults are those of `Config`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpt",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )

    def option(group, kind, name, text, **more):
        default = getattr(Config, name)
        more = {"metavar": {int: "N", float: "X"}[kind], "help": f"{text} (default: {default})"} | more
        group.add_argument("--" + name.replace("_", "-"), type=kind, default=default, **more)

    group = parser.add_argument_group("sharding")
    text = "ZeRO stage: 0 nothing sharded; 1, 2 gradients and optimizer state; 3 params as well"
    option(group, int, "stage", text, choices=range(4), metavar="0..3")
    text = "size of each mesh axis: 'data', perhaps 'replica' or 'model'; -1 takes what is left (default: data=-1)"
    group.add_argument("--mesh", type=parsed(parse_mesh), default=Config.mesh, metavar="AXES", help=text)
    text = "how many devices (default: what --mesh needs, else all accelerators, or 8 simulated ones)"
    option(group, int, "devices", text, help=text)
    option(group, int, "min_shard_size", "leaves with fewer elements stay whole on every device")

    group = parser.add_argument_group("precision")
    text = (
        f"fp32; bf16 or fp16 with float32 master weights; bf16-pure, all stored in bfloat16 "
        f"(default: {Config.precision}; slow on CPUs, but for fp32)"
    )
    group.add_argument("--precision", choices=get_args(Precision), default=Config.precision, help=text)
    text = "a number, 'dynamic', or 0 for none (default: dynamic for fp16, else none)"
    group.add_argument("--loss-scale", type=parsed(parse_loss_scale), metavar="X", help=text)

    group = parser.add_argument_group("model")
    option(group, int, "layers", "transformer blocks")
    option(group, int, "width", "width of the residual stream")
    option(group, int, "heads", "attention heads")
    option(group, int, "context", "bytes that the model sees at once")
    text = "recompute each block in the backward pass, or store its activations (default: recompute)"
    group.add_argument("--remat", action=argparse.BooleanOptionalAction, default=Config.remat, help=text)

    group = parser.add_argument_group("training")
    text = "train on this file, or on the text files of this folder; a part is held out (default: the standard library)"
    group.add_argument("--data", metavar="PATH", help=text)
    text = f"optimizer steps (default: {Config.steps}; {COMPARE_STEPS} with --compare-stages)"
    group.add_argument("--steps", type=int, metavar="N", help=text)
    option(group, int, "batch_size", "windows per step, over all devices and microbatches")
    option(group, int, "microbatches", "parts that each device's share of the batch is split into")
    optimizers = ("adamw", "sgd", "lamb", "adafactor")
    text = f"which optimizer (default: {Config.optimizer})"
    group.add_argument("--optimizer", choices=optimizers, default=Config.optimizer, help=text)
    option(group, float, "lr", "peak learning rate")
    option(group, float, "warmup", "share of the steps over which it rises; then it falls to a tenth")
    option(group, float, "weight_decay", "decoupled weight decay, for adamw and lamb")
    option(group, float, "clip", "largest gradient norm; 0: no clipping")
    option(group, int, "seed", "seeds params, batches and sample; what is held out does not depend on it")

    group = parser.add_argument_group("output")
    option(group, int, "eval_every", "steps between validations on a part of the held-out text; 0: only at the end")
    option(group, int, "save_every", "steps between checkpoints, beside one at the end or when stopped; 0: none")
    option(group, int, "sample", "bytes to generate at the end; 0: none")
    text = f"what they go on from (default: {Config.prompt!r})"
    group.add_argument("--prompt", default=Config.prompt, metavar="TEXT", help=text)
    option(group, float, "temperature", "of the sample; 0 takes the likeliest byte")
    text = "folder for config.json, metrics.jsonl, loss.png and checkpoints (default: a new one under runs/)"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "replace the run that --out holds, instead of refusing"
    group.add_argument("--overwrite", action="store_true", help=text)
    text = "go on from the last checkpoint of the run that --out holds, at any stage and mesh; if there is none, begin"
    group.add_argument("--resume", action="store_true", help=text)
    text = "train the same few steps at stages 0 to 3, print them side by side, and stop"
    group.add_argument("--compare-stages", action="store_true", help=text)
    text = "print what stages 0 to 3 would take, and where each leaf lives and is gathered; train nothing"
    group.add_argument("--plan", action="store_true", help=text)
    text = "after the first step hold its program against what ZeRO promises (compiles the step once more)"
    group.add_argument("--audit", action="store_true", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns an exit code."""
    command = parser()
    options = vars(command.parse_args(argv))
    out, overwrite, resuming, comparing = (
        options.pop(name) for name in ("out", "overwrite", "resume", "compare_stages")
    )
    planning, auditing = (options.pop(name) for name in ("plan", "audit"))
    named, out = out is not None, out or _new_folder()
    if options["steps"] is None:
        options["steps"] = COMPARE_STEPS if comparing else Config.steps
    console = Console()
    try:
        config = Config(**options)
        mesh = devices.make_mesh(config)
        config = dataclasses.replace(config, devices=mesh.size, mesh=tuple(mesh.shape.items()))
        job = build(config, mesh)
        if planning:
            return report.show_plan(console, config, job)
        text = data.load(config.data)
        data.check(text, config.context)
        if resuming and (overwrite or comparing):
            raise ValueError("--resume goes on with a run; leave --overwrite and --compare-stages out.")
        if resuming and not named:
            raise ValueError("--resume goes on with the run of a folder; name it with --out.")
        saved = checkpointer(out, config)
        restored = resume(saved, job, config, text) if resuming else None
        record = Record(out, config, overwrite=overwrite or resuming, upto=restored.step if restored else 0)
    except (ValueError, OSError, CorruptCheckpoint) as error:
        command.exit(2, f"{command.prog}: error: {error}\n")
    console.print(devices.describe(mesh))
    if comparing:
        return compare(config, mesh, text, record, console)
    report.show_placements(console, job)
    yardstick = ByteTrigrams(text.train).bits_per_byte(text.held_out)
    report.show_text(console, text, yardstick)
    with saved:
        return train(config, job, text, yardstick, record, saved, restored, console, auditing=auditing)


def _new_folder() -> Path:
    return Path("runs") / time.strftime("gpt-%Y%m%d-%H%M%S")
