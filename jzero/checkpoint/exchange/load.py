"""Safetensors files straight into arrays on devices: each process reads the slices that its devices hold."""

import warnings
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import tree_flatten_with_path

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import Region, grid, halved, inside, overlap, region_of
from jzero.checkpoint.errors import CheckpointMismatch
from jzero.checkpoint.exchange.link import ROOT, Link
from jzero.checkpoint.exchange.rules import Rules
from jzero.checkpoint.exchange.source import Source
from jzero.checkpoint.names import Path as Keys
from jzero.checkpoint.names import keys, shown
from jzero.checkpoint.parts import Want
from jzero.checkpoint.read import aligned
from jzero.layout import Layout
from jzero.wording import few

BLOCK = 8 * 2**20
"""Bytes that are read at once."""


def load_safetensors(
    path: str | PathLike[str],
    target: Any,
    *,
    map: str | PathLike[str] | Rules | None = None,
    on_extra: Literal["error", "ignore"] = "error",
    cast: bool = False,
) -> Any:
    """Reads params from safetensors files into sharded arrays. A process reads what its devices hold, and no more.

    Into a layout, leaves come in the dtypes that the layout was made for and placed as what the optimizer moves, padded
    where the layout pads; to train them:

        state = jzero.init(layout.logical, tx, layout, load_safetensors(path, layout, map="llama"))

    Args:
        path: A safetensors file; a folder of them, with an index or without; or a checkpoint of PyTorch, as for
            `import_params`.
        target: A `Layout`; or a tree of shardings, or of `jax.ShapeDtypeStruct`s with shardings.
        map: Which tensor is which leaf, as for `export_safetensors`.
        on_extra: What becomes of a tensor that is no leaf of the target: "error", or "ignore".
        cast: Whether floats may be cast to the dtype that is wanted.

    Returns:
        A tree in the structure of the target.

    Raises:
        FileNotFoundError: There is no such file or map.
        CorruptTensors: A file is damaged or missing.
        CheckpointMismatch: The files do not hold what is wanted; every leaf that does not fit is named.

    Warns:
        UserWarning: Params come in 16 bits, as Megatron-LM saved their float32 master weights in flat buffers.

    Example:
        >>> import tempfile
        >>> from safetensors.numpy import save_file
        >>> sharding = jax.NamedSharding(jzero.make_mesh(data=-1), jax.P("data"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"layer.weight": np.ones((16, 2), np.float32)}, f"{folder}/model.safetensors")
        ...     params = load_safetensors(folder, {"layer": {"weight": sharding}})
        >>> params["layer"]["weight"].addressable_shards[0].data.shape
        (2, 2)
    """
    if on_extra not in ("error", "ignore"):
        raise ValueError(f"load_safetensors: on_extra={on_extra!r}; wanted 'error' or 'ignore'.")
    rules = Rules.read(map) if isinstance(map, str | PathLike) else map
    with Source(Path(path), rules) as model:
        links = {link.path: link for link in model.links}
        treedef, wants = _wants(target, links)
        pairs = _fit(model, wants, on_extra, cast)
        model.check_copies()
        if model.note:
            warnings.warn(f"{path}: {model.note}", stacklevel=2)
        return treedef.unflatten([_array(model, link, want) for link, want in pairs])


def _wants(target: Any, links: dict[Keys, Link]) -> tuple[Any, list[Want]]:
    """The structure of what is wanted, and its leaves. Where only shardings are given, the files say the rest."""
    if isinstance(target, Layout):
        named = tree_flatten_with_path(target.treedef.unflatten(target.leaves))[0]
        wants = []
        for path, leaf in named:
            placement = target.stage.opt_state if leaf.trainable else target.stage.params
            sharding, stored = target.sharding(target.spec(leaf, placement)), leaf.placed(placement).shape
            wants.append(Want((ROOT, *keys(path)), leaf.shape, str(leaf.dtypes.given), stored, sharding))
        return target.treedef, wants
    named, treedef = tree_flatten_with_path(target)
    wants = []
    for path, leaf in named:
        where, sharding = (ROOT, *keys(path)), leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
        if not isinstance(sharding, Sharding):
            raise TypeError(
                f"load_safetensors: the target's leaf {shown(where)} is a {type(leaf).__name__} without a sharding; "
                f"wanted a sharding, or a jax.ShapeDtypeStruct with one."
            )
        link = links.get(where)
        like = link if isinstance(leaf, Sharding) else leaf
        shape, dtype = ((), "") if like is None else (tuple(like.shape), str(like.dtype))
        wants.append(Want(where, shape, dtype, shape, sharding))
    return treedef, wants


def _fit(model: Source, wants: list[Want], on_extra: str, cast: bool) -> list[tuple[Link, Want]]:
    links, pairs, problems = {link.path: link for link in model.links}, [], []
    for want in wants:
        link = links.pop(want.path, None)
        if link is None:
            asked = f"; asked for {want.dtype}{want.shape}" if want.dtype else ""
            problems.append(
                f"{shown(want.path)}: the files have no tensor for it{asked}. Load files that do, or pass map=, if "
                f"they name it otherwise."
            )
        elif problem := _problem(link, want, cast):
            problems.append(f"{link.name}: the files have {_described(link)}, {problem}")
        else:
            pairs.append((link, want))
    if on_extra == "error":
        problems += [
            f"{link.name}: the files have {_described(link)}, which was not asked for. To leave it, pass "
            f"on_extra='ignore'."
            for link in links.values()
        ]
    if problems:
        raise CheckpointMismatch(str(model.path), problems)
    return pairs


def _problem(link: Link, want: Want, cast: bool) -> str:
    asked = f"asked for {want.dtype}{want.shape}"
    if link.shape != want.shape:
        return f"{asked}. Make the model with the sizes of the files, or turn the dims by a map."
    if link.dtype != want.dtype:
        if not (encoding.is_float(link.dtype) and encoding.is_float(want.dtype)):
            return f"{asked}, and only floats are cast to floats."
        if not cast:
            return f"{asked}. Pass cast=True to cast it."
    if jax.dtypes.canonicalize_dtype(encoding.dtype_of(want.dtype)) != want.dtype:
        return f"{asked}, which JAX has only with jax_enable_x64."
    try:
        want.sharding.shard_shape(want.stored)
    except ValueError as error:
        return f"{asked}, which cannot be placed so: {error}"
    return ""


def _described(link: Link) -> str:
    return f"{link.dtype}{link.shape}, of {few(map(str, link.tensors), 1)}"


def _array(model: Source, link: Link, want: Want) -> jax.Array:
    """Reads one leaf. What a layout pads is filled with zeros."""
    places = {
        device: region_of(index or (), want.stored)
        for device, index in want.sharding.addressable_devices_indices_map(want.stored).items()
    }
    parts = {region: _part(model, link, want, region) for region in set(places.values())}
    placed = [jax.device_put(parts[region], device) for device, region in places.items()]
    return jax.make_array_from_single_device_arrays(want.stored, want.sharding, placed)


def _part(model: Source, link: Link, want: Want, region: Region) -> np.ndarray:
    """What one device holds, in the host's memory."""
    dtype = encoding.dtype_of(want.dtype)
    memory = aligned([end - begin for begin, end in region], dtype)
    there = overlap(region, tuple((0, size) for size in want.shape))
    if there != region:
        memory[...] = np.zeros((), dtype)
    if there is None:
        return memory
    shape = [end - begin for begin, end in there]
    for _, block in grid(shape, halved(shape, dtype.itemsize, BLOCK)):
        one = tuple((begin + start, end + start) for (begin, end), (start, _) in zip(block, there, strict=True))
        values = model.slice(link, one)
        memory[inside(one, region)] = values if values.dtype == dtype else encoding.cast(values, want.dtype)
    return memory
