"""The receivers of a run's metrics besides its JSON lines: TensorBoard, Weights & Biases, MLflow.

Each is a Writer, and `train.writers` names the ones to use. Their packages are imported when a run
first writes, so a program that only decodes does not need them. Weights & Biases and MLflow take
their project, server and account from their own environment variables (WANDB_PROJECT,
MLFLOW_TRACKING_URI and others).
"""

from __future__ import annotations

import os
import pathlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lingvo_gshard.core.settings import values_by_path
from xla_spmd.files import atomic_file

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter


class Writer(Protocol):
    """Writes numbers by tag, such as `routing/load_E/encoder_1/3`."""

    def add(self, part: str, values: dict[str, float], step: int) -> None:
        """Adds all values of a step to one part of the run: `train`, or `eval_NAME`."""

    def close(self) -> None:
        """Ends the run."""


class TensorBoard:
    """Writes event files to the run's folder, in a folder for each part."""

    def __init__(self, model_dir: pathlib.Path) -> None:
        self._model_dir = model_dir
        self._files: dict[str, RecordWriter] = {}

    def add(self, part: str, values: dict[str, float], step: int) -> None:
        """See Writer; an OSError names the folder."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all values, since an event for each would take 30 times as long.
        tagged = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=tagged))

        # The file of a part is created with its first values.
        folder = self._model_dir / part
        with atomic_file.naming(folder):
            if part not in self._files:
                self._files[part] = _new_file(folder)
            self._files[part].write(event.SerializeToString())
            self._files[part].flush()  # A killed run keeps its last summaries.

    def close(self) -> None:
        """See Writer."""
        for file in self._files.values():
            file.close()


class WeightsAndBiases:
    """Writes to one run of Weights & Biases, which later starts in the same folder continue."""

    def __init__(self, model_dir: pathlib.Path, settings: str) -> None:
        """Begins or continues the run; `settings` are the run's, a Params.ToText()."""
        import wandb  # type: ignore[import-not-found]

        path = model_dir / "wandb_run.txt"
        self._run = wandb.init(
            dir=str(model_dir),
            name=model_dir.name,
            id=_read(path),
            resume="allow",
            config=values_by_path(settings),
        )
        self._run.define_metric("*", step_metric="step")
        atomic_file.write(path, self._run.id)

    def add(self, part: str, values: dict[str, float], step: int) -> None:
        """See Writer."""
        # The step is one of the values: W&B drops values logged at a smaller step than before, such
        # as the steps that a resumed run repeats.
        self._run.log({**_prefixed(part, values), "step": step})

    def close(self) -> None:
        """See Writer."""
        self._run.finish()


class MLflow:
    """Writes to one run of MLflow, which later starts in the same folder continue."""

    def __init__(self, model_dir: pathlib.Path, settings: str) -> None:
        """Begins or continues the run; `settings` are the run's, a Params.ToText()."""
        import mlflow  # type: ignore[import-not-found]

        self._mlflow: Any = mlflow
        path = model_dir / "mlflow_run.txt"
        run = mlflow.start_run(run_id=_read(path), run_name=model_dir.name)
        atomic_file.write(path, run.info.run_id)
        # As a file: MLflow's parameters can't change when a run continues with other settings.
        mlflow.log_text(settings, "params.txt")

    def add(self, part: str, values: dict[str, float], step: int) -> None:
        """See Writer."""
        self._mlflow.log_metrics(_prefixed(part, values), step=step)

    def close(self) -> None:
        """See Writer."""
        self._mlflow.end_run()


class Writers:
    """Several writers as one, which begin with the first numbers."""

    def __init__(self, names: Sequence[str], model_dir: str | pathlib.Path, settings: str) -> None:
        """`names` are the names in train.writers, checked by config.check."""
        folder = pathlib.Path(model_dir)
        makers: dict[str, Callable[[], Writer]] = {
            "tensorboard": lambda: TensorBoard(folder),
            "wandb": lambda: WeightsAndBiases(folder, settings),
            "mlflow": lambda: MLflow(folder, settings),
        }
        self._makers = [makers[name] for name in names]
        self._writers: list[Writer] = []

    def add(self, part: str, values: dict[str, float], step: int) -> None:
        """See Writer."""
        if not self._writers:
            self._writers = [make() for make in self._makers]
        for writer in self._writers:
            writer.add(part, values, step)

    def close(self) -> None:
        """See Writer."""
        for writer in self._writers:
            writer.close()


def _new_file(folder: pathlib.Path) -> RecordWriter:
    """Opens an event file, and writes the first event that TensorBoard expects in each.

    TensorBoard's own EventFileWriter would import TensorFlow, in order to write to buckets.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard looks for this beginning of the name; the rest is unique to a process.
    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
    writer = RecordWriter((folder / name).open("xb"))
    writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    return writer


def _prefixed(part: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{part}/{tag}": value for tag, value in values.items()}


def _read(path: pathlib.Path) -> str | None:
    """Returns the id of the run that was begun in this folder; None before the first run."""
    return path.read_text(encoding="utf-8") if path.exists() else None
