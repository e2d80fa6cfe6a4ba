"""Checkpoints: Orbax's sharded arrays, the input's state, what they are of, and digests.

    model_dir/checkpoints/STEP/{state/,input_state/,about/,digests.json}
    model_dir/checkpoints/best.json    which one has the best metric
    model_dir/damaged_checkpoints/     what was found damaged, never deleted

The state is one flat dict from dotted paths to arrays, so that a file names its weights as the
rest of the program does. The digests are written last: a step without them was cut short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import pathlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes, specs
from lingvo_gshard.train import best, digests
from lingvo_gshard.train.about import About, check_specs, specs_of
from lingvo_gshard.train.best import Best
from lingvo_gshard.train.digests import DamagedCheckpointError
from lingvo_gshard.train.fingerprints import fingerprints
from lingvo_gshard.train.retention import Retention

_FOLDER = "checkpoints"
_DAMAGED_FOLDER = "damaged_checkpoints"
_TRIES, _TRY_AGAIN_SECS = 20, 0.1
_Result = TypeVar("_Result")


class SaveError(OSError):
    """A checkpoint could not be written; those before it are as they were."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read: its step, the state on its devices, and the input's state."""

    step: int
    state: NestedMap
    input_state: dict[str, Any]


def folder(model_dir: str | pathlib.Path) -> pathlib.Path:
    """Where a run's checkpoints lie."""
    return pathlib.Path(model_dir).absolute() / _FOLDER


def exist(model_dir: str | pathlib.Path) -> bool:
    """Whether a run has ever saved in this folder."""
    return folder(model_dir).is_dir()


def whole_steps(model_dir: str | pathlib.Path) -> list[int]:
    """The steps of whole checkpoints, oldest first; none before the first."""
    within = folder(model_dir)
    return [step for step in _steps_in(within) if digests.exist(within / str(step))]


def _steps_in(within: pathlib.Path) -> list[int]:
    """What is in the folder now, which another process may write to; oldest first."""
    found = within.iterdir() if within.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())


class Checkpoints:
    """The checkpoints of one model_dir. Close it, or use it as a context manager.

    With several processes all of them make the same calls; process 0 decides what is whole.
    """

    def __init__(
        self,
        model_dir: str | pathlib.Path,
        about: About | None = None,
        retention: Retention = Retention(),  # noqa: B008 (frozen)
    ) -> None:
        """Opens the folder.

        Args:
          model_dir: where it lies.
          about: what will be saved; the folder is made. None: this process only reads.
          retention: which checkpoints stay when another is saved.
        """
        self._folder = folder(model_dir)
        self._retention, self._about = retention, about
        handlers = {
            # Weights hardly get smaller by compression; without, both ways take half the time.
            "state": ocp.PyTreeCheckpointHandler(use_compression=False),
            "input_state": ocp.JsonCheckpointHandler(),
            "about": ocp.JsonCheckpointHandler(),
        }
        # Which ones stay is settled here, once the new one is whole: Orbax deletes before that.
        saves = about is not None
        options = ocp.CheckpointManagerOptions(create=saves, save_root_metadata=saves)
        if saves and processes.is_first():
            _again_if_changed(lambda: _delete_cut_short(self._folder))
        self._manager = _again_if_changed(
            lambda: ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)
        )
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._saving: tuple[int, Future[None]] | None = None
        self._failed = False

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a save under way and releases Orbax's threads; SaveError as `wait`."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            # After a save that failed, which was told, Orbax has nothing new to say.
            with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
                self._manager.close()

    def steps(self) -> list[int]:
        """The steps of whole checkpoints, oldest first."""
        return whole_steps(self._folder.parent)

    def latest(self) -> int | None:
        """The last whole checkpoint's step, None if there is none; process 0's answer."""
        return self._newest_before(None)

    def save(self, step: int, state: NestedMap, input_state: dict[str, Any]) -> None:
        """Begins to write a checkpoint; returns once the state may be written over.

        Waits for the save before it. `wait` tells when the checkpoint is whole.

        Args:
          step: its name.
          state: JAX arrays; every device writes its own part.
          input_state: JSON-able.

        Raises:
          SaveError: this one, or the one before it, could not be written.
        """
        assert self._about is not None, "opened to read"
        self.wait()
        # Cut short before, or written again; process 0 may delete it before another one looks.
        if processes.of_first(step in _steps_in(self._folder)):
            logging.info("checkpoints: writing step %d again", step)
            self._delete(step)
        about = self._about.described()
        about["fingerprints"] = fingerprints(state, self._about.state_spec)
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(dict(state.FlattenItems())),
                    input_state=ocp.args.JsonSave(input_state),
                    about=ocp.args.JsonSave(about),
                ),
                force=True,
            )
        except Exception as error:  # Whatever the file system says, in whichever library's words.
            raise self._save_error(step, error) from error
        self._saving = step, self._finisher.submit(self._finish, step)

    def wait(self) -> None:
        """Returns when the last save is whole on disk; SaveError if it could not be written."""
        if self._saving is None:
            return
        (step, done), self._saving = self._saving, None
        try:
            done.result()
        except Exception as error:
            raise self._save_error(step, error) from error

    def restore(self, step: int, state_spec: NestedMap, shardings: NestedMap) -> Restored:
        """Reads the checkpoint of `step`.

        Args:
          step: one of `steps()`.
          state_spec: NestedMap of TensorSpec that the checkpoint must hold exactly.
          shardings: where each array goes, on as many devices as now are there.

        Raises:
          DamagedCheckpointError: names the file, or the weight and its expert.
          ValueError: no such checkpoint, or of another model; names the weight.
        """
        self._check_files(step)
        about = self.about(step)
        check_specs(self._path(step), specs_of(about), state_spec)
        wanted = {
            name: specs.abstract_array(spec, sharding)
            for (name, spec), sharding in zip(
                state_spec.FlattenItems(), shardings.Flatten(), strict=True
            )
        }
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(state=_restored(wanted), input_state=ocp.args.JsonRestore()),
        )
        arrays = [restored["state"][name] for name, _ in state_spec.FlattenItems()]
        state = state_spec.Pack(jax.block_until_ready(arrays))
        found = fingerprints(state, state_spec)
        _check_fingerprints(self._path(step), about["fingerprints"], found)
        return Restored(step, state, restored["input_state"])

    def restore_newest(self, state_spec: NestedMap, shardings: NestedMap) -> Restored | None:
        """Reads the newest checkpoint that is not damaged; None if there is none at all.

        A damaged one is told of. Where this process saves, it is also put aside, into
        model_dir/damaged_checkpoints, so that its step can be saved again.

        Raises:
          DamagedCheckpointError: all are damaged.
          ValueError: as `restore`.
        """
        step, damaged = self._newest_before(None), None
        while step is not None:
            try:
                return self.restore(step, state_spec, shardings)
            except DamagedCheckpointError as error:
                logging.warning("%s Falling back to the checkpoint before it.", error)
                damaged = error
            if self._about is not None:
                self._put_aside(step)
            step = self._newest_before(step)
        if damaged is not None:
            raise DamagedCheckpointError(f"No checkpoint is left that is whole. {damaged}")
        aside = self._folder.parent / _DAMAGED_FOLDER
        if aside.exists():
            raise DamagedCheckpointError(
                f"{self._folder}: no checkpoint, only damaged ones in {aside}; move that folder "
                "away to begin anew."
            )
        return None

    def restore_arrays(self, step: int) -> dict[str, np.ndarray]:
        """The whole of every array of `step`, by path, of whichever model they are.

        Raises:
          DamagedCheckpointError: names the file.
          ValueError: no such checkpoint.
        """
        self._check_files(step)
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {
            name: jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=here)
            for name, spec in specs_of(self.about(step)).items()
        }
        restored = self._manager.restore(step, args=ocp.args.Composite(state=_restored(wanted)))
        return {name: np.asarray(array) for name, array in restored["state"].items()}

    def about(self, step: int) -> dict[str, Any]:
        """What the checkpoint of `step` is of: params, mesh, table, arrays and fingerprints."""
        restored = self._manager.restore(
            step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
        )
        return restored["about"]

    def best(self) -> Best | None:
        """The best checkpoint by its evaluation, if one was noted and is whole."""
        noted = best.read(self._folder)
        return noted if noted is not None and noted.step in self.steps() else None

    def _finish(self, step: int) -> None:
        """Makes a written checkpoint whole, then deletes those that need not stay."""
        self._manager.wait_until_finished()
        if not processes.is_first():
            return
        digests.write(self._path(step))
        kept_as_best = self.best()
        times = {step: self._time(step) for step in self.steps()}
        stay = self._retention.kept(times, kept_as_best.step if kept_as_best else None)
        for old in times.keys() - stay:
            digests.remove(self._path(old))
            shutil.rmtree(self._path(old))

    def _time(self, step: int) -> float:
        try:
            return digests.time_written(self._path(step))
        except DamagedCheckpointError:
            return 0.0

    def _newest_before(self, step: int | None) -> int | None:
        """The last whole checkpoint before `step`, process 0's answer."""
        before = [s for s in self.steps() if step is None or s < step]
        newest = processes.of_first(before[-1] if before else -1)
        return None if newest < 0 else newest

    def _path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)

    def _delete(self, step: int) -> None:
        if processes.is_first():
            digests.remove(self._path(step))
            shutil.rmtree(self._path(step))
        processes.of_first(0)  # Nobody goes on before it is done.
        _again_if_changed(self._manager.reload)

    def _put_aside(self, step: int) -> None:
        if processes.is_first():
            aside = self._folder.parent / _DAMAGED_FOLDER
            aside.mkdir(exist_ok=True)
            place, copies = aside / str(step), 1
            while place.exists():
                place, copies = aside / f"{step}.{copies}", copies + 1
            self._path(step).rename(place)
            logging.warning("The damaged checkpoint is kept as %s.", place)
        processes.of_first(0)
        _again_if_changed(self._manager.reload)

    def _save_error(self, step: int, error: Exception) -> SaveError:
        self._failed = True
        whole = self.steps()
        kept = f"the last whole one is of step {whole[-1]}" if whole else "there is no other one"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return SaveError(
            f"{self._folder}: the checkpoint of step {step} could not be written; {kept}. "
            f"({first_line})"
        )

    def _check_files(self, step: int) -> None:
        path = self._path(step)
        if step not in self.steps():
            raise ValueError(f"{path}: no whole checkpoint; there are {self.steps() or 'none'}.")
        damage = None
        if processes.is_first():
            try:
                digests.check(path)
            except DamagedCheckpointError as error:
                damage = error
        if processes.largest([damage is not None])[0]:
            raise damage or DamagedCheckpointError(f"{path}: damaged; process 0 says where.")
        _again_if_changed(self._manager.reload)


def _restored(wanted: dict[str, jax.ShapeDtypeStruct]) -> ocp.args.PyTreeRestore:
    """Arrays of these shapes and dtypes, at these shardings."""
    as_wanted = ocp.checkpoint_utils.construct_restore_args(wanted)
    return ocp.args.PyTreeRestore(wanted, restore_args=as_wanted)


def _delete_cut_short(within: pathlib.Path) -> None:
    """Deletes what Orbax had begun to write.

    Orbax itself does so in a thread for which a process that saves nothing, and ends, waits not.
    """
    for partial in ocp.utils.tmp_checkpoints(within):
        shutil.rmtree(partial.get())


def _again_if_changed(do: Callable[[], _Result]) -> _Result:
    """Does what may fail because somebody else writes or deletes in the folder just then."""
    for _ in range(_TRIES - 1):
        try:
            return do()
        except OSError as error:
            vanished = isinstance(error, FileNotFoundError | NotADirectoryError)
            if not vanished and error.errno != errno.ENOTEMPTY:
                raise
        time.sleep(_TRY_AGAIN_SECS)
    return do()


def _check_fingerprints(
    path: pathlib.Path, written: dict[str, list[str]], found: dict[str, list[str]]
) -> None:
    for name, experts in found.items():
        differing = [
            i
            for i, pair in enumerate(zip(written[name], experts, strict=True))
            if pair[0] != pair[1]
        ]
        if differing:
            raise DamagedCheckpointError(
                f"{path}: the checkpoint is damaged: {name} is not what was saved, in experts "
                f"{differing}."
            )
