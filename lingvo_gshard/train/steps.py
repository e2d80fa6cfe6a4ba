"""The programs of a model_fn, traced in this process. K steps, B batch, L length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.program import Program

# (seed, an int32 [2] tensor) -> state
InitFn = Callable[["tf.Tensor"], NestedMap]
# (state, features, labels, mode, params) -> TPUEstimatorSpec
ModelFn = Callable[[NestedMap, NestedMap, NestedMap, Mode, Any], TPUEstimatorSpec]
Step = Callable[[NestedMap, NestedMap], NestedMap]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelPrograms:
    """Exports the programs of a model_fn and an init_fn: a ProgramSource (programs.py)."""

    model_fn: ModelFn
    init_fn: InitFn | None  # None if no state is to be made.
    params: Any
    partitioning: Partitioning
    state_spec: NestedMap

    def initializer(self) -> Program:
        """Exports the program that makes a state; ValueError if it differs from state_spec."""
        init_fn = self.init_fn
        if init_fn is None:
            raise ValueError("initializer: there is no init_fn, which would make a state.")

        made_specs = {f"state.{path}": spec for path, spec in self.state_spec.FlattenItems()}
        initialize = AnnotatedFn(
            name="initialize",
            fn=lambda seed: NestedMap(state=init_fn(seed.seed)),
            arg_names=("seed",),
            args=(NestedMap(seed=TensorSpec((2,), "int32", "_")),),
            result_dims={path: spec.dims for path, spec in made_specs.items()},
            result_stacks={path: spec.stack for path, spec in made_specs.items()},
        )
        exported = lowering.export(initialize, self.partitioning)

        # Training would fail later, with a message that names neither.
        made = dict(exported.results.state.FlattenItems())
        specs.check_same("init_fn differs from state_spec", made, self.state_spec)
        return exported

    def step(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Program:
        """Exports the program of a mode; see ProgramSource.step."""
        step = functools.partial(call_model_fn, self.model_fn, mode, self.params)
        args = (self.state_spec, batch_spec)

        match mode:
            case Mode.TRAIN:
                annotated = self._trainer(step, batch_spec, num_steps)
            case Mode.EVAL:
                annotated = AnnotatedFn("evaluate", step, ("state", "batch"), args)
            case Mode.PREDICT:
                # Predictions are rows of the batch, and stay on the devices that hold these.
                annotated = AnnotatedFn("predict", step, ("state", "batch"), args, unnamed_dims="B")
        return lowering.export(annotated, self.partitioning)

    def _trainer(self, step: Step, batch_spec: NestedMap, num_steps: int) -> AnnotatedFn:
        """Returns K steps, from batches [K, B, L] to metrics [K, ...]; the state is donated."""
        # The steps of a call follow each other, so K is split nowhere.
        stacked = batch_spec.Transform(
            lambda spec: TensorSpec((num_steps, *spec.shape), spec.dtype, "K" + spec.dims)
        )

        # A single step needs no loop, which the partitioner could not look through.
        def once(state: NestedMap, batches: NestedMap) -> NestedMap:
            result = step(state, batches.Transform(lambda x: x[0]))
            stacked_results = _without_state(result).Transform(lambda x: x[None])
            return NestedMap(stacked_results, state=result.state)

        fn = once if num_steps == 1 else functools.partial(self._loop, step, batch_spec)
        return AnnotatedFn(
            name=f"train_{num_steps}",
            fn=fn,
            arg_names=("state", "batches"),
            args=(self.state_spec, stacked),
            donate=("state",),
        )

    def _loop(
        self, step: Step, batch_spec: NestedMap, state: NestedMap, batches: NestedMap
    ) -> NestedMap:
        """Runs the steps in a tf.while_loop and writes the results of step k to index k."""
        leaf_specs = [*self.state_spec.Flatten(), *batch_spec.Flatten()]
        annotate = Annotator(self.partitioning).annotate_as
        num_state = len(state.Flatten())
        num_steps = batches.Flatten()[0].shape[0]
        results: list[NestedMap] = []

        # A loop carries a flat list of tensors. Each is annotated at both ends of the body: the
        # partitioner does not look through it.
        def flat_step(*leaves: tf.Tensor) -> list[tf.Tensor]:
            leaves = tuple(annotate(x, spec) for x, spec in zip(leaves, leaf_specs, strict=True))
            result = step(state.Pack(leaves[:num_state]), batches.Pack(leaves[num_state:]))
            result = result.Transform(tf.convert_to_tensor)
            results.append(result)
            new_state = zip(result.state.Flatten(), leaf_specs[:num_state], strict=True)
            other_results = _without_state(result).Flatten()
            return [annotate(x, spec) for x, spec in new_state] + other_results

        # The loop needs the results' shapes beforehand; the step is traced only once.
        signature = [tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)) for spec in leaf_specs]
        once = tf.function(flat_step, autograph=False, input_signature=signature)
        results_of_a_step = once.get_concrete_function().outputs[num_state:]
        stacks = [tf.zeros([num_steps, *x.shape], x.dtype) for x in results_of_a_step]

        def body(k: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
            # Step k: its batch, then its results at index k of theirs.
            batch = [tf.gather(stack, k) for stack in batches.Flatten()]
            new = once(*carried[:num_state], *batch)

            pairs = zip(carried[num_state:], new[num_state:], strict=True)
            written = [tf.tensor_scatter_nd_update(stack, [[k]], x[None]) for stack, x in pairs]
            return [k + 1, *new[:num_state], *written]

        _, *carried = tf.while_loop(
            lambda k, *_: k < num_steps,
            body,
            [tf.constant(0), *state.Flatten(), *stacks],
            maximum_iterations=num_steps,
        )
        stacked_results = _without_state(results[-1]).Pack(carried[num_state:])
        return NestedMap(stacked_results, state=state.Pack(carried[:num_state]))


def _without_state(result: NestedMap) -> NestedMap:
    """Returns the results of a step that are kept for each step of a call."""
    return NestedMap({name: tree for name, tree in result.items() if name != "state"})


def call_model_fn(
    model_fn: ModelFn, mode: Mode, params: Any, state: NestedMap, batch: NestedMap
) -> NestedMap:
    """Returns what the program of a mode returns, from the TPUEstimatorSpec of a model_fn.

    In TRAIN these are `state`, `metrics`, with the loss among them, and `host_call`, whose
    `tensors` are those of a host_call, if there is one; in EVAL the metrics' `sums` and `weights`;
    in PREDICT `predictions`. Raises ValueError if the spec is of another mode.
    """
    spec = model_fn(state, batch.features, batch.get("labels", NestedMap()), mode, params)
    if spec.mode != mode:
        raise ValueError(f"model_fn: called with mode {mode.name}, returned {spec.mode.name}.")

    if mode is Mode.TRAIN:
        result = NestedMap(state=spec.train_op, metrics=NestedMap(spec.metrics, loss=spec.loss))
        if spec.host_call is not None:
            _, tensors = spec.host_call
            by_name = NestedMap(tensors) if isinstance(tensors, Mapping) else list(tensors)
            result.host_call = NestedMap(tensors=by_name)
        return result
    if mode is Mode.PREDICT:
        return NestedMap(predictions=spec.predictions)

    # Sums over batches stay exact, where means of means would not.
    metrics = spec.metric_sums
    sums = {name: total for name, (total, _) in metrics.items()}
    weights = {name: weight for name, (_, weight) in metrics.items()}
    return NestedMap(sums=NestedMap(sums), weights=NestedMap(weights))
