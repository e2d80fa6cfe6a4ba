"""TPUEstimator (sections 3 and A): train, evaluate and predict, each with one partitioned program.

An estimator holds no variables: the state, a tree of arrays, is an argument and a result of each
call that trains. Estimator takes a registered experiment's model; TPUEstimator makes one from a
model_fn.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from lingvo_gshard.checkpoints import averages, checkpoints, exported, saved_steps, stored
from lingvo_gshard.checkpoints.checked_array import CheckedArray
from lingvo_gshard.checkpoints.checkpoints import Checkpoints, Contents, Restored
from lingvo_gshard.checkpoints.warm_start import WarmStart
from lingvo_gshard.core.hyperparams import AnyParams, BaseParams
from lingvo_gshard.core.nested_map import NestedMap, nested
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import processes, specs
from lingvo_gshard.spmd.annotated_fn import check_specs
from lingvo_gshard.spmd.saved_executable import SavedExecutables
from lingvo_gshard.train import config, loop, summaries
from lingvo_gshard.train.hooks import NonFiniteHook, ProgressHook, TrainHook
from lingvo_gshard.train.loop import Input, TrainLoop, group_sizes
from lingvo_gshard.train.programs import Programs
from lingvo_gshard.train.run_config import RunConfig, as_input
from lingvo_gshard.train.run_times import Laps, TimesLog
from lingvo_gshard.train.steps import Model
from lingvo_gshard.train.user_model import InitFn, ModelFn, UserModel
from lingvo_gshard.train.writers import Writers
from xla_spmd import checks
from xla_spmd.files import digests, storage, table
from xla_spmd.runtime import progress

InputFn = Callable[[Any], Input]
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The data of an evaluation, and the metric by which the best checkpoint is kept."""

    input_fn: InputFn  # Its Input must end.
    steps: int | None = None  # The number of batches; None evaluates all.
    name: str = "eval"  # Results go to eval_NAME/ and eval_metrics.jsonl.
    best_by: str | None = None
    higher_is_better: bool = False


class Estimator:
    """Trains, evaluates and predicts with the programs of a model."""

    def __init__(
        self,
        model: Model,
        model_dir: str,
        *,
        params: AnyParams,
        model_prefixes: tuple[str, ...] = (),
        warm_start: WarmStart | None = None,
        executables: str | None = None,
        log_step_count_steps: int = 1,
        show_progress: bool = True,
    ) -> None:
        """Compiles nothing yet.

        `params.train` has the settings of config.train_params. `model_dir` is refused if it was
        trained with other params at the dotted paths `model_prefixes`, by default all except
        `train`. The state must contain `step`, an int32 scalar. A folder without checkpoints starts
        from `warm_start`, if given. `executables` is a folder of saved executables to train with,
        instead of compiling. TensorBoard gets a summary at each multiple of `log_step_count_steps`.

        Raises ValueError if a setting is wrong, the state lacks `step`, or the folder `executables`
        contains no executables.
        """
        if "train" not in params:
            define = 'params.Define("train", config.train_params(), "")'
            raise ValueError(f"TPUEstimator: params lack the settings of training: {define}.")
        config.check(params.train)

        state_spec = model.state_spec
        check_specs("TPUEstimator: state_spec", state_spec)
        step = state_spec.get("step")
        if step is None or (step.shape, step.dtype) != ((), "int32"):
            raise ValueError(f"TPUEstimator: the state needs `step`, an int32 scalar, got {step}.")

        if params.train.ema_decay is not None and averages.EMA not in state_spec:
            raise ValueError(
                f"TPUEstimator: train.ema_decay={params.train.ema_decay} needs a state with `ema`."
            )

        self.model_dir = storage.expanded(model_dir)
        self.params = copy.deepcopy(params)  # The caller may change its own for other estimators.
        self.partitioning = model.partitioning
        self.state_spec = state_spec
        self._model_prefixes = model_prefixes
        self._warm_start = warm_start
        self._log_steps = log_step_count_steps
        self._show_progress = show_progress
        self._writer: Writers | None = None  # Set while training, or during an evaluation.

        saved = None if executables is None else SavedExecutables(executables)
        self._programs = Programs(model, saved)

    def input_share(self, batch_size: int) -> specs.Share:
        """Returns the part that this process must read of a batch with B rows in all."""
        return specs.own_share(self.partitioning, batch_size)

    def train(
        self,
        input_fn: InputFn,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[TrainHook] = (),
    ) -> Self:
        """Trains from the last checkpoint, or from new weights, and saves at the end.

        `steps` is the number of further steps, and `max_steps` the step to train to; with neither,
        training ends with the input, whose state is restored with the weights. Raises ValueError if
        both are given, or one is below 1, or model_dir holds another model, or another process
        trains in it. Raises NonFiniteLossError for a loss that is not finite if train.on_nonfinite
        is STOP, SaveError if a checkpoint could not be written, and DamagedCheckpointError if all
        checkpoints are damaged.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(f"train: give steps ({steps}) or max_steps ({max_steps}), not both.")
        _check_counts("train", steps=steps, max_steps=max_steps)
        checks.check_each("train: hooks", hooks, TrainHook, "a list of TrainHooks")
        began_secs = time.monotonic()
        laps = Laps(began_secs)

        # Opened for saving: a damaged checkpoint is then moved aside, not just passed over.
        contents = Contents(self.params, self.partitioning, self.state_spec)
        with (
            self.claimed(),
            self._writing() as writer,
            Checkpoints(self.model_dir, contents) as saved,
        ):
            shardings = self._shardings()
            restored = saved.newest(lambda step: saved.restore(step, self.state_spec, shardings))

            # If `stop` is None, training ends with the input.
            start = restored.step if restored else 0
            stop = max_steps if steps is None else start + steps
            if stop is not None and start >= stop:
                logging.info("train: step %d of %d is already done", start, stop)
                return self

            hooks = [*self._own_hooks(stop, began_secs, laps, writer), *hooks]
            with self._input(input_fn, Mode.TRAIN) as source:
                state = self._first_state(restored, source)

                # A call does several steps; if the last call does fewer, it has its own program.
                program = functools.partial(self._programs.get, Mode.TRAIN, source.specs)
                steps_per_call = self.params.train.iterations_per_loop
                sizes = group_sizes(start, stop, steps_per_call)
                program(next(group_sizes(start, stop, steps_per_call)))
                with contextlib.closing(loop.groups(source, sizes, program)) as groups:
                    TrainLoop(saved, hooks, self.params.train, laps).run(state, groups)
        return self

    def training_bytes(self, batch_spec: NestedMap) -> int:
        """Returns the memory that the first call of training to train.max_steps needs on a device.

        It compiles that program, which `train` then runs. `batch_spec` has the TensorSpecs of a
        batch. Raises JaxRuntimeError if the compiler finds that the program is too large.
        """
        p = self.params.train
        num_steps = next(group_sizes(0, p.max_steps, p.iterations_per_loop))
        return self._programs.get(Mode.TRAIN, batch_spec, num_steps).peak_bytes

    def evaluate(
        self,
        input_fn: InputFn,
        *,
        steps: int | None = None,
        checkpoint_step: int | None = None,
        name: str = "eval",
    ) -> dict[str, Any]:
        """Returns `evaluate_state` of a checkpoint, by default the latest one."""
        restored = self.restore(checkpoint_step)
        return self.evaluate_state(restored.state, restored.step, EvalSpec(input_fn, steps, name))

    def evaluate_state(self, state: NestedMap, step: int, spec: EvalSpec) -> dict[str, Any]:
        """Evaluates a state on the devices, after `step` steps.

        Returns each metric's sum over all batches divided by its weight (lists for tensors), and
        `step`, `num_batches` and `secs`. Raises ValueError if the input is empty, steps is below
        1, a weight is 0, or the metric `best_by` is missing.
        """
        _check_counts(f"evaluate {spec.name}", steps=spec.steps)
        began_secs = time.monotonic()

        # The sums and weights of the batches so far.
        totals: NestedMap | None = None
        num_batches = 0
        doing = f"evaluating {spec.name}"
        for result in self._results(Mode.EVAL, state, spec.input_fn, doing, spec.steps):
            sums = result.Transform(lambda x: np.asarray(x, float))  # float64: there may be many.
            totals = sums if totals is None else totals.Transform(np.add, sums)
            num_batches += 1
        if totals is None:
            raise ValueError(f"evaluate {spec.name}: the input has no batches.")

        # Each token counts once, however it is divided into batches.
        metrics: dict[str, Any] = {}
        for metric, weight in totals.weights.items():
            if weight == 0.0:
                raise ValueError(f"evaluate {spec.name}: {metric} has weight 0 over all batches.")
            metrics[metric] = (totals.sums[metric] / weight).tolist()
        metrics["step"] = step
        metrics["num_batches"] = num_batches
        metrics["secs"] = time.monotonic() - began_secs

        if processes.is_first():
            with self._writing() as writer:
                summaries.write_evaluation(self.model_dir, spec.name, metrics, writer)
            if spec.best_by is not None:
                checkpoints.note_best(
                    self.model_dir, step, metrics, spec.best_by, spec.higher_is_better
                )
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
        of their names and shapes, and the path that a WarmStart takes. Raises ValueError if the
        checkpoint does not exist, or lacks arrays under `prefix`.
        """

        def write(saved: Checkpoints, step: int) -> str:
            arrays = self._evaluated(saved.arrays(step, average))
            weights = {name: array for name, array in arrays.items() if name.startswith(prefix)}
            if not weights:
                raise ValueError(f"export: nothing begins with {prefix!r} in {', '.join(arrays)}.")

            # Read and written piece by piece, as the weights may exceed a host's memory.
            target = pathlib.Path(path)
            with processes.locked(target, "writes this file"):
                written = exported.write(target, weights, step, part_bytes)

            rows = [(name, specs.describe(array)) for name, array in sorted(weights.items())]
            total = sum(math.prod(array.shape) for array in weights.values())
            count = f"{len(weights)} tensors, {total:,} weights"
            return f"{table.text(rows)}\n{count}\nWrote {storage.origin(written)}."

        return self._with_checkpoint(checkpoint_step, write)

    def saved_weights(
        self, checkpoint_step: int | None = None, average: int = 1
    ) -> dict[str, CheckedArray]:
        """Returns a checkpoint's weights by path, `theta`, to read a part when it is used.

        These are the weights that `restore` would evaluate. Raises ValueError if the checkpoint
        does not exist, or if there are too few checkpoints for `average`.
        """

        def weights(saved: Checkpoints, step: int) -> dict[str, CheckedArray]:
            arrays = self._evaluated(saved.arrays(step, average))
            return {path: array for path, array in arrays.items() if path.startswith("theta.")}

        return self._with_checkpoint(checkpoint_step, weights)

    def check_folder(self) -> None:
        """Raises ValueError if model_dir holds another model."""
        p = self.params
        config.check_folder(self.model_dir, p.ToText(), self._model_prefixes, p.DefaultsText())

    def claimed(self) -> contextlib.AbstractContextManager[None]:
        """Locks model_dir for training; process 0 does so for all. See config.claimed."""
        if not processes.is_first():
            return contextlib.nullcontext()
        p = self.params
        return config.claimed(self.model_dir, p.ToText(), self._model_prefixes, p.DefaultsText())

    def restore(
        self, checkpoint_step: int | None = None, average: int = 1, weights_alone: bool = False
    ) -> Restored:
        """Reads a checkpoint, by default the latest one, to evaluate it.

        If the state has moving averages of the weights, they become its `theta`. With `average`
        above 1, `theta` is the mean over this many checkpoints, up to this one. With
        `weights_alone`, the state is just `theta` and nothing else is read. Raises ValueError if
        the checkpoint does not exist, if there are too few, or if a weight is not finite.
        """
        shardings = self._shardings()
        has_averages = averages.EMA in self.state_spec
        if weights_alone:
            shardings = NestedMap(theta=shardings.theta)

        def read(saved: Checkpoints, step: int) -> Restored:
            restored = saved.restore(step, self.state_spec, shardings)
            if average == 1 and not has_averages:
                return restored

            # The optimizer's slots are one checkpoint's; decoding does not need them.
            replaced = NestedMap(theta=shardings.theta)
            if averages.EMA in shardings:
                replaced.ema = shardings.ema
            arrays = self._evaluated(saved.arrays(step, average))
            means = stored.restored(
                f"{self.model_dir}: the mean up to step {step}",
                arrays,
                dict(replaced.FlattenItems()),
            )
            state = NestedMap(restored.state, **replaced.Pack(means.values()))
            digest = restored.digest
            if average > 1:
                digest = digests.of_json(digest, average, saved.steps())
            return dataclasses.replace(restored, state=state, digest=digest)

        return self._with_checkpoint(checkpoint_step, read)

    def predict(
        self, input_fn: InputFn, *, checkpoint_step: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields every row's predictions, arrays by dotted path, in order.

        Raises ValueError if the checkpoint does not exist, or if a weight is not finite.
        """
        return self._predictions(self.restore(checkpoint_step).state, input_fn)

    def _predictions(self, state: NestedMap, input_fn: InputFn) -> Iterator[dict[str, np.ndarray]]:
        for result in self._results(Mode.PREDICT, state, input_fn, "predicting"):
            # All processes get all rows.
            items = processes.to_host(result.predictions).FlattenItems()
            paths, arrays = zip(*items, strict=True)
            for row in zip(*arrays, strict=True):
                yield dict(zip(paths, row, strict=True))

    def _results(
        self,
        mode: Mode,
        state: NestedMap,
        input_fn: InputFn,
        doing: str,
        steps: int | None = None,
    ) -> Iterator[NestedMap]:
        """Yields the results of a mode's program for each batch, or for the first `steps` ones.

        `doing` names the work, whose progress it shows.
        """
        with self._input(input_fn, mode) as source:
            share = self.input_share(specs.num_rows(source.specs))
            counted = getattr(source, "count_batches", None)
            num_batches = counted(steps) if counted is not None else steps
            shown = progress.shown(
                doing, total=num_batches, unit="batches", enabled=self._show_progress
            )
            with shown as done:
                for batch in itertools.islice(source, steps):
                    # The batches may have different lengths.
                    batch_spec = loop.batch_spec_of(batch, source.specs, share)
                    executable = self._programs.get(mode, batch_spec)
                    yield executable(state, executable.place("batch", batch))
                    done.update()

    def _input(self, input_fn: InputFn, mode: Mode) -> contextlib.AbstractContextManager[Input]:
        """Returns the context of the input, which closes it if it has a method `close`."""
        checks.check_takes("input_fn", input_fn, ("params",))
        source = as_input(input_fn(self._params_of(mode)))
        if hasattr(source, "close"):
            return contextlib.closing(source)
        return contextlib.nullcontext(source)

    def _params_of(self, mode: Mode) -> Any:
        """Returns the params for a user's function in a mode: a copy, which it may change."""
        return copy.deepcopy(self.params)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Writers]:
        """Yields the writers of metrics; the outermost of nested contexts closes them."""
        if self._writer is not None:
            yield self._writer
            return

        names = config.writers(self.params.train)
        self._writer = Writers(names, self.model_dir, self.params.ToText())
        try:
            yield self._writer
        finally:
            self._writer.close()
            self._writer = None

    def _own_hooks(
        self, stop: int | None, began_secs: float, laps: Laps, writer: Writers
    ) -> list[TrainHook]:
        # Every process must stop at a loss that is not finite; only one writes and prints.
        hooks: list[TrainHook] = [NonFiniteHook(self.params.train.on_nonfinite)]
        if processes.is_first():
            hooks.append(summaries.MetricsLog(self.model_dir, began_secs))
            hooks.append(TimesLog(self.model_dir, laps))
            hooks.append(summaries.SummaryHook(writer, self._log_steps))
            if self._show_progress:
                hooks.append(ProgressHook(stop))
        return hooks

    def _first_state(self, restored: Restored | None, source: Input) -> NestedMap:
        """Returns the initial state, and sets the input's state to match."""
        if restored is not None:
            # Imported weights, at step 0, do not belong to a position in the data.
            if restored.step > 0:
                source.set_state(restored.input_state)
            logging.info("train: continues after step %d", restored.step)
            return restored.state

        # New weights are created on their devices; a warm start replaces some of them.
        state = self._programs.initialize(self.params.train.seed)
        if self._warm_start is not None:
            state = self._warm_start.apply(state, self.state_spec)
        return state

    def _with_checkpoint(
        self, step: int | None, use: Callable[[Checkpoints, int], _Result]
    ) -> _Result:
        """Returns use(checkpoints, step); if `step` is None, it is the newest undamaged one."""
        self.check_folder()
        with Checkpoints(self.model_dir) as saved:
            # A checkpoint that was requested by its step is never replaced by another.
            if step is not None:
                return use(saved, step)
            result = saved.newest(functools.partial(use, saved))

        if result is None:
            raise saved_steps.none_error(self.model_dir)
        return result

    def _evaluated(self, arrays: dict[str, CheckedArray]) -> dict[str, CheckedArray]:
        """Returns a checkpoint's arrays; the moving averages, if any, replace the weights."""
        if averages.EMA not in self.state_spec:
            return arrays
        return averages.as_weights(arrays)

    def _shardings(self) -> NestedMap:
        mesh = specs.device_mesh(self.partitioning)
        return specs.shardings(self.partitioning, self.state_spec, mesh)


class TPUEstimator(Estimator):
    """Trains, evaluates and predicts with a model_fn, which is traced in this process.

    `model_fn(state, features, labels, mode, params) -> TPUEstimatorSpec` is traced for each mode,
    shape of a batch, and number of steps in a call; `state` is a NestedMap with at least `step`, an
    int32 scalar. `init_fn` takes an int32 [2] seed tensor, and returns a state that matches the
    TensorSpecs `state_spec`.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        model_dir: str | None = None,
        *,
        state_spec: NestedMap,
        init_fn: InitFn,
        params: BaseParams | Mapping[str, Any] | None = None,
        partitioning: Partitioning | None = None,
        config: RunConfig | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        """Compiles nothing yet; `settings` are further arguments of Estimator.

        Give either Params, a partitioning and model_dir, or, as in TensorFlow, a RunConfig and
        `params` by name. A RunConfig splits only the rows of a batch, unless a partitioning is
        given, too. model_fn and input_fn then get a dict: `params` and, if given, the mode's
        `batch_size`, in rows of all devices and processes.

        Raises ValueError if arguments are missing, or do not go together, or if Estimator refuses
        them.
        """
        self._values: dict[str, Any] | None = None  # With a RunConfig, the functions' `params`.
        self._batch_sizes = {
            Mode.TRAIN: train_batch_size,
            Mode.EVAL: eval_batch_size,
            Mode.PREDICT: predict_batch_size,
        }

        for mode, batch_size in self._batch_sizes.items():
            _check_counts("TPUEstimator", **{f"{mode.name.lower()}_batch_size": batch_size})

        if config is not None:
            if isinstance(params, BaseParams):
                raise ValueError("TPUEstimator: with a RunConfig, params are a dict, got Params.")
            self._values = copy.deepcopy(dict(params or {}))
            params = config.params(self._values)
            partitioning = partitioning or config.partitioning()
            model_dir = model_dir or config.model_dir
            settings = {"log_step_count_steps": config.log_step_count_steps, **settings}
        elif any(self._batch_sizes.values()):
            raise ValueError("TPUEstimator: batch sizes need a RunConfig.")

        if not isinstance(params, BaseParams) or partitioning is None or model_dir is None:
            raise ValueError(
                "TPUEstimator: give model_dir and either a RunConfig, or Params and a partitioning."
            )
        _check_is_left_to_model_fn(params)
        names = ("state", "features", "labels", "mode", "params")
        checks.check_takes("TPUEstimator: model_fn", model_fn, names)
        checks.check_takes("TPUEstimator: init_fn", init_fn, ("seed",))
        state_spec = nested("TPUEstimator: state_spec", state_spec)
        self._model = UserModel(model_fn, init_fn, self._params_of, partitioning, state_spec)
        super().__init__(self._model, model_dir, params=params, **settings)

    def _params_of(self, mode: Mode) -> Any:
        if self._values is None:
            return super()._params_of(mode)

        values = copy.deepcopy(self._values)
        batch_size = self._batch_sizes[mode]
        if batch_size is not None:
            values["batch_size"] = batch_size
        return values

    def _own_hooks(
        self, stop: int | None, began_secs: float, laps: Laps, writer: Writers
    ) -> list[TrainHook]:
        hooks = super()._own_hooks(stop, began_secs, laps, writer)
        if processes.is_first():
            hooks.append(summaries.HostCallHook(writer, lambda: self._model.host_fn))
        return hooks


def _check_is_left_to_model_fn(params: AnyParams) -> None:
    """Raises ValueError for settings of gradients and updates, which a model_fn makes itself."""
    if "train" not in params:
        return
    p = params.train
    if p.frozen is not None:
        raise ValueError(
            f"TPUEstimator: train.frozen={p.frozen!r}, but a model_fn updates its weights itself."
        )
    if p.gradient_accumulation_steps != 1:
        raise ValueError(
            f"TPUEstimator: train.gradient_accumulation_steps={p.gradient_accumulation_steps}, but "
            "a model_fn computes its own gradients."
        )


def _check_counts(caller: str, **counts: int | None) -> None:
    """Raises ValueError, prefixed by `caller`, if a count is not a whole number, 1 or more."""
    for name, count in counts.items():
        if count is not None:
            checks.check_count(f"{caller}: {name}", count)
