"""A model of one or several safetensors files, laid out as Hugging Face does: shards, and an index of them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jzero.checkpoint.exchange import deepspeed, megatron, torch_dist
from jzero.checkpoint.exchange.format import CorruptTensors, Found, Spec, Tensor, read_header
from jzero.checkpoint.origin import check_finished
from jzero.wording import few

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def find(source: Path) -> Found:
    """The tensors of a model: a file, a folder with one or several and perhaps an index, or a checkpoint of PyTorch.

    Raises:
        FileNotFoundError: There is none.
        CorruptTensors: A file is damaged or missing, or the index is not of these files.
        ValueError: It is what an export has not finished, whose files have their full size before their content.
    """
    check_finished(source)
    if source.is_file():
        if source.name.endswith(".index.json"):
            return Found(_indexed(source))
        return Found(read_header(source))
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not there. Name a .safetensors file, or a folder of them.")
    indices = sorted(source.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return Found(_indexed(indices[0]))
    if indices:
        names = ", ".join(path.name for path in indices)
        raise ValueError(f"{source} holds several models: {names}. Name the index of one of them.")
    files = sorted(source.glob("*.safetensors"))
    if not files and deepspeed.is_checkpoint(source):
        return Found(deepspeed.find(source))
    if not files and megatron.is_checkpoint(source):
        return megatron.find(source)
    if not files and torch_dist.is_checkpoint(source):
        return torch_dist.find(source)
    if not files:
        pickles = [path.name for path in sorted(source.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        why = (
            f" {pickles[0]} is a pickle, which can run code when it is opened: make safetensors files of it first."
            if pickles
            else ""
        )
        raise FileNotFoundError(
            f"{source} holds no .safetensors files, and no checkpoint of DeepSpeed, Megatron-LM or torch.distributed."
            f"{why}"
        )
    for file, other in _absent([file.name for file in files]):
        raise CorruptTensors(source / other, f"is missing, {file} is there")
    tensors = [tensor for file in files for tensor in read_header(file)]
    _check_once(source, tensors)
    return Found(tensors)


def _indexed(index: Path) -> list[Tensor]:
    try:
        names = json.loads(index.read_bytes().decode())["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ValueError("weight_map is no dict of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptTensors(index, f"is no index of safetensors files ({type(error).__name__}: {error})") from error
    files = sorted(set(names.values()))
    for file in files:
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CorruptTensors(index, f"names a file {file!r} outside of its folder")
        if not (index.parent / file).is_file():
            raise CorruptTensors(index.parent / file, f"is missing; {index.name} names it")
    for file, other in _absent(files):
        raise CorruptTensors(index, f"names {file}, and not {other}")
    tensors = [tensor for file in files for tensor in read_header(index.parent / file)]
    _check_once(index, tensors)
    found = {tensor.name: tensor.file.name for tensor in tensors}
    wrong = [
        f"{name} (index: {names.get(name, 'none')}, found: {found.get(name, 'none')})"
        for name in sorted(found.keys() | names.keys())
        if names.get(name) != found.get(name)
    ]
    if wrong:
        raise CorruptTensors(index, f"is not of these files; they differ in {few(wrong, 10)}")
    return tensors


def _absent(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Files that are one of several, and such as are not among them."""
    for file in files:
        if match := _SHARD.fullmatch(file):
            others = (f"{match[1]}-{number:05d}-of-{match[3]}.safetensors" for number in range(1, int(match[3]) + 1))
            yield from ((file, other) for other in others if other not in files)


def _check_once(where: Path, tensors: Sequence[Tensor]) -> None:
    first: dict[str, Tensor] = {}
    for tensor in tensors:
        other = first.setdefault(tensor.name, tensor)
        if other is not tensor:
            why = f"holds this tensor twice, in {other.file.name} and {tensor.file.name}"
            raise CorruptTensors(where, why, tensor.name)


def shards(specs: Sequence[Spec], largest: int) -> dict[str, list[Spec]]:
    """The files of a model, by name, and what is in each: tensors in their order, as many as there is room for.

    Args:
        specs: The tensors.
        largest: Most bytes of tensors in a file; one that is larger gets a file for itself.

    Example:
        >>> specs = [Spec(name, "float32", (1000,)) for name in "abc"]
        >>> {file: [spec.name for spec in some] for file, some in shards(specs, 8000).items()}
        {'model-00001-of-00002.safetensors': ['a', 'b'], 'model-00002-of-00002.safetensors': ['c']}
    """
    groups: list[list[Spec]] = [[]]
    held = 0
    for spec in specs:
        if groups[-1] and held + spec.nbytes > largest:
            groups.append([])
            held = 0
        groups[-1].append(spec)
        held += spec.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def index(files: Mapping[str, Sequence[Spec]]) -> str:
    """The text of the index of several files."""
    total = sum(spec.nbytes for group in files.values() for spec in group)
    names = {spec.name: file for file, group in files.items() for spec in group}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    return json.dumps(document, indent=2) + "\n"
