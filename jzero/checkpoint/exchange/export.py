"""The params of a checkpoint as safetensors files: whole tensors, as Hugging Face has them, a few chunks at a time."""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from jzero.checkpoint import encoding, place
from jzero.checkpoint.blocks import ENOUGH, MEMORY, Progress, Reader, budget
from jzero.checkpoint.chunks import Region, grid
from jzero.checkpoint.entry import Entry
from jzero.checkpoint.exchange import slices
from jzero.checkpoint.exchange.files import INDEX, index, shards
from jzero.checkpoint.exchange.format import CorruptTensors, Spec, Tensor, header, read_header
from jzero.checkpoint.exchange.link import ROOT, Link, outward
from jzero.checkpoint.exchange.rules import Rules
from jzero.checkpoint.origin import Origin
from jzero.checkpoint.recipe import same
from jzero.checkpoint.room import check_apart, check_disk, check_free, on_disk, target

SHARD = 5_000_000_000
"""Most bytes of tensors in a file, as Hugging Face has it by default."""

FLOATS = ("float32", "bfloat16", "float16")
"""What floats can be exported as."""


@dataclass(frozen=True)
class Exported:
    """What `export_safetensors` wrote.

    Attributes:
        checkpoint: The checkpoint that it is of.
        files: The names of the files, the index apart.
        tensors: How many tensors.
        nbytes: Bytes of them.
        dtypes: How many tensors there are of each dtype.
        left: What is not exported: other parts of the checkpoint, such as "opt_state", and params that the map skips.
    """

    checkpoint: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    dtypes: Mapping[str, int]
    left: tuple[str, ...]


def export_safetensors(
    checkpoint: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    map: str | PathLike[str] | Rules | None = None,
    dtype: str | None = None,
    max_shard: int = SHARD,
    memory: int = MEMORY,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Exported:
    """Writes the params of a checkpoint as safetensors files: those that the optimizer moved, so master weights.

    The folder gets `model.safetensors`, or several files and `model.safetensors.index.json`, in the names and shapes of
    the map. Each chunk of the checkpoint is read and checked once and put where it belongs; never is a tensor whole in
    memory. All is read back and compared before the folder takes its name, so that it is whole wherever a run stops.

    Args:
        checkpoint: A checkpoint, of jzero or of orbax, or a folder of them, of which the latest is taken.
        folder: Where the files will be.
        map: Which leaf becomes which tensor: the name of a map that comes with jzero ("gpt2", "llama"), a TOML file, or
            `Rules`. None: every leaf as it is, its keys joined by dots.
        dtype: What floats become, "float32", "bfloat16" or "float16", rounded to nearest. None: as they are stored.
        max_shard: Most bytes of tensors in a file.
        memory: Bytes of memory that it may take, over those of the process before.
        overwrite: Whether an earlier export is replaced.
        progress: Is told what is being done.

    Raises:
        FileNotFoundError: There is no such checkpoint or map.
        FileExistsError: The folder is there.
        CheckpointMismatch: Leaves of which no tensor can be made; all of them are named.
        CorruptCheckpoint: A file of the checkpoint is missing or was changed, or what was written reads back otherwise.
        LimitExceeded: Memory or disk are too small; nothing was written.
        SaveFailed: It could not be written; nothing of it is left.
        ValueError: An option or a map that makes no sense, or a number that is too large for the dtype.

    Example:
        >>> import tempfile, safetensors
        >>> layout = jzero.zero({"w": jnp.ones((8, 3))}, stage=3, mesh=jzero.make_mesh(data=-1), precision="bf16")
        >>> state = jzero.init(lambda: {"w": jnp.full((8, 3), 1.001)}, optax.adam(0.1), layout)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jzero.checkpoint.Checkpointer(f"{folder}/run") as checkpointer:
        ...         checkpointer.save(7, state, optax.adam(0.1), layout)
        ...     found = export_safetensors(f"{folder}/run", f"{folder}/model")
        ...     with safetensors.safe_open(f"{folder}/model/model.safetensors", "np") as file:
        ...         found.left[:2], file.get_tensor("w")[0, 0]
        (('opt_state', 'step'), np.float32(1.001))
    """
    if dtype not in (None, *FLOATS):
        raise ValueError(f"export: dtype={dtype!r}; wanted one of {', '.join(FLOATS)}, or None to keep what is stored.")
    if max_shard < 1:
        raise ValueError(f"export: max_shard={max_shard!r}; wanted 1 byte or more.")
    rules = Rules.read(map) if isinstance(map, str | PathLike) else map
    origin, folder = Origin.open(Path(checkpoint)), target(folder)
    check_apart(origin.folder, folder)
    check_free(folder, overwrite, lambda path: path.name == INDEX or path.suffix == ".safetensors", "an export")
    links = outward(str(origin.folder), origin.leaves, rules, dtype)
    files = shards(
        [Spec(name, link.dtype, link.turn.tensor_shape) for link in links for name in link.tensors], max_shard
    )
    nbytes = sum(spec.nbytes for specs in files.values() for spec in specs)
    leaves = {leaf.path: leaf for leaf in origin.leaves}
    pairs = [(leaf, link) for link in links if (leaf := leaves[link.path]).stored is not None]
    largest = max((leaf.chunk_nbytes for leaf, _ in pairs), default=0)
    shared = budget(f"export {origin.folder}", memory, largest, largest)
    check_disk(folder, on_disk(nbytes, len(files)))
    block = min(shared.block, max(largest, ENOUGH))
    work = [
        (leaf, link, region)
        for leaf, link in pairs
        for _, region in grid(leaf.stored_shape, shape_of_blocks(leaf, link, block))
    ]
    with place.whole(folder, overwrite) as where:
        wanted = ((same(leaf), region) for leaf, _, region in work)
        blocks = Reader(origin, shared.reading).blocks(wanted, shared.ahead)
        sums = _write(zip(work, blocks, strict=True), where, files, lambda done: progress("writing", done, nbytes))
        _check(where, files, sums, lambda done: progress("checking", done, nbytes))
    dtypes = [spec.dtype for specs in files.values() for spec in specs]
    taken = {link.path for link in links}
    rest = [leaf for leaf in origin.leaves if leaf.path not in taken]
    left = dict.fromkeys(leaf.name if leaf.path[0] == ROOT else leaf.path[0] for leaf in rest)
    counts = {name: dtypes.count(name) for name in dict.fromkeys(dtypes)}
    return Exported(origin.folder, tuple(files), len(dtypes), nbytes, counts, tuple(left))


def shape_of_blocks(leaf: Entry, link: Link, largest: int) -> tuple[int, ...]:
    """The shape of blocks of whole chunks, at most `largest` bytes or one chunk, that make long runs of the tensor.

    They grow in the dims that lie closest together in the tensor.
    """
    shape, size = list(leaf.chunk), encoding.dtype_of(str(leaf.stored)).itemsize
    count = len(link.stack)
    for dim in [*(count + dim for dim in link.turn.fastest), *reversed(range(count))]:
        room = max(1, largest // (math.prod(shape) * size))
        shape[dim] *= min(room, -(-leaf.stored_shape[dim] // shape[dim]))
    return tuple(shape)


Sums = list[tuple[Link, Region, dict[str, int]]]
"""For each block that was written its leaf, where it lies, and the CRC-32 of what each tensor got of it.

Not for each slice of a tensor: where dims are turned there may be as many as elements.
"""


def _write(
    blocks: Iterable[tuple[tuple[Entry, Link, Region], np.ndarray]],
    folder: Path,
    files: Mapping[str, Sequence[Spec]],
    progress: Callable[[int], None],
) -> Sums:
    """Writes all tensors; returns the sums of what was written."""
    sums, done = [], 0
    with ExitStack() as stack:
        places: dict[str, tuple[int, Tensor]] = {}
        for name, specs in files.items():
            text, tensors = header(folder / name, specs, {"format": "pt"})
            file = stack.enter_context((folder / name).open("xb"))
            file.write(text)
            file.truncate(len(text) + sum(tensor.nbytes for tensor in tensors))
            places |= {tensor.name: (file.fileno(), tensor) for tensor in tensors}
        for (leaf, link, region), block in blocks:
            array, found = encoding.values(block, leaf.dtype), {}
            for name, at, piece in link.parts(region):
                handle, tensor = places[name]
                part = _cast(piece.of(array[(*at, ...)]), link)
                slices.write(handle, tensor, piece.region, part)
                found[name] = zlib.crc32(slices.raw(part), found.get(name, 0))
                done += part.nbytes
                progress(done)
                del part
            sums.append((link, region, found))
            del array, block  # or they would be there while the next but one is read
        for handle in {handle for handle, _ in places.values()}:
            os.fsync(handle)
            if hasattr(os, "posix_fadvise"):  # what is compared then comes from the disk
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    if len(files) > 1:
        place.write_text(folder / INDEX, index(files))
    return sums


def _cast(array: np.ndarray, link: Link) -> np.ndarray:
    """A slice in the dtype of its tensor, C-contiguous."""
    dtype = encoding.dtype_of(link.dtype)
    if array.dtype == dtype:
        return np.ascontiguousarray(array).reshape(array.shape)
    with np.errstate(over="ignore"):
        cast = encoding.cast(array, link.dtype)
    if np.any(np.isinf(cast) & np.isfinite(array)):
        number = np.max(np.abs(array[np.isfinite(array)]))
        raise ValueError(
            f"{link.name}: {number} is too large for {link.dtype}. Export it as it is stored, with no dtype."
        )
    return cast


def _check(folder: Path, files: Mapping[str, Sequence[Spec]], sums: Sums, progress: Callable[[int], None]) -> None:
    """Compares what is on the disk with what was written.

    Raises:
        CorruptTensors: It differs.
    """
    tensors = {tensor.name: tensor for name in files for tensor in read_header(folder / name)}
    wanted = {spec.name: (spec.code, spec.shape) for specs in files.values() for spec in specs}
    if {tensor.name: (tensor.code, tensor.shape) for tensor in tensors.values()} != wanted:
        raise CorruptTensors(folder, "reads back with other tensors than were written")
    done = 0
    with slices.Files() as opened:
        for link, region, before in sums:
            found: dict[str, int] = {}
            for name, _, piece in link.parts(region):
                array = slices.read(opened, tensors[name], piece.region)
                found[name] = zlib.crc32(slices.raw(array), found.get(name, 0))
                done += array.nbytes
                progress(done)
                del array
            for name in before:
                if found[name] != before[name]:
                    raise CorruptTensors(tensors[name].file, "reads back with other bytes than were written", name)
