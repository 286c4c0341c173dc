"""What a manifest may say: it may come from anywhere, and names must stay inside of its folder.

Each raises a `ValueError` that goes on from the name of the manifest: "... has the step -1".
"""

import re
from typing import Any

from jzero.checkpoint import encoding
from jzero.checkpoint.entry import Entry, Sum
from jzero.checkpoint.names import is_safe, shown

_FILE = re.compile(r"[A-Za-z0-9_%.-]+(/[A-Za-z0-9_%.-]+)*")


def entry(leaf: dict[str, Any]) -> Entry:
    """A leaf, whose folder is a name, and whose shapes and dtypes fit each other."""
    if not is_safe(leaf["folder"]):
        raise ValueError(f"has a leaf in a folder named {leaf['folder']!r}, which may not be one")
    spec = leaf["spec"]
    shape, stored, chunk = leaf["shape"], leaf["stored_shape"], leaf["chunk"]
    sizes = [*shape, *stored, *chunk]
    if not leaf["path"] or not all(isinstance(key, str) for key in leaf["path"]):
        raise ValueError(f"has a leaf of the path {leaf['path']!r}")
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or len(chunk) != len(stored):
        raise ValueError(f"has a leaf {shown(tuple(leaf['path']))!r} of shape {shape} in chunks of {chunk}")
    words = 1 if leaf["dtype"].startswith(encoding.KEY) else 0
    if stored[: len(shape)] != shape or len(stored) != len(shape) + words:
        raise ValueError(f"has a leaf {shown(tuple(leaf['path']))!r} of shape {shape}, stored as {stored} in {chunk}")
    # What has elements is on the disk; else memory would be handed out as it is.
    dtype = encoding.stored_dtype(leaf["dtype"])
    if leaf["stored"] != (None if 0 in stored else dtype) or (leaf["stored"] is not None and 0 in chunk):
        raise ValueError(
            f"has a leaf {shown(tuple(leaf['path']))!r} of {leaf['dtype']}{tuple(shape)}, stored in {leaf['stored']}"
        )
    if spec is not None and not (isinstance(spec, list) and len(spec) >= len(shape) and all(map(_texts, spec))):
        raise ValueError(f"has a leaf {shown(tuple(leaf['path']))!r} of shape {shape}, cut over {spec!r}")
    return Entry(
        path=tuple(leaf["path"]),
        folder=leaf["folder"],
        dtype=leaf["dtype"],
        stored=leaf["stored"],
        spec=None if spec is None else tuple(map(tuple, spec)),
        **{name: tuple(int(size) for size in leaf[name]) for name in ("shape", "stored_shape", "chunk")},
    )


def file(name: str) -> str:
    """The name of a file, which lies inside of the checkpoint."""
    if _FILE.fullmatch(name) is None or any(part in (".", "..") for part in name.split("/")):
        raise ValueError(f"names a file {name!r}, which none of a checkpoint can be")
    return name


def sum_of(name: str, values: Any) -> Sum:
    """The sum of a file."""
    if not isinstance(values, list) or len(values) != 2 or type(values[0]) is not int or type(values[1]) is not str:
        raise ValueError(f"has {values!r} for the sum of the file {name!r}")
    return Sum(*values)


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def check_about(step: Any, metrics: Any, saved: Any) -> None:
    """Raises unless what a manifest says beside leaves and files is of the kinds that jzero writes."""
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"has the step {step!r}")
    if not isinstance(metrics, dict) or not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError(f"has the metrics {metrics!r}")
    if not isinstance(saved, dict) or not isinstance(mesh := saved.get("mesh", {}), dict):
        raise ValueError(f"was saved from {saved!r}")
    counts = [*mesh.values(), saved.get("processes", 1), saved.get("min_shard_size", 0) + 1]
    tables = [saved.get(name) or {} for name in ("stage", "precision")]
    if (
        not all(type(count) is int and count >= 1 for count in counts)
        or not all(_texts(saved.get(name, [])) for name in ("data_axes", "replica_axes"))
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise ValueError(f"was saved from {saved!r}")
