"""The command line: `jzero <command>`, a thin layer over the library."""

import argparse
from collections.abc import Sequence

from jzero.cli import bandwidth


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns an exit code."""
    parser = argparse.ArgumentParser(prog="jzero", description="ZeRO for JAX: see it before and after.")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in (bandwidth,):
        command.add(subparsers)
    args = parser.parse_args(argv)
    return args.run(args)
