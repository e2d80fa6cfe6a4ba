"""The paper's Table 2 in miniature: tokens to a loss, MoE beside dense at equal flops a token.

    python -m bench.sample_efficiency --data_dir=out/demo/data --out=out/sample_efficiency

A run that is interrupted goes on from its last checkpoint; one that has ended is only read.
"""

from __future__ import annotations

import dataclasses
import pathlib

from absl import app, flags

from lingvo_gshard.spmd import environment

_DATA_DIR = flags.DEFINE_string("data_dir", None, "What data_prep prepared.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for the runs.", required=True)
_STEPS = flags.DEFINE_integer("steps", 800, "Training steps of each run.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each model.")
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "Of a layer; a model for each number.")
_SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True)
class _Model:
    """A row of the table: a registered experiment and its settings."""

    name: str
    experiment: str
    overrides: tuple[str, ...] = ()


def _moe(num_experts: int) -> _Model:
    # A token goes to two experts: each is half as wide as the dense layer that they stand for.
    settings = {
        "hidden_dim": 256,
        "num_experts": num_experts,
        "group_size": 32,
    }
    moe = [
        f"task.{stack}.moe.{name}={value}"
        for stack in ("encoder", "decoder")
        for name, value in settings.items()
    ]
    overrides = (*moe, f"task.aux_loss_weight={0.01 * num_experts**2}")
    return _Model(f"MoE({num_experts}E, 4L)", "toy.MoE8E4L", overrides)


_DENSE = _Model("T(4L)", "toy.Dense4L")


def main(argv: list[str]) -> None:
    environment.prepare()
    from bench import tokens_to_loss

    # Seed by seed, so that what has ended can be compared at any time.
    curves: dict[_Model, list] = {
        model: [] for model in (_DENSE, *(_moe(int(count)) for count in _EXPERTS.value))
    }
    for seed in range(1, _SEEDS.value + 1):
        for model, found in curves.items():
            found.append(tokens_to_loss.read_curve(_trained(model, seed)))
            print(f"{model.name}, seed {seed}: loss {found[-1].nll[-1]:.3f}", flush=True)
    dense, *mixtures = (
        tokens_to_loss.Runs(model.name, _flops_per_token(model), tuple(found))
        for model, found in curves.items()
    )
    print(tokens_to_loss.table(dense, mixtures, _SHARES))


def _params(model: _Model, seed: int):
    from lingvo_gshard.train import run

    overrides = (
        *model.overrides,
        f"train.max_steps={_STEPS.value}",
        f"train.seed={seed}",
        f"input.seed={seed}",
        "optimizer.schedule.cool_down_steps=0",  # The losses on the way count.
    )
    launch = run.Launch(model.experiment, overrides, _DATA_DIR.value)
    return run.experiment_params(launch, run.data_facts(_DATA_DIR.value))


def _trained(model: _Model, seed: int) -> pathlib.Path:
    """The folder of a finished run."""
    from lingvo_gshard.train import run
    from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

    logdir = pathlib.Path(_OUT.value, f"{model.name}-seed{seed}")
    lines = read_lines(logdir / TRAIN_METRICS)
    if not lines or lines[-1]["step"] < _STEPS.value:
        estimator = run.make_estimator(_params(model, seed), str(logdir), num_partitions=1)
        estimator.train(lambda p: p.input.Instantiate(), max_steps=_STEPS.value)
    return logdir


def _flops_per_token(model: _Model) -> float:
    """Of a training step on full rows, a target token."""
    from lingvo_gshard.model import flops
    from lingvo_gshard.sharding.layout import Partitioning
    from lingvo_gshard.sharding.mesh import Mesh

    params = _params(model, seed=1)
    task = params.task.Instantiate(Partitioning(Mesh.flat(1), ()))
    rows, source_len, target_len = (
        params.input.Get(name) for name in ("batch_size", "source_len", "target_len")
    )
    return flops.train_step_flops(task, rows, source_len, target_len) / (rows * target_len)


if __name__ == "__main__":
    app.run(main)
