"""A user's model_fn and init_fn in the form of a Model (steps.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap, nested
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec, as_sums
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import specs
from lingvo_gshard.train.summaries import HostFn

# (seed, an int32 [2] tensor) -> state
InitFn = Callable[["tf.Tensor"], NestedMap]
# (state, features, labels, mode, params) -> TPUEstimatorSpec
ModelFn = Callable[[NestedMap, NestedMap, NestedMap, Mode, Any], TPUEstimatorSpec]


@dataclasses.dataclass(eq=False)
class UserModel:
    """A Model that calls a model_fn. Its methods raise ValueError for a spec of another mode."""

    model_fn: ModelFn
    init_fn: InitFn
    params_of: Callable[[Mode], Any]  # Returns the params of a mode's call.
    partitioning: Partitioning
    state_spec: NestedMap
    host_fn: HostFn | None = None  # The function of the host_call, known once TRAIN is traced.

    def init_state(self, seed: tf.Tensor) -> NestedMap:
        """Returns what init_fn returns."""
        return nested("what init_fn returns", self.init_fn(seed))

    def train(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """See Model.train."""
        spec = self._spec(state, batch, Mode.TRAIN)
        assert spec.train_op is not None
        new_state = dict(spec.train_op.Transform(tf.convert_to_tensor).FlattenItems())
        specs.check_same("train_op differs from state_spec", new_state, self.state_spec)
        result = NestedMap(state=spec.train_op, metrics=NestedMap(spec.metrics, loss=spec.loss))
        if spec.host_call is not None:
            self.host_fn, tensors = spec.host_call
            by_name = NestedMap(tensors) if isinstance(tensors, Mapping) else list(tensors)
            result.host_call = NestedMap(tensors=by_name)
        return result

    def evaluate(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """See Model.evaluate."""
        return as_sums(self._spec(state, batch, Mode.EVAL).metric_sums)

    def predict(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """See Model.predict."""
        return NestedMap(predictions=self._spec(state, batch, Mode.PREDICT).predictions)

    def _spec(self, state: NestedMap, batch: NestedMap, mode: Mode) -> TPUEstimatorSpec:
        """Calls the model_fn."""
        labels = batch.get("labels", NestedMap())
        spec = self.model_fn(state, batch.features, labels, mode, self.params_of(mode))
        if not isinstance(spec, TPUEstimatorSpec):
            raise ValueError(
                f"model_fn: expected a TPUEstimatorSpec in mode {mode.name}, got "
                f"{type(spec).__name__}; is a `return` missing?"
            )
        if spec.mode != mode:
            raise ValueError(f"model_fn: called with mode {mode.name}, returned {spec.mode.name}.")
        return spec
