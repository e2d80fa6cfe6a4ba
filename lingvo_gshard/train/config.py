"""How a run is run, apart from what it computes."""

from __future__ import annotations

import dataclasses
import enum

from lingvo_gshard.train.nonfinite import NonFinite
from lingvo_gshard.train.retention import Retention


class PerHostInput(enum.Enum):
    """What each of several processes reads of a batch.

    ALL: all rows, the same in every process. OWN_ROWS: those of TPUEstimator.input_share; the
    input's `specs` are of all rows nevertheless.
    """

    ALL = "all"
    OWN_ROWS = "own_rows"


@dataclasses.dataclass(frozen=True)
class TPUConfig:
    """The devices and the loop on them.

    Attributes:
      iterations_per_loop: K, training steps in one call of the program.
      num_partitions: devices that one model is split over; those of the partitioning's mesh.
      per_host_input: what an input yields where there are several processes.

    Raises:
      ValueError: a number below 1.
    """

    iterations_per_loop: int = 1
    num_partitions: int = 1
    per_host_input: PerHostInput = PerHostInput.ALL

    def __post_init__(self) -> None:
        _at_least("TPUConfig", self, iterations_per_loop=1, num_partitions=1)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where a run keeps its files, and how often.

    Attributes:
      model_dir: checkpoints, summaries, params.txt and train_metrics.jsonl.
      tpu_config: the devices and the loop.
      save_checkpoints_steps: a checkpoint after the call that reaches a multiple of it, and at
        the end.
      save_checkpoints_secs: and after the call that ends so long after the last one; None: by
        steps alone.
      keep_checkpoint_max: older ones are deleted,
      keep_checkpoint_every_n_hours: but for one of every so many hours; None for no such ones.
      log_step_count_steps: TensorBoard summaries after the call that reaches a multiple of it.
      seed: of the initial weights.
      show_progress: whether train draws a progress bar.
      on_nonfinite: what a loss that is no finite number does.

    Raises:
      ValueError: a number below 1.
    """

    model_dir: str
    tpu_config: TPUConfig
    save_checkpoints_steps: int = 1000
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int = 5
    keep_checkpoint_every_n_hours: float | None = None
    log_step_count_steps: int = 100
    seed: int = 0
    show_progress: bool = True
    on_nonfinite: NonFinite = NonFinite.STOP

    def __post_init__(self) -> None:
        _at_least(
            "RunConfig",
            self,
            save_checkpoints_steps=1,
            keep_checkpoint_max=1,
            log_step_count_steps=1,
            seed=0,
        )
        if self.seed >= 2**31:
            raise ValueError(f"RunConfig: seed must be an int32, got {self.seed}.")
        if self.save_checkpoints_secs is not None and self.save_checkpoints_secs <= 0:
            raise ValueError(
                f"RunConfig: save_checkpoints_secs must be more than 0, got "
                f"{self.save_checkpoints_secs}."
            )
        _ = self.retention  # Refuses what it can't be.

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay."""
        return Retention(self.keep_checkpoint_max, self.keep_checkpoint_every_n_hours)


def _at_least(kind: str, config: object, **least: int) -> None:
    for name, value in least.items():
        if getattr(config, name) < value:
            raise ValueError(
                f"{kind}: {name} must be {value} or more, got {getattr(config, name)}."
            )
