"""A task in the estimator's terms: a state, its initializer and a model_fn."""

from __future__ import annotations

import functools
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import stored_weights
from lingvo_gshard.layers.context import Context
from lingvo_gshard.model.accumulation import Accumulation
from lingvo_gshard.model.frozen import frozen
from lingvo_gshard.model.gradient_norms import gradient_norms
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.model.weight_average import average_specs, averaged
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec


class TaskModel:
    """An experiment on a partitioning; `state_spec` has the specs of step, theta and slots.

    With train.ema_decay, the state also has `ema`, the weights' moving averages.
    """

    def __init__(self, params: Params, partitioning: Partitioning) -> None:
        self._params = params.Copy().Freeze()
        self.partitioning = partitioning
        self._annotator = Annotator(partitioning, params.train.scatter_gradients)
        self.task = params.task.Instantiate(self._annotator)
        self.optimizer = params.optimizer.Instantiate()
        weights = frozen(self.task.weight_specs, params.train.frozen)
        self._accumulated = Accumulation(
            self.task.Loss,
            self.task.NumTokens,
            weights,
            self._annotator,
            params.train.gradient_accumulation_steps,
        )

        self._weight_specs = weights
        self.state_spec = NestedMap(
            step=TensorSpec((), "int32", ""),
            theta=weights.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims, w.stack)),
            slots=self.optimizer.slot_specs(weights),
        )
        if params.train.ema_decay is not None:
            self.state_spec.ema = average_specs(weights)

    def init_state(self, seed: tf.Tensor) -> NestedMap:
        """Returns the state before the first step; the seed is int32 [2]."""
        state = NestedMap(
            step=tf.constant(0),
            theta=self.task.InitTheta(seed),
            slots=self.state_spec.slots.Transform(lambda spec: tf.zeros(spec.shape, spec.dtype)),
        )
        if "ema" in self.state_spec:
            state.ema = state.theta
        return state

    def model_fn(
        self, state: NestedMap, features: NestedMap, labels: NestedMap, mode: Mode, params: Any
    ) -> TPUEstimatorSpec:
        """Trains one step, or evaluates or decodes one batch."""
        del params  # The layers have their own.
        if mode is Mode.TRAIN:
            return self._train(state, features, labels)
        if mode is Mode.EVAL:
            return self._evaluate(state, features, labels)
        predictions = self.task.Predict(self._decoded(state), features, self._params.decode)
        return TPUEstimatorSpec(mode=Mode.PREDICT, predictions=predictions)

    def _train(self, state: NestedMap, features: NestedMap, labels: NestedMap) -> TPUEstimatorSpec:
        """Takes one step. If the loss or a gradient is not finite, only the step count changes."""
        weight_specs = self._weight_specs

        # Loss and gradients. The seed differs by step, and so do dropout and random routing.
        context = Context(Mode.TRAIN, tf.stack([self._params.train.seed, state.step]))
        loss, metrics, gradients = self._accumulated(state.theta, features, labels, context)

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
            new_state = NestedMap(step=state.step + 1, theta=theta, slots=slots)
            if "ema" in state:
                decay = self._params.train.ema_decay
                new_state.ema = averaged(state.ema, theta, state.step, decay)

        return TPUEstimatorSpec(
            mode=Mode.TRAIN,
            loss=loss,
            train_op=new_state,
            metrics=metrics,
        )

    def _annotate_update(self, tensor: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
        """Splits a weight or its gradient where the update is computed, as its slots are split."""
        return self._annotator.in_stack(spec.stack).annotate(tensor, spec.dims.lower())

    def _evaluated(self, state: NestedMap) -> NestedMap:
        """Returns the weights to evaluate and predict with: their averages, if there are any."""
        if "ema" not in state:
            return state.theta
        # From the slots' layout to that of weights.
        return state.ema.Transform(self._annotator.annotate_as, self.task.weight_specs)

    def decoder_spec(self) -> NestedMap:
        """Returns the specs of theta alone, as decode.weights has a decoder keep it."""
        specs = stored_weights.specs(self.task.weight_specs, self._params.decode.weights)
        return NestedMap(theta=specs)

    def decoder_state(self, theta: NestedMap) -> NestedMap:
        """Returns what decoder_spec describes, from the float32 weights to decode with."""
        weight_specs = self.task.weight_specs
        return NestedMap(
            theta=stored_weights.kept(theta, weight_specs, self._params.decode.weights)
        )

    def _decoded(self, state: NestedMap) -> NestedMap:
        """Returns the weights to decode with; a decoder keeps them as they are."""
        theta = self._evaluated(state)
        if stored_weights.numbers_of(theta) is self._params.decode.weights:
            return theta
        return self.decoder_state(theta).theta

    def _evaluate(
        self, state: NestedMap, features: NestedMap, labels: NestedMap
    ) -> TPUEstimatorSpec:
        """Evaluates one batch."""
        theta = self._evaluated(state)
        _, metrics = self.task.Loss(theta, features, labels, Context(Mode.EVAL))
        return TPUEstimatorSpec(mode=Mode.EVAL, eval_metrics=self.task.EvalMetrics(metrics))
