"""A task in the estimator's terms: a state, its initializer and a model_fn."""

from __future__ import annotations

import functools
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.model.gradient_norms import gradient_norms
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec


class TaskModel:
    """An experiment on a partitioning; `state_spec` has the specs of step, theta and slots."""

    def __init__(self, params: Params, partitioning: Partitioning) -> None:
        self._params = params.Copy().Freeze()
        self.partitioning = partitioning
        self._annotator = Annotator(partitioning, params.train.scatter_gradients)
        self.task = params.task.Instantiate(self._annotator)
        self.optimizer = params.optimizer.Instantiate()

        weights = self.task.weight_specs
        self.state_spec = NestedMap(
            step=TensorSpec((), "int32", ""),
            theta=weights.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims, w.stack)),
            slots=self.optimizer.slot_specs(weights),
        )

    def init_state(self, seed: tf.Tensor) -> NestedMap:
        """Returns the state before the first step; the seed is int32 [2]."""
        return NestedMap(
            step=tf.constant(0),
            theta=self.task.InitTheta(seed),
            slots=self.state_spec.slots.Transform(lambda spec: tf.zeros(spec.shape, spec.dtype)),
        )

    def model_fn(
        self, state: NestedMap, features: NestedMap, labels: NestedMap, mode: Mode, params: Any
    ) -> TPUEstimatorSpec:
        """Trains one step, or evaluates or decodes one batch."""
        del params  # The layers have their own.
        if mode is Mode.TRAIN:
            return self._train(state, features, labels)
        if mode is Mode.EVAL:
            return self._evaluate(state, features, labels)
        predictions = self.task.Predict(state.theta, features, self._params.decode)
        return TPUEstimatorSpec(mode=Mode.PREDICT, predictions=predictions)

    def _train(self, state: NestedMap, features: NestedMap, labels: NestedMap) -> TPUEstimatorSpec:
        """Takes one step. If the loss or a gradient is not finite, only the step count changes."""
        weight_specs = self.task.weight_specs

        # Loss and gradients. The seed differs by step, and so do dropout and random routing.
        context = Context(Mode.TRAIN, tf.stack([self._params.train.seed, state.step]))
        weights = state.theta.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss, metrics = self.task.Loss(state.theta, features, labels, context)
        gradients = weight_specs.Pack(tape.gradient(loss, weights))
        gradients = gradients.Transform(self._annotate_gradient, weight_specs)

        # Signs of instability (section 4.3).
        metrics.gradient_norms = gradient_norms(gradients, weight_specs)
        metrics.gradient_norm = tf.linalg.global_norm(metrics.gradient_norms.Flatten())
        metrics.learning_rate = self.optimizer.learning_rate(state.step)
        is_finite = tf.math.is_finite(loss) & tf.math.is_finite(metrics.gradient_norm)
        metrics.skipped = 1.0 - tf.cast(is_finite, tf.float32)

        # The update, where weights are split as their slots are, then back to the weights' own
        # layout.
        with tf.name_scope("optimizer"):
            old_theta = state.theta.Transform(self._annotate_update, weight_specs)
            gradients = gradients.Transform(self._annotate_update, weight_specs)
            gradients = self.optimizer.clipped(gradients, metrics.gradient_norm)
            theta, slots = self.optimizer.update(
                old_theta, state.slots, gradients, state.step, weight_specs=weight_specs
            )
            if_finite = functools.partial(tf.where, is_finite)
            theta = theta.Transform(if_finite, old_theta)
            theta = theta.Transform(self._annotate_update, weight_specs)
            slots = slots.Transform(if_finite, state.slots)

        return TPUEstimatorSpec(
            mode=Mode.TRAIN,
            loss=loss,
            train_op=NestedMap(step=state.step + 1, theta=theta, slots=slots),
            metrics=metrics,
        )

    def _annotate_gradient(self, gradient: Any, spec: WeightSpec) -> tf.Tensor:
        # The gradient of an embedding is tf.IndexedSlices.
        dense = tf.convert_to_tensor(gradient)
        annotator = self._annotator.in_stack(spec.stack)
        return annotator.annotate(dense, annotator.gradient_dims(spec.dims))

    def _annotate_update(self, tensor: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
        """Splits a weight or its gradient where the update is computed, as its slots are split."""
        return self._annotator.in_stack(spec.stack).annotate(tensor, spec.dims.lower())

    def _evaluate(
        self, state: NestedMap, features: NestedMap, labels: NestedMap
    ) -> TPUEstimatorSpec:
        """Evaluates one batch."""
        _, metrics = self.task.Loss(state.theta, features, labels, Context(Mode.EVAL))
        return TPUEstimatorSpec(mode=Mode.EVAL, eval_metrics=self.task.EvalMetrics(metrics))
