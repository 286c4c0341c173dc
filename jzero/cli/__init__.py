"""The command `jzero`. Each subcommand is a module here, and one call of the library."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

import jax

from jzero import __version__
from jzero.cli import bandwidth, estimate, export, import_, inspect, preflight, reshard, verify
from jzero.cli.help import Help

COMMANDS = (estimate, preflight, bandwidth, inspect, verify, reshard, export, import_)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Returns an exit code: 0 done, 1 done with a verdict of no, 2 a wrong command line, or output that cannot be written,
    3 memory or disk are too small, 130 stopped by Ctrl-C, 141 nobody reads what it prints, as in `jzero inspect CKPT |
    head`.
    """
    try:
        code = _run(argv)
        if sys.stdout is not None:  # it was closed, as by ">&-"
            sys.stdout.flush()
    except KeyboardInterrupt:
        _say("jzero: stopped")
        return 128 + signal.SIGINT
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):  # rich exits for it
            raise
        _to_nowhere(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        _to_nowhere(sys.stdout)
        _say(f"jzero: error: the output cannot be written: {error}")
        return 2
    return code


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr)
    except OSError:
        _to_nowhere(sys.stderr)


def _to_nowhere(stream: TextIO | None) -> None:
    """What is left in the buffer of a stream goes nowhere when Python ends."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(argv: Sequence[str] | None) -> int:
    text = "ZeRO for JAX: look before and after you train. `jzero COMMAND --help` has examples."
    parser = argparse.ArgumentParser(prog="jzero", description=text, formatter_class=Help)
    parser.add_argument("--version", action="version", version=f"jzero {__version__}, jax {jax.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(subparsers)
    try:
        options = parser.parse_args(argv)
    except SystemExit as error:  # argparse: 0 after --help, 2 after a message
        return error.code if isinstance(error.code, int) else 2
    try:
        return options.run(options)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"jzero: error: {error}", file=sys.stderr)
        return 2
