"""TPUEstimator (sections 3 and A): train, evaluate and predict with one partitioned program each.

It holds no variables: a tree of arrays, the state, is an argument and result of training calls.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from lingvo_gshard.checkpoints import checkpoints, exported, stored
from lingvo_gshard.checkpoints.checkpoints import Checkpoints, Contents, Restored, whole_steps
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError
from lingvo_gshard.checkpoints.warm_start import WarmStart
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import digests, storage, table
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import processes, specs
from lingvo_gshard.spmd.saved_executable import SavedExecutables
from lingvo_gshard.train import config, loop, summaries
from lingvo_gshard.train.hooks import NonFiniteHook, ProgressHook, TrainHook
from lingvo_gshard.train.loop import Input, TrainLoop, group_sizes
from lingvo_gshard.train.steps import InitFn, ModelFn, Programs

InputFn = Callable[[Any], Input]
_Found = TypeVar("_Found")


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on, and the metric whose best checkpoint is kept."""

    input_fn: InputFn  # Its Input ends.
    steps: int | None = None  # The number of batches, if not all.
    name: str = "eval"  # Results go to eval_NAME/ and eval_metrics.jsonl.
    best_by: str | None = None
    higher_is_better: bool = False


class TPUEstimator:
    """Trains, evaluates and predicts with a model_fn.

    `model_fn(state, features, labels, mode, params) -> TPUEstimatorSpec` is traced for each mode,
    shape of a batch, and number of steps in a call; `state` is a NestedMap that holds at least
    `step`, an int32 scalar.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        model_dir: str,
        *,
        params: Params,
        partitioning: Partitioning,
        state_spec: NestedMap,
        init_fn: InitFn,
        model_prefixes: tuple[str, ...] = (),
        warm_start: WarmStart | None = None,
        executables: str | None = None,
        log_step_count_steps: int = 1,
        show_progress: bool = True,
    ) -> None:
        """Compiles nothing yet.

        `model_dir` is refused if it was trained with other `params` at the dotted paths
        `model_prefixes`, by default all but `train`, which has the settings of config.train_params.
        `init_fn` returns a state of the TensorSpecs `state_spec`, given an int32 [2] seed tensor.
        A folder without checkpoints starts from `warm_start`, if given. `executables` is a folder
        of saved executables to train with, instead of compiling. TensorBoard gets a summary at each
        multiple of `log_step_count_steps`. ValueError for a wrong setting, a state without step, or
        `executables` without any.
        """
        if "train" not in params:
            define = 'params.Define("train", config.train_params(), "")'
            raise ValueError(f"TPUEstimator: params lack the settings of training: {define}.")
        config.check(params.train)
        step = state_spec.get("step")
        if step is None or (step.shape, step.dtype) != ((), "int32"):
            raise ValueError(f"TPUEstimator: the state needs `step`, an int32 scalar, got {step}.")
        self.model_dir, self.params, self.partitioning = model_dir, params, partitioning
        self.state_spec, self._init_fn = state_spec, init_fn
        self._model_prefixes, self._warm_start = model_prefixes, warm_start
        self._log_steps, self._show_progress = log_step_count_steps, show_progress
        saved = None if executables is None else SavedExecutables(executables)
        self._programs = Programs(model_fn, params, partitioning, state_spec, saved)

    @property
    def input_share(self) -> specs.Share:
        """The part of each batch's rows that this process's input must yield."""
        return specs.own_share(self.partitioning)

    def train(
        self,
        input_fn: InputFn,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[TrainHook] = (),
    ) -> Self:
        """Trains from the last checkpoint, or from new weights, and saves at the end.

        `steps` is how many more steps to train, and `max_steps` the step to train to; with neither,
        training ends with the input, whose state is restored with the weights. Raises ValueError if
        both are given, or one is below 1, or model_dir holds another model, or another process
        trains in it; NonFiniteLossError if train.on_nonfinite is STOP; SaveError if a checkpoint
        could not be written; and DamagedCheckpointError if all checkpoints are damaged.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(f"train: give steps ({steps}) or max_steps ({max_steps}), not both.")
        _check_steps("train", steps=steps, max_steps=max_steps)
        began_secs = time.monotonic()
        contents = Contents(self.params, self.partitioning, self.state_spec)
        with self.claimed(), Checkpoints(self.model_dir, contents) as saved:
            spec, shardings = self.state_spec, self._shardings()
            restored = saved.newest(lambda step: saved.restore(step, spec, shardings))
            start = restored.step if restored else 0
            stop = max_steps if steps is None else start + steps
            if stop is not None and start >= stop:
                logging.info("train: step %d of %d is already done", start, stop)
                return self
            hooks = [*self._own_hooks(stop, began_secs), *hooks]
            with self._input(input_fn) as source:
                state = self._begin(restored, source)
                program = functools.partial(self._programs.get, Mode.TRAIN, source.specs)
                sizes = group_sizes(start, stop, self.params.train.iterations_per_loop)
                with contextlib.closing(loop.groups(source, sizes, program)) as groups:
                    TrainLoop(saved, hooks, self.params.train).run(state, groups)
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        *,
        steps: int | None = None,
        checkpoint_step: int | None = None,
        name: str = "eval",
    ) -> dict[str, Any]:
        """Returns a checkpoint's metrics, by default the latest one's, as `evaluate_state` does."""
        restored = self.restore(checkpoint_step)
        return self.evaluate_state(restored.state, restored.step, EvalSpec(input_fn, steps, name))

    def evaluate_state(self, state: NestedMap, step: int, spec: EvalSpec) -> dict[str, Any]:
        """Evaluates a state that is on the devices, after `step` steps.

        Returns each metric's sum over all batches divided by its weight, lists for tensors, and
        `step`, `num_batches` and `secs`. Raises ValueError for no batches, steps below 1, weight 0,
        or no such `best_by`.
        """
        _check_steps(f"evaluate {spec.name}", steps=spec.steps)
        began_secs = time.monotonic()
        totals, num_batches = None, 0
        for found in self._results(Mode.EVAL, state, spec.input_fn, spec.steps):
            result = found.Transform(lambda x: np.asarray(x, float))
            totals = result if totals is None else totals.Transform(np.add, result)
            num_batches += 1
        if totals is None:
            raise ValueError(f"evaluate {spec.name}: the input holds no batches.")
        metrics: dict[str, Any] = {}
        for metric, weight in totals.weights.items():
            if weight == 0.0:
                raise ValueError(f"evaluate {spec.name}: {metric} has weight 0 over all batches.")
            metrics[metric] = (totals.sums[metric] / weight).tolist()
        secs = time.monotonic() - began_secs
        metrics |= {"step": step, "num_batches": num_batches, "secs": secs}
        if processes.is_first():
            summaries.write_evaluation(self.model_dir, spec.name, metrics)
            if spec.best_by is not None:
                best = spec.best_by, spec.higher_is_better
                checkpoints.note_best(self.model_dir, step, metrics, *best)
        return metrics

    def export_weights(
        self,
        path: str | pathlib.Path,
        prefix: str = "theta.",
        part_bytes: int = exported.PART_BYTES,
        checkpoint_step: int | None = None,
        average: int = 1,
    ) -> str:
        """Writes a checkpoint's arrays under `prefix`, by default the latest one's, as safetensors.

        All processes must call it; see exported.write, and `restore` for `average`. Returns a table
        of their names and shapes, and the path that a WarmStart takes. Raises ValueError if there
        is no such checkpoint, or nothing under `prefix`.
        """

        def write(saved: Checkpoints, step: int) -> str:
            arrays = saved.arrays(step, average)
            weights = {name: array for name, array in arrays.items() if name.startswith(prefix)}
            if not weights:
                raise ValueError(f"export: nothing begins with {prefix!r} in {', '.join(arrays)}.")
            whole = exported.write(pathlib.Path(path), weights, step, part_bytes)
            rows = [(name, specs.describe(array)) for name, array in sorted(weights.items())]
            total = sum(math.prod(array.shape) for array in weights.values())
            count = f"{len(weights)} tensors, {total:,} weights"
            return f"{table.text(rows)}\n{count}\nWrote {storage.origin(whole)}."

        return self._read(write, checkpoint_step)

    def check_folder(self) -> None:
        """Raises ValueError if model_dir holds another model."""
        config.check_folder(self.model_dir, self.params.ToText(), self._model_prefixes)

    def claimed(self) -> contextlib.AbstractContextManager[None]:
        """Locks model_dir to train in it, which process 0 does for all; see config.claimed."""
        if not processes.is_first():
            return contextlib.nullcontext()
        return config.claimed(self.model_dir, self.params.ToText(), self._model_prefixes)

    def restore(self, checkpoint_step: int | None = None, average: int = 1) -> Restored:
        """Reads a checkpoint, by default the latest one; ValueError if there is none, or too few.

        With `average` above 1, the state's `theta` is the mean over so many, up to this one.
        """

        def read(saved: Checkpoints, step: int) -> Restored:
            found = saved.restore(step, self.state_spec, self._shardings())
            if average == 1:
                return found
            shardings = NestedMap(theta=self._shardings().theta)
            arrays = stored.placed(saved.arrays(step, average), dict(shardings.FlattenItems()))
            state = NestedMap(found.state, **shardings.Pack(arrays.values()))
            digest = digests.of_json(found.digest, average, saved.steps())
            return dataclasses.replace(found, state=state, digest=digest)

        return self._read(read, checkpoint_step)

    def predict(
        self, input_fn: InputFn, *, checkpoint_step: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields every row's predictions, arrays by dotted path, in order. Raises as `restore`."""
        return self._predictions(self.restore(checkpoint_step).state, input_fn)

    def _predictions(self, state: NestedMap, input_fn: InputFn) -> Iterator[dict[str, np.ndarray]]:
        for result in self._results(Mode.PREDICT, state, input_fn):
            items = processes.to_host(result.predictions).FlattenItems()
            paths, arrays = zip(*items, strict=True)
            for row in zip(*arrays, strict=True):
                yield dict(zip(paths, row, strict=True))

    def _results(
        self, mode: Mode, state: NestedMap, input_fn: InputFn, steps: int | None = None
    ) -> Iterator[NestedMap]:
        """Yields the result of each batch, or of the first `steps` ones."""
        share = self.input_share
        with self._input(input_fn) as source:
            for batch in itertools.islice(source, steps):
                spec = loop.batch_spec_of(batch, source.specs, share)
                executable = self._programs.get(mode, spec)
                yield executable(state, executable.place("batch", batch))

    @contextlib.contextmanager
    def _input(self, input_fn: InputFn) -> Iterator[Input]:
        """Yields the input, and closes it in the end if it has a method `close`."""
        source = input_fn(self.params)
        try:
            yield source
        finally:
            getattr(source, "close", lambda: None)()

    def _own_hooks(self, stop: int | None, began_secs: float) -> list[TrainHook]:
        hooks: list[TrainHook] = [NonFiniteHook(self.params.train.on_nonfinite)]
        if processes.is_first():
            hooks.append(summaries.MetricsLog(self.model_dir, began_secs))
            hooks.append(summaries.SummaryHook(f"{self.model_dir}/train", self._log_steps))
            hooks += [ProgressHook(stop)] if self._show_progress else []
        return hooks

    def _begin(self, restored: Restored | None, source: Input) -> NestedMap:
        """Returns the state to start from, and sets the input's state to match."""
        if restored is not None:
            source.set_state(restored.input_state)
            logging.info("train: continues after step %d", restored.step)
            return restored.state
        state = self._programs.initialize(self._init_fn, self.params.train.seed)
        if self._warm_start is not None:
            state = self._warm_start.apply(state, self.state_spec)
        return state

    def _read(self, read: Callable[[Checkpoints, int], _Found], step: int | None) -> _Found:
        """Returns read(checkpoints, step), by default of the newest undamaged checkpoint."""
        self.check_folder()
        with Checkpoints(self.model_dir) as saved:
            if step is not None:
                return read(saved, step)
            found = saved.newest(functools.partial(read, saved))
        if found is None:
            raise ValueError(f"{self.model_dir}: there is no checkpoint; train first.")
        return found

    def _shardings(self) -> NestedMap:
        mesh = specs.device_mesh(self.partitioning)
        return specs.shardings(self.partitioning, self.state_spec, mesh)


def train_and_evaluate(
    estimator: TPUEstimator,
    input_fn: InputFn,
    evaluation: EvalSpec,
    *,
    max_steps: int,
    hooks: Sequence[TrainHook] = (),
) -> dict[str, Any] | None:
    """Trains and evaluates each checkpoint; returns the last metrics, None if a hook stopped it."""
    evaluator = _EvaluationHook(estimator, evaluation)
    estimator.train(input_fn, max_steps=max_steps, hooks=[*hooks, evaluator])
    if evaluator.stopped:
        return None
    if evaluator.last is not None:
        return evaluator.last
    # max_steps was reached before this run began.
    found = estimator.restore()
    return estimator.evaluate_state(found.state, found.step, evaluation)


def evaluate_continuously(
    estimator: TPUEstimator, spec: EvalSpec, *, until_step: int, poll_secs: float = 5.0
) -> dict[str, Any] | None:
    """Evaluates the newest checkpoint again and again while another process trains.

    It skips checkpoints that a newer one overtakes, that are deleted while it reads them, that are
    damaged, or that were evaluated before. Returns the last metrics; None if there were none.
    """
    lines = summaries.read_lines(pathlib.Path(estimator.model_dir, summaries.EVAL_METRICS))
    seen = {int(line["step"]) for line in lines if line["name"] == spec.name}
    metrics = None
    while max(seen, default=-1) < until_step:
        step = processes.of_first(max(whole_steps(estimator.model_dir), default=-1))
        if step < 0 or step in seen:
            time.sleep(poll_secs)
            continue
        seen.add(step)
        try:
            metrics = estimator.evaluate_state(estimator.restore(step).state, step, spec)
        except Exception as error:
            if step not in whole_steps(estimator.model_dir):  # It was deleted in the meantime.
                continue
            if not isinstance(error, DamagedCheckpointError):
                raise
            logging.warning("%s It is not evaluated.", error)
    return metrics


class _EvaluationHook(TrainHook):
    """Evaluates each state that is saved, while it is still on the devices."""

    def __init__(self, estimator: TPUEstimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self.last: dict[str, Any] | None = None
        self.stopped = False

    def after_save(self, step: int, state: NestedMap) -> None:
        self.last = self._estimator.evaluate_state(state, step, self._spec)

    def on_stop(self, step: int) -> None:
        self.stopped = True


def _check_steps(caller: str, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{caller}: {name} must be 1 or more, or None, got {count}.")
