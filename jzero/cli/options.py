"""What options say: sizes of a mesh, and things named as module:name."""

import argparse
import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jzero.jaxprs import LIBRARIES


def parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser of an option, whose message argparse then shows."""

    def checked(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def mesh_axes(text: str) -> dict[str, int]:
    """Reads "replica=2,data=-1".

    Raises:
        ValueError: No pairs of name and size, a name twice, or a size that is neither positive nor -1.

    Example:
        >>> mesh_axes("replica=2,data=-1")
        {'replica': 2, 'data': -1}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not name.isidentifier() or not size.removeprefix("-").isdecimal() or (int(size) < 1 and int(size) != -1):
            raise ValueError(f"{part!r} is not a name and a positive size (or -1); wanted for example data=32,model=2")
        if name in axes:
            raise ValueError(f"axis {name!r} is named twice in {text!r}")
        axes[name] = int(size)
    return axes


def nbytes(text: str) -> int:
    """Reads a number of bytes.

    Raises:
        ValueError: Another form, or no whole bytes.

    Example:
        >>> nbytes("300MB"), nbytes("1.5KiB"), nbytes("64")
        (300000000, 1536, 64)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT]?)(i?)B)?", text)
    if match is None or (size := float(match[1]) * unit(match[2], match[3])) < 1 or size % 1:
        raise ValueError(f"{text!r}; wanted whole bytes, as 65536, 64KiB (1024) or 64KB (1000)")
    return int(size)


def plot_file(text: str) -> Path:
    """Where a picture is to go, checked before the work that it shows.

    Raises:
        ValueError: No format that matplotlib writes, or a folder that is not there or may not be written to.

    Example:
        >>> plot_file("memory.pdf").suffix
        '.pdf'
    """
    from matplotlib.figure import Figure  # takes half a second, of those who draw alone

    path = Path(text)
    if path.suffix[1:] not in (known := Figure().canvas.get_supported_filetypes()):
        raise ValueError(f"{text}: cannot write {path.suffix or 'a file without an ending'}; {', '.join(known)}.")
    if not path.parent.is_dir():
        raise ValueError(f"No such file or directory: {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{text}: may not be written.")
    return path


def filled(axes: dict[str, int] | None, devices: int | None) -> dict[str, int]:
    """Sizes of all axes, from `--mesh` and `--devices`, of which one may be left out.

    Raises:
        ValueError: Neither is there, or they do not fit one another.

    Example:
        >>> filled({"data": -1, "model": 2}, 64), filled(None, 8)
        ({'data': 32, 'model': 2}, {'data': 8})
    """
    if devices is not None and devices < 1:
        raise ValueError(f"--devices {devices}: wanted 1 or more.")
    if axes is None:
        if devices is None:
            raise ValueError("on how many devices? Pass --devices 64, or --mesh data=32,model=2.")
        return {"data": devices}
    free = [name for name, size in axes.items() if size == -1]
    known = math.prod(size for size in axes.values() if size != -1)
    given = ",".join(f"{name}={size}" for name, size in axes.items())
    if len(free) > 1:
        raise ValueError(f"--mesh {given}: only one axis can be -1, and take the devices that are left.")
    if free and devices is None:
        raise ValueError(f"--mesh {given}: how many devices are left for {free[0]!r}? Pass --devices as well.")
    if devices is not None and (devices % known if free else known != devices):
        fit = f"do not divide --devices {devices}" if free else f"are {known} devices, but --devices says {devices}"
        raise ValueError(f"--mesh {given}: {' x '.join(str(s) for s in axes.values() if s != -1)} {fit}.")
    return {name: devices // known if devices and size == -1 else size for name, size in axes.items()}


def named(text: str, what: str) -> Any:
    """What "module:name" stands for; the current folder is importable.

    Raises:
        ValueError: Another form, a module that cannot be imported (with its own error), or no such name in it.

    Example:
        >>> named("math:tau", "--number")
        6.283185307179586
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{what} {text!r}: wanted module:name, such as experiments.gpt.rules:RULES.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script exits
        raise ValueError(
            f"{what} {text!r}: importing {module_name!r} failed with {type(error).__name__}: {error}. It must be "
            f"installed, or lie in the current folder, {os.getcwd()}."
        ) from error
    if not hasattr(module, name):
        own = [name for name, x in vars(module).items() if getattr(x, "__module__", None) == module_name]
        public = [other for other in own if not other.startswith("_")]
        raise ValueError(f"{what} {text!r}: {module_name!r} has no {name!r}; it has {', '.join(public) or 'nothing'}.")
    return getattr(module, name)


def called(text: str, what: str, *args: Any, takes: str = "without arguments") -> Any:
    """What the function "module:name" returns for these arguments.

    Args:
        text: The name.
        what: The option that it comes from.
        *args: What it is called with.
        takes: What it should take, as in "of one argument, the mesh".

    Raises:
        ValueError: As `named`; it is no function, takes other arguments, or raises (with its own error).
    """
    function = named(text, what)
    if not callable(function):
        raise ValueError(f"{what} {text!r} is a {type(function).__name__}; wanted a function {takes}.")
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        raise ValueError(
            f"{what} {text!r} takes arguments, {inspect.signature(function)}; wanted a function {takes}. Write one "
            f"that calls it with what it needs."
        ) from None
    try:
        return function(*args)
    except Exception as error:
        raise ValueError(f"{what} {text!r} failed with {raised(error)}") from error


def raised(error: BaseException) -> str:
    """An error as it was raised, and the line of whose code it was."""
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((*LIBRARIES, "<"))
    ]
    at = f" ({own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{at}"


def speed(text: str) -> float:
    """Reads the speed of a link in bytes per second.

    Raises:
        ValueError: No number, or another unit.

    Example:
        >>> speed("450GB/s"), speed("400Gb/s")
        (450000000000.0, 50000000000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)([Bb])/s", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r}; wanted a speed, as 450GB/s, or 400Gb/s in bits")
    return float(match[1]) * unit(match[2], match[3]) / (8 if match[4] == "b" else 1)


def unit(prefix: str | None, binary: str | None) -> int:
    """The factor of a prefix K, M, G or T, decimal or binary."""
    return (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1 if prefix else 0)
