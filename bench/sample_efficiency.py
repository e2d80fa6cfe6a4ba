"""The paper's Table 2 in miniature: tokens to a loss, MoE and dense at equal flops per token.

    python -m bench.sample_efficiency --data_dir=out/demo/data --out=out/sample_efficiency
    python -m bench.sample_efficiency --data_dir=out/figure6/data/all --out=out/figure6/efficiency \
        --family=small --experts=8,32,128 --layers=4,8,12 --seeds=2 --steps=1600

The second command uses the text that bench.figure6 prepared. --layers adds deeper and shallower
models with the first number of experts, whose flops per token differ (Table 2's other question).
An interrupted run continues from its last checkpoint. A finished run is only read.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

from absl import app, flags

from bench import curves
from bench.curves import Curve, Runs
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.train import launch, run
from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for the runs.", required=True)
_STEPS = flags.DEFINE_integer("steps", 800, "The training steps of each run.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "The number of runs of each model.")
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "The numbers of experts to try.")
_LAYERS = flags.DEFINE_list("layers", [], "The even numbers of layers to try, with experts.")


@dataclasses.dataclass(frozen=True)
class _Model:
    """A registered experiment and its settings."""

    name: str
    experiment: str
    overrides: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Family:
    """A dense model and one with experts, of as many layers, and settings of its MoE layers.

    A token goes to two experts, which together cost as much as what they replace.
    """

    dense: str
    moe: str
    num_layers: int
    settings: tuple[str, ...] = ()

    def without_experts(self) -> _Model:
        return _Model(f"T({self.num_layers}L)", self.dense)

    def with_experts(self, count: int, num_layers: int | None = None) -> _Model:
        num_layers = num_layers or self.num_layers
        each = (f"moe.num_experts={count}", f"num_layers={num_layers // 2}")
        stacks = [f"task.{stack}.{x}" for stack in _STACKS for x in (*each, *self.settings)]
        balance = f"task.aux_loss_weight={0.01 * count**2}"
        return _Model(f"MoE({count}E, {num_layers}L)", self.moe, (*stacks, balance))


_STACKS = ("encoder", "decoder")
_FAMILIES = {
    # Its experts would cost twice as much as dense layers.
    "toy": _Family("toy.Dense4L", "toy.MoE8E4L", 4, ("moe.hidden_dim=256", "moe.group_size=32")),
    "small": _Family("small.Dense6LLong", "small.MoE8E6LLong", 6),
}
_FAMILY = flags.DEFINE_enum("family", "toy", list(_FAMILIES), "The models to compare.")


def main(argv: list[str]) -> None:
    # All models train with one seed before the next, so that finished runs can be compared early.
    models = _models(_FAMILIES[_FAMILY.value])
    by_model: dict[_Model, list[Curve]] = {model: [] for model in models}
    for seed in range(1, _SEEDS.value + 1):
        for model, found in by_model.items():
            found.append(curves.read(_trained(model, seed)))
            print(f"{model.name}, seed {seed}: loss {found[-1].nll[-1]:.3f}", flush=True)
    dense, *mixtures = (
        Runs(model.name, curves.flops_per_token(_params(model, seed=1)), tuple(found))
        for model, found in by_model.items()
    )
    print(curves.text(dense, mixtures))


def _models(family: _Family) -> Iterator[_Model]:
    """Yields the dense model, those with more and more experts, and those of other depths."""
    yield family.without_experts()
    counts = [int(count) for count in _EXPERTS.value]
    yield from (family.with_experts(count) for count in counts)
    depths = (int(layers) for layers in _LAYERS.value)
    yield from (family.with_experts(counts[0], n) for n in depths if n != family.num_layers)


def _params(model: _Model, seed: int) -> Params:
    overrides = (
        *model.overrides,
        f"train.max_steps={_STEPS.value}",
        f"train.seed={seed}",
        f"input.seed={seed}",
        "optimizer.schedule.cool_down_steps=0",  # It would lower the last losses only.
    )
    facts = launch.data_facts(_DATA_DIR.value)
    asked = launch.Launch(model.experiment, overrides, _DATA_DIR.value, facts)
    return launch.experiment_params(asked)


def _trained(model: _Model, seed: int) -> pathlib.Path:
    """Returns the folder of a finished run; trains the model first if necessary."""
    logdir = pathlib.Path(_OUT.value, f"{model.name}-seed{seed}")
    lines = read_lines(logdir / TRAIN_METRICS)
    if not lines or lines[-1]["step"] < _STEPS.value:
        estimator = run.make_estimator(_params(model, seed), str(logdir), num_partitions=1)
        estimator.train(lambda p: p.input.Instantiate(), max_steps=_STEPS.value)
    return logdir


if __name__ == "__main__":
    app.run(main)
