"""The steps of a run's complete checkpoints; nothing here imports JAX or Orbax.

model_dir/checkpoints/STEP/commit_success.txt    without it, the checkpoint of STEP is incomplete
model_dir/damaged_checkpoints/                   checkpoints that were found damaged
"""

import os
import pathlib
from typing import Any

from xla_spmd.files import storage

COMMITTED = "commit_success.txt"  # The name is Orbax's.
NEW_RUN = 0  # The step of a run that starts from the weights of another program or another run.


def folder(model_dir: str | pathlib.Path) -> Any:
    """Returns the folder of a run's checkpoints, a pathlib.Path.

    In gs://, where Orbax itself reads and writes, it is the bucket's epath.Path.
    """
    origin = storage.origin(model_dir)
    if str(origin).startswith("gs://"):
        return origin / "checkpoints"
    return pathlib.Path(os.path.abspath(model_dir), "checkpoints")


def damaged_folder(model_dir: str | pathlib.Path) -> Any:
    """Returns the folder of the checkpoints that were found damaged."""
    return folder(model_dir).parent / "damaged_checkpoints"


def partial_folder(model_dir: str | pathlib.Path, step: int) -> pathlib.Path:
    """Returns the folder that holds the checkpoint of `step` while it is written.

    Raises ValueError for a folder in gs://, since writing needs a disk.
    """
    path = folder(model_dir)
    if storage.is_bucket(path):
        raise ValueError(
            f"{path}: its arrays are written part by part, which needs a disk: give a folder "
            "there, and copy it."
        )
    return pathlib.Path(path) / f"{step}.import"


def whole_steps(model_dir: str | pathlib.Path) -> list[int]:
    """Returns the steps of complete checkpoints, oldest first."""
    committed = folder(model_dir).glob(f"*/{COMMITTED}")
    names = [path.parent.name for path in committed]
    # A checkpoint that somebody renamed, such as 100_good, does not count.
    return sorted(int(name) for name in names if name.isdigit())


def none_error(model_dir: str | pathlib.Path) -> ValueError:
    """Returns the error for a folder without checkpoints."""
    return ValueError(f"{model_dir}: there is no checkpoint; train first.")


def check_none(model_dir: str | pathlib.Path) -> None:
    """Raises ValueError if a folder for a new run has checkpoints."""
    steps = whole_steps(model_dir)
    if steps:
        raise ValueError(f"{model_dir} has checkpoints already, of steps {steps}: choose another.")


def check_whole(model_dir: str | pathlib.Path, step: int) -> None:
    """Raises ValueError, which lists the steps that there are, unless `step` is complete."""
    steps = whole_steps(model_dir)
    if step not in steps:
        path = folder(model_dir) / str(step)
        raise ValueError(f"{path}: no whole checkpoint; there are {steps or 'none'}.")


def averaged(model_dir: str | pathlib.Path, step: int, average: int) -> list[int]:
    """Returns the steps of `average` checkpoints up to and including `step`.

    Raises ValueError if there are too few, or if the checkpoint of `step` is not complete.
    """
    check_whole(model_dir, step)
    steps = [saved for saved in whole_steps(model_dir) if saved <= step]
    if not 1 <= average <= len(steps):
        most = "1" if len(steps) == 1 else f"1 to {len(steps)}"
        raise ValueError(
            f"{folder(model_dir)}: the mean of {average} checkpoints up to step {step} was asked "
            f"for, and there are {steps}: give {most}; train.keep_checkpoint_max="
            f"{max(average, 1)} keeps more while training."
        )
    return steps[-average:]


def check(model_dir: str | pathlib.Path, step: int | None, average: int) -> None:
    """Raises ValueError unless there are `average` checkpoints up to `step`, by default the newest.

    Damage is only found when they are read.
    """
    steps = whole_steps(model_dir)
    if step is None and not steps:
        if damaged_folder(model_dir).exists():  # Restoring reports the damage.
            return
        raise none_error(model_dir)
    averaged(model_dir, max(steps) if step is None else step, average)
