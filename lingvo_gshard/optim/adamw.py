"""AdamW (Loshchilov and Hutter 2019, algorithm 2), as pure functions.

Each weight has two slots of its own size, the moving averages of its gradient (`m`) and of the
gradient's square (`v`), in the optimizer's lowercase letters: split like the weight, or further.
"""

from __future__ import annotations

import re
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.optimizer import Optimizer, WeightStep, count, slot


class AdamW(Optimizer):
    """Adam's moments, and a decay of the weights that does not pass through them."""

    class Params(Optimizer.Params):
        beta1: float = setting(0.9, "The decay of the gradient's average.")
        beta2: float = setting(0.999, "The decay of the squared gradient's average.")
        epsilon: float = setting(1e-8, "Added to the root of the squared gradient's average.")
        weight_decay: float = setting(
            0.01, "The share of the weight that a step subtracts, at a learning rate of 1."
        )
        undecayed: str = setting(
            r".*embedding.*",
            "The matrices that never decay: a regular expression for their whole paths. Biases and "
            "scales never decay.",
        )

    p: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        p = self.p
        self._check_setting("beta1", 0 <= p.beta1 < 1, "in [0, 1)")
        self._check_setting("beta2", 0 <= p.beta2 < 1, "in [0, 1)")
        self._check_setting("epsilon", p.epsilon > 0, "above 0")
        self._check_setting("weight_decay", p.weight_decay >= 0, "0 or more")
        try:
            self._undecayed = re.compile(p.undecayed)
        except re.error as error:
            raise ValueError(
                f"AdamW: undecayed, {p.undecayed!r}, is not a regular expression: {error}."
            ) from None

    def _slot_specs(self, spec: WeightSpec) -> NestedMap:
        moment = slot(spec, range(len(spec.shape)))
        return NestedMap(m=moment, v=moment)

    def _facts(self, path: str, spec: WeightSpec) -> dict[str, Any]:
        is_decayed = spec.is_matrix and not self._undecayed.fullmatch(path)
        return {"weight_decay": self.p.weight_decay if is_decayed else 0.0}

    def _weight_step(self, step: tf.Tensor) -> WeightStep:
        p = self.p
        t = count(step)
        rate = self.learning_rate(step)

        # Averages that begin at 0 are too small by these factors.
        bias_m = 1.0 - p.beta1**t
        bias_v = 1.0 - p.beta2**t

        # Lines 6 to 12 of the algorithm, whose schedule multiplier is the learning rate here.
        def step_of(
            weight: tf.Tensor,
            gradient: tf.Tensor,
            slots: dict[str, tf.Tensor],
            weight_decay: float,
        ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            m = p.beta1 * slots["m"] + (1.0 - p.beta1) * gradient
            v = p.beta2 * slots["v"] + (1.0 - p.beta2) * tf.square(gradient)
            update = (m / bias_m) / ((v / bias_v) ** 0.5 + p.epsilon)
            if weight_decay:
                update += weight_decay * weight
            return weight - rate * update, {"m": m, "v": v}

        return step_of
