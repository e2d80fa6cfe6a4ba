"""What to do when a loss or a gradient is infinite or not a number."""

import enum
import logging

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.hooks import TrainCall, TrainHook

# Optional metrics of a step: 1.0 if it left the weights unchanged, and norms by layer.
_SKIPPED = "skipped"
_NORMS_BY_LAYER = ("activation_norms", "gradient_norms")


class NonFinite(enum.Enum):
    """STOP ends training with an error; SKIP logs a warning and continues.

    SKIP needs a model_fn that leaves the weights unchanged in such a step and sets its metric
    `skipped` to 1.
    """

    STOP = "stop"
    SKIP = "skip"


class NonFiniteLossError(FloatingPointError):
    """A loss or gradient became infinite or not a number after the last checkpoint."""


class NonFiniteHook(TrainHook):
    """Checks the losses of every call."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self._num_skipped = 0
        self._step_saved = 0

    def begin(self, step: int) -> None:
        self._step_saved = step

    def after_save(self, step: int, state: NestedMap) -> None:
        self._step_saved = step

    def after_call(self, call: TrainCall) -> None:
        """Raises or logs the first step whose loss or gradients are not finite, with its layers.

        Raises NonFiniteLossError if the policy is STOP, and ValueError if it is SKIP but the model
        has no metric `skipped`.
        """
        skipped = np.asarray(call.metrics.get(_SKIPPED, 0.0)) > 0.0
        bad = np.flatnonzero(~np.isfinite(call.metrics.loss) | skipped)
        if not bad.size:
            return
        k = int(bad[0])
        step = call.step - call.num_steps + 1 + k
        message = f"The loss of step {step} is {call.metrics.loss[k]}"
        if layers := _first_bad_layers(call.metrics, k):
            message += f", first in {' and '.join(layers)}"
        if self._policy is NonFinite.STOP:
            raise NonFiniteLossError(
                f"{message}; the last checkpoint is of step {self._step_saved}."
            )
        if _SKIPPED not in call.metrics:
            raise ValueError(
                f"{message}; to skip such steps, model_fn must leave the state unchanged and set "
                f"its metric {_SKIPPED!r} to 1."
            )
        self._num_skipped += bad.size
        logging.warning("%s; skipped, %d steps in this run so far.", message, self._num_skipped)


def _first_bad_layers(metrics: NestedMap, k: int) -> list[str]:
    """Returns the first bad layer of each stack, such as `encoder_1 (activation_norms)`.

    A layer without an index, such as `softmax`, is a stack of its own.
    """
    for name in _NORMS_BY_LAYER:
        first: dict[str, tuple[int, str]] = {}
        for layer, norms in metrics.get(name, NestedMap()).items():
            stack, _, index = layer.rpartition("_")
            stack, position = (stack, int(index)) if index.isdigit() else (layer, 0)
            if not np.isfinite(norms[k]):
                first[stack] = min((position, layer), first.get(stack, (position, layer)))
        if first:
            return [f"{layer} ({name})" for _, layer in first.values()]
    return []
