"""Checkpoints: Orbax's sharded arrays, the input's state, and a digest of every file.

    model_dir/checkpoints/STEP/{state/,input_state/,digests.json}

The state is one flat dict from dotted paths to arrays, so that a file names its weights as the
rest of the program does. The digests are written last: a step without them was cut short.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.partitioning import TensorSpec
from lingvo_gshard.spmd import specs

_FOLDER = "checkpoints"
_DIGESTS = "digests.json"


def exist(model_dir: str | pathlib.Path) -> bool:
    """Whether a run has ever saved in this folder."""
    return (pathlib.Path(model_dir) / _FOLDER).is_dir()


class Checkpoints:
    """The checkpoints of one model_dir. Close it, or use it as a context manager."""

    def __init__(self, model_dir: str | pathlib.Path, keep_max: int) -> None:
        """Opens, or makes, the folder; the oldest beyond `keep_max` are deleted on saving."""
        self._folder = pathlib.Path(model_dir).absolute() / _FOLDER
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_max, enable_async_checkpointing=False
        )
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "input_state": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases Orbax's threads."""
        self._manager.close()

    def steps(self) -> list[int]:
        """The steps of whole checkpoints, oldest first."""
        return [step for step in self._saved_steps() if (self._path(step) / _DIGESTS).exists()]

    def latest(self) -> int | None:
        """The last whole checkpoint's step, None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def save(self, step: int, state: NestedMap, input_state: dict[str, Any]) -> None:
        """Writes a checkpoint; returns when it is whole on disk.

        Args:
          step: its name.
          state: JAX arrays; every device writes its own part.
          input_state: JSON-able.
        """
        if step in self._saved_steps():  # Cut short before, or written again.
            logging.info("checkpoints: writing step %d again", step)
            self._manager.delete(step)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(dict(state.FlattenItems())),
                input_state=ocp.args.JsonSave(input_state),
            ),
            force=True,
        )
        self._manager.wait_until_finished()
        _write_digests(self._path(step))

    def restore(
        self, step: int, state_spec: NestedMap, shardings: NestedMap
    ) -> tuple[NestedMap, dict[str, Any]]:
        """Reads (state, input_state) of `step`.

        Args:
          step: one of `steps()`.
          state_spec: NestedMap of TensorSpec that the checkpoint must hold exactly.
          shardings: where each array goes, on as many devices as now are there.

        Raises:
          ValueError: no such checkpoint, damaged, or of another model; names the file or weight.
        """
        path = self._path(step)
        if step not in self.steps():
            raise ValueError(f"{path}: no whole checkpoint; there are {self.steps() or 'none'}.")
        _check_digests(path)
        self._check_state(step, state_spec)
        wanted = {
            name: specs.abstract_array(spec, sharding)
            for (name, spec), sharding in zip(
                state_spec.FlattenItems(), shardings.Flatten(), strict=True
            )
        }
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(wanted), input_state=ocp.args.JsonRestore()
            ),
        )
        arrays = [restored["state"][name] for name, _ in state_spec.FlattenItems()]
        return state_spec.Pack(jax.block_until_ready(arrays)), restored["input_state"]

    def _saved_steps(self) -> list[int]:
        """What is in the folder now, which another process may write to; oldest first."""
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def _path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)

    def _check_state(self, step: int, state_spec: NestedMap) -> None:
        held = self._manager.item_metadata(step)["state"].tree
        held = {name: (tuple(array.shape), str(array.dtype)) for name, array in held.items()}
        wanted = {name: _shape_and_dtype(spec) for name, spec in state_spec.FlattenItems()}
        for name in sorted(held.keys() | wanted.keys()):
            if held.get(name) != wanted.get(name):
                raise ValueError(
                    f"{self._path(step)}: {name} is {_text(held.get(name))} in the checkpoint, "
                    f"{_text(wanted.get(name))} in the model."
                )


def _shape_and_dtype(spec: TensorSpec) -> tuple[tuple[int, ...], str]:
    return tuple(spec.shape), spec.dtype


def _text(array: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if array is None else f"{array[1]}{list(array[0])}"


def _digests(path: pathlib.Path) -> dict[str, str]:
    """sha256 by relative name of every file under `path` but the digests themselves."""
    digests = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name not in (_DIGESTS, _DIGESTS + ".partial"):
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            digests[str(file.relative_to(path))] = digest
    return digests


def _write_digests(path: pathlib.Path) -> None:
    partial = path / (_DIGESTS + ".partial")
    partial.write_text(json.dumps(_digests(path), indent=1))
    partial.replace(path / _DIGESTS)


def _check_digests(path: pathlib.Path) -> None:
    try:
        written = json.loads((path / _DIGESTS).read_text())
    except ValueError:
        raise ValueError(f"{path}: the checkpoint is damaged: {_DIGESTS} is no JSON.") from None
    found = _digests(path)
    for name in sorted(written.keys() | found.keys()):
        if written.get(name) != found.get(name):
            what = "is missing" if name not in found else "was changed"
            raise ValueError(f"{path}: the checkpoint is damaged: {name} {what}.")
