"""The estimator's four programs as AnnotatedFns: initialize, train, evaluate, predict.

K steps of one call, B batch, L length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import ModeKeys, TPUEstimatorSpec
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

# state, features, labels, mode, params -> TPUEstimatorSpec
ModelFn = Callable[[NestedMap, NestedMap, NestedMap, ModeKeys, Any], TPUEstimatorSpec]
Step = Callable[[NestedMap, NestedMap], NestedMap]


def initializer(init_fn: Callable[[tf.Tensor], NestedMap], state_spec: NestedMap) -> AnnotatedFn:
    """The program that makes the state, each device its own part, from an int32 [2] seed."""
    return AnnotatedFn(
        name="initialize",
        fn=lambda seed: NestedMap(state=init_fn(seed.seed)),
        arg_names=("seed",),
        args=(NestedMap(seed=TensorSpec((2,), "int32", "_")),),
        result_dims={f"state.{path}": spec.dims for path, spec in state_spec.FlattenItems()},
    )


def train_step(model_fn: ModelFn, params: Any) -> Step:
    """(state, batch) -> NestedMap(state, metrics), the loss among the metrics."""

    def step(state: NestedMap, batch: NestedMap) -> NestedMap:
        spec = _call(model_fn, ModeKeys.TRAIN, params, state, batch)
        return NestedMap(state=spec.train_op, metrics=NestedMap(spec.metrics, loss=spec.loss))

    return step


def trainer(
    step: Step,
    state_spec: NestedMap,
    batch_spec: NestedMap,
    num_steps: int,
    partitioning: Partitioning,
) -> AnnotatedFn:
    """K = num_steps training steps in one program; donates its state.

    The batches come stacked, [K, B, L], and every metric goes back stacked along K.
    """
    stacked = batch_spec.Transform(
        lambda spec: TensorSpec((num_steps, *spec.shape), spec.dtype, "K" + spec.dims)
    )

    def once(state: NestedMap, batches: NestedMap) -> NestedMap:
        result = step(state, batches.Transform(lambda x: x[0]))
        return NestedMap(result, metrics=result.metrics.Transform(lambda x: x[None]))

    def loop(state: NestedMap, batches: NestedMap) -> NestedMap:
        return _loop(step, state, batches, (state_spec, batch_spec), partitioning)

    return AnnotatedFn(
        name=f"train_{num_steps}",
        fn=once if num_steps == 1 else loop,
        arg_names=("state", "batches"),
        args=(state_spec, stacked),
        donate=("state",),
    )


def evaluator(
    model_fn: ModelFn, params: Any, state_spec: NestedMap, batch_spec: NestedMap
) -> AnnotatedFn:
    """One batch's weighted sums and weights: NestedMap(sums, weights), by metric."""

    def fn(state: NestedMap, batch: NestedMap) -> NestedMap:
        metrics = _call(model_fn, ModeKeys.EVAL, params, state, batch).eval_metrics
        assert metrics is not None
        return NestedMap(
            sums=NestedMap({name: pair[0] for name, pair in metrics.items()}),
            weights=NestedMap({name: pair[1] for name, pair in metrics.items()}),
        )

    return AnnotatedFn("evaluate", fn, ("state", "batch"), (state_spec, batch_spec))


def predictor(
    model_fn: ModelFn, params: Any, state_spec: NestedMap, batch_spec: NestedMap
) -> AnnotatedFn:
    """One batch's predictions, split over rows as the batch is."""

    def fn(state: NestedMap, batch: NestedMap) -> NestedMap:
        spec = _call(model_fn, ModeKeys.PREDICT, params, state, batch)
        return NestedMap(predictions=spec.predictions)

    return AnnotatedFn(
        "predict", fn, ("state", "batch"), (state_spec, batch_spec), unnamed_dims="B"
    )


def _call(
    model_fn: ModelFn, mode: ModeKeys, params: Any, state: NestedMap, batch: NestedMap
) -> TPUEstimatorSpec:
    spec = model_fn(state, batch.features, batch.get("labels", NestedMap()), mode, params)
    if spec.mode != mode:
        raise ValueError(f"model_fn: called with mode {mode.name}, its spec says {spec.mode.name}.")
    return spec


def _loop(
    step: Step,
    state: NestedMap,
    batches: NestedMap,
    specs: tuple[NestedMap, NestedMap],
    partitioning: Partitioning,
) -> NestedMap:
    """tf.while_loop over the K batches, each step's metrics written at its place."""
    dims = [spec.dims for tree in specs for spec in tree.Flatten()]
    num_state = len(state.Flatten())
    packed: list[NestedMap] = []
    annotate = Annotator(partitioning).annotate

    def flat_step(*leaves: tf.Tensor) -> list[tf.Tensor]:
        leaves = tuple(annotate(x, d) for x, d in zip(leaves, dims, strict=True))
        result = step(state.Pack(leaves[:num_state]), batches.Pack(leaves[num_state:]))
        result = result.Transform(tf.convert_to_tensor)
        packed.append(result)
        new = zip(result.state.Flatten(), dims[:num_state], strict=True)
        return [annotate(x, d) for x, d in new] + result.metrics.Flatten()

    # The loop needs its metrics' shapes beforehand, and a step is traced once alone.
    signature = [tf.TensorSpec(s.shape, tf.as_dtype(s.dtype)) for t in specs for s in t.Flatten()]
    once = tf.function(flat_step, autograph=False, input_signature=signature)
    outputs = once.get_concrete_function().outputs[num_state:]
    num_steps = batches.Flatten()[0].shape[0]
    stacks = [tf.zeros([num_steps, *x.shape], x.dtype) for x in outputs]

    def body(k: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
        now = [tf.gather(stack, k) for stack in batches.Flatten()]
        new = once(*carried[:num_state], *now)
        places = zip(carried[num_state:], new[num_state:], strict=True)
        metrics = [tf.tensor_scatter_nd_update(s, [[k]], x[None]) for s, x in places]
        return [k + 1, *new[:num_state], *metrics]

    _, *carried = tf.while_loop(
        lambda k, *_: k < num_steps,
        body,
        [tf.constant(0), *state.Flatten(), *stacks],
        maximum_iterations=num_steps,
    )
    metrics = packed[-1].metrics.Pack(carried[num_state:])
    return NestedMap(state=state.Pack(carried[:num_state]), metrics=metrics)
