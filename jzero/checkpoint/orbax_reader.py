"""Checkpoints that orbax wrote: what they hold, as `Entry`s, from their metadata alone.

Orbax's own reader would need its handlers, and JAX; here tensorstore opens the arrays that `_METADATA` names. Both of
its storages are read (OCDBT, or a folder for each array), zarr 2 and zarr 3.
"""

import base64
import functools
import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorstore as ts

from jzero.checkpoint import encoding
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CorruptCheckpoint
from jzero.checkpoint.manifest import FILE
from jzero.checkpoint.names import shown
from jzero.checkpoint.orbax_format import CHECKPOINT, ITEM, MARK, store

UNLIKE = (KeyError, TypeError, AttributeError, ValueError)
"""What is raised where metadata is not as orbax writes it."""

Axes = tuple[tuple[str, ...], ...]

AT_ONCE = 64
"""Arrays whose descriptions are read at once."""


@dataclass(frozen=True)
class Described:
    """What orbax's metadata says.

    Attributes:
        leaves: The arrays; `folder` is orbax's name of each. Nothing is known of checksums.
        specs: For each of them, as tensorstore opens it.
        others: What is no array: paths, and what stands there.
        saved_from: The mesh, if all arrays were saved from one.
        metrics: The metrics.
    """

    leaves: tuple[Entry, ...]
    specs: tuple[dict[str, Any], ...]
    others: dict[str, str]
    saved_from: dict[str, Any]
    metrics: dict[str, Any]


def is_checkpoint(folder: Path) -> bool:
    """Whether this is a folder that orbax wrote a checkpoint into."""
    return (folder / ITEM).is_file() or (folder / CHECKPOINT).is_file()


def described(folder: Path) -> Described:
    """What a checkpoint of orbax holds. No array is read.

    Raises:
        CorruptCheckpoint: Its metadata cannot be read, or an array that it names is not there.
    """
    top = _json(folder / CHECKPOINT) if (folder / CHECKPOINT).is_file() else {}
    items = [folder] if (folder / ITEM).is_file() else sorted(path.parent for path in folder.glob(f"*/{ITEM}"))
    if not items:
        raise CorruptCheckpoint(folder, f"holds no item with a {ITEM}")
    named: list[tuple[tuple[str, ...], str, Path, dict[str, Any]]] = []
    others: dict[str, str] = {}
    placed: dict[tuple[Path, str], tuple[Axes, dict[str, int]]] = {}
    implementations: dict[tuple[Path, str], str] = {}
    for item in items:
        metadata = _json(item / ITEM)
        if metadata.get("custom_metadata") == MARK:
            raise CorruptCheckpoint(folder / FILE, "is missing, for jzero wrote this checkpoint; it may be half a copy")
        prefix = (item.name,) if len(items) > 1 else ()
        implementations |= {(item, name): impl for name, impl in _random_keys(item)}
        placed |= {(item, name): (axes, mesh) for name, axes, mesh in _shardings(item)}
        try:
            for leaf in metadata["tree_metadata"].values():
                path = tuple(str(level["key"]) for level in leaf["key_metadata"])
                kind = leaf["value_metadata"]["value_type"]
                if kind in ("None", "string") or leaf["value_metadata"].get("skip_deserialize"):
                    others[shown(prefix + path)] = kind
                else:
                    named.append((prefix + path, ".".join(path), item, metadata))
        except UNLIKE as error:
            raise _unlike(item / ITEM, error) from error
    count = Counter((item, name) for _, name, item, _ in named)
    for path, name, item, _ in named:
        if count[item, name] > 1:
            raise CorruptCheckpoint(
                item / ITEM, f"names {count[item, name]} leaves {name!r}, of which orbax kept one only", shown(path)
            )
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise CorruptCheckpoint(item / ITEM, f"has an array named {name!r}, which leads out of it", shown(path))
    specs = tuple(_spec(item, name, metadata) for _, name, item, metadata in named)
    leaves, arrays = [], _opened(specs)
    for (path, name, item, _), array in zip(named, arrays, strict=True):
        if isinstance(array, Exception):
            raise CorruptCheckpoint(item / name, f"cannot be opened ({_first_line(array)})", shown(path)) from array
        dtype, shape = array.dtype.name, tuple(array.shape)
        if dtype not in encoding.NATIVE:
            raise CorruptCheckpoint(item / name, f"has dtype {dtype}, which jzero does not know", shown(path))
        implementation = implementations.get((item, name))
        axes = placed[item, name][0] if (item, name) in placed else None
        leaves.append(
            Entry(
                path=path,
                folder=name,
                shape=shape if implementation is None else shape[:-1],
                dtype=dtype if implementation is None else encoding.KEY + implementation,
                stored=None if 0 in shape else dtype,
                stored_shape=shape,
                chunk=tuple(array.chunk_layout.read_chunk.shape or shape),
                spec=None if axes is None else (*axes, *[()] * (len(shape) - len(axes)))[: len(shape)],
            )
        )
    meshes = {json.dumps(mesh) for _, mesh in placed.values() if mesh}
    saved_from = {"mesh": json.loads(meshes.pop())} if len(meshes) == 1 else {}
    return Described(tuple(leaves), specs, others, saved_from, dict(top.get("metrics") or {}))


def _opened(specs) -> Iterator[Any]:
    """Arrays in order, some of them being opened ahead; for one that cannot be, the error."""
    context = _context()
    ahead: deque = deque()

    def first():
        try:
            return ahead.popleft().result()
        except Exception as error:
            return error

    for spec in specs:
        if len(ahead) >= AT_ONCE:
            yield first()
        ahead.append(ts.open(spec, read=True, open=True, context=context))
    while ahead:
        yield first()


@functools.cache
def _context() -> ts.Context:
    return ts.Context({"cache_pool": {"total_bytes_limit": 2**26}})  # never given up, as in `store`


def _spec(item: Path, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    if metadata.get("use_ocdbt"):
        kvstore = {"driver": "ocdbt", "base": store(item), "path": f"{name}/"}
    else:
        kvstore = store(item, f"{name}/")
    # Where orbax has written all chunks, one that is not there is lost; else it was all zeros.
    lost = bool(metadata.get("store_array_data_equal_to_fill_value"))
    return {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": not lost}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(path, f"cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CorruptCheckpoint(path, "is not as orbax writes it")
    return found


def _shardings(item: Path) -> Iterator[tuple[str, Axes, dict[str, int]]]:
    """Name of each array of which orbax has noted on which mesh it was, which axes cut its dims, and that mesh."""
    path = item / "_sharding"
    if not path.is_file():
        return
    for name, text in _json(path).items():
        try:
            sharding = json.loads(text)
            if sharding.get("sharding_type") != "NamedSharding":
                continue
            axes = tuple(
                (axis,) if isinstance(axis, str) else tuple(map(str, axis or ())) for axis in sharding["partition_spec"]
            )
            mesh = dict(zip(map(str, sharding["axis_names"]), map(int, sharding["shape"]), strict=True))
            found = base64.b64decode(name, validate=True).decode(), axes, mesh
        except UNLIKE as error:
            raise _unlike(path, error) from error
        yield found


def _random_keys(item: Path) -> Iterator[tuple[str, str]]:
    """Name and implementation of each array that holds random keys."""
    for path in sorted((item / "array_metadatas").glob("process_*")):
        try:
            arrays = [entry["array_metadata"] for entry in _json(path)["array_metadatas"]]
            found = [(each["param_name"], (each.get("ext_metadata") or {}).get("random_key_impl")) for each in arrays]
        except UNLIKE as error:
            raise _unlike(path, error) from error
        yield from ((name, implementation) for name, implementation in found if implementation)


def _unlike(path: Path, error: Exception) -> CorruptCheckpoint:
    return CorruptCheckpoint(path, f"is not as orbax writes it ({error!r})")


def _first_line(error: Exception) -> str:
    return str(error).split(" [")[0].splitlines()[0]
