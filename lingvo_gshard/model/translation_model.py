"""The translation task in the estimator's terms: a state, its initializer and a model_fn."""

from __future__ import annotations

import functools
from typing import Any

from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import BeamSearch, Requests
from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.model.gradient_norms import gradient_norms
from lingvo_gshard.model.spec import ModeKeys, TPUEstimatorSpec
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec


class TranslationModel:
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
            theta=weights.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims)),
            slots=self.optimizer.slot_specs(weights),
        )

    def init_state(self, seed: tf.Tensor) -> NestedMap:
        """The state before the first step; the seed is int32 [2]."""
        return NestedMap(
            step=tf.constant(0),
            theta=self.task.InitTheta(seed),
            slots=self.state_spec.slots.Transform(lambda s: tf.zeros(s.shape, s.dtype)),
        )

    def model_fn(
        self, state: NestedMap, features: NestedMap, labels: NestedMap, mode: ModeKeys, params: Any
    ) -> TPUEstimatorSpec:
        """Trains one step, or evaluates or translates one batch."""
        del params  # The layers have their own.
        if mode is ModeKeys.PREDICT:
            return self._predict(state, features)
        make = self._train if mode is ModeKeys.TRAIN else self._evaluate
        return make(state, features, labels)

    def _train(self, state: NestedMap, features: NestedMap, labels: NestedMap) -> TPUEstimatorSpec:
        """One step. If the loss or a gradient is not finite, only the step count changes."""
        context = Context(Mode.TRAIN, tf.stack([self._params.train.seed, state.step]))
        with tf.GradientTape() as tape:
            tape.watch(state.theta.Flatten())
            loss, metrics = self.task.Loss(state.theta, features, labels, context)
        weight_specs = self.task.weight_specs
        gradients = weight_specs.Pack(tape.gradient(loss, state.theta.Flatten()))
        gradients = gradients.Transform(self._annotate_gradient, weight_specs)
        metrics.gradient_norms = gradient_norms(gradients, weight_specs)
        metrics.gradient_norm = tf.linalg.global_norm(metrics.gradient_norms.Flatten())
        metrics.learning_rate = self.optimizer.learning_rate(state.step)
        finite = tf.math.is_finite(loss) & tf.math.is_finite(metrics.gradient_norm)
        metrics.skipped = 1.0 - tf.cast(finite, tf.float32)
        with tf.name_scope("optimizer"):
            old = state.theta.Transform(self._annotate_update, weight_specs)
            gradients = gradients.Transform(self._annotate_update, weight_specs)
            theta, slots = self.optimizer.update(
                old, state.slots, gradients, state.step, weight_specs=weight_specs
            )
            chosen = functools.partial(tf.where, finite)
            theta = theta.Transform(chosen, old).Transform(self._annotate_update, weight_specs)
            slots = slots.Transform(chosen, state.slots)
        return TPUEstimatorSpec(
            mode=ModeKeys.TRAIN,
            loss=loss,
            train_op=NestedMap(step=state.step + 1, theta=theta, slots=slots),
            metrics=metrics,
        )

    def _annotate_gradient(self, gradient: Any, spec: WeightSpec) -> tf.Tensor:
        dims = self._annotator.gradient_dims(spec.dims)
        return self._annotator.annotate(tf.convert_to_tensor(gradient), dims)

    def _annotate_update(self, tensor: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
        """Splits a weight or its gradient where the update is computed, as its slots are split."""
        return self._annotator.annotate(tensor, spec.dims.lower())

    def _evaluate(
        self, state: NestedMap, features: NestedMap, labels: NestedMap
    ) -> TPUEstimatorSpec:
        _, m = self.task.Loss(state.theta, features, labels, Context(Mode.EVAL))
        means = {"nll": m.nll, "aux_loss": m.aux_loss}
        for field, values in m.routing.items():
            means |= {f"{field}_{name}": value for name, value in values.items()}
        metrics = {name: (mean * m.num_tokens, m.num_tokens) for name, mean in means.items()}
        return TPUEstimatorSpec(mode=ModeKeys.EVAL, eval_metrics=metrics)

    def _predict(self, state: NestedMap, features: NestedMap) -> TPUEstimatorSpec:
        p, requests = self._params.decode, self._requests(features)
        alike = ("beam_size", "length_norm_alpha", "num_best", "coverage_weight", "temperature")
        config = BeamSearch(max_steps=p.max_target_len, **{name: p.Get(name) for name in alike})
        attention_beam = p.beam_size if p.tell_attention or p.coverage_weight else 0
        first = self.task.InitDecode(
            state.theta, features, config.first_places, attention_beam=attention_beam
        )
        found = flat_beam_search.search(
            config,
            functools.partial(self.task.DecodeStep, state.theta),
            first,
            requests,
            self._annotator.annotate,
            self.task.GrowDecode,
        )
        names = ["ids", "lengths", "scores", "token_log_probs"] + ["attention"] * p.tell_attention
        predictions = NestedMap({name: getattr(found, name) for name in names})
        return TPUEstimatorSpec(mode=ModeKeys.PREDICT, predictions=predictions)

    def _requests(self, features: NestedMap) -> Requests:
        """The experiment's length limits. A row without a source gets no steps."""
        p, shape = self._params.decode, features.source_ids.shape[:1]
        if not 1 <= p.min_target_len <= p.max_target_len:
            raise ValueError(
                f"decode.min_target_len must be 1 to max_target_len {p.max_target_len}, got "
                f"{p.min_target_len}."
            )
        if not 0 <= p.seed < 2**31:
            raise ValueError(f"decode.seed must be from 0 to 2**31 - 1, got {p.seed}.")
        shortest, longest = tf.fill(shape, p.min_target_len), tf.fill(shape, p.max_target_len)
        has_source = tf.reduce_max(tf.cast(features.source_segment_ids > 0, tf.int32), 1)
        return Requests(shortest, longest * has_source, tf.constant((p.seed, 0)))
