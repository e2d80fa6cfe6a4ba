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
from lingvo_gshard.layers.context import Context
from lingvo_gshard.model.accumulation import Accumulation
from lingvo_gshard.model.gradient_norms import gradient_norms
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.model.weight_average import average_specs, averaged
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec


class TranslationModel:
    """An experiment on a partitioning; `state_spec` has the specs of step, theta and slots.

    With train.ema_decay, the state also has `ema`, the weights' moving averages.
    """

    def __init__(self, params: Params, partitioning: Partitioning) -> None:
        self._params = params.Copy().Freeze()
        self.partitioning = partitioning
        self._annotator = Annotator(partitioning, params.train.scatter_gradients)
        self.task = params.task.Instantiate(self._annotator)
        self.optimizer = params.optimizer.Instantiate()
        self._accumulated = Accumulation(
            self.task.Loss,
            self.task.NumTokens,
            self.task.weight_specs,
            self._annotator,
            params.train.gradient_accumulation_steps,
        )

        weights = self.task.weight_specs
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
        """Trains one step, or evaluates or translates one batch."""
        del params  # The layers have their own.
        if mode is Mode.TRAIN:
            return self._train(state, features, labels)
        if mode is Mode.EVAL:
            return self._evaluate(state, features, labels)
        return self._predict(state, features)

    def _train(self, state: NestedMap, features: NestedMap, labels: NestedMap) -> TPUEstimatorSpec:
        """Takes one step. If the loss or a gradient is not finite, only the step count changes."""
        weight_specs = self.task.weight_specs

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

    def _evaluate(
        self, state: NestedMap, features: NestedMap, labels: NestedMap
    ) -> TPUEstimatorSpec:
        """Evaluates one batch; each metric is a mean over its tokens."""
        theta = self._evaluated(state)
        _, metrics = self.task.Loss(theta, features, labels, Context(Mode.EVAL))

        means = {"nll": metrics.nll, "aux_loss": metrics.aux_loss}
        for field, by_layer in metrics.routing.items():
            for layer, value in by_layer.items():
                means[f"{field}_{layer}"] = value

        num_tokens = metrics.num_tokens
        eval_metrics = {name: (mean * num_tokens, num_tokens) for name, mean in means.items()}
        return TPUEstimatorSpec(mode=Mode.EVAL, eval_metrics=eval_metrics)

    def _predict(self, state: NestedMap, features: NestedMap) -> TPUEstimatorSpec:
        """Translates one batch by flat beam search (A.1)."""
        p = self._params.decode
        theta = self._evaluated(state)
        requests = self._requests(features)
        config = BeamSearch(
            beam_size=p.beam_size,
            max_steps=p.max_target_len,
            length_norm_alpha=p.length_norm_alpha,
            num_best=p.num_best,
            coverage_weight=p.coverage_weight,
            temperature=p.temperature,
        )

        needs_attention = p.tell_attention or p.coverage_weight
        first_state = self.task.InitDecode(
            theta,
            features,
            config.first_places,
            attention_beam=p.beam_size if needs_attention else 0,
        )
        hypotheses = flat_beam_search.search(
            config,
            functools.partial(self.task.DecodeStep, theta),
            first_state,
            requests,
            self._annotator.annotate,
            self.task.GrowDecode,
        )

        predictions = NestedMap(
            ids=hypotheses.ids,
            lengths=hypotheses.lengths,
            scores=hypotheses.scores,
            token_log_probs=hypotheses.token_log_probs,
        )
        if p.tell_attention:
            predictions.attention = hypotheses.attention
        return TPUEstimatorSpec(mode=Mode.PREDICT, predictions=predictions)

    def _requests(self, features: NestedMap) -> Requests:
        """Returns the experiment's length limits. A row without a source gets no steps."""
        p = self._params.decode
        if not 1 <= p.min_target_len <= p.max_target_len:
            raise ValueError(
                f"decode.min_target_len must be 1 to max_target_len {p.max_target_len}, got "
                f"{p.min_target_len}."
            )
        if not 0 <= p.seed < 2**31:
            raise ValueError(f"decode.seed must be from 0 to 2**31 - 1, got {p.seed}.")

        batch = features.source_ids.shape[:1]
        shortest = tf.fill(batch, p.min_target_len)
        longest = tf.fill(batch, p.max_target_len)
        has_source = tf.reduce_max(tf.cast(features.source_segment_ids > 0, tf.int32), 1)
        return Requests(shortest, longest * has_source, tf.constant((p.seed, 0)))
