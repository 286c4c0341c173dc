"""The files by which orbax finds the arrays of a checkpoint of jzero; `orbax_reader` reads those that it wrote itself.

The arrays are zarr 3, one folder each (orbax's `use_ocdbt=False`, `use_zarr3=True`), not compressed, each chunk with
zarr's own codec `crc32c`: whatever reads them, orbax included, notices a changed byte. jzero writes them through
tensorstore, as orbax does, and not through orbax, which has no public option for that codec, holds no array whose
shards are uneven (a padded leaf in its logical shape), and stops at some dtypes. A test reads them with plain orbax.

Leaves are declared as numpy arrays, so that orbax loads them on any machine without a target that says where they
live; with a target it places them as that says.
"""

import json
from pathlib import Path
from typing import Any

from jzero.checkpoint.entry import ARRAYS, Entry
from jzero.checkpoint.manifest import Manifest

MARK = {"jzero": 1}
"""Is in the metadata of what jzero writes, so that a checkpoint that has lost its manifest is not taken for orbax's."""

CHECKPOINT, ITEM = "_CHECKPOINT_METADATA", "_METADATA"
"""The files by which orbax knows a checkpoint, and a tree of arrays in it."""

DICT = 2
"""Orbax's number for a key of a dict."""


def files(manifest: Manifest) -> dict[str, str]:
    """Name and text of each file of orbax that describes a checkpoint."""
    handler = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
    checkpoint = {"item_handlers": {ARRAYS: handler}, "metrics": dict(manifest.metrics), "custom_metadata": {}}
    tree: dict[str, Any] = {}
    for leaf in manifest.leaves:
        if leaf.stored is not None:
            keys = leaf.folder.split(".")
            tree[str(tuple(keys))] = {
                "key_metadata": [{"key": key, "key_type": DICT} for key in keys],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
    item = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": MARK,
    }
    return {CHECKPOINT: json.dumps(checkpoint), f"{ARRAYS}/{ITEM}": json.dumps(item)}


def store(folder: Path, name: str = "") -> dict[str, str]:
    """Where something in a folder is, as tensorstore's driver of files has it, which refuses "..", and two slashes."""
    folder = folder.resolve() if ".." in folder.parts else folder.absolute()
    return {"driver": "file", "path": f"/{str(folder).lstrip('/')}/{name}"}


def zarr(leaf: Entry) -> dict[str, Any]:
    """Zarr's description of the array of a leaf."""
    return {
        "shape": list(leaf.stored_shape),
        "data_type": leaf.stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(leaf.chunk)}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
