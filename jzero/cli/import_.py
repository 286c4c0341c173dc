"""`jzero import`: a checkpoint of params from safetensors files, or from checkpoints of PyTorch."""

import argparse
import dataclasses
import time
from typing import Any

from jzero.checkpoint.exchange.bring import import_params
from jzero.cli.as_json import print_json
from jzero.cli.checkpoints import add_memory, command, exits, pace, safe, shown_progress
from jzero.cli.export import add_map, rules_of
from jzero.wording import few

DESCRIPTION = """\
Makes a checkpoint of params to start a training from, of safetensors files; of the float32 master weights that
DeepSpeed saved with ZeRO at stage 1, 2 or 3, or Megatron-LM as torch_dist; or of other folders of
torch.distributed.checkpoint. PyTorch is not needed. Nothing in the files is run, and their names cannot lead out of
DST. It takes a bounded amount of memory, compares what it wrote with the files, and only then gives the checkpoint its
name."""

EXAMPLES = """\
examples:
  jzero import model.safetensors run/checkpoints/0 --map gpt2
  jzero import Llama-3.2-1B/ run/checkpoints/0 --map llama        a folder of files, with their index
  jzero import files/ run/checkpoints/0 --map my.toml --under params --json
  jzero import run/global_step1000 run/checkpoints/0 --map llama  what DeepSpeed saved
  jzero import iter_0001000 run/checkpoints/0 --map megatron-gpt  what Megatron-LM saved
  jzero import files/ DST                                         tensor a.b becomes the leaf params/a/b

To start from it: Checkpointer("run/checkpoints").restore(tx, layout, step=0, only=("params",), init=...), with
cast=True if the files have another dtype than the layout. Or without a checkpoint between:
jzero.checkpoint.load_safetensors(files, layout, map=...)."""


def add(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = command(subparsers, "import", "a checkpoint of safetensors files, or of PyTorch's", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "source", metavar="SRC", help="a .safetensors file, a folder of them, or one that PyTorch saved"
    )
    text = "the new checkpoint; a step of a folder of checkpoints, such as run/checkpoints/0"
    parser.add_argument("checkpoint", metavar="DST", help=text)
    add_map(parser)
    add_memory(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace DST, once the new one is whole")
    parser.set_defaults(run=exits(run))


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    began = time.perf_counter()
    with shown_progress() as progress:
        done = import_params(
            options.source,
            options.checkpoint,
            map=rules_of(options),
            memory=options.max_memory,
            overwrite=options.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    if options.json:
        plain = dataclasses.asdict(done) | {"source": options.source, "checkpoint": options.checkpoint}
        print_json(plain | {"seconds": seconds})
        return 0
    speed = pace(done.nbytes, seconds)
    print(f"{safe(options.checkpoint)}: {done.leaves} leaves, {speed}; compared with the files.")
    for why, names in (("as the map says", done.ignored), ("as no params", done.left_out)):
        if names:
            print(f"Left out, {why}: {few(map(safe, names), 5)}.")
    if done.note:
        print(safe(done.note))
    return 0
