"""The estimator's four programs, exported and compiled on demand. K steps, B batch, L length."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.saved_executable import SavedExecutables

InitFn = Callable[[tf.Tensor], NestedMap]
# (state, features, labels, mode, params) -> TPUEstimatorSpec
ModelFn = Callable[[NestedMap, NestedMap, NestedMap, Mode, Any], TPUEstimatorSpec]
Step = Callable[[NestedMap, NestedMap], NestedMap]


@dataclasses.dataclass(eq=False)
class Programs:
    """Compiles programs on demand, in any thread; training programs that `saved` has are loaded."""

    model_fn: ModelFn
    params: Any
    partitioning: Partitioning
    state_spec: NestedMap
    saved: SavedExecutables | None = None
    _compiled: dict[Any, Executable] = dataclasses.field(default_factory=dict, init=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def initialize(self, init_fn: InitFn, seed: int) -> NestedMap:
        """Returns a new state, computed where it lies. Raises as `export_initializer`."""
        compiled = compile_program(self.export_initializer(init_fn))
        return compiled(NestedMap(seed=np.array([seed, 0], np.int32))).state

    def export_initializer(self, init_fn: InitFn) -> Program:
        """Exports the program that makes a state; ValueError if it differs from state_spec."""
        wanted = self.state_spec.FlattenItems()
        initialize = AnnotatedFn(
            name="initialize",
            fn=lambda seed: NestedMap(state=init_fn(seed.seed)),
            arg_names=("seed",),
            args=(NestedMap(seed=TensorSpec((2,), "int32", "_")),),
            result_dims={f"state.{path}": spec.dims for path, spec in wanted},
        )
        exported = lowering.export(initialize, self.partitioning)
        made = dict(exported.results.state.FlattenItems())
        specs.check_same("init_fn differs from state_spec", made, self.state_spec)
        return exported

    def get(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Executable:
        """Returns the program of a mode; in TRAIN it does `num_steps` training steps."""
        key = (mode, num_steps, *batch_spec.FlattenItems())
        with self._lock:
            if key not in self._compiled:
                exported = self.export(mode, batch_spec, num_steps)
                saved = self.saved if mode is Mode.TRAIN else None
                make = saved.load_or_compile if saved else compile_program
                self._compiled[key] = make(exported)
            return self._compiled[key]

    def export(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Program:
        """Exports the program that `get` compiles; the rows of its predictions are split."""
        step = functools.partial(call_model_fn, self.model_fn, mode, self.params)
        args = (self.state_spec, batch_spec)
        if mode is Mode.TRAIN:
            annotated = self._trainer(step, batch_spec, num_steps)
        else:
            name, dims = ("evaluate", "") if mode is Mode.EVAL else ("predict", "B")
            annotated = AnnotatedFn(name, step, ("state", "batch"), args, unnamed_dims=dims)
        return lowering.export(annotated, self.partitioning)

    def _trainer(self, step: Step, batch_spec: NestedMap, num_steps: int) -> AnnotatedFn:
        """Returns K steps, from batches [K, B, L] to metrics [K, ...]; the state is donated."""
        stacked = batch_spec.Transform(
            lambda spec: TensorSpec((num_steps, *spec.shape), spec.dtype, "K" + spec.dims)
        )

        def once(state: NestedMap, batches: NestedMap) -> NestedMap:
            result = step(state, batches.Transform(lambda x: x[0]))
            return NestedMap(result, metrics=result.metrics.Transform(lambda x: x[None]))

        fn = once if num_steps == 1 else functools.partial(self._loop, step, batch_spec)
        names, args = ("state", "batches"), (self.state_spec, stacked)
        return AnnotatedFn(f"train_{num_steps}", fn, names, args, donate=("state",))

    def _loop(
        self, step: Step, batch_spec: NestedMap, state: NestedMap, batches: NestedMap
    ) -> NestedMap:
        """Runs the steps in a tf.while_loop and writes the metrics of step k to index k."""
        leaf_specs = [*self.state_spec.Flatten(), *batch_spec.Flatten()]
        dims, annotate = [spec.dims for spec in leaf_specs], Annotator(self.partitioning).annotate
        num_state = len(state.Flatten())
        packed: list[NestedMap] = []

        def flat_step(*leaves: tf.Tensor) -> list[tf.Tensor]:
            leaves = tuple(annotate(x, d) for x, d in zip(leaves, dims, strict=True))
            result = step(state.Pack(leaves[:num_state]), batches.Pack(leaves[num_state:]))
            result = result.Transform(tf.convert_to_tensor)
            packed.append(result)
            new = zip(result.state.Flatten(), dims[:num_state], strict=True)
            return [annotate(x, d) for x, d in new] + result.metrics.Flatten()

        # The loop needs the metrics' shapes beforehand; the step is traced only once.
        signature = [tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)) for spec in leaf_specs]
        once = tf.function(flat_step, autograph=False, input_signature=signature)
        outputs = once.get_concrete_function().outputs[num_state:]
        num_steps = batches.Flatten()[0].shape[0]
        stacks = [tf.zeros([num_steps, *x.shape], x.dtype) for x in outputs]

        def body(k: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
            now = [tf.gather(stack, k) for stack in batches.Flatten()]
            new = once(*carried[:num_state], *now)
            pairs = zip(carried[num_state:], new[num_state:], strict=True)
            metrics = [tf.tensor_scatter_nd_update(s, [[k]], x[None]) for s, x in pairs]
            return [k + 1, *new[:num_state], *metrics]

        _, *carried = tf.while_loop(
            lambda k, *_: k < num_steps,
            body,
            [tf.constant(0), *state.Flatten(), *stacks],
            maximum_iterations=num_steps,
        )
        metrics = packed[-1].metrics.Pack(carried[num_state:])
        return NestedMap(state=state.Pack(carried[:num_state]), metrics=metrics)


def call_model_fn(
    model_fn: ModelFn, mode: Mode, params: Any, state: NestedMap, batch: NestedMap
) -> NestedMap:
    """Returns state and metrics with loss; in EVAL metrics' sums and weights; or predictions."""
    spec = model_fn(state, batch.features, batch.get("labels", NestedMap()), mode, params)
    if spec.mode != mode:
        raise ValueError(f"model_fn: called with mode {mode.name}, returned {spec.mode.name}.")
    if mode is Mode.TRAIN:
        return NestedMap(state=spec.train_op, metrics=NestedMap(spec.metrics, loss=spec.loss))
    if mode is Mode.PREDICT:
        return NestedMap(predictions=spec.predictions)
    assert spec.eval_metrics is not None
    sums = {name: total for name, (total, _) in spec.eval_metrics.items()}
    weights = {name: weight for name, (_, weight) in spec.eval_metrics.items()}
    return NestedMap(sums=NestedMap(sums), weights=NestedMap(weights))
