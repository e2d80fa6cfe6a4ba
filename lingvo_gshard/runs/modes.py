"""The trainer's modes that train, evaluate and export a run, and their output."""

import contextlib
import dataclasses
import functools
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.decoding.reading import READINGS
from lingvo_gshard.model import placement
from lingvo_gshard.runs import expert_load
from lingvo_gshard.runs.launch import evaluated_input, is_decoded, record
from lingvo_gshard.runs.run import Run
from lingvo_gshard.spmd import processes
from lingvo_gshard.train import train_and_evaluate
from lingvo_gshard.train.estimator import EvalSpec, InputFn
from lingvo_gshard.train.hooks import EXIT_STATUS, StopOnSignal, TrainHook
from lingvo_gshard.train.loop import Input
from lingvo_gshard.train.train_and_evaluate import EvaluationHook
from xla_spmd.files import digests, storage, table

_FIRST = ("step", "nll", "perplexity")  # The metrics at the top of a table, and at its end.
_LAST = ("num_batches", "secs")
Tell = Callable[[str], None]  # Takes a line of what there is to say, as soon as it is known.


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The metrics of a split, dev or test, and of its parts by name, such as languages."""

    split: str
    metrics: dict[str, float]
    parts: dict[str, dict[str, float]]
    shown: tuple[str, ...]  # The metrics of a part that are worth a column.

    def rows(self) -> list[list[str]]:
        """Returns a header, then the shown metrics of the whole split and of each part."""
        rows = [["part", *self.shown]]
        for name, metrics in {f"all of {self.split}": self.metrics, **self.parts}.items():
            rows.append([name, *(f"{metrics[metric]:.6g}" for metric in self.shown)])
        return rows

    def __str__(self) -> str:
        return table.text(self.rows())

    def _repr_html_(self) -> str:
        return table.as_html(self.rows())


def train(run: Run, hooks: Sequence[TrainHook] = ()) -> None:
    """Trains to the experiment's max_steps; raises SystemExit if a signal stops it before.

    Raises ValueError if the model or the data is not the run's. See launches.check_to_train.
    """
    with _training(run) as (input_fn, stop):
        run.estimator.train(input_fn, max_steps=run.params.train.max_steps, hooks=[stop, *hooks])


def train_and_eval(
    run: Run, hooks: Sequence[TrainHook] = (), tell: Tell | None = None
) -> dict[str, float]:
    """Trains as `train` does and evaluates (a part of) dev at every checkpoint.

    Returns the last metrics, and passes their text to `tell`; by default it is printed.
    """
    dev = _dev(run)
    # The input is opened once, so that a missing split is reported at the start.
    opened: Any = dev.input_fn(run.params)
    opened.close()

    evaluator = EvaluationHook(run.estimator, dev)
    with _training(run) as (input_fn, stop):
        run.estimator.train(
            input_fn,
            max_steps=run.params.train.max_steps,
            hooks=[stop, *hooks, evaluator],
        )
        metrics = evaluator.metrics()
    # A run that a signal stopped has ended by now.
    assert metrics is not None
    return _told(metrics, tell)


def evaluate(run: Run, split: str = "dev", tell: Tell | None = None) -> Evaluation:
    """Evaluates the weights that decode on dev or test, then on its parts.

    Each result is passed to `tell` as soon as it is known; by default it is printed. Raises
    ValueError for another split, or for an experiment without Test().
    """
    p = evaluated_input(run.launch, run.params, split)
    restored = run.estimator.restore(**run.averaged)
    evaluated = functools.partial(run.estimator.evaluate_state, restored.state, restored.step)

    # All of dev has another name than the part of it that is evaluated while training.
    whole = _told(evaluated(EvalSpec(_input_fn(run, p), name=f"whole_{split}")), tell)

    parts: dict[str, dict[str, float]] = {}
    shown = ("nll", "perplexity", *run.params.task.cls.SHOWN)
    for name, part in p.cls.Parts(p).items():
        if part.num_examples:
            input_fn = _input_fn(run, part.settings)
            metrics = evaluated(EvalSpec(input_fn, name=f"{split}_{name}"))
            parts[name] = _scalars(metrics)
            for metric in shown:
                (tell or print_once)(f"{metric} of {name}: {parts[name][metric]:.6g}")
    return Evaluation(split, whole, parts, shown)


def evaluate_continuously(run: Run) -> None:
    """Evaluates each new checkpoint of a run that another process trains, up to its last step."""
    # A folder in s3:// is a local copy, which does not get another process's checkpoints.
    folder = storage.origin(run.logdir)
    if str(folder).startswith("s3://"):
        raise ValueError(f"{folder}: --mode=continuous_eval cannot follow a run in s3://.")

    last_step = run.params.train.max_steps
    metrics = train_and_evaluate.evaluate_continuously(
        run.estimator, _dev(run), until_step=last_step
    )
    if metrics is None:
        print_once(f"Every checkpoint up to step {last_step} was evaluated before.")
    else:
        _told(metrics)


def export(run: Run) -> None:
    """Writes the weights to logdir/weights.safetensors, or to parts of it; prints their shapes."""
    path = pathlib.Path(run.logdir, "weights.safetensors")
    print_once(run.estimator.export_weights(path, **run.averaged))


def verify_data(run: Run) -> None:
    """Hashes all files of the data; each process hashes a share of them.

    Raises ValueError if the input does not read such files, or if a file is missing or damaged.
    """
    data_dir = run.launch.data_dir
    files = () if data_dir is None else run.params.input.cls.Files(data_dir)
    if data_dir is None or not files:
        raise ValueError(f"--verify_data: {run.launch.model} reads no data whose hashes are known.")

    # The stride gives each process about as many large files.
    digests.verify(data_dir, files[jax.process_index() :: jax.process_count()])
    processes.wait_for_all()
    print_once(f"{data_dir}: all {len(files)} files match the manifest.")


def next_commands(run: Run, logdir: str) -> str:
    """Returns where a trained run is, and the commands that come next."""
    logdir = shlex.quote(logdir)
    if not is_decoded(run.params):
        return f"The run is in {logdir}."
    program = READINGS[run.params.input.cls.KIND].command
    return (
        f"The run is in {logdir}. Next: gshard {program} --logdir={logdir} < in.txt, or gshard "
        f"train --logdir={logdir} --mode=decode for the test split"
    )


def print_once(line: str) -> None:
    """Prints a line, in the first process only."""
    if processes.is_first():
        print(line, flush=True)


def _dev(run: Run) -> EvalSpec:
    """Returns the evaluation of dev during training."""
    p = run.params.train
    return EvalSpec(
        _input_fn(run, run.params.eval_input),
        steps=p.eval_batches,
        name="dev",
        best_by=p.keep_best_by,
    )


def _input_fn(run: Run, p: Params) -> InputFn:
    """Returns this process's part of the input of settings `p`."""
    share = run.estimator.input_share(p.batch_size)

    def input_fn(params: Params) -> Input:
        return p.Instantiate(process_index=share.index, num_processes=share.count)

    return input_fn


@contextlib.contextmanager
def _training(run: Run) -> Iterator[tuple[InputFn, StopOnSignal]]:
    """Yields the input, which is opened before anything is written, and a hook to train with.

    Draws the experts' loads at the end. Raises SystemExit if a signal stopped the run, and
    ValueError if the folder holds another model, or one of other data.
    """
    # Signals are caught from here on, so that opening a slow input can be stopped as well.
    with StopOnSignal() as stop:
        source: Any = _input_fn(run, run.params.input)(run.params)
        with contextlib.closing(source):
            _announce(run)
            yield lambda _: source, stop

    if processes.is_first():
        expert_load.draw(run.logdir)

    # A scheduler restarts a job that ends with this status.
    if stop.stopped_at is not None:
        saved = ", which is saved" if stop.stopped_at else ": nothing was done yet"
        print_once(f"Stopped by a signal after step {stop.stopped_at}{saved}.")
        sys.exit(EXIT_STATUS)


def _announce(run: Run) -> None:
    """Claims the folder, and prints the model, its size and the steps to train."""
    if not processes.is_first():
        return

    # This raises ValueError before a folder of another model or process is changed.
    with run.estimator.claimed():
        record(run.launch, run.logdir)

    done = run.done
    max_steps = run.params.train.max_steps
    if done < max_steps:
        steps = f"step {done} to {max_steps}"
    else:
        steps = f"step {max_steps} is done already"

    num_weights = table.count(placement.num_weights(run.params))
    num_partitions = run.estimator.partitioning.mesh.num_partitions
    print(
        f"{run.launch.model}: {num_weights} weights over {num_partitions} partitions, {steps} in "
        f"{storage.origin(run.logdir)}",
        flush=True,
    )


def _told(metrics: dict[str, Any], tell: Tell | None = None) -> dict[str, float]:
    """Tells the metrics that are one number, and returns them."""
    scalars = _scalars(metrics)
    (tell or print_once)(metrics_text(scalars))
    return scalars


def metrics_text(metrics: dict[str, float]) -> str:
    """Returns metrics as a table of text: the loss first, then its parts, then each layer's."""

    def place(name: str) -> tuple[int, bool, str]:
        rank = _FIRST.index(name) if name in _FIRST else len(_FIRST)
        is_of_layer = name.rpartition("_")[2].isdigit()
        return (len(_FIRST) + 1 if name in _LAST else rank, is_of_layer, name)

    names = sorted(metrics, key=place)
    return table.text((name, f"{metrics[name]:.6g}") for name in names)


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics that are single numbers, with the perplexity, e ** nll."""
    scalars = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    if "nll" in scalars:
        scalars["perplexity"] = float(np.exp(scalars["nll"]))
    return scalars
