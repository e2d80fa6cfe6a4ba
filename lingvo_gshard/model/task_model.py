"""A task in the estimator's terms: a state, its initializer, and the steps of programs."""

from __future__ import annotations

import copy
import functools
from typing import Self

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import stored_weights
from lingvo_gshard.layers.context import Context
from lingvo_gshard.model.accumulation import Accumulation
from lingvo_gshard.model.frozen import frozen
from lingvo_gshard.model.gradient_norms import gradient_norms
from lingvo_gshard.model.spec import Mode, as_sums
from lingvo_gshard.model.weight_average import average_specs, averaged
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec

# The settings of `train` that programs depend on.
_TRAIN_SETTINGS = (
    "seed",
    "scatter_gradients",
    "gradient_accumulation_steps",
    "ema_decay",
    "frozen",
)


class TaskModel:
    """An experiment on a partitioning: a Model (train/steps.py).

    `state_spec` has the specs of step, theta and slots. With train.ema_decay, the state also has
    `ema`, the weights' moving averages.
    """

    def __init__(self, params: Params, partitioning: Partitioning) -> None:
        self.params = params.Copy().Freeze()
        self.partitioning = partitioning
        self._annotator = Annotator(partitioning, params.train.scatter_gradients)
        self.task = params.task.Instantiate(self._annotator)
        self.optimizer = params.optimizer.Instantiate()
        weights = frozen(self.task.weight_specs, params.train.frozen)
        self._gradients = Accumulation(
            self.task.Loss,
            self.task.NumTokens,
            weights,
            self._annotator,
            params.train.gradient_accumulation_steps,
        ).gradients

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

    def settings(self, *groups: str) -> Params:
        """Returns the settings that all programs depend on, and these groups of settings."""
        settings = Params()
        for group in ("task", "optimizer", *groups):
            settings.Define(group, self.params.Get(group), self.params.Describe(group))

        train = Params()
        for name in _TRAIN_SETTINGS:
            train.Define(name, self.params.train.Get(name), self.params.train.Describe(name))
        settings.Define("train", train, self.params.Describe("train"))
        return settings

    def train(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """Takes one step, and returns the new `state` and `metrics`.

        If the loss or a gradient is not finite, only the step count changes.
        """
        weight_specs = self._weight_specs

        # Loss and gradients. The seed differs by step, and so do dropout and random routing.
        context = Context(Mode.TRAIN, tf.stack([self.params.train.seed, state.step]))
        loss, terms, gradients = self._gradients(state.theta, batch.features, batch.labels, context)
        metrics = self.task.Metrics(terms)

        # Signs of instability (section 4.3).
        metrics.gradient_norms = gradient_norms(gradients, weight_specs)
        metrics.gradient_norm = tf.linalg.global_norm(metrics.gradient_norms.Flatten())
        metrics.learning_rate = self.optimizer.learning_rate(state.step)
        is_finite = tf.math.is_finite(loss) & tf.math.is_finite(metrics.gradient_norm)
        metrics.skipped = 1.0 - tf.cast(is_finite, tf.float32)

        # The update, in the layout of the slots. Then the weights return to their own layout.
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
                decay = self.params.train.ema_decay
                ema = averaged(state.ema, theta, state.step, decay)
                new_state.ema = ema.Transform(if_finite, state.ema)

        return NestedMap(state=new_state, metrics=NestedMap(metrics, loss=loss))

    def evaluate(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """Returns the metrics' `sums` over one batch, and their `weights`."""
        theta = self._evaluated(state)
        _, terms = self.task.Loss(theta, batch.features, batch.labels, Context(Mode.EVAL))
        return as_sums(self.task.EvalMetrics(self.task.Metrics(terms)))

    def predict(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """Returns the `predictions` of one batch."""
        theta = self._decoded(state)
        predictions = self.task.Predict(theta, batch.features, self.params.decode)
        return NestedMap(predictions=predictions)

    def _annotate_update(self, tensor: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
        """Splits a weight or its gradient for the update, like its slots."""
        return self._annotator.in_stack(spec.stack).annotate(tensor, spec.dims.lower())

    def _evaluated(self, state: NestedMap) -> NestedMap:
        """Returns the weights for evaluation and prediction: their averages, if kept."""
        if "ema" not in state:
            return state.theta
        # Moves the averages from the slots' layout to the weights'.
        return state.ema.Transform(self._annotator.annotate_as, self.task.weight_specs)

    def decoder_spec(self) -> NestedMap:
        """Returns the specs of theta alone, in the decoder's form that decode.weights chooses."""
        specs = stored_weights.specs(self.task.weight_specs, self.params.decode.weights)
        return NestedMap(theta=specs)

    def weights_alone(self) -> Self:
        """Returns the model whose state is `decoder_spec`."""
        model = copy.copy(self)
        model.state_spec = self.decoder_spec()
        return model

    def decoder_state(self, theta: NestedMap) -> NestedMap:
        """Returns the state that decoder_spec describes, from the float32 weights."""
        weight_specs = self.task.weight_specs
        return NestedMap(theta=stored_weights.kept(theta, weight_specs, self.params.decode.weights))

    def _decoded(self, state: NestedMap) -> NestedMap:
        """Returns the weights to decode with; a decoder's state already has them."""
        theta = self._evaluated(state)
        if stored_weights.numbers_of(theta) is self.params.decode.weights:
            return theta
        return self.decoder_state(theta).theta
