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
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from lingvo_gshard.checkpoints import stored
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError, SavedArray, Stored, fingerprint
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import digests, json_records, storage
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import processes, specs

_BEST = "checkpoints/best.json"
_COMMITTED = "commit_success.txt"
_WRITTEN = re.compile(r"\d+(\.orbax-checkpoint-tmp.*)?")
_Result = TypeVar("_Result")


class SaveError(OSError):
    """A checkpoint could not be written; earlier ones are untouched."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a run's checkpoints hold; the settings in `params.train` decide which of them stay."""

    params: Params
    partitioning: Partitioning
    state_spec: NestedMap

    def to_json(self, state: NestedMap) -> dict[str, Any]:
        """Returns these facts and the state's fingerprints; all processes must call it."""
        mesh, items = self.partitioning.mesh, self.state_spec.FlattenItems()
        arrays = dict(state.FlattenItems())
        return {
            "params": self.params.ToText(),
            "mesh": [list(mesh.axis_names), list(mesh.axis_sizes), list(mesh.devices)],
            "table": dict(self.partitioning.table),
            "arrays": {path: specs.to_json(spec) for path, spec in items},
            "num_processes": jax.process_count(),
            "fingerprints": {path: fingerprint(arrays[path], spec.dims) for path, spec in items},
        }


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint: its step, its state on the devices, the input's state, and a digest."""

    step: int
    state: NestedMap
    input_state: dict[str, Any]
    digest: str


def folder(model_dir: str | pathlib.Path) -> epath.Path:
    """Returns the folder of a run's checkpoints, which Orbax reads and writes in gs:// itself."""
    there = storage.origin(model_dir)
    is_direct = str(there).startswith("gs://")
    return epath.Path(there if is_direct else os.path.abspath(model_dir)) / "checkpoints"


def whole_steps(model_dir: str | pathlib.Path) -> list[int]:
    """Returns the steps of complete checkpoints, oldest first; empty before the first."""
    whole = folder(model_dir).glob(f"*/{_COMMITTED}")
    return sorted(int(path.parent.name) for path in whole if path.parent.name.isdigit())


def _committed_secs(path: epath.Path) -> float:
    """Returns when a checkpoint was complete, by what it says itself; 0 if it cannot be read."""
    try:
        about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return about["commit_timestamp_nsecs"] / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def steps_to_keep(times: Mapping[int, float], best: int | None, train_params: Params) -> set[int]:
    """Returns the steps to keep, by the settings of training, of those in `times` (seconds)."""
    steps, hours = sorted(times), train_params.keep_checkpoint_every_n_hours
    stay = {*steps[-train_params.keep_checkpoint_max :], *(times.keys() & {best})}
    last = None
    for step in steps if hours is not None else ():
        # A clock that was set back counts as elapsed time, or it would have to catch up first.
        if last is None or abs(times[step] - times[last]) >= hours * 3600:
            stay.add(step)
            last = step
    return stay


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
        return digests.read_json(path, 1, functools.partial(json_records.read, Best), older=(None,))
    except ValueError as error:
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
    value, before = numbers[metric], read_best(model_dir)
    # A save that failed, or a deletion, may have left a note of a checkpoint that is not there.
    if before is not None and before.metric == metric and before.step in whole_steps(model_dir):
        is_better = value > before.value if higher_is_better else value < before.value
    else:
        is_better = not math.isnan(value)
    if is_better:
        path = pathlib.Path(model_dir, _BEST)
        path.parent.mkdir(parents=True, exist_ok=True)
        digests.write_json(path, 1, dataclasses.asdict(Best(step, metric, value)))


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one model_dir; all processes make the same calls. It waits at its end."""

    def __init__(self, model_dir: str | pathlib.Path, contents: Contents | None = None) -> None:
        """Opens the folder to read, or to save `contents`; then it is created."""
        self._model_dir, self._folder, self._contents = model_dir, folder(model_dir), contents
        self._damaged = self._folder.parent / "damaged_checkpoints"
        if contents is not None:
            processes.check_shared(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            if processes.is_first():
                whole = set(map(str, self.steps()))
                for partial in self._folder.glob("[0-9]*"):
                    if partial.name not in whole and _WRITTEN.fullmatch(partial.name):
                        partial.rmtree()  # A save or a deletion that was cut short.
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                # Weights hardly compress; without compression saving takes half the time.
                state=ocp.PyTreeCheckpointHandler(use_compression=False),
                input_state=ocp.JsonCheckpointHandler(),
                about=ocp.JsonCheckpointHandler(),
            )
        )
        self._saving: int | None = None

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError):  # Reported by `wait`; Orbax may raise it again.
                self._checkpointer.close()

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, oldest first."""
        return whole_steps(self._model_dir)

    def latest(self, before: float = math.inf) -> int | None:
        """Returns the last step below `before` with a complete checkpoint, as process 0 sees it."""
        newest = processes.of_first(max((s for s in self.steps() if s < before), default=-1))
        return None if newest < 0 else newest

    def save(self, step: int, state: NestedMap, input_state: dict[str, Any]) -> None:
        """Starts writing a checkpoint and returns once the state may be overwritten.

        Every device writes its own part of the arrays; `input_state` is JSON-able. The checkpoint
        is complete after `wait`. Raises SaveError if it, or the one before, could not be written.
        """
        assert self._contents is not None, "opened for reading only"
        self.wait()
        contents = self._contents.to_json(state)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(dict(state.FlattenItems())),
            input_state=ocp.args.JsonSave(input_state),
            about=ocp.args.JsonSave(contents | {"digest": digests.of_json(contents, input_state)}),
        )
        with self._save_errors(step):
            self._checkpointer.save(self._path(step), args=items)
        self._saving = step

    def wait(self) -> None:
        """Returns when the last save is complete; then deletes the checkpoints that need not stay.

        Raises SaveError if it could not be written, and OSError if one could not be deleted.
        """
        if self._contents is None or self._saving is None:
            return
        step, self._saving = self._saving, None
        with self._save_errors(step):
            self._checkpointer.wait_until_finished()
        if processes.is_first():
            best, p = read_best(self._model_dir), self._contents.params.train
            times = {s: _committed_secs(self._path(s)) for s in self.steps()}
            for old in times.keys() - steps_to_keep(times, best.step if best else None, p):
                (self._path(old) / _COMMITTED).unlink()
                self._path(old).rmtree()

    def restore(self, step: int, state_spec: NestedMap, shardings: NestedMap) -> Restored:
        """Reads the checkpoint of `step`, which must hold the arrays of `state_spec`.

        Raises DamagedCheckpointError, which names the file, or the weight and its experts; and
        ValueError if there is no such checkpoint, or it is of another model or an earlier version.
        """
        path = self._whole(step)

        def read() -> tuple[Stored, dict[str, jax.Array]]:
            found = Stored.open(path)
            specs.check_same(
                f"{path}, of another model or an earlier version", found.specs, state_spec
            )
            return found, stored.placed(found.arrays(), dict(shardings.FlattenItems()))

        found, arrays = stored.in_all_processes(path, read)
        found.check(arrays)
        state = state_spec.Pack(arrays.values())
        return Restored(step, state, found.input_state, digests.of_json(found.fingerprints))

    def newest(self, read: Callable[[int], _Result]) -> _Result | None:
        """Returns read(step) of the newest undamaged checkpoint; None if there is none at all.

        Logs damaged ones. If opened for saving, it also moves them to damaged_checkpoints, so that
        their steps can be saved again. Raises DamagedCheckpointError if all are damaged.
        """
        step, damaged = self.latest(), None
        while step is not None:
            there = {*self.steps()}
            try:
                return stored.in_all_processes(self._path(step), functools.partial(read, step))
            except DamagedCheckpointError as error:
                if processes.of_first(bool(there - {*self.steps()})):  # Training has deleted some.
                    step = self.latest()
                    continue
                logging.warning("%s Falling back to the checkpoint before it.", error)
                damaged = error
            if self._contents is not None:
                self._put_aside(step)
            step = self.latest(before=step)
        if damaged is None and not self._damaged.exists():
            return None
        reason = damaged or f"Damaged ones are in {self._damaged}; move it away to start anew."
        raise DamagedCheckpointError(f"{self._folder}: no undamaged checkpoint is left. {reason}")

    def arrays(self, step: int, average: int = 1) -> dict[str, SavedArray]:
        """Returns the arrays of `step` by path, of any model, parts of which are read when used.

        With `average` above 1, each is the mean over so many checkpoints, of which `step` is the
        last. All processes must call it. Raises DamagedCheckpointError, as reading them does, and
        ValueError for no such checkpoint, or if there are too few.
        """
        self._whole(step)
        steps = [each for each in self.steps() if each <= step]
        if not 1 <= average <= len(steps):
            raise ValueError(
                f"{self._folder}: the mean of {average} checkpoints up to step {step} was asked "
                f"for, and there are {steps}: give 1 to {len(steps)}; train.keep_checkpoint_max="
                f"{max(average, 1)} keeps more while training."
            )
        paths = map(self._path, steps[-average:])
        opened = [stored.in_all_processes(p, functools.partial(Stored.open, p)) for p in paths]
        found = [each.arrays() for each in opened]
        if average == 1:
            return found[0]
        return {name: stored.mean([arrays[name] for arrays in found]) for name in found[-1]}

    def _path(self, step: int) -> epath.Path:
        return self._folder / str(step)

    def _whole(self, step: int) -> epath.Path:
        """Returns the folder of a complete checkpoint, once a save in progress is complete."""
        self.wait()
        if step not in self.steps():
            there = self.steps() or "none"
            raise ValueError(f"{self._path(step)}: no whole checkpoint; there are {there}.")
        return self._path(step)

    def _put_aside(self, step: int) -> None:
        if processes.is_first():
            self._damaged.mkdir(exist_ok=True)
            target, copies = self._damaged / str(step), 1
            while target.exists():
                target, copies = self._damaged / f"{step}.{copies}", copies + 1
            self._path(step).rename(target)
            logging.warning("The damaged checkpoint is kept as %s.", target)
        processes.wait_for_all()

    @contextlib.contextmanager
    def _save_errors(self, step: int) -> Iterator[None]:
        """Raises SaveError for the errors of file systems and libraries, which are of all kinds."""
        try:
            yield
        except Exception as error:
            whole = self.steps()
            kept = f"the last whole one is of step {whole[-1]}" if whole else "there is no other"
            problem = f"{self._folder}: the checkpoint of step {step} could not be written"
            raise SaveError(f"{problem}; {kept}. ({stored.first_line(error)})") from error
