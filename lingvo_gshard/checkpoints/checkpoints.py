"""Checkpoints: sharded arrays and the input's state, written by Orbax.

    model_dir/checkpoints/STEP/{state/,input_state/,about/}
    model_dir/checkpoints/STEP/commit_success.txt    written last: without it, STEP is incomplete
    model_dir/checkpoints/best.json    the best checkpoint's step, metric and value
    model_dir/damaged_checkpoints/     checkpoints that were found damaged; never deleted

The state is one flat dict from dotted paths to arrays, so that files and programs name them alike;
`about` has a fingerprint of each. Older checkpoints are deleted only when a new one is complete.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from lingvo_gshard.checkpoints import averages, epath_glob, stored
from lingvo_gshard.checkpoints.fingerprints import fingerprint
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError, SavedArray, Stored
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import digests, json_records, storage
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import padded, processes, specs
from lingvo_gshard.spmd.padded import PaddedArray

_BEST = "checkpoints/best.json"
COMMITTED = "commit_success.txt"  # The name is Orbax's.
# The folder that a save writes, or leaves behind if it is killed.
_OF_A_SAVE = re.compile(r"\d+(\.orbax-checkpoint-tmp.*)?")
_SECS_PER_HOUR = 3600
epath_glob.correct()  # Orbax lists a checkpoint's parts by it.
_Result = TypeVar("_Result")


class SaveError(OSError):
    """A checkpoint could not be written; earlier ones are untouched."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a run's checkpoints are of; the settings in `params.train` decide which of them stay."""

    params: Params
    partitioning: Partitioning
    state_spec: NestedMap  # TensorSpecs.

    def to_json(self, state: NestedMap) -> dict[str, Any]:
        """Returns these facts and the state's fingerprints; all processes must call it."""
        array_of = dict(state.FlattenItems())
        fingerprints = {
            path: fingerprint(array_of[path], spec.dims)
            for path, spec in self.state_spec.FlattenItems()
        }
        return self.described(fingerprints, jax.process_count())

    def described(
        self, fingerprints: Mapping[str, list[str]], num_processes: int
    ) -> dict[str, Any]:
        """Returns these facts, given the fingerprints of a state's arrays."""
        mesh = self.partitioning.mesh
        # Programs read `arrays` and `fingerprints` back; the rest is for people.
        return {
            "params": self.params.ToText(),
            "mesh": [list(mesh.axis_names), list(mesh.axis_sizes), list(mesh.devices)],
            "table": dict(self.partitioning.table),
            "arrays": {path: specs.to_json(spec) for path, spec in self.state_spec.FlattenItems()},
            "num_processes": num_processes,
            "fingerprints": dict(fingerprints),
        }


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read."""

    step: int
    state: NestedMap  # On the devices.
    input_state: dict[str, Any]
    digest: str  # Of the state's fingerprints.


def folder(model_dir: str | pathlib.Path) -> epath.Path:
    """Returns the folder of a run's checkpoints, which Orbax reads and writes in gs:// itself."""
    origin = storage.origin(model_dir)
    is_direct = str(origin).startswith("gs://")
    return epath.Path(origin if is_direct else os.path.abspath(model_dir)) / "checkpoints"


def whole_steps(model_dir: str | pathlib.Path) -> list[int]:
    """Returns the steps of complete checkpoints, oldest first; empty before the first."""
    committed = folder(model_dir).glob(f"*/{COMMITTED}")
    names = [path.parent.name for path in committed]
    # A checkpoint that somebody renamed, such as 100_good, does not count.
    return sorted(int(name) for name in names if name.isdigit())


def _committed_secs(path: epath.Path) -> float:
    """Returns when a checkpoint was complete, as noted in it; 0 if that cannot be read.

    The times of its files are no guide, since copying a checkpoint changes them.
    """
    try:
        about = json_records.parse((path / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
        return about["commit_timestamp_nsecs"] / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def steps_to_keep(times: Mapping[int, float], best: int | None, train_params: Params) -> set[int]:
    """Returns which steps' checkpoints stay, by the settings of training.

    `times` has the time of each checkpoint in seconds, by step; `best` is the best one's step.
    """
    # The newest, and the best one as long as it is there.
    steps = sorted(times)
    kept = set(steps[-train_params.keep_checkpoint_max :])
    if best is not None and best in times:
        kept.add(best)

    hours = train_params.keep_checkpoint_every_n_hours
    if hours is None:
        return kept

    # The first one, and each that is so many hours from the last one kept by this rule.
    last = None
    for step in steps:
        # A clock that was set back counts as elapsed time, or it would have to catch up first.
        if last is None or abs(times[step] - times[last]) >= hours * _SECS_PER_HOUR:
            kept.add(step)
            last = step
    return kept


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far: its step, and the metric's value there."""

    step: int
    metric: str
    value: float


def read_best(model_dir: str | pathlib.Path) -> Best | None:
    """Returns the best checkpoint noted in a run's folder; None if none can be read."""
    path = pathlib.Path(model_dir, _BEST)
    if not path.exists():
        return None
    try:
        return digests.read_json(path, 1, functools.partial(json_records.read, Best))
    except ValueError as error:
        # Training goes on without it: the next evaluation writes another.
        logging.warning("%s It counts as absent.", error)
        return None


def note_best(
    model_dir: str | pathlib.Path,
    step: int,
    metrics: Mapping[str, float | list[float]],
    metric: str,
    higher_is_better: bool = False,
) -> None:
    """Notes `step` if its metric is the best so far, which NaN never is.

    Raises ValueError if there is no such metric, or it is a list.
    """
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    if metric not in numbers:
        raise ValueError(f"best by {metric!r}: expected one of {', '.join(sorted(numbers))}.")

    value = numbers[metric]
    before = read_best(model_dir)
    # A save that failed, or a deletion, may have left a note of a checkpoint that is not there.
    if before is None or before.metric != metric or before.step not in whole_steps(model_dir):
        is_best = not math.isnan(value)
    elif higher_is_better:
        is_best = value > before.value
    else:
        is_best = value < before.value

    if is_best:
        path = pathlib.Path(model_dir, _BEST)
        path.parent.mkdir(parents=True, exist_ok=True)
        digests.write_json(path, 1, dataclasses.asdict(Best(step, metric, value)))


def _check_slots(path: epath.Path, checkpoint: Stored, state_spec: NestedMap) -> None:
    """Raises ValueError if the slots are another optimizer's, by their names."""
    saved = _slot_names(checkpoint.specs)
    expected = _slot_names(dict(state_spec.FlattenItems()))
    if saved != expected:
        raise ValueError(
            f"{path}: its optimizer has the slots {', '.join(saved) or 'none'}, and this run's "
            f"{', '.join(expected) or 'none'}: they are of different kinds. Start a new run from "
            "its weights, by train.warm_start_from."
        )


def _slot_names(paths: Collection[str]) -> list[str]:
    """Returns the names of an optimizer's slots of a weight, such as `column` and `row`."""
    return sorted({path.rpartition(".")[2] for path in paths if path.startswith("slots.")})


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one model_dir, as a context manager, which waits for the last save.

    All processes must make the same calls.
    """

    def __init__(self, model_dir: str | pathlib.Path, contents: Contents | None = None) -> None:
        """Opens the folder: to read if `contents` is None, else to save what `contents` describes.

        To save, the folder is created, and what a killed save left in it is deleted.
        """
        self._model_dir = model_dir
        self._folder = folder(model_dir)
        self._damaged = self._folder.parent / "damaged_checkpoints"
        self._contents = contents
        self._saving: int | None = None  # The step of the save in progress.

        if contents is not None:
            # Each process writes the arrays of its own devices into this folder.
            processes.check_shared(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            if processes.is_first():
                self._delete_incomplete()

        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                # Weights hardly compress; without compression saving takes half the time.
                state=ocp.PyTreeCheckpointHandler(use_compression=False),
                input_state=ocp.JsonCheckpointHandler(),
                about=ocp.JsonCheckpointHandler(),
            )
        )

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError):  # Reported by `wait`; Orbax may raise it again.
                self._checkpointer.close()

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, oldest first."""
        return whole_steps(self._model_dir)

    def latest(self, passed_over: Collection[int] = ()) -> int | None:
        """Returns the last step with a complete checkpoint, as process 0 sees it; None without one.

        The steps in `passed_over` do not count.
        """
        steps = set(self.steps()).difference(passed_over)
        # Machines may list a folder of a network disk differently for a while.
        newest = processes.of_first(max(steps, default=-1))
        return None if newest < 0 else newest

    def save(self, step: int, state: NestedMap, input_state: dict[str, Any]) -> None:
        """Starts writing a checkpoint and returns once the state may be overwritten.

        Every device writes its own part of the arrays; `input_state` is JSON-able. The checkpoint
        is complete after `wait`. Raises SaveError if it, or the one before, could not be written.
        """
        assert self._contents is not None, "opened for reading only"
        self.wait()  # One save at a time.

        # Fingerprints are computed now, before the next call reuses the memory of the arrays.
        about = self._contents.to_json(state)
        about["digest"] = digests.of_json(about, input_state)
        items = ocp.args.Composite(
            # Uneven arrays are written with their padding; `about` has the logical shapes.
            state=ocp.args.PyTreeSave(dict(state.Transform(padded.on_devices).FlattenItems())),
            input_state=ocp.args.JsonSave(input_state),
            about=ocp.args.JsonSave(about),
        )
        with self._save_errors(step):
            self._checkpointer.save(self._path(step), args=items)
        self._saving = step

    def wait(self) -> None:
        """Waits until the last save is complete, then deletes the checkpoints that need not stay.

        Raises SaveError if it could not be written, and OSError if one could not be deleted.
        """
        if self._saving is None:
            return
        step = self._saving
        self._saving = None  # A save that failed is not waited for again.
        with self._save_errors(step):
            self._checkpointer.wait_until_finished()

        # Only now is there one more checkpoint, and another one may go.
        if processes.is_first():
            self._delete_older()

    def restore(self, step: int, state_spec: NestedMap, shardings: NestedMap) -> Restored:
        """Reads the checkpoint of `step`, which must hold the arrays of `state_spec`.

        Those of `shardings` are read: all, or a part of the tree. Only moving averages of weights
        may be missing, or be left out: see averages.fitted.
        Raises DamagedCheckpointError, which names the file, or the weight and its experts; and
        ValueError if there is no such checkpoint, or it is of another model or an earlier version.
        """
        path = self._whole(step)

        def read() -> tuple[Stored, dict[str, jax.Array | PaddedArray]]:
            checkpoint = averages.fitted(Stored.open(path), state_spec)
            _check_slots(path, checkpoint, state_spec)
            specs.check_same(
                f"{path}, of another model or an earlier version", checkpoint.specs, state_spec
            )
            return checkpoint, stored.placed(checkpoint.arrays(), dict(shardings.FlattenItems()))

        checkpoint, arrays = stored.in_all_processes(path, read)

        # On the devices, so that whatever went wrong between the files and them is found, too.
        checkpoint.check(arrays)
        return Restored(
            step=step,
            state=shardings.Pack(arrays.values()),
            input_state=checkpoint.input_state,
            digest=digests.of_json(checkpoint.fingerprints),
        )

    def newest(self, read: Callable[[int], _Result]) -> _Result | None:
        """Returns read(step) of the newest undamaged checkpoint; None if there is none at all.

        Logs damaged ones. If opened for saving, it also moves them to damaged_checkpoints, so that
        their steps can be saved again. Raises DamagedCheckpointError if all are damaged.
        """
        damaged: set[int] = set()
        # The reason if there are only checkpoints that were moved away earlier.
        reason = f"Damaged ones are in {self._damaged}; move it away to start anew."
        while (step := self.latest(passed_over=damaged)) is not None:
            steps_before = set(self.steps())
            try:
                return stored.in_all_processes(self._path(step), functools.partial(read, step))
            except DamagedCheckpointError as error:
                # Training, in another process, may have deleted what could not be read.
                were_deleted = bool(steps_before - set(self.steps()))
                if processes.of_first(were_deleted):
                    continue
                reason = str(error)  # The error itself would keep what was read in memory.
                logging.warning("%s Falling back to the checkpoint before it.", reason)

            damaged.add(step)
            if self._contents is not None:
                self._put_aside(step)

        if not damaged and not self._damaged.exists():
            return None
        raise DamagedCheckpointError(f"{self._folder}: no undamaged checkpoint is left. {reason}")

    def arrays(self, step: int, average: int = 1) -> dict[str, SavedArray]:
        """Returns the arrays of `step` by path, of any model; parts are read when they are used.

        With `average` above 1, each is the mean over that many checkpoints, of which `step` is the
        last. All processes must call it. Raises DamagedCheckpointError, as reading them does, and
        ValueError for no such checkpoint, or if there are too few.
        """
        self._whole(step)
        steps = [saved for saved in self.steps() if saved <= step]
        if not 1 <= average <= len(steps):
            raise ValueError(
                f"{self._folder}: the mean of {average} checkpoints up to step {step} was asked "
                f"for, and there are {steps}: give 1 to {len(steps)}; train.keep_checkpoint_max="
                f"{max(average, 1)} keeps more while training."
            )

        # Only descriptions are read here, no arrays.
        checkpoints = []
        for averaged in steps[-average:]:
            path = self._path(averaged)
            checkpoint = stored.in_all_processes(path, functools.partial(Stored.open, path))
            checkpoints.append(checkpoint.arrays())

        last = checkpoints[-1]
        if average == 1:
            return last  # With its fingerprints, which a mean has not.
        means = {}
        for name in last:
            if not all(name in arrays for arrays in checkpoints):
                raise ValueError(
                    f"{self._folder}: not all of the {average} checkpoints up to step {step} have "
                    f"{name}: take the mean of fewer."
                )
            means[name] = stored.mean([arrays[name] for arrays in checkpoints])
        return means

    def _path(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def _whole(self, step: int) -> epath.Path:
        """Returns the folder of a complete checkpoint, once a save in progress is complete.

        Raises ValueError, which lists the steps, if there is none of `step`.
        """
        self.wait()
        steps = self.steps()
        if step not in steps:
            there = steps or "none"
            raise ValueError(f"{self._path(step)}: no whole checkpoint; there are {there}.")
        return self._path(step)

    def _delete_incomplete(self) -> None:
        """Deletes what saves and deletions have left that were cut short, and nothing else."""
        complete = {str(step) for step in self.steps()}
        for path in self._folder.glob("[0-9]*"):
            if path.name not in complete and _OF_A_SAVE.fullmatch(path.name):
                path.rmtree()

    def _delete_older(self) -> None:
        """Deletes the checkpoints that need not stay, now that a newer one is complete."""
        assert self._contents is not None
        best = read_best(self._model_dir)
        best_step = None if best is None else best.step
        times = {step: _committed_secs(self._path(step)) for step in self.steps()}
        kept = steps_to_keep(times, best_step, self._contents.params.train)
        for step in times.keys() - kept:
            # Without this file it is incomplete, so that no one reads what is being deleted.
            (self._path(step) / COMMITTED).unlink()
            self._path(step).rmtree()

    def _put_aside(self, step: int) -> None:
        """Moves a checkpoint to damaged_checkpoints, as STEP, or STEP.1 if there is one already."""
        if processes.is_first():
            # A step that was trained again may be damaged again: nothing is written over.
            self._damaged.mkdir(exist_ok=True)
            target = self._damaged / str(step)
            num_earlier = 0
            while target.exists():
                num_earlier += 1
                target = self._damaged / f"{step}.{num_earlier}"
            self._path(step).rename(target)
            logging.warning("The damaged checkpoint is kept as %s.", target)
        processes.wait_for_all()  # Otherwise others might still list the step.

    @contextlib.contextmanager
    def _save_errors(self, step: int) -> Iterator[None]:
        """Raises SaveError for an error of any kind: libraries wrap those of file systems."""
        try:
            yield
        except Exception as error:
            # A user wants to know what is left.
            steps = self.steps()
            kept = f"the last whole one is of step {steps[-1]}" if steps else "there is no other"
            problem = f"{self._folder}: the checkpoint of step {step} could not be written"
            raise SaveError(f"{problem}; {kept}. ({stored.first_line(error)})") from error
