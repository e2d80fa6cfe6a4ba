"""What happens when a step's loss or gradients are infinite or no numbers."""

from __future__ import annotations

import enum
import logging

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.hooks import TrainCall, TrainHook

# Metrics of a step, if its model_fn gives them: 1.0 where the step left the weights as they were;
# and norms by layer, such as encoder_1.
_SKIPPED = "skipped"
_BY_LAYER = ("activation_norms", "gradient_norms")


class NonFinite(enum.Enum):
    """STOP ends training with an error; SKIP counts the step and goes on.

    SKIP needs a model_fn whose step changes no weights then, and says so in its metric `skipped`.
    """

    STOP = "stop"
    SKIP = "skip"


class NonFiniteLossError(FloatingPointError):
    """A loss or gradient became infinite or no number; the last checkpoint is from before."""


class NonFiniteHook(TrainHook):
    """Looks at every call's losses, and does what the policy says."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self._num_skipped = 0
        self._step_saved = 0

    def begin(self, step: int) -> None:
        self._step_saved = step

    def after_save(self, step: int, state: NestedMap) -> None:
        self._step_saved = step

    def after_call(self, call: TrainCall) -> None:
        """Raises NonFiniteLossError, naming step and layer, or counts.

        Raises ValueError if the policy is SKIP but the step doesn't say that it skipped.
        """
        bad = np.flatnonzero(_bad_steps(call.metrics))
        if not bad.size:
            return
        k = int(bad[0])
        what = f"The loss of step {call.step - call.num_steps + 1 + k} is {call.metrics.loss[k]}"
        layers = _first_bad_layers(call.metrics, k)
        if layers:
            what += f", first in {' and '.join(layers)}"
        if self._policy is NonFinite.STOP:
            raise NonFiniteLossError(f"{what}; the last checkpoint is of step {self._step_saved}.")
        if _SKIPPED not in call.metrics:
            raise ValueError(
                f"{what}; to skip such steps, model_fn must leave the state as it was and say so "
                f"in its metric {_SKIPPED!r}."
            )
        self._num_skipped += bad.size
        logging.warning("%s; skipped, %d steps in this run so far.", what, self._num_skipped)


def _bad_steps(metrics: NestedMap) -> np.ndarray:
    """bool [K]."""
    return ~np.isfinite(metrics.loss) | (np.asarray(metrics.get(_SKIPPED, 0.0)) > 0.0)


def _first_bad_layers(metrics: NestedMap, k: int) -> list[str]:
    """The first layer of each stack, such as `encoder_1 (activation_norms)`; none if unknown.

    A layer that stands alone, such as `softmax`, is a stack of its own.
    """
    for name in _BY_LAYER:
        first: dict[str, int] = {}
        for layer, norms in metrics.get(name, NestedMap()).items():
            stack, _, index = layer.rpartition("_")
            if not np.isfinite(norms[k]):
                stack, place = (stack, int(index)) if index.isdigit() else (layer, -1)
                first[stack] = min(place, first.get(stack, place))
        if first:
            named = (stack if place < 0 else f"{stack}_{place}" for stack, place in first.items())
            return [f"{layer} ({name})" for layer in named]
    return []
