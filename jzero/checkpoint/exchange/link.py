"""Leaves of params and tensors of files, joined by the rules of a map, slice by slice."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jzero.checkpoint import encoding
from jzero.checkpoint.chunks import Region
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.errors import CheckpointMismatch
from jzero.checkpoint.exchange.dims import Piece, Turn
from jzero.checkpoint.exchange.format import CODES, METADATA, Tensor
from jzero.checkpoint.exchange.rules import Rules
from jzero.checkpoint.names import Path, quote, shown, unquote
from jzero.wording import few

ROOT = "params"
"""The part of a checkpoint that is exchanged."""


@dataclass(frozen=True)
class Link:
    """A leaf, and the tensors that are it.

    Attributes:
        path: Where the leaf is, from "params" on.
        dtype: Name of its dtype.
        tensors: Names of its tensors: one, or one for each index of the dims in which they are stacked.
        stack: The lengths of these dims, which come first.
        turn: How the dims of a tensor become the further dims of the leaf.
    """

    path: Path
    dtype: str
    tensors: tuple[str, ...]
    stack: tuple[int, ...]
    turn: Turn

    @property
    def name(self) -> str:
        """Its path as messages have it."""
        return shown(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return self.stack + self.turn.leaf_shape

    def parts(self, region: Region) -> Iterator[tuple[str, tuple[int, ...], Piece]]:
        """What of which tensors a slice of the leaf is.

        Returns:
            For each box of a tensor: the tensor's name, where the box lies in the slice of the leaf, as an index of the
            dims that are stacked, and what it is of the slice there.
        """
        ahead, inner = region[: len(self.stack)], region[len(self.stack) :]
        for index in itertools.product(*(range(begin, end) for begin, end in ahead)):
            number = int(np.ravel_multi_index(index, self.stack)) if index else 0
            at = tuple(i - begin for i, (begin, _) in zip(index, ahead, strict=True))
            yield from ((self.tensors[number], at, piece) for piece in self.turn.pieces(inner))


def outward(what: str, entries: Iterable[Entry], rules: Rules | None, dtype: str | None = None) -> list[Link]:
    """Finds for each leaf of the params of a checkpoint the tensors that it becomes.

    Without rules, a leaf is a tensor whose name is the keys of the leaf joined by dots, quoted as folders are.

    Args:
        what: The checkpoint, for messages.
        entries: Its leaves.
        rules: The map; None: every leaf as it is.
        dtype: The dtype that floats are cast to; None: none is cast.

    Raises:
        CheckpointMismatch: Leaves that no tensor can be made of, all of them.
    """
    links, problems, taken = [], [], {}
    for entry in entries:
        if entry.path[0] != ROOT:
            continue
        try:
            link = _outward(entry, rules)
        except ValueError as error:
            problems.append(f"{entry.name}: the checkpoint has {entry.dtype}{entry.shape}; {error}.")
            continue
        if link is None:
            continue
        floats = encoding.is_float(entry.dtype)
        cast = dtype if dtype and floats else entry.dtype
        if cast not in CODES:
            way_out = "Cast it, with dtype= or --dtype." if floats else "List it under `skip` of a map."
            problems.append(
                f"{entry.name}: the checkpoint has {entry.dtype}{entry.shape}, and safetensors has no such dtype. "
                f"{way_out}"
            )
            continue
        for name in link.tensors:
            if taken.setdefault(name, link) is not link:
                problems.append(f"{entry.name}: would be tensor {name!r}, as is {taken[name].name}. Change the map.")
        links.append(replace(link, dtype=cast))
    if not links and not problems:
        problems.append("params: the checkpoint has none that could be exported.")
    if problems:
        raise CheckpointMismatch(what, problems)
    return links


def _outward(entry: Entry, rules: Rules | None) -> Link | None:
    keys = entry.path[1:]
    if rules is None:
        name = ".".join(map(quote, keys)) if keys else ROOT
        if name == METADATA:
            raise ValueError(f"a tensor cannot be named {METADATA}, the format needs it. Rename it by a map")
        return Link(entry.path, entry.dtype, (name,), (), Turn.of_order(entry.shape, range(len(entry.shape))))
    if keys[: len(rules.under)] != rules.under:
        raise ValueError(f"the map is for leaves under {shown(rules.under)}")
    keys = keys[len(rules.under) :]
    if rules.skips(keys):
        return None
    found = rules.of_leaf(keys)
    if found is None:
        raise ValueError(
            f"map {rules.source} has no leaf {shown(keys)}. Add it to [leaves] or `skip` of a map of your own; for "
            f"leaves under another key pass under= or --under, for layers that are not stacked --unstacked"
        )
    rule, values = found
    count = len(rule.stacked)
    if len(entry.shape) < count:
        raise ValueError(f"map {rules.source} has {rule.stacked} stacked in its first dims")
    stack = entry.shape[:count]
    try:
        turn = rule.turn(entry.shape[count:], "leaf")
    except ValueError as error:
        raise ValueError(f"{'behind stacked dims ' if count else ''}it {error}") from error
    if 0 in stack:
        raise ValueError("no tensor can be made of no layers")
    indices = itertools.product(*map(range, stack))
    names = tuple(rule.name(values | dict(zip(rule.stacked, index, strict=True))) for index in indices)
    return Link(entry.path, entry.dtype, names, stack, turn)


def inward(what: str, tensors: Sequence[Tensor], rules: Rules | None) -> list[Link]:
    """Finds the leaves that the tensors of a model become, in the order of their names.

    Args:
        what: The model, for messages.
        tensors: Its tensors, each name once.
        rules: The map; None: every tensor as it is, the inverse of `outward` without rules.

    Raises:
        CheckpointMismatch: Tensors that are no leaf, or do not make up one; all of them.
    """
    problems: list[str] = []
    groups: dict[Path, dict[tuple[int, ...], Tensor]] = {}
    found_rules = {}
    for tensor in tensors:
        if rules is not None and (rules.ignores(tensor.name) or rules.copy_of(tensor.name) is not None):
            continue
        if tensor.dtype is None:
            problems.append(f"{_described(tensor)}: jzero does not read this dtype. Cast it, or `ignore` it in a map.")
            continue
        found = None if rules is None else rules.of_tensor(tensor.name)
        if rules is None:
            path, index = (ROOT, *map(unquote, tensor.name.split("."))), ()
        elif found is None:
            problems.append(
                f"{_described(tensor)}: map {rules.source} has no such tensor. Add it to [leaves] or `ignore` of a map "
                f"of your own."
            )
            continue
        else:
            rule, values = found
            path = (ROOT, *rules.under, *rule.path(values))
            index = tuple(values[name] for name in rule.stacked)
            found_rules[path] = rule
        other = groups.setdefault(path, {}).setdefault(index, tensor)
        if other is not tensor:
            problems.append(f"{_described(tensor)}: would be the leaf {shown(path)}, as is {other.name}.")
    links = []
    for path, group in sorted(groups.items()):
        try:
            links.append(_stacked(path, group, found_rules.get(path)))
        except ValueError as error:
            problems.append(f"{shown(path)}: {error}.")
    if not links and not problems:
        problems.append("no tensors: the files have none that could be imported.")
    problems += _nested([link.path for link in links])
    if problems:
        raise CheckpointMismatch(what, problems)
    return links


def _stacked(path: Path, group: Mapping[tuple[int, ...], Tensor], rule) -> Link:
    tensors = [group[index] for index in sorted(group)]
    first, indices = tensors[0], sorted(group)
    stack = tuple(max(index[dim] for index in indices) + 1 for dim in range(len(indices[0])))
    if math.prod(stack) != len(indices):
        absent = (index for index in _indices(stack) if index not in group)
        names = (rule.name(dict(zip(rule.stacked, index, strict=True))) for index in absent)
        some = few(itertools.islice(names, 5), 5, of=math.prod(stack) - len(indices))
        raise ValueError(f"the file has {len(indices)} tensors of {math.prod(stack)}; missing are {some}")
    for tensor in tensors:
        if (tensor.code, tensor.shape) != (first.code, first.shape):
            raise ValueError(f"the file has {_described(first)} and {_described(tensor)}, which cannot be stacked")
    try:
        turn = rule.turn(first.shape, "tensor") if rule else Turn.of_order(first.shape, range(len(first.shape)))
    except ValueError as error:
        raise ValueError(f"the file has {_described(first)}, which {error}") from error
    return Link(path, str(first.dtype), tuple(tensor.name for tensor in tensors), stack, turn)


def _indices(stack: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """As `np.ndindex`, but in no memory: a name may claim any number of layers."""
    if not stack:
        yield ()
        return
    for first in range(stack[0]):
        yield from ((first, *rest) for rest in _indices(stack[1:]))


def _nested(paths: Sequence[Path]) -> list[str]:
    """Leaves inside of leaves, which no tree has."""
    leaves = set(paths)
    return [
        f"{shown(path)}: would lie inside of {shown(path[:length])}, which is a leaf itself. Rename them by a map."
        for path in paths
        for length in range(1, len(path))
        if path[:length] in leaves
    ]


def _described(tensor: Tensor) -> str:
    return f"{tensor.name} {tensor.code}{tensor.shape}"
