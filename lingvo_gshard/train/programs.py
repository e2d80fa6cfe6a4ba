"""The estimator's programs, each exported and compiled when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.train import rows, steps
from lingvo_gshard.train.rows import Share


class Programs:
    """Compiles on demand; the training loop and its feed's thread share one."""

    def __init__(
        self,
        model_fn: steps.ModelFn,
        params: Any,
        partitioning: Partitioning,
        state_spec: NestedMap,
    ) -> None:
        self._model_fn, self._params, self._partitioning = model_fn, params, partitioning
        self._state_spec = state_spec
        self._compiled: dict[Any, Executable] = {}
        self._lock = threading.Lock()

    def initialize(self, init_fn: Callable[[tf.Tensor], NestedMap], seed: int) -> NestedMap:
        """A new state: every device makes its own part.

        Raises:
          ValueError: init_fn's state is not of the state_spec.
        """
        exported = lowering.export(steps.initializer(init_fn, self._state_spec), self._partitioning)
        made = dict(exported.results.state.FlattenItems())
        for path, spec in self._state_spec.FlattenItems():
            given = made.pop(path)
            if given != spec:
                raise ValueError(f"init_fn: {path} is made as {given}, state_spec says {spec}.")
        if made:
            raise ValueError(f"init_fn: makes {', '.join(made)}, which state_spec lacks.")
        seeds = np.array([seed, 0], np.int32)
        return compile_program(exported)(NestedMap(seed=seeds)).state

    def train(self, batch_spec: NestedMap, num_steps: int) -> Executable:
        """`num_steps` training steps in one call."""
        step = steps.train_step(self._model_fn, self._params)
        return self._get(
            ("train", num_steps, _key(batch_spec)),
            lambda: steps.trainer(
                step, self._state_spec, batch_spec, num_steps, self._partitioning
            ),
        )

    def evaluate(self, batch_spec: NestedMap) -> Executable:
        """The sums and weights of one batch."""
        return self._get(
            ("evaluate", _key(batch_spec)),
            lambda: steps.evaluator(self._model_fn, self._params, self._state_spec, batch_spec),
        )

    def predict(self, batch_spec: NestedMap) -> Executable:
        """The predictions of one batch."""
        return self._get(
            ("predict", _key(batch_spec)),
            lambda: steps.predictor(self._model_fn, self._params, self._state_spec, batch_spec),
        )

    def _get(self, key: Any, annotated: Callable[[], AnnotatedFn]) -> Executable:
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = compile_program(
                    lowering.export(annotated(), self._partitioning)
                )
            return self._compiled[key]


def batch_spec_of(batch: NestedMap, specs: NestedMap, share: Share) -> NestedMap:
    """The specs of all rows of a batch, whose lengths may differ from those of its `specs`."""
    return specs.Pack(
        TensorSpec(rows.of_all(array.shape, spec.dims, share), spec.dtype, spec.dims)
        for array, spec in zip(batch.Flatten(), specs.Flatten(), strict=True)
    )


def _key(batch_spec: NestedMap) -> tuple:
    return tuple(batch_spec.FlattenItems())
