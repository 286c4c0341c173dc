"""One process of `test_processes`: trains on its own part of the batches, and writes what came as JSON."""

import contextlib
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from jzero.checkpoint import Checkpointer, CorruptCheckpoint, SaveFailed, cut, place, read, run_folder
from jzero.checkpoint.processes import Processes
from jzero.checkpoint.reshard import reshard

STEPS, EXAMPLES = 3, 16
PROCESS_CONFIGS = [(1, "8"), (3, "2,2,2")]


def init_params(key):
    keys = jax.random.split(key, 2)
    return {
        "w": jax.random.normal(keys[0], (8, 16)),
        "v": jax.random.normal(keys[1], (16, 8)),
        "odd": jnp.ones(7),
        "scale": jnp.ones(()),
    }


def loss_fn(params, batch):
    h = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] * params["scale"] + params["odd"].sum()
    errors = ((h - batch["x"]) ** 2).mean(-1)
    return jzero.Weighted((errors * batch["weight"]).sum(), batch["weight"].sum())


def make_batch(step):
    rng = np.random.default_rng(step)
    weight = rng.uniform(size=EXAMPLES) * (np.arange(EXAMPLES) > 5)  # most of the weight is in the second half
    return {"x": rng.normal(size=(EXAMPLES, 8)).astype(np.float32), "weight": weight.astype(np.float32)}


def train(stage, process, processes, **axes):
    """Losses and norms of a few steps on all devices, from one process's part of the batches."""
    part = slice(process * EXAMPLES // processes, (process + 1) * EXAMPLES // processes)
    replica_axes = ("replica",) if "replica" in axes else ()
    layout = jzero.zero(
        jax.eval_shape(init_params, jax.random.key(0)),
        stage=stage,
        mesh=jzero.make_mesh(**axes),
        replica_axes=replica_axes,
        min_shard_size=0,
    )
    tx = optax.sgd(0.05, momentum=0.9)
    state = jzero.init(init_params, tx, layout, jax.random.key(0))
    step = jzero.train_step(loss_fn, tx, layout, microbatches=2, clip_norm=1.0)
    log = []
    for n in range(STEPS):
        batch = layout.put_batch(jax.tree.map(lambda x: x[part], make_batch(n)))
        state, metrics = step(state, batch)
        log.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return log


def refusal():
    """What `put_batch` says of a process's part when all parts together do not divide."""
    layout = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=-1))
    try:
        layout.put_batch(np.zeros((3, 2)))
    except ValueError as error:
        return str(error)
    return "no error"


def save_while_locked(checkpointer, state, layout, tx):
    """Saves step 9 while the second process holds its place, as another job would."""
    folder, processes = checkpointer.directory / "9", Processes.of_jax()
    with place.locked(folder) if processes.index else contextlib.nullcontext():
        if processes.index:
            place.tmp(folder).mkdir()
        processes.meet("held")
        try:
            checkpointer.save(9, state, tx, layout, only=("params",))
            checkpointer.wait()
        except SaveFailed as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = "no error"
        processes.meet("refused")
        left = sorted(path.name for path in place.tmp(folder).iterdir())
        processes.meet("looked")
    if processes.index:
        place.tmp(folder).rmdir()
    return said, left


def save_in_two_orders(folder, state, layout, tx):
    """Two checkpointers write at once, in each process another one first, after one process has rewritten alone."""
    if jax.process_index():
        reshard(folder / "alone", folder / "rewritten")
    both = [Checkpointer(folder / name, keep=1, timeout=20) for name in ("one", "other")]
    for checkpointer in both if jax.process_index() else reversed(both):  # as their threads may come to it
        checkpointer.save(1, state, tx, layout, only=("params",))
    for checkpointer in both:
        checkpointer.close()
    return [checkpointer.steps for checkpointer in both]


def restore_what_one_cannot_read(checkpointer, layout, tx, others):
    """What both hear when the second process finds a damaged chunk, and when it does not see the latest step."""
    arrays, steps = read.arrays, run_folder.steps

    def damaged(folder, manifest, pairs):
        yield from list(arrays(folder, manifest, pairs))[:1]
        raise CorruptCheckpoint(folder / "state/params.w/c/0", "was changed", "params/w")

    found = []
    if jax.process_index():
        read.arrays, run_folder.steps = damaged, lambda directory: []
    for restore in (lambda: checkpointer.restore(tx, layout, **others), lambda: checkpointer.restore_params(layout)):
        try:
            found.append(str(restore()))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    read.arrays, run_folder.steps = arrays, steps
    return [*found, str(checkpointer.restore(tx, layout, **others).step)]


def checkpoints(folder):
    """Saves from both processes, restores what one process has saved, and says what came of each.

    A save of which one process fails is given up by both.
    """
    from tests.checkpoints import (  # makes arrays, so not before JAX is set up
        OTHERS,
        TX,
        digest,
        layout_of,
        random_state,
    )

    found, pieces = {}, cut.pieces

    def failing(source, process):
        yield from pieces(source, process)
        raise OSError("no more space")

    for stage, mesh in PROCESS_CONFIGS:
        layout = layout_of(stage, mesh)
        state = random_state(layout, 5)
        name = f"{stage} {mesh}"
        with Checkpointer(folder / name.replace(",", "x"), keep=1, timeout=60) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state, TX, layout, data={"of": jax.process_index()})
            restored = checkpointer.restore(TX, layout, **OTHERS)
            found[name] = {"own": digest(restored.state) == digest(state), "data": restored.data}
            found[name]["damaged"] = restore_what_one_cannot_read(checkpointer, layout, TX, OTHERS)
            if stage == 3:
                checkpointer.save(3, state, TX, layout, only=("params",))
                checkpointer.wait()
                cut.pieces = failing if jax.process_index() else pieces
                found[name]["failed"] = []
                save = functools.partial(checkpointer.save, 4, state, TX, layout, only=("params",))
                for work in (save, checkpointer.wait):
                    try:
                        work()
                    except Exception as error:
                        found[name]["failed"].append(f"{type(error).__name__}: {error}")
                cut.pieces = pieces
                found[name]["steps"] = checkpointer.steps
                found[name]["refused"] = save_while_locked(checkpointer, state, layout, TX)
                found[name]["orders"] = save_in_two_orders(folder, state, layout, TX)
        alone = Checkpointer(folder / "alone").restore(TX, layout, **OTHERS)
        found[name]["alone"] = digest(alone.state) == digest(state)
    return found


def start(address, process, processes):
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=processes, process_id=process)
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (processes, 8, 8 // processes)


def main(address, process, processes, out):
    start(address, process, processes)
    result = {
        "checkpoints": checkpoints(Path(out).parent / "checkpoints"),
        "refusal": refusal(),
        "1": train(1, process, processes, data=8),
        "3": train(3, process, processes, data=8),
        "3 hybrid": train(3, process, processes, replica=2, data=4),
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
