"""Names of leaves: paths in a tree, and the names of folders that stand for them."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

Path = tuple[str, ...]
"""Where a leaf is: one string for each level, an index or an attribute as its text."""

LONGEST = 200
"""Longest name of a folder, in characters; file systems allow 255."""

TAKEN = frozenset({"_metadata", "_sharding", "array_metadatas"})
"""Names, in lower case, that orbax gives to files of its own beside the folders of leaves."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_SAFE = re.compile(r"[A-Za-z0-9_%-]+(\.[A-Za-z0-9_%-]+)*")


def keys(path: Any) -> Path:
    """The levels of a path of JAX, such as ("blocks", "0", "kernel")."""

    def text(key):
        match key:
            case GetAttrKey(name=name):
                return name
            case SequenceKey(idx=index):
                return str(index)
            case DictKey(key=key) | FlattenedIndexKey(key=key):
                return str(key)
        return str(key)

    return tuple(map(text, path))


def shown(path: Path) -> str:
    """A path as messages and patterns have it, such as "params/blocks/0/kernel"."""
    return "/".join(path)


def quote(key: str) -> str:
    """A key as part of a folder's name: letters, digits, "_" and "-" stay, every other byte becomes %XX.

    Example:
        >>> quote("kernel"), quote("a.b/c"), quote("ü"), quote("")
        ('kernel', 'a%2Eb%2Fc', '%C3%BC', '%empty')
    """
    if not key:
        return "%empty"
    # surrogatepass: a key may be any str that Python allows.
    return "".join(
        char if _PLAIN.fullmatch(char) else "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
        for char in key
    )


def unquote(text: str) -> str:
    """The inverse of `quote`; what it does not write stays as it is.

    Example:
        >>> unquote("a%2Eb%2Fc"), unquote("%empty"), unquote("100%")
        ('a.b/c', '', '100%')
    """
    if text == quote(""):
        return ""
    try:
        return unquote_to_bytes(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return text


def folders(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """For each leaf its keys in the tree that orbax shows; joined by dots they are the name of its folder.

    Orbax joins keys by dots, so that ("a.b",) and ("a", "b") would be one array; quoted keys have no dots. A name that
    is too long, that of a file of orbax, or the same as another but for upper and lower case, which some file systems
    do not tell apart, becomes ("%", a hash of the path).

    Example:
        >>> folders([("params", "a.b"), ("params", "a", "b")])
        [('params', 'a%2Eb'), ('params', 'a', 'b')]
    """
    quoted = [tuple(map(quote, path)) for path in paths]
    count = Counter([*(".".join(name).lower() for name in quoted), *TAKEN])
    return [
        name
        if len(".".join(name)) <= LONGEST and count[".".join(name).lower()] == 1
        else ("%", hashlib.sha256(json.dumps(path).encode()).hexdigest()[:32])
        for path, name in zip(paths, quoted, strict=True)
    ]


def is_safe(folder: str) -> bool:
    """Whether this can be the name of a leaf's folder: it stays inside of the checkpoint wherever it comes from."""
    return len(folder) <= 255 and _SAFE.fullmatch(folder) is not None
