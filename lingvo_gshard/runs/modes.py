"""The trainer's modes that train, evaluate and export a run, and what they print."""

import contextlib
import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import digests, storage, table
from lingvo_gshard.model import placement
from lingvo_gshard.runs import expert_load
from lingvo_gshard.runs.launch import check_data, evaluated_input, record
from lingvo_gshard.runs.run import Run
from lingvo_gshard.spmd import processes
from lingvo_gshard.train import train_and_evaluate
from lingvo_gshard.train.estimator import EvalSpec, InputFn
from lingvo_gshard.train.hooks import EXIT_STATUS, StopOnSignal, TrainHook
from lingvo_gshard.train.loop import Input


def train(run: Run, hooks: Sequence[TrainHook] = ()) -> None:
    """Trains to the experiment's max_steps; raises SystemExit if a signal stops it before.

    Raises ValueError if it should end early, which takes evaluations.
    """
    patience = run.params.train.early_stop_patience
    if patience is not None:
        raise ValueError(f"train.early_stop_patience={patience} needs --mode=train_and_eval.")
    with _training(run) as (input_fn, stop):
        run.estimator.train(input_fn, max_steps=run.params.train.max_steps, hooks=[stop, *hooks])


def train_and_eval(run: Run, hooks: Sequence[TrainHook] = ()) -> None:
    """Trains as `train` does and evaluates (a part of) dev at every checkpoint."""
    dev = _dev(run)
    # Opened here and now, so that a split that is missing is noticed at once.
    opened: Any = dev.input_fn(run.params)
    opened.close()

    with _training(run) as (input_fn, stop):
        metrics = train_and_evaluate.train_and_evaluate(
            run.estimator,
            input_fn,
            dev,
            max_steps=run.params.train.max_steps,
            hooks=[stop, *hooks],
        )
        if metrics is not None:
            _print_metrics(metrics)


def evaluate(run: Run, split: str = "dev") -> None:
    """Evaluates the weights that decode on dev or test, then on its parts; prints the metrics.

    Raises ValueError as launch.evaluated_input.
    """
    check_data(run.launch, run.logdir)
    p = evaluated_input(run.launch, run.params, split)
    restored = run.estimator.restore(**run.averaged)
    evaluated = functools.partial(run.estimator.evaluate_state, restored.state, restored.step)

    # All of dev has another name than the part of it that is evaluated while training.
    _print_metrics(evaluated(EvalSpec(_input_fn(run, p), name=f"whole_{split}")))

    shown = ("nll", "perplexity", *run.params.task.cls.SHOWN)
    for name, part in p.cls.Parts(p).items():
        if part.num_examples:
            input_fn = _input_fn(run, part.settings)
            metrics = evaluated(EvalSpec(input_fn, name=f"{split}_{name}"))
            scalars = _scalars(metrics)
            for metric in shown:
                print_once(f"{metric} of {name}: {scalars[metric]:.6g}")


def evaluate_continuously(run: Run) -> None:
    """Evaluates each new checkpoint of a run that another process trains, to its last step."""
    check_data(run.launch, run.logdir)
    # A bucket's folder is a copy here, to which no other process's checkpoints come.
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
        _print_metrics(metrics)


def export(run: Run) -> None:
    """Writes the weights to logdir/weights.safetensors, or parts of it; prints their shapes."""
    path = pathlib.Path(run.logdir, "weights.safetensors")
    print_once(run.estimator.export_weights(path, **run.averaged))


def verify_data(run: Run) -> None:
    """Hashes all files of the data, each process its share.

    Raises ValueError if the input reads no such files, and as digests.verify.
    """
    data_dir = run.launch.data_dir
    files = () if data_dir is None else run.params.input.cls.Files(data_dir)
    if data_dir is None or not files:
        raise ValueError(f"--verify_data: {run.launch.model} reads no data whose hashes are known.")

    # Strided, so that each process gets as many large files as the others.
    digests.verify(data_dir, files[jax.process_index() :: jax.process_count()])
    processes.wait_for_all()
    print_once(f"{data_dir}: all {len(files)} files are as the manifest says.")


def print_once(line: str) -> None:
    """Prints a line in the first process alone."""
    if processes.is_first():
        print(line, flush=True)


def _dev(run: Run) -> EvalSpec:
    """Returns the evaluation that goes with training."""
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
        del params  # Those of the whole experiment.
        return p.Instantiate(process_index=share.index, num_processes=share.count)

    return input_fn


@contextlib.contextmanager
def _training(run: Run) -> Iterator[tuple[InputFn, StopOnSignal]]:
    """Yields the input, which is opened before anything is written, and a hook to train with.

    Draws the experts' loads at the end. Raises SystemExit if a signal stopped the run, and
    ValueError as `_check_schedule` and `check_data`.
    """
    _check_schedule(run.params)
    check_data(run.launch, run.logdir)

    # Signals are caught from here on, so that even a slow opening ends in order.
    with StopOnSignal() as stop:
        source: Any = _input_fn(run, run.params.input)(run.params)
        with contextlib.closing(source):
            _announce(run)
            yield lambda _: source, stop

    if processes.is_first():
        expert_load.draw(run.logdir)

    # A scheduler starts a job again that ends with this status.
    if stop.stopped_at is not None:
        saved = ", which is saved" if stop.stopped_at else ": nothing was done yet"
        print_once(f"Stopped by a signal after step {stop.stopped_at}{saved}.")
        sys.exit(EXIT_STATUS)


def _check_schedule(params: Params) -> None:
    """Raises ValueError if a learning rate of zero would leave the last steps without effect."""
    zero_from = params.optimizer.schedule.Instantiate().zero_from
    max_steps = params.train.max_steps
    if zero_from is not None and zero_from < max_steps:
        raise ValueError(
            f"train.max_steps is {max_steps}, but the learning rate falls to zero at step "
            f"{zero_from}: set optimizer.schedule.total_steps={max_steps}, too."
        )


def _announce(run: Run) -> None:
    """Claims the folder and prints what will be trained."""
    if not processes.is_first():
        return

    # Before anything in a folder of another model, or of another process, is written over.
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


def _print_metrics(metrics: dict[str, Any]) -> None:
    scalars = sorted(_scalars(metrics).items())
    print_once(table.text((name, f"{value:.6g}") for name, value in scalars))


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics that are one number, and the perplexity, e ** nll, among them."""
    scalars = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    if "nll" in scalars:
        scalars["perplexity"] = float(np.exp(scalars["nll"]))
    return scalars
