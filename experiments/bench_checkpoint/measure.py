"""One save or restore in this process: its peak of resident memory over what was there before, and its time."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jzero
from jzero.checkpoint import Checkpointer

DEVICES = 8
KINDS = ("save", "save async", "restore")


def measure(kind: str, folder: Path, nbytes: int, leaves: int, stage: int) -> dict[str, float]:
    """Saves or restores a state of Adam.

    Args:
        kind: One of `KINDS`; a restore reads what a save has left.
        folder: Where checkpoints are.
        nbytes: Bytes of params and optimizer state, each counted once.
        leaves: Number of params.
        stage: ZeRO stage.

    Returns:
        `state`, bytes that this process's devices hold; `saved`, bytes on the disk; `peak`, bytes over those before;
        `seconds`; for an asynchronous save also `blocked`, the seconds until it returned.
    """
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows = max(1, round(nbytes / 12 / leaves / 4096 / DEVICES)) * DEVICES
    mesh, tx = jzero.make_mesh(data=-1), optax.adam(1e-3)

    def init_params():
        return {f"layer{i}": jnp.full((rows, 4096), i, jnp.float32) for i in range(leaves)}

    layout = jzero.zero(jax.eval_shape(init_params), stage=stage, mesh=mesh)
    if kind == "restore":
        checkpointer = Checkpointer(folder)
        return _watched(lambda: checkpointer.restore(tx, layout).state)
    state = jax.block_until_ready(jzero.init(init_params, tx, layout))
    checkpointer = Checkpointer(folder, async_=kind == "save async")
    blocked = 0.0

    def save():
        nonlocal blocked
        began = time.perf_counter()
        checkpointer.save(0, state, tx, layout, overwrite=True)
        blocked = time.perf_counter() - began
        checkpointer.wait()
        return state

    found = _watched(save)
    checkpointer.close()
    return found | ({"blocked": blocked} if kind == "save async" else {})


def _watched(work) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began = _status("VmRSS"), time.perf_counter()
    state = jax.block_until_ready(work())
    seconds = time.perf_counter() - began
    leaves = jax.tree.leaves(state)
    held = {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for x in leaves for shard in x.addressable_shards}
    return {
        "state": sum(held.values()),
        "saved": sum(x.nbytes for x in leaves),
        "peak": _status("VmHWM") - before,
        "seconds": seconds,
    }


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; this benchmark needs Linux.")
