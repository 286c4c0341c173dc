"""Checkpoints of Megatron-LM in its format `torch_dist`: the params, in float32 where the optimizer kept them so.

The folder is one of `torch.distributed.checkpoint` with two files more: `common.pt`, a pickle of what all processes
share, and `metadata.json`, written when all else is. The tensors are those of the model and of its optimizer, beside
pickles of other things. Of the optimizer's, the float32 master weights of a param have its name behind a prefix, and
its shape; or else those of many params lie flat in buffers, in an order that only the model tells.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jzero.checkpoint.exchange import torch_dist
from jzero.checkpoint.exchange.format import CorruptTensors, Found
from jzero.checkpoint.exchange.torch_file import SIZES
from jzero.wording import few

LATEST = "latest_checkpointed_iteration.txt"

_COMMON, _MARK = "common.pt", "metadata.json"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_MASTER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(.*)", re.DOTALL)
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*\.(?:fp32_)?param", re.DOTALL)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one step of such a checkpoint, or holds steps of which a file names the latest."""
    begun = (folder / _COMMON).is_file() and any(folder.glob("*.distcp"))
    return begun or (folder / LATEST).is_file() or _form(folder) is not None


def find(folder: Path) -> Found:
    """The params by their names: the float32 master weights of those that have some, the others as they are.

    Raises:
        CorruptTensors: A file is missing or damaged.
        ValueError: It is in another format than `torch_dist`.
    """
    if (folder / LATEST).is_file():
        folder = _latest(folder)
    form = _form(folder)
    if form is None:
        why = "is missing or damaged; Megatron-LM writes it last, so the save was perhaps not finished"
        raise CorruptTensors(folder / _MARK, why)
    if form != "torch_dist":
        raise ValueError(f"{folder} is in Megatron-LM's format {form!r}; jzero reads torch_dist, of --ckpt-format.")
    if not torch_dist.is_checkpoint(folder):
        raise CorruptTensors(folder / torch_dist.METADATA, f"is missing; {_MARK} is there")
    saved = torch_dist.describe(folder)
    states = [name for name in saved.shapes if _OPTIMIZER.match(name)]
    masters = {match[1]: name for name in states if (match := _MASTER.fullmatch(name))}
    tensors, taken, rounded = [], set(), []
    for name in (name for name in saved.shapes if not _OPTIMIZER.match(name)):
        tensor, master = saved.tensor(name), masters.get(name)
        if master and saved.shapes[master] == tensor.shape:
            taken.add(master)
            tensor = max(replace(saved.tensor(master), name=name), tensor, key=lambda one: SIZES[one.code])
        elif tensor.code in ("BF16", "F16"):
            rounded.append(name)
        tensors.append(tensor)
    rest = [name for name in states if name not in taken]
    unread = [name for name in rest if _MASTER.fullmatch(name) or _FLAT.fullmatch(name)]
    return Found(tensors, (*rest, *saved.others, _COMMON), _note(rounded, unread) if rounded and unread else "")


def _latest(folder: Path) -> Path:
    said = (folder / LATEST).read_text(errors="replace").strip()
    if not re.fullmatch("[0-9]{1,18}|release", said):
        raise CorruptTensors(folder / LATEST, f"says {said[:100]!r}; wanted a number, or release")
    step = folder / (said if said == "release" else f"iter_{int(said):07d}")
    if not step.is_dir():
        raise CorruptTensors(step, f"is missing; {LATEST} names it")
    return step


def _form(folder: Path) -> str | None:
    """What the folder says of its format; None if it says nothing."""
    if not (folder / _MARK).is_file():
        return None
    try:
        return str(json.loads((folder / _MARK).read_bytes())["sharded_backend"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _note(rounded: Sequence[str], unread: Sequence[str]) -> str:
    return (
        f"{few(rounded, 1)} come in 16 bits, as the model computes with them. The optimizer has them in float32, but "
        f"in buffers of its own layout ({unread[0]}), which jzero does not take apart. To have them, save with "
        f"--dist-ckpt-optim-fully-reshardable."
    )
