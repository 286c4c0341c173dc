"""`jzero verify`: a checkpoint against its checksums, or against another one."""

import argparse
from typing import Any

from jzero.checkpoint.compare import compare
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.verify import Verified, verify
from jzero.cli.as_json import print_json
from jzero.cli.checkpoints import add_memory, command, exits, safe, shown_progress
from jzero.wording import size

DESCRIPTION = """\
Reads all of a checkpoint and checks every file against the checksums that were written with it; or, with --against,
compares two checkpoints leaf by leaf and bit by bit, whatever mesh, stage or chunks they were written with."""

EXAMPLES = """\
examples:
  jzero verify run/checkpoints/1000
  jzero verify run/checkpoints/1000 --against resharded
  jzero verify run/checkpoints --json && echo "the latest one is whole"

A checkpoint of plain orbax has no checksums: only what cannot be read at all is noticed there."""


def add(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = command(subparsers, "verify", "whether a checkpoint is whole, or equal to another", DESCRIPTION, EXAMPLES)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them")
    parser.add_argument("--against", metavar="OTHER", help="a checkpoint to compare it with")
    add_memory(parser)
    parser.set_defaults(run=exits(run))


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    if options.against is not None:
        return _compared(options)
    with shown_progress() as progress:
        found = verify(options.checkpoint, memory=options.max_memory, progress=progress)
    if options.json:
        print_json(_plain(found))
    else:
        print("\n".join(_lines(found)))
    return 1 if found.problems else 0


def _compared(options: argparse.Namespace) -> int:
    one, other = Origin.open(options.checkpoint), Origin.open(options.against)
    with shown_progress() as progress:
        found = list(compare(one, other, options.max_memory, progress))
    if options.json:
        plain = {
            "checkpoint": str(one.folder),
            "against": str(other.folder),
            "equal": not found,
            "leaves": len(one.leaves),
            "differences": [{"leaf": each.leaf, "reason": each.reason} for each in found],
        }
        print_json(plain)
    elif found:
        print(f"{safe(str(one.folder))} and {safe(str(other.folder))} differ in {len(found)} of their leaves:")
        print("\n".join(f"  {safe(each.leaf)}: {safe(each.reason)}" for each in found))
    else:
        print(f"{safe(str(one.folder))} and {safe(str(other.folder))} are equal in all {len(one.leaves)} leaves.")
    return 1 if found else 0


def _lines(found: Verified) -> list[str]:
    where = safe(str(found.folder))
    if found.problems:
        lines = [f"{where} is damaged; {len(found.problems)} file{'s' if len(found.problems) > 1 else ''}:"]
        lines += [f"  {safe(str(problem))}" for problem in found.problems]
    elif found.has_checksums:
        lines = [f"{where} is whole: {found.files} files, {size(found.bytes)} of arrays."]
    else:
        lines = [
            f"{where} can be read, {size(found.bytes)} of arrays. Plain orbax wrote it, without checksums: changed "
            f"numbers would not be noticed. `jzero reshard` makes a copy that has them."
        ]
    if found.unknown:
        lines += ["Not of it, and never read:", *(f"  {safe(name)}" for name in found.unknown)]
    return lines


def _plain(found: Verified) -> dict[str, Any]:
    """All of it as JSON can hold it."""
    return {
        "checkpoint": str(found.folder),
        "whole": not found.problems,
        "has_checksums": found.has_checksums,
        "files": found.files,
        "bytes": found.bytes,
        "problems": [
            {"file": problem.file, "leaf": problem.leaf, "message": str(problem)} for problem in found.problems
        ],
        "unknown": list(found.unknown),
    }
