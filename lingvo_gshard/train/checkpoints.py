"""Checkpoints: sharded arrays and the input's state, written by Orbax and checked by digests.

    model_dir/checkpoints/STEP/{state/,input_state/,about/,digests.json}
    model_dir/checkpoints/best.json    the step with the best metric
    model_dir/damaged_checkpoints/     checkpoints that were found damaged; never deleted

The state is one flat dict from dotted paths to arrays, so that files and programs name the weights
alike. digests.json is written last: a step without it was cut short and is never restored. Old
checkpoints are deleted only after that, and lose their digests.json first; Orbax's own preservation
policies would delete them before the new one is known to be complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import pathlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import processes, specs
from lingvo_gshard.train import digests, retention
from lingvo_gshard.train.digests import DamagedCheckpointError
from lingvo_gshard.train.retention import Best, Retention

_FOLDER = "checkpoints"
_DAMAGED_FOLDER = "damaged_checkpoints"
_BARRIER_MS = 1_200_000
_barrier_ids = itertools.count()
_Result = TypeVar("_Result")


class SaveError(OSError):
    """A checkpoint could not be written; earlier ones are untouched."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a run's checkpoints hold, written beside the arrays.

    Attributes:
      params: the experiment's Params.ToText().
      partitioning: how the state is laid out on its devices.
      state_spec: NestedMap of TensorSpec.
    """

    params: str
    partitioning: Partitioning
    state_spec: NestedMap

    def to_json(self, state: NestedMap) -> dict[str, Any]:
        """Returns these facts and the state's fingerprints; all processes must call it."""
        mesh = self.partitioning.mesh
        return {
            "params": self.params,
            "mesh": [list(mesh.axis_names), list(mesh.axis_sizes), list(mesh.devices)],
            "table": dict(self.partitioning.table),
            "arrays": {path: specs.to_json(spec) for path, spec in self.state_spec.FlattenItems()},
            "num_processes": jax.process_count(),
            "fingerprints": digests.fingerprints(state, self.state_spec),
        }


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read: its step, the state on its devices, and the input's state."""

    step: int
    state: NestedMap
    input_state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint, read from disk each time that it is given to np.asarray.

    Reading it raises DamagedCheckpointError if it is not what was saved.
    """

    folder: pathlib.Path
    name: str
    spec: TensorSpec
    fingerprints: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.spec.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        here = NamedSharding(Mesh(jax.local_devices()[:1], ("here",)), PartitionSpec())
        array = _read_arrays(self.folder, {self.name: specs.abstract_array(self.spec, here)})[0]
        found = digests.fingerprints(NestedMap(x=array), NestedMap(x=self.spec))["x"]
        digests.check_fingerprints(self.folder, {self.name: self.fingerprints}, {self.name: found})
        return np.asarray(array, dtype)


def folder(model_dir: str | pathlib.Path) -> pathlib.Path:
    """Returns the folder of a run's checkpoints."""
    return pathlib.Path(model_dir).absolute() / _FOLDER


def exist(model_dir: str | pathlib.Path) -> bool:
    """Whether a run has ever saved in this folder."""
    return folder(model_dir).is_dir()


def whole_steps(model_dir: str | pathlib.Path) -> list[int]:
    """Returns the steps of complete checkpoints, oldest first; empty before the first."""
    within = folder(model_dir)
    names = [path.name for path in within.iterdir()] if within.is_dir() else []
    return sorted(int(n) for n in names if n.isdigit() and digests.exist(within / n))


class Checkpoints:
    """The checkpoints of one model_dir. Close it, or use it as a context manager.

    With several processes all of them make the same calls; process 0 decides which are complete.
    """

    def __init__(
        self,
        model_dir: str | pathlib.Path,
        contents: Contents | None = None,
        keep: Retention = Retention(),  # noqa: B008 (frozen)
    ) -> None:
        """Opens the folder.

        Args:
          model_dir: the run's folder.
          contents: what will be saved; the folder is made. None opens it for reading only.
          keep: which checkpoints stay when another is saved.
        """
        self._folder = folder(model_dir)
        self._contents, self._keep = contents, keep
        if contents is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if processes.is_first():
                for partial in self._folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                    shutil.rmtree(partial)  # A save that was cut short.
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                # Weights hardly compress; without compression saving takes half the time.
                state=ocp.PyTreeCheckpointHandler(use_compression=False),
                input_state=ocp.JsonCheckpointHandler(),
                about=ocp.JsonCheckpointHandler(),
            )
        )
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._saving: tuple[int, Future[None]] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a save in progress and releases the threads; SaveError as `wait`."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            with contextlib.suppress(OSError):  # Reported by `wait`; Orbax may raise it again.
                self._checkpointer.close()

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, oldest first."""
        return whole_steps(self._folder.parent)

    def latest(self) -> int | None:
        """Returns the step of the newest complete checkpoint, as process 0 sees it, or None."""
        return self._newest_before(None)

    def best(self) -> Best | None:
        """Returns the best checkpoint by its evaluation, if one was noted and is complete."""
        noted = retention.read_best(self._folder)
        return noted if noted is not None and noted.step in self.steps() else None

    def save(self, step: int, state: NestedMap, input_state: dict[str, Any]) -> None:
        """Starts writing a checkpoint and returns once the state may be overwritten.

        Waits for the previous save. The checkpoint is complete after `wait`.

        Args:
          step: the checkpoint's name.
          state: JAX arrays; every device writes its own part.
          input_state: JSON-able.

        Raises:
          SaveError: this checkpoint, or the one before, could not be written.
        """
        assert self._contents is not None, "opened for reading only"
        self.wait()
        path = self._path(step)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(dict(state.FlattenItems())),
            input_state=ocp.args.JsonSave(input_state),
            about=ocp.args.JsonSave(self._contents.to_json(state)),
        )
        try:
            if processes.is_first():
                digests.remove(path)  # With `force`, Orbax deletes the rest of an old save.
            self._checkpointer.save(path, args=items, force=True)
        except Exception as error:  # File systems and libraries raise all kinds of errors.
            raise self._save_error(step, error) from error
        finish = functools.partial(self._finish, step, next(_barrier_ids))
        self._saving = step, self._finisher.submit(finish)

    def wait(self) -> None:
        """Returns when the last save is complete; SaveError if it could not be written."""
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
          shardings: where each array goes, on any number of devices.

        Raises:
          DamagedCheckpointError: names the file, or the weight and its experts.
          ValueError: no such checkpoint, or another model's; names the weight.
        """
        self._check_files(step)
        path, described = self._path(step), self.description(step)
        _check_specs(path, _specs_of(described), state_spec)
        pairs = zip(state_spec.FlattenItems(), shardings.Flatten(), strict=True)
        wanted = {name: specs.abstract_array(spec, sharding) for (name, spec), sharding in pairs}
        state = state_spec.Pack(_read_arrays(path, wanted))
        found = digests.fingerprints(state, state_spec)
        digests.check_fingerprints(path, described["fingerprints"], found)
        return Restored(step, state, _read_json(path / "input_state"))

    def restore_newest(self, state_spec: NestedMap, shardings: NestedMap) -> Restored | None:
        """Reads the newest undamaged checkpoint; see `newest` and `restore`."""
        return self.newest(lambda step: self.restore(step, state_spec, shardings))

    def newest(self, read: Callable[[int], _Result]) -> _Result | None:
        """Returns read(step) of the newest undamaged checkpoint; None if there is none at all.

        Logs damaged ones. If opened for saving, it also moves them to
        model_dir/damaged_checkpoints, so that their steps can be saved again.

        Raises:
          DamagedCheckpointError: all are damaged.
          ValueError: as `read`.
        """
        step, damaged = self._newest_before(None), None
        while step is not None:
            try:
                return read(step)
            except DamagedCheckpointError as error:
                logging.warning("%s Falling back to the checkpoint before it.", error)
                damaged = error
            if self._contents is not None:
                self._put_aside(step)
            step = self._newest_before(step)
        if damaged is not None:
            raise DamagedCheckpointError(f"No undamaged checkpoint is left. {damaged}")
        aside = self._folder.parent / _DAMAGED_FOLDER
        if aside.exists():
            raise DamagedCheckpointError(
                f"{self._folder}: no checkpoint, only damaged ones in {aside}; move that folder "
                "away to start anew."
            )
        return None

    def arrays(self, step: int) -> dict[str, StoredArray]:
        """Returns the arrays of `step` by path, of any model, after checking its files.

        Raises:
          DamagedCheckpointError: names the file.
          ValueError: no such checkpoint.
        """
        self._check_files(step)
        path, described = self._path(step), self.description(step)
        return {
            name: StoredArray(path, name, spec, described["fingerprints"][name])
            for name, spec in _specs_of(described).items()
        }

    def description(self, step: int) -> dict[str, Any]:
        """Returns what `Contents.to_json` wrote into the checkpoint of `step`."""
        return _read_json(self._path(step) / "about")

    def _finish(self, step: int, barrier_id: int) -> None:
        """Completes a written checkpoint, then deletes those that need not stay."""
        self._checkpointer.wait_until_finished()
        path = self._path(step)
        digests.write_own(path)
        all_listed = ocp.multihost.get_barrier_sync_fn()
        all_listed(key=f"lingvo_gshard_digests_{barrier_id}", timeout_ms=_BARRIER_MS)
        if not processes.is_first():
            return
        digests.write(path)
        best = self.best()
        times = {step: digests.time_written(self._path(step)) for step in self.steps()}
        for old in times.keys() - self._keep.kept(times, best.step if best else None):
            digests.remove(self._path(old))
            shutil.rmtree(self._path(old))

    def _newest_before(self, step: int | None) -> int | None:
        """The step of the last complete checkpoint before `step`, as process 0 sees it."""
        before = [s for s in self.steps() if step is None or s < step]
        newest = processes.of_first(before[-1] if before else -1)
        return None if newest < 0 else newest

    def _path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)

    def _put_aside(self, step: int) -> None:
        if processes.is_first():
            aside = self._folder.parent / _DAMAGED_FOLDER
            aside.mkdir(exist_ok=True)
            target, copies = aside / str(step), 1
            while target.exists():
                target, copies = aside / f"{step}.{copies}", copies + 1
            self._path(step).rename(target)
            logging.warning("The damaged checkpoint is kept as %s.", target)
        processes.of_first(0)  # The others wait until it is moved.

    def _save_error(self, step: int, error: Exception) -> SaveError:
        whole = self.steps()
        kept = f"the last whole one is of step {whole[-1]}" if whole else "there is no other"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return SaveError(
            f"{self._folder}: the checkpoint of step {step} could not be written; {kept}. "
            f"({first_line})"
        )

    def _check_files(self, step: int) -> None:
        """Checks all files, each process its share of them."""
        self.wait()
        path = self._path(step)
        if step not in self.steps():
            raise ValueError(f"{path}: no whole checkpoint; there are {self.steps() or 'none'}.")
        index, damage = jax.process_index(), None
        try:
            digests.check(path, slice(index, None, jax.process_count()))
        except DamagedCheckpointError as error:
            damage = error
        finder = processes.largest([0 if damage is None else index + 1])[0] - 1
        if finder >= 0:
            raise damage or DamagedCheckpointError(
                f"{path}: the checkpoint is damaged; process {finder} names the file."
            )


def _read_arrays(path: pathlib.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Reads some of a checkpoint's arrays, each at the dtype and sharding that is wanted."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    arrays = ocp.PyTreeCheckpointHandler().restore(path / "state", args=args)
    return jax.block_until_ready([arrays[name] for name in wanted])


def _read_json(folder: pathlib.Path) -> dict[str, Any]:
    """Reads what Orbax's JsonCheckpointHandler wrote."""
    return json.loads((folder / "metadata").read_bytes())


def _specs_of(described: dict[str, Any]) -> dict[str, TensorSpec]:
    return {path: specs.from_json(text) for path, text in described["arrays"].items()}


def _check_specs(path: pathlib.Path, held: dict[str, TensorSpec], state_spec: NestedMap) -> None:
    """ValueError, naming the array, unless the checkpoint holds exactly those of the state."""
    wanted = dict(state_spec.FlattenItems())
    for name in sorted(held.keys() | wanted.keys()):
        here, there = (_text(arrays.get(name)) for arrays in (wanted, held))
        if here != there:
            raise ValueError(f"{path}: {name} is {there} in the checkpoint, {here} in the model.")


def _text(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"
