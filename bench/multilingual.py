"""Multilingual models that benchmarks compare, trained by the trainer's command.

A run is in RUNS/MODEL-seedN. A finished run is only read, and an interrupted one continues, so that
benchmarks with the same --out share their runs.
"""

import concurrent.futures
import dataclasses
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from absl import flags

from bench import curves
from lingvo_gshard.train import launch
from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "The numbers of experts to try.")
_PARTITIONS = flags.DEFINE_integer("partitions", 1, "The devices of a training.")
_JOBS = flags.DEFINE_integer("jobs", 1, "How many trainings run side by side.", lower_bound=1)
_SET = flags.DEFINE_multi_string("set", [], "A setting of all models, path=value; repeatable.")

_STACKS = ("encoder", "decoder")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Model:
    """A registered experiment and its settings."""

    name: str
    experiment: str
    settings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """A dense model and one with experts, of as many layers, and settings of all of its models.

    A token goes to two experts, which together cost as much as what they replace.
    """

    dense: str
    moe: str
    num_layers: int
    settings: tuple[str, ...] = ()
    stack_settings: tuple[str, ...] = ()  # Of an encoder or decoder with experts.

    def models(self, depths: Sequence[int] = ()) -> Iterator[Model]:
        """Yields the dense model, those with --experts, and the first of these in other depths."""
        yield Model(f"T({self.num_layers}L)", self.dense, self.settings)
        counts = [int(count) for count in _EXPERTS.value]
        yield from (self._with_experts(count, self.num_layers) for count in counts)
        others = (depth for depth in depths if depth != self.num_layers)
        yield from (self._with_experts(counts[0], depth) for depth in others)

    def _with_experts(self, count: int, num_layers: int) -> Model:
        each = (f"moe.num_experts={count}", f"num_layers={num_layers // 2}", *self.stack_settings)
        stacks = [f"task.{stack}.{setting}" for stack in _STACKS for setting in each]
        balance = f"task.aux_loss_weight={0.01 * count**2}"
        settings = (*self.settings, *stacks, balance)
        return Model(f"MoE({count}E, {num_layers}L)", self.moe, settings)


def schedule(steps: int, cool_down_steps: int) -> tuple[str, ...]:
    """Returns the settings of a learning rate that falls to zero at the end of `steps` steps."""
    return (
        f"optimizer.schedule.total_steps={steps}",
        f"optimizer.schedule.cool_down_steps={cool_down_steps}",
        f"train.save_checkpoints_steps={max(steps // 12, 1)}",
    )


STEPS = 9600
# Chosen by dev; see docs/results.md.
LEARNING = ("optimizer.schedule.multiplier=1.6", "input.batch_size=16", "input.source_len=128")
SMALL = Family(
    "small.Dense6LLong",
    "small.MoE8E6LLong",
    6,
    settings=("input.temperature=2.0", *LEARNING, *schedule(STEPS, STEPS // 2)),
)
# Its experts would cost twice as much as dense layers.
TOY = Family(
    "toy.Dense4L",
    "toy.MoE8E4L",
    4,
    settings=("optimizer.schedule.cool_down_steps=0",),
    stack_settings=("moe.hidden_dim=256", "moe.group_size=32"),
)


def seeded(runs: pathlib.Path, model: Model, seed: int, data: pathlib.Path, steps: int) -> str:
    """Trains a model with a seed; returns the folder of its run."""
    logdir = runs / f"{model.name.replace(' ', '')}-seed{seed}"
    settings = (*model.settings, f"train.seed={seed}", f"input.seed={seed}")
    return train(logdir, dataclasses.replace(model, settings=settings), data, steps)


def train(logdir: pathlib.Path, model: Model, data: pathlib.Path, steps: int) -> str:
    """Trains a model to `steps` steps unless it is; returns the folder of its run."""
    lines = read_lines(logdir / TRAIN_METRICS)
    if not lines or lines[-1]["step"] < steps:
        settings = (*model.settings, f"train.max_steps={steps}", *_SET.value)
        flagged = (f"--model={model.experiment}", f"--data_dir={data}", f"--logdir={logdir}")
        trainer("train_and_eval", *flagged, *(f"--set={each}" for each in settings))
    return str(logdir)


def runs_of(name: str, logdirs: Iterable[str], steps: int) -> curves.Runs:
    """Reads the first `steps` steps of a model's runs."""
    logdirs = list(logdirs)
    params = launch.experiment_params(launch.recorded(logdirs[0]))
    found = (curves.read(logdir, steps) for logdir in logdirs)
    return curves.Runs(name, curves.flops_per_token(params), tuple(found))


def in_parallel(calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
    """Returns what --jobs calls at a time return; after an error no further one begins."""
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as jobs:
        futures = [jobs.submit(call) for call in calls]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            jobs.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]


def trainer(mode: str, *flagged: str) -> None:
    """Runs the trainer as `command` does."""
    devices = ("--platform=cpu", f"--num_partitions={_PARTITIONS.value}")
    command("lingvo_gshard.trainer", f"--mode={mode}", *devices, *flagged)


def command(module: str, *flagged: str) -> str:
    """Runs a command of the README; returns what it printed. Ends with its status if it failed."""
    print(shlex.join(["python", "-m", module, *flagged]), flush=True)
    done = subprocess.run([sys.executable, "-m", module, *flagged], stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.decode().strip()
