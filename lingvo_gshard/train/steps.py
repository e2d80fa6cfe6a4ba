"""A model's programs as annotated functions. K steps, B batch, L length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

# (state, batch) -> the results of one step, among them the new state.
Step = Callable[[NestedMap, NestedMap], NestedMap]


class Model(Protocol):
    """What programs compute: a TaskModel, or a user's model_fn (user_model.py).

    A batch has `features` and perhaps `labels`.
    """

    @property
    def partitioning(self) -> Partitioning:
        """The mesh and the table of its programs."""

    @property
    def state_spec(self) -> NestedMap:
        """The TensorSpecs of the state."""

    def init_state(self, seed: tf.Tensor) -> NestedMap:
        """Returns a new state, from an int32 [2] seed."""

    def train(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """Takes one step.

        Returns the new `state`, `metrics` with the loss, and perhaps `host_call`, whose `tensors`
        are for a function of the host.
        """

    def evaluate(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """Returns the metrics' `sums` over a batch, and their `weights`."""

    def predict(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """Returns `predictions`, whose rows are the batch's."""


def initializer(model: Model) -> AnnotatedFn:
    """Returns the function from `seed`, int32 [2], to a new state."""
    made_specs = {f"state.{path}": spec for path, spec in model.state_spec.FlattenItems()}
    return AnnotatedFn(
        name="initialize",
        fn=lambda seed: NestedMap(state=model.init_state(seed.seed)),
        arg_names=("seed",),
        args=(NestedMap(seed=TensorSpec((2,), "int32", "_")),),
        result_dims={path: spec.dims for path, spec in made_specs.items()},
        result_stacks={path: spec.stack for path, spec in made_specs.items()},
    )


def annotated(model: Model, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> AnnotatedFn:
    """Returns the function of a mode, for batches of these TensorSpecs.

    In TRAIN it does K = `num_steps` steps, from (state, batches [K, B, L]) to the new state and
    metrics [K, ...], and its state is donated. In EVAL it maps (state, batch) to the metrics' sums
    and weights, and in PREDICT to predictions, whose rows are split.
    """
    args = (model.state_spec, batch_spec)
    match mode:
        case Mode.EVAL:
            return AnnotatedFn("evaluate", model.evaluate, ("state", "batch"), args)
        case Mode.PREDICT:
            # Predictions are rows of the batch, and stay on the devices that hold the batch.
            return AnnotatedFn("predict", model.predict, ("state", "batch"), args, unnamed_dims="B")

    # The steps of a call run one after another, so K is never split.
    stacked = batch_spec.Transform(
        lambda spec: TensorSpec((num_steps, *spec.shape), spec.dtype, "K" + spec.dims)
    )
    # A single step does not need a loop.
    steps = _one_step if num_steps == 1 else functools.partial(_loop, model, batch_spec)
    return AnnotatedFn(
        name=f"train_{num_steps}",
        fn=functools.partial(steps, model.train),
        arg_names=("state", "batches"),
        args=(model.state_spec, stacked),
        donate=("state",),
    )


def decoder(model: TaskModel, length: int) -> AnnotatedFn:
    """Returns the function that decodes inputs of one length; its state is theta alone."""
    decode = model.params.decode
    features = model.task.DecodeSpecs(decode, decode.batch_size, length)
    return annotated(model.weights_alone(), Mode.PREDICT, NestedMap(features=features))


def weight_converter(model: TaskModel) -> AnnotatedFn:
    """Returns the function from float32 `weights` to the state of a decoder."""
    made_specs = {f"state.{path}": spec for path, spec in model.decoder_spec().FlattenItems()}
    return AnnotatedFn(
        name="keep",
        fn=lambda weights: NestedMap(state=model.decoder_state(weights.theta)),
        arg_names=("weights",),
        args=(NestedMap(theta=model.state_spec.theta),),
        result_dims={path: spec.dims for path, spec in made_specs.items()},
        result_stacks={path: spec.stack for path, spec in made_specs.items()},
    )


def _one_step(step: Step, state: NestedMap, batches: NestedMap) -> NestedMap:
    """Takes the only step of batches [1, B, L]; its results are stacks of one."""
    result = step(state, batches.Transform(lambda x: x[0]))
    stacked_results = _without_state(result).Transform(lambda x: x[None])
    return NestedMap(stacked_results, state=result.state)


def _loop(
    model: Model, batch_spec: NestedMap, step: Step, state: NestedMap, batches: NestedMap
) -> NestedMap:
    """Runs the steps in a tf.while_loop and writes the results of step k to index k."""
    annotate = Annotator(model.partitioning).annotate_as
    num_steps = batches.Flatten()[0].shape[0]

    # The loop needs the shapes of the results beforehand; still, the step is traced only once.
    signature = [
        specs.Transform(lambda spec: tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)))
        for specs in (model.state_spec, batch_spec)
    ]
    once = tf.function(step, autograph=False, input_signature=signature)
    result_of_a_step = once.get_concrete_function().structured_outputs
    stacks = _without_state(result_of_a_step).Transform(
        lambda x: tf.zeros([num_steps, *x.shape], x.dtype)
    )

    # The state is annotated at both ends of the body, and the batch at its beginning, so that their
    # layout in a step does not depend on propagation through the loop.
    def body(
        k: tf.Tensor, state: NestedMap, stacks: NestedMap
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        # Step k: gather its batch, and write its results at index k.
        state = state.Transform(annotate, model.state_spec)
        batch = batches.Transform(lambda stack: tf.gather(stack, k))
        result = once(state, batch.Transform(annotate, batch_spec))

        stacks = stacks.Transform(
            lambda stack, x: tf.tensor_scatter_nd_update(stack, [[k]], x[None]),
            _without_state(result),
        )
        return k + 1, result.state.Transform(annotate, model.state_spec), stacks

    _, state, stacks = tf.while_loop(
        lambda k, *_: k < num_steps,
        body,
        (tf.constant(0), state, stacks),
        maximum_iterations=num_steps,
    )
    return NestedMap(stacks, state=state)


def _without_state(result: NestedMap) -> NestedMap:
    """Returns the results of a step without the state: a call keeps these for each step."""
    return NestedMap({name: tree for name, tree in result.items() if name != "state"})
