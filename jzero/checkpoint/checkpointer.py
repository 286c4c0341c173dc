"""`Checkpointer`: a run's folder of checkpoints, one for each step that was saved."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import optax

from jzero.arguments import check_arguments
from jzero.checkpoint import cut, parts, place, run_folder
from jzero.checkpoint.errors import BeingWritten
from jzero.checkpoint.manifest import Manifest, as_json
from jzero.checkpoint.parts import PARTS
from jzero.checkpoint.processes import TIMEOUT, Processes
from jzero.checkpoint.restore import restored, restored_params
from jzero.checkpoint.room import check_free, is_of_checkpoint
from jzero.checkpoint.store import Piece
from jzero.checkpoint.write import write
from jzero.layout import Layout
from jzero.loss_scale import DynamicLossScale
from jzero.state import TrainState


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns.

    Attributes:
        state: The state, placed as the layout says.
        step: The step that it was saved at.
        data: The position in the data that was saved with it.
        metrics: The numbers that were saved with it.
    """

    state: TrainState
    step: int
    data: Any
    metrics: Mapping[str, float]


class Checkpointer:
    """Saves training states into a folder, and restores them into any layout.

    A state is saved with the logical shapes of its leaves, whatever the stage, the mesh, the padding or the number of
    processes, so that each can be restored at any stage, on any mesh and by any number of processes, bit for bit, with
    nothing to convert. See `docs/checkpoints.md` for the format, which plain orbax reads.

    A save appears in the folder all at once, under the number of its step; until then it has another name, which the
    next save removes if it was never finished. Files have checksums, which are checked as they are read.

    In a run of several processes, each makes a `Checkpointer` of the same folder, which all must see, and calls the
    same methods in the same order. The folder belongs to one run at a time: a save that another job is writing is left
    alone, and refused here.

    Args:
        directory: The folder; the first save makes it.
        keep: How many checkpoints are kept: the latest ones, and beside them the best one if there is a `best`, and the
            one that was just saved, where a run went back and has later ones. None: all.
        every: `due` is true at each multiple of this step.
        async_: Whether `save` returns when the state has been copied to the host's memory, and a thread writes it.
        best: Name of a metric and whether "min" or "max" is best, such as ("loss", "min").
        timeout: Seconds that processes wait for each other.

    Raises:
        ValueError: An option that makes no sense.

    Example:
        >>> import tempfile
        >>> layout = jzero.zero({"w": jnp.ones(8)}, stage=2, mesh=jzero.make_mesh(data=-1), precision="bf16")
        >>> state = jzero.init(lambda: {"w": jnp.full(8, 1.001)}, tx := optax.adam(0.1), layout)
        >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, keep=2) as checkpointer:
        ...     checkpointer.save(100, state, tx, layout, data={"epoch": 3})
        ...     checkpointer.wait()
        ...     other = jzero.zero({"w": jnp.ones(8)}, stage=3, mesh=jzero.make_mesh(data=4, model=2), precision="bf16")
        ...     restored = checkpointer.restore(tx, other)
        >>> restored.step, restored.data, restored.state.params["w"][0]
        (100, {'epoch': 3}, Array(1.001, dtype=float32))
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        keep: int | None = None,
        every: int = 1,
        async_: bool = True,
        best: tuple[str, Literal["min", "max"]] | None = None,
        timeout: float = TIMEOUT,
    ):
        for name, value in (("keep", 1 if keep is None else keep), ("every", every)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Checkpointer: {name}={value!r}; wanted an int of 1 or more.")
        if best is not None and not (
            isinstance(best, tuple) and len(best) == 2 and isinstance(best[0], str) and best[1] in ("min", "max")
        ):
            raise ValueError(f"Checkpointer: best={best!r}; wanted a metric and its best end, such as ('loss', 'min').")
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"Checkpointer: {directory} is a file; wanted a folder.")
        self.keep, self.every, self.async_, self.best, self.timeout = keep, every, async_, best, timeout
        self._thread = ThreadPoolExecutor(1, "jzero-save") if async_ else None
        self._pending: tuple[int, Future] | None = None
        self._closed = False

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def due(self, step: int) -> bool:
        """Whether a run should save at this step."""
        return step % self.every == 0

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, in order.

        Warns:
            UserWarning: A folder has the name of a step, and is none: it was made by something else, or damaged.
        """
        return run_folder.steps(self.directory)

    @property
    def latest(self) -> int | None:
        """The last step of which there is a checkpoint; None if there is none."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The step whose metric is best; the later one of equals. None if none has it, or there is no `best`.

        Warns:
            UserWarning: The manifest of a checkpoint was changed; it is passed over.
        """
        return None if self.best is None else run_folder.best_step(self.directory, *self.best)

    def path(self, step: int) -> Path:
        """The folder of one checkpoint; where its replacement was stopped, that of the one before."""
        return run_folder.path(self.directory, step)

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint holds. No array is read.

        Raises:
            FileNotFoundError: There is none of this step.
            CorruptCheckpoint: Its manifest was changed.
        """
        return run_folder.manifest(self.directory, step)

    def save(
        self,
        step: int,
        state: TrainState,
        tx: optax.GradientTransformation,
        layout: Layout,
        *,
        data: Any = None,
        metrics: Mapping[str, float] | None = None,
        only: Sequence[str] = PARTS,
        overwrite: bool = False,
    ) -> None:
        """Saves a state as the checkpoint of a step.

        With `async_` it returns when the state has been copied to the host's memory, up to as much as this process
        writes: its share of one copy of the state. Then the state may be donated to the next step. Without, it returns
        when all is on the disk, and takes the memory of a few chunks of 16 MiB. The save before is waited for. No
        collective runs.

        Args:
            step: The step; an int of 0 or more.
            state: The state.
            tx: The optimizer that it was made with.
            layout: The layout that it was made with.
            data: Where the run is in its data, such as {"epoch": 1, "batch": 200}: whatever JSON can hold, as it is
                when this is called; tuples come back as lists. Of several processes, what the first one passes.
            metrics: Numbers to choose the best checkpoint by; those of the first process. Without the one of `best`
                this checkpoint is never the best.
            only: Parts of the state to save; ("params",) makes a checkpoint to start others from.
            overwrite: Whether a checkpoint of this step is replaced, in the end.

        Raises:
            FileExistsError: There is one of this step; or, with `overwrite`, something that is none.
            SaveFailed: Without `async_`: it could not be written. Those before are as they were.
            TypeError: `data` is nothing that JSON can hold, or has keys that are no strings; or one of `metrics` is no
                number.
            ValueError: The state is not of this layout and `tx`.

        Warns:
            UserWarning: The save before this one failed, a later step is there, or `metrics` are without the one of
                `best`.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"save: step={step!r}; wanted an int of 0 or more.")
        if self._closed:
            raise ValueError(f"save: this Checkpointer of {self.directory} was closed; make another one.")
        check_arguments("save(step, state, tx, layout)", layout=layout, tx=tx)
        only = parts.chosen("save", only)
        try:
            self.wait()
        except Exception as error:  # whatever it was, this save may go well
            warnings.warn(f"The save before step {step} failed: {error}", stacklevel=2)
        numbers = _numbers(metrics or {})
        try:  # a copy: the caller may go on with them while the thread writes
            data, numbers = as_json(data), as_json(numbers)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"save: data or metrics are nothing that JSON holds: {error}. Pass numbers, strings, lists and dicts."
            ) from error
        check_free(self.path(step), overwrite, is_of_checkpoint, "a checkpoint of jzero")
        if later := [other for other in self.steps if other > step]:
            warnings.warn(
                f"save: step {step} comes before step {later[-1]}, which {self.directory} has already: that one stays "
                f"the latest, and the last that keep= removes. Save into another folder, or remove the later steps.",
                stacklevel=2,
            )
        sources = cut.sources(parts.items(state, tx, layout, only))
        manifest = Manifest(
            leaves=tuple(source.entry for source in sources),
            step=step,
            data=data,
            metrics=numbers,
            saved_from=parts.described(layout),
        )
        if self.best is not None and metrics and self.best[0] not in metrics:
            warnings.warn(
                f"save: metrics have {', '.join(metrics)}, and not {self.best[0]!r}, by which this Checkpointer finds "
                f"the best checkpoint; step {step} will not be it.",
                stacklevel=2,
            )
        processes = Processes.of_jax(self.timeout)
        pieces = (piece for source in sources for piece in cut.pieces(source, processes.index))
        if self._thread is None:
            self._write(manifest, pieces, processes, overwrite)
        else:
            # The thread writes while the rest is copied, and what is written is let go.
            copies: SimpleQueue = SimpleQueue()
            written = self._thread.submit(self._write, manifest, _taken(copies), processes, overwrite)
            self._pending = step, written
            try:
                for piece in pieces:
                    copies.put(cut.snapshot(piece))
            except BaseException as error:
                # What stops this call, as Ctrl-C does, is not to stop the next one, which hears of this save.
                copies.put(error if isinstance(error, Exception) else RuntimeError(f"it was stopped ({error!r})"))
                raise
            copies.put(None)

    def _write(self, manifest, pieces, processes, overwrite):
        if processes.index == 0:
            try:
                place.clean(self.directory)
            except OSError as error:  # the new one is what counts, and others wait for this process there
                warnings.warn(f"What stopped saves have left in {self.directory} stays: {error}", stacklevel=2)
        write(self.directory / str(manifest.step), manifest, pieces, processes=processes, overwrite=overwrite)
        if self.keep is not None:
            try:
                if processes.index == 0:
                    self._prune(self.keep, manifest.step)
            except OSError as error:
                warnings.warn(f"{self.directory} keeps more than keep={self.keep}: {error}", stacklevel=2)
            finally:  # whatever it was, others wait for this process there
                processes.meet(f"{self.directory}/pruned")

    def _prune(self, keep: int, saved: int) -> None:
        stay = {saved, self.best_step}
        for step in self.steps[:-keep]:
            if step not in stay:
                try:
                    place.remove(self.path(step))
                except BeingWritten as error:
                    warnings.warn(f"{self.path(step)} is more than keep={keep}, and stays: {error}", stacklevel=2)

    def wait(self) -> None:
        """Waits until the save that is being written is on the disk.

        Raises:
            SaveFailed: It could not be written.
        """
        if self._pending is not None:
            (_, future), self._pending = self._pending, None
            future.result()

    def close(self) -> None:
        """Waits, and ends the thread. `with Checkpointer(...) as checkpointer:` does so by itself.

        Raises:
            SaveFailed: The last save could not be written.
        """
        self._closed = True
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def restore(
        self,
        tx: optax.GradientTransformation,
        layout: Layout,
        *,
        step: int | Literal["latest", "best"] = "latest",
        key: Any = None,
        model_state: Any = None,
        loss_scale: float | DynamicLossScale | None = None,
        only: Sequence[str] = PARTS,
        init: Callable[[], TrainState] | None = None,
        on_missing: Literal["error", "init"] = "error",
        on_extra: Literal["error", "ignore"] = "error",
        cast: bool = False,
    ) -> Restored:
        """Reads a checkpoint into a layout, whatever it was saved from.

        Each process reads what its devices hold, a few chunks at a time; at stages 0 to 2 of a mixed precision the
        params are then made of the master weights (one all-gather). Everything is checked before any array is read. Of
        several processes the first one says which checkpoint is the latest, and what stops one of them stops all.

        Args:
            tx: The optimizer of the state that is wanted.
            layout: The layout of that state.
            step: Which checkpoint: a step, "latest", or "best" by the metric that `best` names.
            key: A random key, if the state is to have one; the one that was saved takes its place.
            model_state: A tree with the shapes and dtypes of the model state, if there is one; what was saved takes its
                place.
            loss_scale: The loss scale of the training step, if there is one.
            only: Parts of the state to read; the others come from `init`. ("params",) starts a new run from the
                weights of another one.
            init: Makes a fresh state with this `tx` and layout: `lambda: jzero.init(init_params, tx, layout, ...)`. It
                is called where something is not read: with `on_missing="init"`, or `only`.
            on_missing: What becomes of a leaf that is wanted and not in the checkpoint: "error", or "init".
            on_extra: What becomes of a leaf that is in the checkpoint, among the parts of `only`, and not wanted:
                "error", or "ignore".
            cast: Whether floats may be cast to the dtype that is wanted.

        Returns:
            The state, the step that it was saved at, and what was saved with it.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            CheckpointMismatch: It does not hold what is wanted; every leaf that does not fit is named.
            CorruptCheckpoint: A file is missing or was changed.
            RestoreFailed: Another process could not read its part; nobody then waits for it.
        """
        check_arguments("restore(tx, layout)", layout=layout, tx=tx)
        only = parts.chosen("restore", only)
        if (len(only) < len(PARTS) or on_missing == "init") and init is None:
            option = "on_missing='init'" if len(only) == len(PARTS) else f"only={list(only)}"
            raise ValueError(
                f"restore: with {option} the rest is made afresh; pass init=lambda: jzero.init(init_params, tx, "
                f"layout, ...) as well."
            )
        processes = Processes.of_mesh(layout.mesh, self.timeout)
        number, manifest = self._open(step, processes)
        state = restored(
            self.path(number),
            manifest,
            tx,
            layout,
            processes,
            key=key,
            model_state=model_state,
            loss_scale=loss_scale,
            only=only,
            init=init,
            on_missing=on_missing,
            on_extra=on_extra,
            cast=cast,
        )
        return Restored(state, number, manifest.data, manifest.metrics)

    def restore_params(
        self, layout: Layout, *, step: int | Literal["latest", "best"] = "latest", cast: bool = False
    ) -> Any:
        """Reads the params alone, as `state.params` has them: to evaluate or to generate with.

        Args:
            layout: The layout of the params that are wanted.
            step: As for `restore`.
            cast: As for `restore`.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            CheckpointMismatch: It does not hold what is wanted; every leaf that does not fit is named.
            CorruptCheckpoint: A file is missing or was changed.
            RestoreFailed: Another process could not read its part; nobody then waits for it.
        """
        processes = Processes.of_mesh(layout.mesh, self.timeout)
        number, manifest = self._open(step, processes)
        return restored_params(self.path(number), manifest, layout, processes, cast=cast)

    def _open(self, step: int | Literal["latest", "best"], processes: Processes) -> tuple[int, Manifest]:
        """The step and the manifest of a checkpoint, when the save before has come to its end."""
        self.wait()
        number = processes.first(f"{self.directory}/step", lambda: self._number(step))
        with processes.together(f"{self.directory}/manifest"):
            return number, self.manifest(number)

    def _number(self, step: int | Literal["latest", "best"]) -> int:
        if step in ("latest", "best"):
            found = self.latest if step == "latest" else self.best_step
            if step == "best" and self.best is None:
                raise ValueError(
                    "restore: step='best' needs a metric; make the Checkpointer with best=('loss', 'min')."
                )
            if found is None:
                raise FileNotFoundError(run_folder.nothing(self.directory, self.best and self.best[0]))
            step = found
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"restore: step={step!r}; wanted a step, 'latest' or 'best'.")
        return step


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats.

    Raises:
        TypeError: One is no number.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"save: metrics[{name!r}] is no number: {error}. Pass a float of each.") from error
    return numbers


def _taken(copies: SimpleQueue) -> Iterator[Piece]:
    """What is put into a queue, up to None."""
    while (piece := copies.get()) is not None:
        if isinstance(piece, BaseException):
            raise piece
        yield piece
