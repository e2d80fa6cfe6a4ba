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
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from lingvo_gshard.checkpoints import averages, checked_array, saved_steps, stored
from lingvo_gshard.checkpoints.checked_array import CheckedArray
from lingvo_gshard.checkpoints.epath_glob import LiteralPath
from lingvo_gshard.checkpoints.fingerprints import fingerprint
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError, Stored
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import padded, processes, shared_folder, specs
from xla_spmd.files import digests, json_records

_BEST = "checkpoints/best.json"
# The folder that a save writes, or leaves behind if it is killed.
_OF_A_SAVE = re.compile(r"\d+(\.orbax-checkpoint-tmp.*)?")
_SECS_PER_HOUR = 3600
_Result = TypeVar("_Result")


class SaveError(OSError):
    """A checkpoint could not be written; earlier ones are untouched."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a run's checkpoints; settings in `params.train` say which ones to keep."""

    params: Params
    partitioning: Partitioning
    state_spec: NestedMap  # TensorSpecs.

    def described(
        self,
        fingerprints: Mapping[str, list[str]],
        num_processes: int,
        input_state: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns the description of a checkpoint, given the fingerprints of its arrays."""
        mesh = self.partitioning.mesh
        # Programs read `arrays`, `fingerprints` and `digest` back; the rest is for people.
        about = {
            "params": self.params.ToText(),
            "mesh": [list(mesh.axis_names), list(mesh.axis_sizes), list(mesh.devices)],
            "table": dict(self.partitioning.table),
            "arrays": {path: specs.to_json(spec) for path, spec in self.state_spec.FlattenItems()},
            "num_processes": num_processes,
            "fingerprints": dict(fingerprints),
        }
        return about | {"digest": digests.of_json(about, input_state)}


@dataclasses.dataclass(frozen=True)
class Restored:
    """The contents of a checkpoint that was read."""

    step: int
    state: NestedMap  # Arrays on the devices.
    input_state: dict[str, Any]
    digest: str  # A digest of the state's fingerprints.


def _committed_secs(path: epath.Path) -> float:
    """Returns the recorded time when a checkpoint was completed; 0 if it cannot be read.

    The times of its files do not help, since copying a checkpoint changes them.
    """
    try:
        about = json_records.parse((path / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
        return about["commit_timestamp_nsecs"] / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def steps_to_keep(times: Mapping[int, float], best: int | None, train_params: Params) -> set[int]:
    """Returns the steps whose checkpoints the settings of training keep.

    `times` maps each checkpoint's step to its time in seconds; `best` is the best one's step.
    """
    # The newest ones, and the best one if it still exists.
    steps = sorted(times)
    num_newest = train_params.keep_checkpoint_max
    if num_newest is None:
        return set(steps)
    to_keep = set(steps[-num_newest:])
    if best is not None and best in times:
        to_keep.add(best)

    hours = train_params.keep_checkpoint_every_n_hours
    if hours is None:
        return to_keep

    # The first one, and each one so many hours away from the last that this rule has chosen.
    last = None
    for step in steps:
        # By the absolute difference, a clock that was set back need not catch up first.
        if last is None or abs(times[step] - times[last]) >= hours * _SECS_PER_HOUR:
            to_keep.add(step)
            last = step
    return to_keep


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far: its step, and the metric's value there."""

    step: int
    metric: str
    value: float


def read_best(model_dir: str | pathlib.Path) -> Best | None:
    """Returns the best checkpoint as recorded in a run's folder; None if it cannot be read."""
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
    """Records `step` as the best if its metric is the best so far. NaN is never the best.

    Raises ValueError if `metrics` lack `metric`, or if it is a list.
    """
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    if metric not in numbers:
        raise ValueError(f"best by {metric!r}: expected one of {', '.join(sorted(numbers))}.")

    value = numbers[metric]
    before = read_best(model_dir)
    # After a failed save or a deletion, the recorded checkpoint may be missing.
    steps = saved_steps.whole_steps(model_dir)
    if before is None or before.metric != metric or before.step not in steps:
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
    """Raises ValueError if the slots have another optimizer's names."""
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
        """Opens the folder to save checkpoints with `contents`, or only to read if it is None.

        For saving, it creates the folder, and deletes the remains of a killed save.
        """
        self._model_dir = model_dir
        self._folder = LiteralPath(saved_steps.folder(model_dir))
        self._damaged = LiteralPath(saved_steps.damaged_folder(model_dir))
        self._contents = contents
        self._saving: int | None = None  # The step of the save in progress.

        if contents is not None:
            # Each process writes the arrays of its own devices into this folder.
            shared_folder.check(self._folder)
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
            with contextlib.suppress(OSError):  # `wait` has raised it; Orbax may do so again.
                self._checkpointer.close()

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, oldest first."""
        return saved_steps.whole_steps(self._model_dir)

    def latest(self, passed_over: Collection[int] = ()) -> int | None:
        """Returns the newest complete checkpoint's step, as process 0 sees it, or None.

        Ignores the steps in `passed_over`.
        """
        steps = set(self.steps()).difference(passed_over)
        # For a while, machines may see different files in a folder of a network disk.
        newest = processes.of_first(max(steps, default=-1))
        return None if newest < 0 else newest

    def save(self, step: int, state: NestedMap, input_state: dict[str, Any]) -> None:
        """Starts writing a checkpoint and returns once the state may be overwritten.

        Every device writes its own part of the arrays. `input_state` can be written as JSON. The
        checkpoint is complete after `wait`. Raises SaveError if this checkpoint, or the previous
        one, could not be written.
        """
        assert self._contents is not None, "opened for reading only"
        self.wait()  # One save at a time.

        # The fingerprints are computed now, as the next step will overwrite the arrays.
        array_of = dict(state.FlattenItems())
        fingerprints = {
            path: fingerprint(array_of[path], spec.dims)
            for path, spec in self._contents.state_spec.FlattenItems()
        }
        about = self._contents.described(fingerprints, jax.process_count(), input_state)
        items = ocp.args.Composite(
            # Arrays are written with their padding; `about` has the logical shapes.
            state=ocp.args.PyTreeSave(dict(state.Transform(padded.on_devices).FlattenItems())),
            input_state=ocp.args.JsonSave(input_state),
            about=ocp.args.JsonSave(about),
        )
        with self._save_errors(step):
            self._checkpointer.save(self._path(step), args=items)
        self._saving = step

    def wait(self) -> None:
        """Waits until the last save is complete, then deletes the checkpoints that are not kept.

        Raises SaveError if the checkpoint could not be written, and OSError if another one could
        not be deleted.
        """
        if self._saving is None:
            return
        step = self._saving
        self._saving = None  # A save that failed is not waited for again.
        with self._save_errors(step):
            self._checkpointer.wait_until_finished()

        # The new checkpoint is complete, so an older one can be deleted.
        if processes.is_first():
            self._delete_older()

    def restore(self, step: int, state_spec: NestedMap, shardings: NestedMap) -> Restored:
        """Reads the checkpoint of `step`, which must hold the arrays of `state_spec`.

        It reads the arrays that have a sharding in `shardings`, which may be a part of the tree.
        The checkpoint may differ from `state_spec` only in whether it has moving averages
        (averages.fitted).

        Raises DamagedCheckpointError, which names the file, or the weight and its experts, if the
        checkpoint is damaged. Raises ValueError if `step` does not exist, if it belongs to another
        model or an earlier version, or if a weight is not finite.
        """
        self.wait()
        saved_steps.check_whole(self._model_dir, step)
        path = self._path(step)

        def read() -> Stored:
            checkpoint = averages.fitted(Stored.open(path), state_spec)
            _check_slots(path, checkpoint, state_spec)
            specs.check_same(
                f"{path}, of another model or an earlier version", checkpoint.specs, state_spec
            )
            return checkpoint

        checkpoint = stored.in_all_processes(path, read)
        arrays = stored.restored(str(path), checkpoint.arrays(), dict(shardings.FlattenItems()))

        return Restored(
            step=step,
            state=shardings.Pack(arrays.values()),
            input_state=checkpoint.input_state,
            digest=digests.of_json(checkpoint.fingerprints),
        )

    def newest(self, read: Callable[[int], _Result]) -> _Result | None:
        """Returns read(step) of the newest undamaged checkpoint; None if the folder is empty.

        Logs damaged checkpoints. If opened for saving, it also moves them to damaged_checkpoints,
        so that their steps can be saved again. Raises DamagedCheckpointError if all are damaged.
        """
        damaged: set[int] = set()
        # The reason if all checkpoints have been moved away earlier.
        reason = f"Damaged ones are in {self._damaged}; move it away to start anew."
        while (step := self.latest(passed_over=damaged)) is not None:
            steps_before = set(self.steps())
            try:
                return stored.in_all_processes(self._path(step), functools.partial(read, step))
            except DamagedCheckpointError as error:
                # The training process may have deleted this checkpoint while it was read.
                were_deleted = bool(steps_before - set(self.steps()))
                if processes.of_first(were_deleted):
                    continue
                reason = str(error)  # The error itself would hold the arrays in memory.
                logging.warning("%s Falling back to the checkpoint before it.", reason)

            damaged.add(step)
            if self._contents is not None:
                self._put_aside(step)

        if not damaged and not self._damaged.exists():
            return None
        raise DamagedCheckpointError(f"{self._folder}: no undamaged checkpoint is left. {reason}")

    def arrays(self, step: int, average: int = 1) -> dict[str, CheckedArray]:
        """Returns the arrays of `step` by path, of any model; each part is read when it is used.

        With `average` above 1, each array is the mean over that many checkpoints, up to and
        including `step`. All processes must call it. Raises ValueError if `step` does not exist, or
        if there are too few checkpoints. This call and reading the arrays raise
        DamagedCheckpointError if a file is damaged.
        """
        self.wait()

        # This reads only the descriptions.
        checkpoints = []
        for averaged in saved_steps.averaged(self._model_dir, step, average):
            path = self._path(averaged)
            checkpoint = stored.in_all_processes(path, functools.partial(Stored.open, path))
            checkpoints.append(checkpoint.arrays())

        last = checkpoints[-1]
        if average == 1:
            return last
        means = {}
        for name in last:
            if not all(name in arrays for arrays in checkpoints):
                raise ValueError(
                    f"{self._folder}: not all of the {average} checkpoints up to step {step} have "
                    f"{name}: take the mean of fewer."
                )
            means[name] = checked_array.mean([arrays[name] for arrays in checkpoints])
        return means

    def _path(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def _delete_incomplete(self) -> None:
        """Deletes only the remains of saves and deletions that were interrupted."""
        complete = {str(step) for step in self.steps()}
        for path in self._folder.glob("[0-9]*"):
            if path.name not in complete and _OF_A_SAVE.fullmatch(path.name):
                path.rmtree()

    def _delete_older(self) -> None:
        """Deletes the checkpoints that are not kept, now that a newer one is complete."""
        assert self._contents is not None
        best = read_best(self._model_dir)
        best_step = None if best is None else best.step
        times = {step: _committed_secs(self._path(step)) for step in self.steps()}
        to_keep = steps_to_keep(times, best_step, self._contents.params.train)
        for step in times.keys() - to_keep:
            # Without this file it is incomplete, so that nobody reads it during the deletion.
            (self._path(step) / saved_steps.COMMITTED).unlink()
            self._path(step).rmtree()

    def _put_aside(self, step: int) -> None:
        """Moves a checkpoint to damaged_checkpoints, as STEP, or STEP.1 if there is one already."""
        if processes.is_first():
            # A step that was trained again may be damaged again: both copies stay.
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
        """Raises SaveError for an error of any kind, as libraries wrap a file system's errors."""
        try:
            yield
        except Exception as error:
            steps = self.steps()
            if steps:
                remaining = f"the last whole one is of step {steps[-1]}"
            else:
                remaining = "there is no other"
            problem = f"{self._folder}: the checkpoint of step {step} could not be written"
            raise SaveError(
                f"{problem}; {remaining}. ({checked_array.first_line(error)})"
            ) from error
