"""The folder of a run that starts from the weights of another program or another run."""

import pathlib
import shutil
from collections.abc import Mapping, Sequence

from lingvo_gshard.checkpoints import saved_steps, streamed
from lingvo_gshard.checkpoints.checked_array import CheckedArray
from lingvo_gshard.checkpoints.checkpoints import Contents
from lingvo_gshard.checkpoints.streamed import Written
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.launch import Launch, Pruned
from lingvo_gshard.train import config as train_config


def contents(params: Params) -> Contents:
    """Returns the contents of the checkpoints of a run with these settings, on one partition."""
    partitioning = placement.partitioning(params, 1)
    return Contents(params, partitioning, TaskModel(params, partitioning).state_spec)


def write(
    logdir: str | pathlib.Path,
    launch: Launch,
    described: Contents,
    theta: Mapping[str, CheckedArray],
    source: str,
    vocabularies: Sequence[bytes],
    pruned: Pruned | None = None,
) -> Written:
    """Writes a run with the weights `theta`; after a kill, the same call continues.

    `described` is the result of `contents`, and `source` identifies the weights' origin. Raises
    ValueError if the folder has checkpoints, holds another model, or is locked, or if a weight is
    damaged or not finite; then it removes all new files.
    """
    folder = pathlib.Path(logdir)
    saved_steps.check_none(folder)
    entries_before = set(folder.iterdir()) if folder.is_dir() else None

    params = described.params
    claim = train_config.claimed(
        folder, params.ToText(), launches.MODEL_PREFIXES, params.DefaultsText()
    )
    with claim:
        try:
            launches.record(launch, str(folder), vocabularies, pruned)
            state = streamed.first_state(described.state_spec, theta)
            return streamed.write(logdir, saved_steps.NEW_RUN, described, state, source)
        except ValueError:
            _remove_new(folder, entries_before)
            raise


def _remove_new(folder: pathlib.Path, entries_before: set[pathlib.Path] | None) -> None:
    for entry in folder.iterdir():
        if entry in (entries_before or set()):
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if entries_before is None:
        folder.rmdir()
