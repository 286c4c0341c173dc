"""`jzero export`: the params of a checkpoint as safetensors files."""

import argparse
import dataclasses
import time
from typing import Any

from jzero.checkpoint.exchange.export import FLOATS, SHARD, export_safetensors
from jzero.checkpoint.exchange.rules import MAPS, Rules
from jzero.cli.as_json import print_json
from jzero.cli.checkpoints import add_memory, command, exits, pace, safe, shown_progress
from jzero.cli.options import nbytes, parsed

DESCRIPTION = """\
Writes the params of a checkpoint as whole tensors into safetensors files, as Hugging Face lays them out: one file, or
several and an index. Where training kept float32 master weights beside narrower params, they are what is exported.
It takes a bounded amount of memory, reads back all that it wrote, and only then gives the folder its name."""

EXAMPLES = """\
examples:
  jzero export run/checkpoints DST                                the latest step, leaves by their own names
  jzero export run/checkpoints/1000 DST --map gpt2                the names and shapes of transformers' GPT2LMHeadModel
  jzero export run/checkpoints DST --map llama --dtype bfloat16   linear weights turned to (out, in)
  jzero export run/checkpoints DST --map llama --under params --unstacked
  jzero export run/checkpoints DST --map my.toml --max-shard-size 2GB --json

A map is a TOML file that says which leaf is which tensor; docs/safetensors.md describes it."""


def add(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = command(subparsers, "export", "params as safetensors files", DESCRIPTION, EXAMPLES)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them: then the latest")
    parser.add_argument("folder", metavar="DST", help="the folder of the files")
    parser.add_argument("--format", choices=("safetensors",), default="safetensors", help="(default: safetensors)")
    add_map(parser)
    text = "what floats become (default: as they are stored)"
    parser.add_argument("--dtype", choices=FLOATS, help=text)
    text = f"most bytes of tensors in a file (default: {SHARD // 10**9}GB)"
    parser.add_argument("--max-shard-size", type=parsed(nbytes), default=SHARD, metavar="SIZE", help=text)
    add_memory(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export, once the new one is whole")
    parser.set_defaults(run=exits(run))


def add_map(parser: argparse.ArgumentParser) -> None:
    """Adds the options of maps."""
    known = ", ".join(sorted(path.stem for path in MAPS.glob("*.toml")))
    text = f"which leaf is which tensor: {known}, or a TOML file (default: each leaf by its own name)"
    parser.add_argument("--map", metavar="MAP", help=text)
    text = "layers have leaves of their own: {layer} in a map is a key, and not the first dim"
    parser.add_argument("--unstacked", action="store_true", help=text)
    text = "keys of the params above the leaves of the map, such as params"
    parser.add_argument("--under", default="", metavar="KEYS", help=text)


def rules_of(options: argparse.Namespace) -> Rules | None:
    """The map that the options name.

    Raises:
        ValueError: It is none, or options of maps come without one.
    """
    if options.map is not None:
        return Rules.read(options.map, stacked=not options.unstacked, under=options.under)
    if options.unstacked or options.under:
        raise ValueError("--unstacked and --under say how a map is read; pass --map as well.")
    return None


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    began = time.perf_counter()
    with shown_progress() as progress:
        done = export_safetensors(
            options.checkpoint,
            options.folder,
            map=rules_of(options),
            dtype=options.dtype,
            max_shard=options.max_shard_size,
            memory=options.max_memory,
            overwrite=options.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    if options.json:
        plain = dataclasses.asdict(done) | {"checkpoint": str(done.checkpoint), "folder": options.folder}
        print_json(plain | {"seconds": seconds})
        return 0
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in done.dtypes.items())
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files and an index"
    print(f"{safe(str(done.checkpoint))} to {safe(options.folder)}: {done.tensors} tensors ({kinds}) in {files},")
    print(f"{pace(done.nbytes, seconds)}; read back and compared.")
    if done.left:
        print(f"Not exported: {', '.join(map(safe, done.left))}.")
    return 0
