"""Training text, held-out text, and the batches cut from them."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Folders that are left out of the standard library: other people's packages, tests, and tables written by programs.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

HELD_OUT_SHARE = 20
HELD_OUT_MOST = 2**19
"""Held out: one byte in HELD_OUT_SHARE, and never more than HELD_OUT_MOST bytes, which bounds the time to validate."""


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes that no training step sees.

    Attributes:
        source: Where they come from, in words.
        train: uint8, the training files one after another, in the order of their names.
        held_out: uint8, the held-out files likewise.
        train_files: Names of the training files.
        held_out_files: Names of the held-out files; none if the tail of a single file is held out.
    """

    source: str
    train: np.ndarray
    held_out: np.ndarray
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def load(path: str | None) -> Text:
    """Reads the standard library's source, or a user's file or folder, and sets some of it apart.

    The split depends on the names and sizes of the files alone, so every run on the same text has the same one.

    Args:
        path: A file; or a folder, of which every file is read that is neither hidden nor binary; or None.

    Raises:
        ValueError: Nothing is there, or no text is in it.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = {
            name: data for name, data in _read(folder, "*.py").items() if not NOT_STDLIB & set(name.split("/")[:-1])
        }
        source = f"the standard library of this Python ({folder})"
        if not files:
            raise ValueError(f"No source files under {folder}: this Python has none. Name some text with --data PATH.")
    elif Path(path).is_file():
        data = Path(path).read_bytes()
        cut = len(data) - held_out_size(len(data))
        return Text(path, _array(data[:cut]), _array(data[cut:]), (Path(path).name,), ())
    elif Path(path).is_dir():
        files, source = _read(Path(path), "*"), path
        if not files:
            raise ValueError(f"--data {path}: no text in this folder (hidden, empty and binary files do not count).")
        if len(files) == 1:
            return load(str(Path(path, *files)))
    else:
        raise ValueError(f"--data {path}: no such file or folder.")
    train, held_out = split({name: len(data) for name, data in files.items()})
    return Text(
        source,
        _array(b"".join(files[name] for name in train)),
        _array(b"".join(files[name] for name in held_out)),
        train,
        held_out,
    )


def split(sizes: dict[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sets files apart: in the order of a hash of their names, those that still fit; if none does, the smallest.

    Args:
        sizes: Bytes of each file by name; two files or more.

    Returns:
        Names of the training files and of the held-out files, each sorted.

    Example:
        >>> split({"a.py": 90, "b.py": 5, "c.py": 5})
        (('a.py', 'c.py'), ('b.py',))
    """
    left = held_out_size(sum(sizes.values()))
    held_out = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= left:
            held_out.add(name)
            left -= sizes[name]
    held_out = held_out or {min(sizes, key=lambda name: (sizes[name], name))}
    return tuple(sorted(set(sizes) - held_out)), tuple(sorted(held_out))


def held_out_size(total: int) -> int:
    """How many of `total` bytes are held out."""
    return min(total // HELD_OUT_SHARE, HELD_OUT_MOST)


def check(text: Text, context: int) -> None:
    """Raises unless both parts hold at least one window of `context` bytes and the byte after it."""
    for name, data in (("training", text.train), ("held-out", text.held_out)):
        if len(data) <= context:
            raise ValueError(
                f"The {name} text has {len(data)} bytes, fewer than one window of --context {context} and the byte "
                f"after it. Give more text ({text.source} has {len(text.train) + len(text.held_out)} bytes, of which "
                f"one in {HELD_OUT_SHARE} is held out), or a shorter --context."
            )


def sample_batch(text: np.ndarray, *, batch_size: int, context: int, seed: int, step: int) -> np.ndarray:
    """Windows at random places, a pure function of `(seed, step)`: a run can stop and go on anywhere.

    Args:
        text: uint8 bytes, at least `context + 1`.
        batch_size: Number of windows.
        context: Bytes that the model sees; each window has one more, to predict.
        seed: Of the run.
        step: Number of the training step.

    Returns:
        int32 (batch_size, context + 1).
    """
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - context, batch_size)
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def windows(text: np.ndarray, context: int) -> np.ndarray:
    """All of a text as int32 (count, context + 1): each byte after the first is predicted once, but for a last bit."""
    count = (len(text) - 1) // context
    return text[np.arange(count)[:, None] * context + np.arange(context + 1)].astype(np.int32)


def _read(folder: Path, pattern: str) -> dict[str, bytes]:
    found = {}
    for path in folder.rglob(pattern):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            found[name] = path.read_bytes()
    return {name: found[name] for name in sorted(found) if found[name] and b"\0" not in found[name]}


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
