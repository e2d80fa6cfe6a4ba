"""Trains the models that benchmarks compare, with the trainer's command.

A run is in RUNS/MODEL-seedN. A finished run is only read, and an interrupted one continues, so that
benchmarks with the same --out share their runs.
"""

import dataclasses
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from absl import flags

from lingvo_gshard.checkpoints.saved_steps import whole_steps
from lingvo_gshard.runs import launch
from lingvo_gshard.train.metrics_files import EVAL_METRICS, read_lines
from repro import families
from repro.families import Family, Model
from repro.quality import curves, parallel

_FAMILY = flags.DEFINE_enum("family", "small", list(families.BY_NAME), "The models to compare.")
_EXPERT_DROPOUT = flags.DEFINE_float("expert_dropout", 0.0, "Dropout within experts.", 0.0, 1.0)
_PARTITIONS = flags.DEFINE_integer("partitions", 1, "The number of devices of a training.")
_JOBS = flags.DEFINE_integer("jobs", 1, "The trainings that run at the same time.", lower_bound=1)
_SET = flags.DEFINE_multi_string("set", [], "A setting of all models, path=value; repeatable.")

_Result = TypeVar("_Result")


def family() -> Family:
    """Returns the family that --family names, with dropout within its experts."""
    chosen = families.BY_NAME[_FAMILY.value]
    rate = _EXPERT_DROPOUT.value
    return dataclasses.replace(chosen, expert_dropout=rate)


def whole_numbers(flag: flags.FlagHolder[list[str]]) -> list[int]:
    """Returns a flag's items as whole numbers. Raises ValueError if an item is something else."""
    try:
        return list(map(int, flag.value))
    except ValueError:
        given = ",".join(flag.value)
        raise ValueError(
            f"--{flag.name}={given}: expected whole numbers with commas between."
        ) from None


def layers(flag: flags.FlagHolder[list[str]]) -> list[int]:
    """Returns a flag's numbers of layers, half of them in either stack.

    Raises ValueError for a number that is odd or below 4.
    """
    depths = whole_numbers(flag)
    for depth in depths:
        # Every other layer of a stack has experts.
        if depth < 4 or depth % 2:
            raise ValueError(f"--{flag.name}: expected even numbers from 4, got {depth}.")
    return depths


def seeded(runs: pathlib.Path, model: Model, seed: int, data: pathlib.Path) -> pathlib.Path:
    """Trains a model with a seed; returns the folder of its run."""
    logdir = runs / f"{model.name.replace(' ', '')}-seed{seed}"
    settings = (*model.settings, f"train.seed={seed}", f"input.seed={seed}")
    return train(logdir, dataclasses.replace(model, settings=settings), data)


def train(logdir: pathlib.Path, model: Model, data: pathlib.Path) -> pathlib.Path:
    """Trains a model for its steps, unless it has done them; returns the folder of its run."""
    evaluated = max((line["step"] for line in read_lines(logdir / EVAL_METRICS)), default=0)
    if min(evaluated, max(whole_steps(logdir), default=0)) < model.steps:  # A save may fail.
        settings = (*model.settings, f"train.max_steps={model.steps}", *_SET.value)
        flagged = (f"--model={model.experiment}", f"--data_dir={data}", f"--logdir={logdir}")
        trainer("train_and_eval", *flagged, *(f"--set={each}" for each in settings))
    return logdir


def runs_of(model: Model, logdirs: Iterable[pathlib.Path]) -> curves.Runs:
    """Reads the curves of a model's runs, each up to the model's number of steps."""
    logdirs = list(logdirs)
    params = launch.experiment_params(launch.recorded(str(logdirs[0])))
    found = (curves.read(logdir, model.steps) for logdir in logdirs)
    return curves.Runs(model.name, curves.flops_per_token(params), tuple(found))


def in_parallel(calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
    """Runs --jobs calls at a time and returns their results; after an error, starts no more."""
    return parallel.results(calls, _JOBS.value)


def trainer(mode: str, *flagged: str) -> None:
    """Runs the trainer's command in a mode."""
    devices = ("--platform=cpu", f"--num_partitions={_PARTITIONS.value}")
    command("lingvo_gshard.trainer", f"--mode={mode}", *devices, *flagged)


def command(module: str, *flagged: str) -> str:
    """Runs a command of the README and returns its output; if it fails, exits with its status."""
    print(shlex.join(["python", "-m", module, *flagged]), flush=True)
    done = subprocess.run([sys.executable, "-m", module, *flagged], stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.decode().strip()
