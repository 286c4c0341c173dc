"""The leaves that safetensors files hold, read slice by slice."""

from pathlib import Path

import numpy as np

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import Region, grid, halved
from jzero.checkpoint.errors import CheckpointMismatch
from jzero.checkpoint.exchange import slices
from jzero.checkpoint.exchange.files import find
from jzero.checkpoint.exchange.link import Link, inward
from jzero.checkpoint.exchange.rules import Rules

BLOCK = 8 * 2**20
"""Bytes of two tensors that are compared at once."""


class Source:
    """A model in safetensors files, as leaves. Use it in a `with` statement, which closes the files.

    Args:
        path: A file, or a folder of files.
        rules: The map; None: every tensor is a leaf, its name the keys.

    Attributes:
        links: The leaves, each with its tensors.
        ignored: Names of tensors that the map ignores.
        left_out: Names of what the files hold that jzero does not take.
        note: What has to be known of the tensors, a sentence or more; empty if nothing.

    Raises:
        FileNotFoundError: There is no file.
        CorruptTensors: A file is damaged or missing.
        CheckpointMismatch: Tensors that do not make up leaves; all of them are named.
    """

    def __init__(self, path: Path, rules: Rules | None):
        self.path, self.rules = path, rules
        found = find(path)
        self.left_out, self.note = found.left_out, found.note
        self.tensors = {tensor.name: tensor for tensor in found.tensors}
        self.links = inward(str(path), found.tensors, rules)
        used = {name for link in self.links for name in link.tensors}
        self.ignored = [name for name in self.tensors if name not in used]
        self._files = slices.Files()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def slice(self, link: Link, region: Region) -> np.ndarray:
        """A slice of a leaf, in the dtype of its tensors."""
        array = np.empty([end - begin for begin, end in region], encoding.dtype_of(link.dtype))
        for name, at, piece in link.parts(region):
            values = self._read(name, piece.region)
            if values.size == array.size and not link.stack:
                return piece.alone(values)
            place = piece.of(array[(*at, ...)])
            place[...] = values.reshape(place.shape)
        return array

    def check_copies(self) -> None:
        """Compares the tensors that the map says are copies with those that they are copies of.

        Raises:
            CheckpointMismatch: They differ, so that a model of which only one is imported would be another model.
        """
        problems = []
        for name in self.tensors:
            other = self.rules and self.rules.copy_of(name)
            if other and (problem := self._difference(name, other)):
                problems.append(
                    f"{name}: the map says that it is a copy of {other}, but {problem}. Give it a leaf of its own in a "
                    f"map of your own."
                )
        if problems:
            raise CheckpointMismatch(str(self.path), problems)

    def _difference(self, name: str, other: str) -> str:
        prefix = self.rules.optional_prefix if self.rules else ""
        found = [self.tensors[each] for each in (other, other.removeprefix(prefix)) if each in self.tensors]
        if not found:
            return "the file has no such tensor"
        one, two = self.tensors[name], found[0]
        if (one.code, one.shape) != (two.code, two.shape):
            return f"the file has {one.code}{one.shape} and {two.code}{two.shape}"
        if one.dtype is None:
            return f"jzero does not read {one.code}"
        for _, region in grid(one.shape, halved(one.shape, encoding.dtype_of(one.dtype).itemsize, BLOCK)):
            mine, theirs = (self._read(each.name, region).reshape(-1).view(np.uint8) for each in (one, two))
            if not np.array_equal(mine, theirs):
                return "their elements differ"
        return ""

    def _read(self, name: str, region: Region) -> np.ndarray:
        return slices.read(self._files, self.tensors[name], region)
