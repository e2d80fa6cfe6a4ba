"""TPUEstimator (sections 3 and A): train, evaluate and predict with one partitioned program each.

Unlike TensorFlow's, it holds no variables. The state, a tree of arrays split over the devices,
goes through every program as an argument and a result.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import processes, specs
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.train import checkpoints, programs, retention, rows, summaries, weights_file
from lingvo_gshard.train import model_dir as model_dirs
from lingvo_gshard.train.background import BackgroundHook
from lingvo_gshard.train.checkpoints import Checkpoints, Contents, Restored
from lingvo_gshard.train.config import PerHostInput, RunConfig
from lingvo_gshard.train.feed import Feed, Input
from lingvo_gshard.train.hooks import ProgressHook, TrainHook
from lingvo_gshard.train.loop import SaveEvery, TrainLoop, group_sizes
from lingvo_gshard.train.nonfinite import NonFiniteHook
from lingvo_gshard.train.retention import BestBy
from lingvo_gshard.train.rows import Share
from lingvo_gshard.train.steps import ModelFn
from lingvo_gshard.train.warm_start import WarmStart

InputFn = Callable[[Any], Input]
_Found = TypeVar("_Found")


class TPUEstimator:
    """Trains, evaluates and predicts with a model_fn.

    `model_fn(state, features, labels, mode, params) -> TPUEstimatorSpec` is traced once a mode;
    `state` is a NestedMap that holds at least `step`, an int32 scalar.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        config: RunConfig,
        *,
        params: Params,
        partitioning: Partitioning,
        state_spec: NestedMap,
        init_fn: Callable[[tf.Tensor], NestedMap],
        model_prefixes: tuple[str, ...] = ("",),
        warm_start: WarmStart | None = None,
    ) -> None:
        """Keeps what it is given; nothing is compiled yet.

        Args:
          model_fn: the model.
          config: where and how often.
          params: handed to model_fn and input_fn, and written to model_dir/params.txt.
          partitioning: the mesh and the table from dims to its axes.
          state_spec: NestedMap of TensorSpec.
          init_fn: makes a state from an int32 [2] seed tensor.
          model_prefixes: dotted paths of `params` that make the model what it is: a model_dir
            whose entries there differ is refused. By default every entry.
          warm_start: where training begins in a folder without checkpoints; None: from init_fn.

        Raises:
          ValueError: the config's partitions are not the mesh's, or the state has no step.
        """
        num_partitions = config.tpu_config.num_partitions
        if num_partitions != partitioning.num_partitions:
            raise ValueError(
                f"TPUEstimator: num_partitions is {num_partitions}, but the mesh has "
                f"{partitioning.num_partitions}."
            )
        step = state_spec.get("step")
        if step is None or (step.shape, step.dtype) != ((), "int32"):
            raise ValueError(f"TPUEstimator: the state needs `step`, an int32 scalar, got {step}.")
        self.config, self.params, self.partitioning = config, params, partitioning
        self.state_spec, self._init_fn = state_spec, init_fn
        self._model_prefixes, self._warm_start = model_prefixes, warm_start
        self._programs = programs.Programs(model_fn, params, partitioning, state_spec)

    @property
    def input_share(self) -> Share:
        """The part of each batch that this process's input yields."""
        if self.config.tpu_config.per_host_input is PerHostInput.ALL:
            return rows.WHOLE
        return rows.own_share(self.partitioning)

    def train(
        self,
        input_fn: InputFn,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[TrainHook] = (),
    ) -> TPUEstimator:
        """Trains from the last checkpoint, or from new weights; saves at the end.

        Args:
          input_fn: given params, returns an Input; its state is restored with the weights.
          steps: how many more steps; or
          max_steps: up to which step. Neither: until the input ends.
          hooks: called besides the estimator's own.

        Returns:
          This estimator.

        Raises:
          ValueError: both steps and max_steps, or below 1; or model_dir holds another model, or
            another process trains in it.
          NonFiniteLossError: the loss is no finite number, and the config says to stop then.
          SaveError: a checkpoint could not be written.
          DamagedCheckpointError: there are checkpoints, and all are damaged.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(f"train: give steps ({steps}) or max_steps ({max_steps}), not both.")
        _check_steps("train", steps=steps, max_steps=max_steps)
        text = self.params.ToText()
        own = self._own_hooks()  # Their clock starts here.
        with (
            self._claimed(text),
            self._open(Contents(text, self.partitioning, self.state_spec)) as saved,
        ):
            restored = saved.restore_newest(self.state_spec, self._shardings())
            start = restored.step if restored else 0
            stop = max_steps if steps is None else start + steps
            if stop is not None and start >= stop:
                logging.info("train: step %d of %d is done already", start, stop)
                return self
            source = input_fn(self.params)
            try:
                state = self._start(restored, source)
                self._loop(saved, source, state, (start, stop), [*own(stop), *hooks])
            finally:
                _close(source)
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        *,
        steps: int | None = None,
        checkpoint_step: int | None = None,
        name: str = "eval",
    ) -> dict[str, float]:
        """Metrics of a checkpoint over an input's batches.

        Args:
          input_fn: given params, returns an Input that ends.
          steps: how many batches at most.
          checkpoint_step: which checkpoint; the latest by default.
          name: names the result in model_dir: eval_NAME/ and eval_metrics.jsonl.

        Returns:
          Each metric's sum over all batches divided by its weight over all batches; also
          `step`, `num_batches` and `secs`.

        Raises:
          ValueError: no such checkpoint, no batches, steps below 1, or a metric of weight 0.
        """
        restored = self._restore(checkpoint_step)
        return self.evaluate_state(restored.state, restored.step, input_fn, steps=steps, name=name)

    def evaluate_state(
        self,
        state: NestedMap,
        step: int,
        input_fn: InputFn,
        *,
        steps: int | None = None,
        name: str = "eval",
    ) -> dict[str, float]:
        """As `evaluate`, of a state on the devices, after `step` steps."""
        _check_steps(f"evaluate {name}", steps=steps)
        began, source = time.monotonic(), input_fn(self.params)
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        num_batches = 0
        try:
            for batch in _first(source, steps):
                evaluate = self._programs.evaluate(self._batch_spec(batch, source))
                result = evaluate(state, self._placed(evaluate, "batch", batch))
                for metric, value in result.sums.FlattenItems():
                    sums[metric] = sums.get(metric, 0.0) + float(value)
                for metric, value in result.weights.FlattenItems():
                    weights[metric] = weights.get(metric, 0.0) + float(value)
                num_batches += 1
        finally:
            _close(source)
        if not num_batches:
            raise ValueError(f"evaluate {name}: the input holds no batches.")
        for metric, weight in weights.items():
            if weight == 0.0:
                raise ValueError(f"evaluate {name}: {metric} has weight 0 over all batches.")
        metrics: dict[str, float] = {metric: sums[metric] / weights[metric] for metric in sums}
        metrics |= {"step": step, "num_batches": num_batches, "secs": time.monotonic() - began}
        if processes.is_first():
            summaries.write_evaluation(self.config.model_dir, name, metrics)
        return metrics

    def note_best(self, by: BestBy, step: int, metrics: Mapping[str, float]) -> None:
        """Notes the checkpoint of `step` as the best one if these metrics of it are: it is kept.

        Raises:
          ValueError: the metrics lack the one that it goes by.
        """
        if processes.is_first():
            retention.note_best(checkpoints.folder(self.config.model_dir), by, step, metrics)

    def export_weights(self, path: str | pathlib.Path, prefix: str = "theta.") -> str:
        """Writes the newest checkpoint's arrays under `prefix` into one .safetensors file.

        Process 0 reads and writes one array at a time.

        Returns:
          A table of their names and shapes.

        Raises:
          ValueError: there is no checkpoint, or nothing under `prefix`.
        """
        with self._open_existing() as saved:
            newest = saved.newest(lambda step: (step, saved.arrays(step)))
        step, arrays = self._present(newest)
        weights = {name: array for name, array in arrays.items() if name.startswith(prefix)}
        if not weights:
            raise ValueError(f"export: nothing begins with {prefix!r} in {', '.join(arrays)}.")
        if processes.is_first():
            weights_file.write(path, weights, step)
        return weights_file.summary(weights)

    def checkpoint_steps(self) -> list[int]:
        """The steps of whole checkpoints, oldest first; none before the first."""
        return checkpoints.whole_steps(self.config.model_dir)

    def restore(self) -> NestedMap:
        """The state of the latest checkpoint, on the devices; ValueError if there is none."""
        return self._restore(None).state

    def predict(
        self, input_fn: InputFn, *, checkpoint_step: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields the predictions of every row of every batch, in order.

        A row is a dict from the predictions' dotted paths to arrays without the batch's dim.
        Batches of several lengths are compiled for one by one.

        Raises:
          ValueError: no such checkpoint.
        """
        return self._rows(self._restore(checkpoint_step).state, input_fn)

    def _rows(self, state: NestedMap, input_fn: InputFn) -> Iterator[dict[str, np.ndarray]]:
        source = input_fn(self.params)
        try:
            for batch in source:
                spec = self._batch_spec(batch, source)
                predict = self._programs.predict(spec)
                result = predict(state, self._placed(predict, "batch", batch)).predictions
                arrays = dict(processes.to_host(result).FlattenItems())
                for row in range(spec.Flatten()[0].shape[0]):
                    yield {path: array[row] for path, array in arrays.items()}
        finally:
            _close(source)

    def _loop(
        self,
        saved: Checkpoints,
        source: Input,
        state: NestedMap,
        start_stop: tuple[int, int | None],
        hooks: Sequence[TrainHook],
    ) -> None:
        batch_spec = source.specs
        steps_per_call = self.config.tpu_config.iterations_per_loop

        def executable_of(num_steps: int):
            return self._programs.train(batch_spec, num_steps)

        def place(batches: NestedMap, num_steps: int) -> NestedMap:
            return self._placed(executable_of(num_steps), "batches", batches)

        save_every = SaveEvery(
            self.config.save_checkpoints_steps, self.config.save_checkpoints_secs
        )
        loop = TrainLoop(executable_of, saved, save_every, hooks)
        with Feed(source, group_sizes(*start_stop, steps_per_call), place) as feed:
            loop.run(state, feed)

    def _claimed(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Process 0 holds the folder for all."""
        if not processes.is_first():
            return contextlib.nullcontext()
        return model_dirs.claimed(self.config.model_dir, text, self._model_prefixes)

    def _batch_spec(self, batch: NestedMap, source: Input) -> NestedMap:
        return programs.batch_spec_of(batch, source.specs, self.input_share)

    def _placed(self, executable: Executable, arg_name: str, batch: NestedMap) -> NestedMap:
        """The batch on its devices, of the rows that this process has of it."""
        spec, shardings = executable.spec(arg_name), executable.shardings(arg_name)
        whole = rows.assembled(batch, spec, shardings, self.input_share)
        return executable.place_arg(arg_name, whole)

    def _own_hooks(self) -> Callable[[int | None], list[TrainHook]]:
        config = self.config
        nonfinite = NonFiniteHook(config.on_nonfinite)
        if not processes.is_first():
            return lambda stop: [nonfinite]
        log = summaries.MetricsLog(config.model_dir)
        every_steps = config.log_step_count_steps
        summary = BackgroundHook(summaries.SummaryHook(f"{config.model_dir}/train", every_steps))
        return lambda stop: [
            nonfinite,
            log,
            summary,
            *([ProgressHook(stop)] if config.show_progress else []),
        ]

    def _start(self, restored: Restored | None, source: Input) -> NestedMap:
        if restored is None:
            state = self._programs.initialize(self._init_fn, self.config.seed)
            if self._warm_start is not None:
                state = self._warm_start.apply(state, self.state_spec)
            return state
        source.set_state(restored.input_state)
        logging.info("train: continues after step %d", restored.step)
        return restored.state

    def _restore(self, step: int | None) -> Restored:
        with self._open_existing() as saved:
            if step is not None:
                return saved.restore(step, self.state_spec, self._shardings())
            return self._present(saved.restore_newest(self.state_spec, self._shardings()))

    def _open(self, contents: Contents | None = None) -> Checkpoints:
        """The checkpoints, for reading only unless `contents` is given."""
        return Checkpoints(self.config.model_dir, contents, self.config.retention)

    def _open_existing(self) -> Checkpoints:
        """The checkpoints of this model, for reading; ValueError if there are none."""
        folder = self.config.model_dir
        model_dirs.check(folder, self.params.ToText(), self._model_prefixes)
        return self._present(self._open() if checkpoints.exist(folder) else None)

    def _present(self, found: _Found | None) -> _Found:
        if found is None:
            raise ValueError(f"{self.config.model_dir}: there is no checkpoint; train first.")
        return found

    def _shardings(self) -> NestedMap:
        mesh = specs.device_mesh(self.partitioning)
        return specs.shardings(self.partitioning, self.state_spec, mesh)


def _first(source: Input, steps: int | None) -> Iterator[NestedMap]:
    for i, batch in enumerate(source):
        yield batch
        if steps is not None and i + 1 >= steps:
            return


def _check_steps(caller: str, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{caller}: {name} must be 1 or more, or None, got {count}.")


def _close(source: Input) -> None:
    """Ends an input's threads, if it has a `close`."""
    close = getattr(source, "close", None)
    if close is not None:
        close()
