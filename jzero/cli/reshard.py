"""`jzero reshard`: a checkpoint rewritten for another mesh, with other leaves, or in other dtypes."""

import argparse
import time
from typing import Any

from jzero.checkpoint.chunks import LARGEST
from jzero.checkpoint.joints import Merge, Split
from jzero.checkpoint.layers import Stack, Unstack
from jzero.checkpoint.patterns import Pattern
from jzero.checkpoint.rename import Cast, Rename
from jzero.checkpoint.reshard import reshard
from jzero.cli.as_json import print_json
from jzero.cli.checkpoints import add_memory, command, exits, mesh_and_stage, pace, safe, shown_progress
from jzero.cli.options import nbytes, parsed

DESCRIPTION = """\
Rewrites a checkpoint: in chunks that another mesh reads fast, with fewer or other leaves, or in other dtypes; from
jzero's or from plain orbax's, into one that both read. It takes a bounded amount of memory, compares what it wrote with
what it read, and only then gives it its name: until there is all of it, there is nothing.

None of this is needed to restore on another mesh: any checkpoint of jzero restores into any layout."""

EXAMPLES = """\
examples:
  jzero reshard run/checkpoints/1000 DST --mesh data=32,model=2,stage=3      chunks for this mesh
  jzero reshard run/checkpoints/1000 DST --only params --cast 'params/**=bfloat16'
  jzero reshard run/checkpoints/1000 DST --drop opt_state --max-memory 300MB
  jzero reshard SRC DST --stack '**/blocks/#=**/blocks'                      one leaf for all layers, as nn.scan has it
  jzero reshard SRC DST --unstack '**/blocks=**/blocks/#'                    and back
  jzero reshard SRC DST --rename 'params/h=params/blocks' --split '**/qkv=**/q,**/k,**/v'
  jzero reshard SRC DST --merge '**/q,**/k,**/v=**/qkv@0'                    along dim 0 instead of the last

A pattern names a leaf, or all below a level: 'params/blocks'. ** stands for any number of levels, * for any text in one
level, # for a number; on the right of a rule they stand for what they found on the left. In a name, a backslash goes
before these and before = @ , : / and itself, as in 'params/a\\=b=params/c'. Rules are applied in the order given, casts
last. `jzero inspect` lists names."""


def add(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = command(subparsers, "reshard", "rewrite a checkpoint for another mesh or model", DESCRIPTION, EXAMPLES)
    parser.add_argument("source", metavar="SRC", help="a checkpoint, or a folder of them")
    parser.add_argument("folder", metavar="DST", help="the folder of the new one")
    text = "chunks that devices of this mesh read whole, such as data=4,model=2,stage=3 (default: as they are)"
    parser.add_argument("--mesh", type=parsed(mesh_and_stage), metavar="AXES", help=text)
    text = f"most bytes of a chunk (default: {LARGEST // 2**20}MiB)"
    parser.add_argument("--chunk", type=parsed(nbytes), default=LARGEST, metavar="SIZE", help=text)
    pattern = {"type": parsed(Pattern), "action": "append", "default": [], "metavar": "PATTERN"}
    parser.add_argument("--drop", **pattern, help="leave these out; may be repeated, as all that follow")
    parser.add_argument("--only", **pattern, help="keep only these")
    for option, rule, form, text in (
        ("--rename", Rename, "LEFT=RIGHT", "give other names"),
        ("--stack", Stack, "LEFT=RIGHT[@DIM]", "make one leaf of numbered ones"),
        ("--unstack", Unstack, "LEFT=RIGHT[@DIM]", "make numbered leaves of one"),
        ("--split", Split, "LEFT=RIGHT,...[@DIM]", "cut a leaf, evenly or as in q:64,k:32"),
        ("--merge", Merge, "LEFT,...=RIGHT[@DIM]", "join leaves along a dim"),
    ):
        kind = parsed(rule.parse)
        parser.add_argument(option, dest="rules", action="append", type=kind, default=[], metavar=form, help=text)
    kind = parsed(Cast.parse)
    parser.add_argument("--cast", action="append", type=kind, default=[], metavar="PATTERN=DTYPE", help="cast floats")
    add_memory(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace DST, once the new one is whole")
    parser.set_defaults(run=exits(run))


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    mesh, stage = options.mesh or (None, None)
    began = time.perf_counter()
    with shown_progress() as progress:
        done = reshard(
            options.source,
            options.folder,
            drop=options.drop,
            only=options.only,
            rules=[*options.rules, *options.cast],
            mesh=mesh,
            stage=3 if stage is None else stage,
            chunk=options.chunk,
            memory=options.max_memory,
            overwrite=options.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    if options.json:
        plain = {
            "source": str(done.origin.folder),
            "checkpoint": options.folder,
            "leaves": len(done.leaves),
            "bytes": done.nbytes,
            "seconds": seconds,
            "left_out": sorted(done.origin.others),
        }
        print_json(plain)
    else:
        print(f"{safe(str(done.origin.folder))} to {safe(options.folder)}: {len(done.leaves)} leaves,")
        print(f"{pace(done.nbytes, seconds)}; compared with what was read.")
        if done.origin.others:
            print(f"Left out, for these are no arrays: {safe(', '.join(sorted(done.origin.others)))}.")
    return 0
