"""The folder of a run that starts from the weights of another program or another run."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from lingvo_gshard.checkpoints import checkpoints
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.launch import Launch, Pruned
from lingvo_gshard.train import config as train_config

STEP = 0  # The step of such a run's first checkpoint.


@contextlib.contextmanager
def claimed(
    launch: Launch,
    params: Params,
    logdir: str | pathlib.Path,
    vocabularies: Sequence[bytes],
    pruned: Pruned | None = None,
) -> Iterator[None]:
    """Locks a folder and records the launch in it; on ValueError, removes all new files.

    Raises ValueError if the folder has checkpoints, holds another model, or is locked.
    """
    folder = pathlib.Path(logdir)
    steps = checkpoints.whole_steps(folder)
    if steps:
        raise ValueError(f"{folder} has checkpoints already, of steps {steps}: choose another.")

    entries_before = set(folder.iterdir()) if folder.is_dir() else None
    claim = train_config.claimed(
        folder, params.ToText(), ("task", "optimizer.cls"), params.DefaultsText()
    )
    with claim:
        try:
            launches.record(launch, str(folder), vocabularies, pruned)
            yield
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
