"""Checkpoints of DeepSpeed's ZeRO, stages 1 to 3: the float32 master weights as tensors, where they lie.

Nothing is put together in memory: a tensor is a list of stretches of the ranks' files, which are read when a slice of
it is. At stages 1 and 2 all params of a group are laid behind one another and cut evenly over the ranks; at stage 3
each param is cut evenly, and a rank's parts of all params are laid behind one another.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jzero.checkpoint.exchange import torch_file
from jzero.checkpoint.exchange.format import CorruptTensors, Stretch, Tensor
from jzero.checkpoint.exchange.torch_file import Stored
from jzero.wording import few

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed, or holds one that its file `latest` names."""
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


def find(folder: Path) -> list[Tensor]:
    """The master weights of all params, the params that are not trained and the buffers, by their names in the model.

    Raises:
        CorruptTensors: A file is missing or damaged.
        ValueError: It is one that jzero does not read: of another kind than ZeRO's, or with tensor parallelism.
    """
    if (folder / "latest").is_file():
        folder = _latest(folder)
    optims, models = _ranks(folder, _OPTIM), _ranks(folder, _MODEL)
    if not models:
        raise CorruptTensors(folder, "holds no *_model_states.pt of DeepSpeed")
    if not optims:
        raise ValueError(
            f"{folder} holds no zero_pp_rank_*_optim_states.pt: it was not saved by ZeRO at stage 1, 2 or 3, of which "
            f"jzero reads the master weights."
        )
    model_states = [_dict(file) for file in models.values()]
    states = [(file, _get(file, _dict(file), "optimizer_state_dict", Mapping)) for file in optims.values()]
    counts = [state.get("partition_count") for _, state in states]
    count = max(counts[0]) if isinstance(counts[0], list) and counts[0] else counts[0]
    if count != len(states):
        raise CorruptTensors(
            folder, f"was saved by {count} ranks, and holds zero_pp_rank_*_optim_states.pt of {len(states)}"
        )
    sharded = "fp32_flat_groups" in states[0][1]
    if sharded and len(models) != len(states):
        raise CorruptTensors(folder, f"was saved by {count} ranks, and holds *_model_states.pt of {len(models)}")
    first, state = next(iter(models.values())), model_states[0]
    shapes = [_shapes(first, group) for group in _get(first, state, "param_shapes", list)]
    key = "fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"
    groups = [[_stored(file, key, x) for x in _get(file, optim, key, list)] for file, optim in states]
    if len({len(parts) for parts in groups}) > 1 or (not sharded and len(groups[0]) != len(shapes)):
        raise CorruptTensors(folder, f"has other groups of params in one file than in another, under {key}")
    tensors = []
    if sharded:
        tensors += _cut_by_param(folder, [pair for group in shapes for pair in group], groups)
        tensors += _frozen(list(models.values()), model_states)
    else:
        for number, group in enumerate(shapes):
            tensors += _cut_by_group(folder, group, [parts[number] for parts in groups])
    tensors += _shared(first, state, tensors)
    return tensors + _others(first, state, tensors, sharded)


def _latest(folder: Path) -> Path:
    name = (folder / "latest").read_text(errors="replace").strip()
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise CorruptTensors(folder / "latest", f"names {name!r}, which is no folder beside it")
    if not (folder / name).is_dir():
        raise CorruptTensors(folder / name, f"is missing; {folder / 'latest'} names it")
    return folder / name


def _ranks(folder: Path, pattern: re.Pattern) -> dict[int, Path]:
    """The files of one kind, by rank, in order."""
    found: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        if int(match[2]) > 0:
            raise ValueError(
                f"{folder} was saved with tensor or pipeline parallelism ({file.name}), which jzero does not put "
                f"together. Convert it with DeepSpeed's own tools, or save it without."
            )
        found[int(match[1] or 0)] = file
    found = dict(sorted(found.items()))
    for rank, (number, file) in enumerate(found.items()):
        if rank != number:
            raise CorruptTensors(folder, f"holds {file.name}, and none of rank {rank}")
    return found


def _dict(file: Path) -> Mapping[str, Any]:
    found = torch_file.read(file)
    if not isinstance(found, Mapping):
        raise CorruptTensors(file, "is no dict, as DeepSpeed writes it")
    return found


def _get(file: Path, state: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(state.get(key), kind):
        raise CorruptTensors(file, f"has no {kind.__name__} under {key!r}, as DeepSpeed writes it")
    return state[key]


def _stored(file: Path, name: str, value: Any) -> Stored:
    if not isinstance(value, Stored):
        raise CorruptTensors(file, f"has no tensor that jzero can read where {name} should be")
    return value


def _shapes(file: Path, group: Any) -> list[tuple[str, tuple[int, ...]]]:
    pairs = list(group.items()) if isinstance(group, Mapping) else None
    if pairs is None or not all(isinstance(name, str) and _is_shape(shape) for name, shape in pairs):
        raise CorruptTensors(file, "has no shapes of params under 'param_shapes', as DeepSpeed writes them")
    return [(name, tuple(shape)) for name, shape in pairs]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(type(size) is int and size >= 0 for size in shape)


def _cut_by_group(folder: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], parts: Sequence[Stored]) -> list[Tensor]:
    """Stages 1 and 2: one param behind the other, over all ranks; at the end there may be padding."""
    tensors, at, total = [], 0, sum(math.prod(part.shape) for part in parts)
    for name, shape in shapes:
        count = math.prod(shape)
        tensors.append(Tensor(name, parts[0].code, shape, _stretches(folder, name, parts, at, count)))
        at += count
    if at > total or total - at >= 4 * len(parts) + 4:
        raise CorruptTensors(folder, f"has {total} elements in a group of params that have {at}")
    return tensors


def _cut_by_param(
    folder: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], groups: Sequence[Sequence[Stored]]
) -> list[Tensor]:
    """Stage 3: of each param the same number of elements in each rank, the last padded."""
    tensors, at = [], 0
    for name, shape in shapes:
        count = math.prod(shape)
        each = -(-count // len(groups))
        stretches: list[Stretch] = []
        for rank, parts in enumerate(groups):
            stretches += _stretches(folder, name, parts, at, min(each, max(0, count - rank * each)))
        tensors.append(Tensor(name, groups[0][0].code, shape, tuple(stretches)))
        at += each
    for parts in groups:
        total = sum(math.prod(part.shape) for part in parts)
        if total != at:
            raise CorruptTensors(folder, f"has {total} elements in a rank; its params have {at}")
    return tensors


def _stretches(folder: Path, name: str, parts: Sequence[Stored], begin: int, count: int) -> tuple[Stretch, ...]:
    """Where elements lie that are counted through several tensors."""
    found, at, end = [], 0, begin + count
    for part in parts:
        size = math.prod(part.shape)
        first, last = max(begin, at), min(end, at + size)
        if first < last:
            found.append(part.part(first - at, last - first))
        at += size
    if end > at:
        raise CorruptTensors(folder, f"ends behind what the ranks have: at element {end} of {at}", name)
    return tuple(found) or (Stretch(parts[0].stretch.file, parts[0].stretch.begin, 0),)


def _frozen(files: Sequence[Path], states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Params that are not trained, at stage 3, where they are cut as the others."""
    tensors = []
    for name, shape in _shapes(files[0], states[0].get("frozen_param_shapes") or {}):
        parts = [
            _stored(file, name, _get(file, state, "frozen_param_fragments", Mapping).get(name))
            for file, state in zip(files, states, strict=True)
        ]
        stretches = _stretches(files[0], name, parts, 0, math.prod(shape))
        tensors.append(Tensor(name, parts[0].code, shape, stretches))
    return tensors


def _shared(file: Path, state: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Further names of tied params."""
    found = {tensor.name: tensor for tensor in tensors}
    pairs = _get(file, state, "shared_params", Mapping) if "shared_params" in state else {}
    return [
        Tensor(str(name), found[other].code, found[other].shape, found[other].stretches)
        for name, other in pairs.items()
        if other in found and name not in found
    ]


def _others(file: Path, state: Mapping[str, Any], tensors: Sequence[Tensor], sharded: bool) -> list[Tensor]:
    """What else the model has: buffers, and below stage 3 the params that are not trained."""
    found, module = {tensor.name for tensor in tensors}, _get(file, state, "module", Mapping)
    whole = state.get("buffer_names") or () if sharded else module
    others = [name for name, value in module.items() if name not in found and isinstance(value, Stored)]
    lost = [name for name in others if name not in whole]
    if lost:
        raise CorruptTensors(file, f"has params of which no part is in the files of the ranks: {few(lost, 10)}")
    return [Tensor(name, x.code, x.shape, (x.stretch,)) for name in others for x in [module[name]]]
