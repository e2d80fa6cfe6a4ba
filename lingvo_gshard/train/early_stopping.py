"""Whether a run has stopped improving, decided from the evaluations that its folder records."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.train.metrics_files import EVAL_METRICS, read_lines


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """Ends training when `patience` evaluations in a row do not improve on the best before them.

    An evaluation is better if it gains more than `min_gain`; NaN is never better.
    """

    name: str  # The name of the evaluations, such as `dev`.
    metric: str
    higher_is_better: bool
    patience: int
    min_gain: float

    @classmethod
    def of(
        cls, p: Params, name: str, metric: str | None, higher_is_better: bool
    ) -> "EarlyStop | None":
        """Returns the rule in the settings `train`; None if early_stop_patience is None.

        Raises ValueError if there is a rule, but no metric.
        """
        if p.early_stop_patience is None:
            return None
        if metric is None:
            raise ValueError(
                f"train.early_stop_patience={p.early_stop_patience} needs a metric to compare: set "
                "train.keep_best_by."
            )
        return cls(name, metric, higher_is_better, p.early_stop_patience, p.early_stop_min_gain)

    def recorded(self, model_dir: str | pathlib.Path, until_step: int) -> str | None:
        """Returns `reason` for a run's recorded evaluations up to a step."""
        lines = read_lines(pathlib.Path(model_dir, EVAL_METRICS))
        # Evaluations that were repeated after a restart count once.
        values: dict[int, Any] = {}
        for line in lines:
            if line["name"] == self.name and line["step"] <= until_step:
                values[line["step"]] = line.get(self.metric, math.nan)
        return self.reason(values)

    def reason(self, values: Mapping[int, float]) -> str | None:
        """Returns why training ends with the last of these evaluations; None if it continues.

        `values` has the metric by step.
        """
        sign = 1 if self.higher_is_better else -1
        best = -math.inf
        best_step = 0
        since_best = 0
        for step, value in sorted(values.items()):
            if sign * value - best > self.min_gain:
                best = sign * value
                best_step = step
                since_best = 0
            else:
                since_best += 1

        if since_best < self.patience:
            return None
        outcome = "it is not a number"
        if best_step:
            outcome = f"the best is {sign * best:.6g} at step {best_step}"
        return (
            f"{self.metric} of {self.name} has not improved by more than {self.min_gain:g} in "
            f"{since_best} evaluations; {outcome}"
        )
