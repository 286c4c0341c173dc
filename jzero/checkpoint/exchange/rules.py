"""Rules of names: which leaf of the params is which tensor of a file, and how its dims are turned.

A map is a TOML file:

    optional_prefix = "model."        # tensors of a file may also come without it
    stacked = ["layer"]               # {layer} is no key of the params, but the first dim of the leaf
    ignore = ["model.layers.{layer}.rotary.inv_freq"]    # tensors that are no params
    skip = ["dropout/rate"]                              # leaves that are not exported

    [copies]                          # a tensor that must be the same as another, and is not imported or exported
    "lm_head.weight" = "model.embed.weight"

    [sizes]                           # lengths of dims that only one side has
    head = 12

    [leaves]                          # a leaf, its keys joined by "/", and its tensor
    "embed/embedding" = "model.embed.weight"
    "layers/{layer}/up/kernel" = { tensor = "model.layers.{layer}.up.weight", transpose = true }
    "layers/{layer}/query/kernel" = { tensor = "model.layers.{layer}.q.weight", dims = "(head k) d -> d head k" }

`{layer}`, or any other name in braces, stands for a number from 0 on. Where it is not stacked, it is a key of the
params: each layer has leaves of its own. Of several stacked names the first is the first dim. `transpose = true` swaps
the last two dims; `dims` turns, cuts and joins them, from the tensor's to those of the leaf behind stacked ones, see
`Dims`. In `ignore` and `skip`, `*` stands for any text.
"""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from jzero.checkpoint.exchange.dims import Dims, Turn
from jzero.checkpoint.exchange.format import METADATA
from jzero.checkpoint.names import shown

MAPS = Path(__file__).with_name("maps")
"""The folder of the maps that come with jzero."""

_VARIABLE = re.compile(r"\{(\w+)\}")
_NUMBER = "0|[1-9][0-9]{0,8}"


@dataclass(frozen=True)
class Rule:
    """One leaf, or those of all layers, and its tensors.

    Attributes:
        leaf: The keys of the leaf, from the params on; each may hold names in braces.
        tensor: The name of the tensor, with the same names in braces.
        dims: How its dims become those of the leaf, behind stacked ones; or whether the last two are swapped.
        stacked: Those of its names that are dims of the leaf, and no keys, in their order.
    """

    leaf: tuple[str, ...]
    tensor: str
    dims: Dims | bool
    stacked: tuple[str, ...]

    def turn(self, shape: Sequence[int], of: Literal["tensor", "leaf"]) -> Turn:
        """How the dims of a tensor, or of a leaf without those that are stacked, become those of the other.

        Raises:
            ValueError: They cannot, in this shape.
        """
        if isinstance(self.dims, Dims):
            return self.dims.turn(shape, of)
        order = list(range(len(shape)))
        if self.dims:
            if len(order) < 2:
                raise ValueError(f"has {len(order)} dims, and the map transposes it")
            order[-2:] = order[:-3:-1]
        return Turn.of_order(shape if of == "tensor" else [shape[dim] for dim in order], order)

    def name(self, values: Mapping[str, int]) -> str:
        """The name of a tensor."""
        return _VARIABLE.sub(lambda match: str(values[match[1]]), self.tensor)

    def path(self, values: Mapping[str, int]) -> tuple[str, ...]:
        """The keys of a leaf."""
        return tuple(_VARIABLE.sub(lambda match: str(values[match[1]]), key) for key in self.leaf)


@dataclass(frozen=True)
class Rules:
    """All rules of a map.

    Attributes:
        source: Where they come from, for messages.
        rules: One for each leaf, or for the same leaf of all layers.
        optional_prefix: What the names of a file may lack at their beginning.
        ignore: Tensors that are no params.
        skip: Leaves that are not exported.
        copies: Tensors that must equal another one.
        under: Keys of the params above all leaves of the map.
    """

    source: str
    rules: tuple[Rule, ...]
    optional_prefix: str = ""
    ignore: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    copies: Mapping[str, str] | None = None
    under: tuple[str, ...] = ()

    @classmethod
    def read(cls, source: str | PathLike[str], *, stacked: bool = True, under: str = "") -> "Rules":
        """Reads a map.

        Args:
            source: The name of one that comes with jzero, such as "gpt2", or a TOML file.
            stacked: Whether layers are stacked as the map says; if not, each has leaves of its own.
            under: Keys of the params above all leaves of the map, joined by "/": "params" for a tree of flax that
                begins with this key.

        Raises:
            FileNotFoundError: There is no such map.
            ValueError: It is none; all that is wrong with it.

        Example:
            >>> rules = Rules.read("llama", under="params")
            >>> rule, values = rules.of_tensor("model.layers.7.mlp.up_proj.weight")
            >>> rule.path(values), rule.stacked, values
            (('layers', 'mlp', 'up_proj', 'kernel'), ('layer',), {'layer': 7})
        """
        known = {path.stem: path for path in sorted(MAPS.glob("*.toml"))}
        path = known.get(str(source)) or Path(source)
        try:
            document = tomllib.loads(path.read_bytes().decode())
        except FileNotFoundError:
            raise FileNotFoundError(
                f"map {source}: no such file, and no map of jzero, which has {', '.join(known)}."
            ) from None
        except ValueError as error:
            raise ValueError(f"map {source} is no TOML: {error}") from error
        return _rules(str(source), document, stacked, tuple(under.split("/")) if under else ())

    def of_leaf(self, path: Sequence[str]) -> tuple[Rule, dict[str, int]] | None:
        """The rule of a leaf, by its keys below `under`, and its numbers; None if there is none."""
        return next(_matches([(rule, rule.leaf) for rule in self.rules], path), None)

    def of_tensor(self, name: str) -> tuple[Rule, dict[str, int]] | None:
        """The rule of a tensor, and its numbers; None if there is none."""
        pairs = [(rule, (rule.tensor,)) for rule in self.rules]
        return next((found for each in self._names(name) for found in _matches(pairs, (each,))), None)

    def ignores(self, name: str) -> bool:
        """Whether a tensor is no param."""
        return any(_wild(pattern).fullmatch(each) for pattern in self.ignore for each in self._names(name))

    def skips(self, path: tuple[str, ...]) -> bool:
        """Whether a leaf is not exported."""
        return any(_wild(pattern).fullmatch(shown(path)) for pattern in self.skip)

    def copy_of(self, name: str) -> str | None:
        """The tensor that this one must equal; None if it stands for itself."""
        copies = self.copies or {}
        return next((copies[each] for each in self._names(name) if each in copies), None)

    def _names(self, name: str) -> tuple[str, ...]:
        return (name, self.optional_prefix + name) if self.optional_prefix else (name,)


def _matches(pairs: Iterable[tuple[Any, Sequence[str]]], parts: Sequence[str]) -> Iterator[tuple[Any, dict[str, int]]]:
    """What has patterns that match these parts, one for one, and the numbers in them."""
    text = "\0".join(parts)
    for what, patterns in pairs:
        values = _match("\0".join(patterns), text)
        if values is not None:
            yield what, values


def _match(pattern: str, text: str) -> dict[str, int] | None:
    """The numbers that the names in braces stand for; None if the text is another."""
    expression, names = _compiled(pattern)
    match = expression.fullmatch(text)
    if match is None:
        return None
    values: dict[str, int] = {}
    same = all(values.setdefault(name, int(n)) == int(n) for name, n in zip(names, match.groups(), strict=True))
    return values if same else None


@functools.cache
def _compiled(pattern: str) -> tuple[re.Pattern, list[str]]:
    pieces = _VARIABLE.split(pattern)  # text and names in turn
    text = "".join(re.escape(piece) if at % 2 == 0 else f"({_NUMBER})" for at, piece in enumerate(pieces))
    return re.compile(text), pieces[1::2]


@functools.cache
def _wild(pattern: str) -> re.Pattern:
    pieces = re.split(r"(\*|\{\w+\})", pattern)  # text and wildcards in turn
    kinds = (".*" if piece == "*" else _NUMBER if at % 2 else re.escape(piece) for at, piece in enumerate(pieces))
    return re.compile("".join(f"(?:{kind})" for kind in kinds), re.DOTALL)


def _rules(source: str, document: Mapping[str, Any], stacked: bool, under: tuple[str, ...]) -> Rules:
    kinds = {"optional_prefix": str, "stacked": list, "ignore": list, "skip": list}
    kinds |= {"copies": dict, "sizes": dict, "leaves": dict}
    problems = [f"{key!r} is not known; a map has {', '.join(kinds)}" for key in document if key not in kinds]
    for key, kind in kinds.items():
        value = document.get(key, kind())
        inner = value.values() if key == "copies" and isinstance(value, dict) else value if kind is list else ()
        if not isinstance(value, kind) or not all(isinstance(one, str) for one in inner):
            problems.append(f"{key} = {value!r}; wanted a {kind.__name__}{'' if kind is str else ' of strings'}")
    sizes = document.get("sizes", {})
    if isinstance(sizes, dict):
        wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        problems += [f"{name} = {size!r} in [sizes]; wanted an int of 1 or more" for name, size in wrong.items()]
    if not problems and not document.get("leaves"):
        problems.append("[leaves] is missing or empty")
    if problems:
        raise ValueError(_listed(source, problems))
    names = tuple(document.get("stacked", ())) if stacked else ()
    rules = []
    for leaf, value in document["leaves"].items():
        row = {"tensor": value} if isinstance(value, str) else value
        try:
            rules.append(_rule(leaf, row, names, sizes))
        except ValueError as error:
            problems.append(f"{leaf!r}: {error}")
    tensors = [rule.tensor for rule in rules]
    problems += [
        f"{name!r} is the tensor of several leaves" for name in dict.fromkeys(tensors) if tensors.count(name) > 1
    ]
    used = {name for rule in rules if isinstance(rule.dims, Dims) for name in rule.dims.sizes}
    if not problems:  # else it may be used by what could not be read
        problems += [f"{name!r} of [sizes] is in no dims" for name in sizes if name not in used]
    if problems:
        raise ValueError(_listed(source, problems))
    return Rules(
        source,
        tuple(rules),
        document.get("optional_prefix", ""),
        tuple(document.get("ignore", ())),
        tuple(document.get("skip", ())),
        document.get("copies", {}),
        under,
    )


def _rule(leaf: str, row: Any, stacked: Sequence[str], sizes: Mapping[str, int]) -> Rule:
    known = {"tensor", "transpose", "dims"}
    if not isinstance(row, dict) or not isinstance(row.get("tensor"), str) or not set(row) <= known:
        raise ValueError(f'{row!r}; wanted a tensor, as in "name" or {{ tensor = "name", transpose = true }}')
    if row["tensor"] == METADATA:
        raise ValueError(f"is the tensor {METADATA}; the format has something else under this name")
    if {"transpose", "dims"} <= set(row):
        raise ValueError("has transpose and dims; wanted one of them")
    dims = row.get("transpose", False)
    if not isinstance(dims, bool):
        raise ValueError(f'transpose = {dims!r}; wanted true or false. Other orders are dims = "o i h w -> h w i o"')
    if "dims" in row:
        dims = Dims.parse(row["dims"], sizes)
    mine, theirs = set(_VARIABLE.findall(leaf)), set(_VARIABLE.findall(row["tensor"]))
    if mine != theirs:
        raise ValueError(
            f"has {_braced(mine)}, its tensor {_braced(theirs)}; both must have the same. Layers that are stacked in "
            f'one leaf layers/up/kernel are written as if each had its own, "layers/{{layer}}/up/kernel", with layer '
            f"in `stacked`"
        )
    layers = tuple(name for name in stacked if name in mine)
    keys = leaf.split("/")
    for name in layers:
        if keys.count(f"{{{name}}}") != 1 or leaf.count(f"{{{name}}}") != 1:
            raise ValueError(f"{{{name}}} is stacked, and so must be a key of its own, once")
        keys.remove(f"{{{name}}}")
    return Rule(tuple(keys), row["tensor"], dims, layers)


def _braced(names: Iterable[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names)) or "no name in braces"


def _listed(source: str, problems: Sequence[str]) -> str:
    return "\n".join([f"map {source} cannot be used:", *(f"  {problem}." for problem in problems)])
