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
from collections.abc import Iterator, Sequence

from absl import app, flags

from lingvo_gshard.core import table
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.model import flops
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.train import run
from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for the runs.", required=True)
_STEPS = flags.DEFINE_integer("steps", 800, "The training steps of each run.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "The number of runs of each model.")
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "The numbers of experts to try.")
_LAYERS = flags.DEFINE_list("layers", [], "The even numbers of layers to try, with experts.")
_SHARES = (0.25, 0.5, 0.75, 1.0)
# A loss is the mean over this many steps, because batches differ more than two models do.
_WINDOW_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Curve:
    """A run's training cross entropy, without the auxiliary loss and label smoothing.

    Attributes:
      tokens: target tokens seen, rising.
      nll: nats per token, the mean over the window that ends there.
    """

    tokens: tuple[float, ...]
    nll: tuple[float, ...]

    def tokens_to(self, nll: float) -> float | None:
        """Returns the tokens seen when the loss first was `nll` or less; None if it never was."""
        points = zip(self.tokens, self.nll, strict=True)
        return next((tokens for tokens, loss in points if loss <= nll), None)


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of one model, one for each seed, and its flops per target token."""

    name: str
    flops_per_token: float
    curves: tuple[Curve, ...]


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
    curves: dict[_Model, list[Curve]] = {model: [] for model in _models(_FAMILIES[_FAMILY.value])}
    for seed in range(1, _SEEDS.value + 1):
        for model, found in curves.items():
            found.append(read_curve(_trained(model, seed)))
            print(f"{model.name}, seed {seed}: loss {found[-1].nll[-1]:.3f}", flush=True)
    dense, *mixtures = (
        Runs(model.name, _flops_per_token(model), tuple(found)) for model, found in curves.items()
    )
    print(text(dense, mixtures, _SHARES))


def _models(family: _Family) -> Iterator[_Model]:
    """Yields the dense model, those with more and more experts, and those of other depths."""
    yield family.without_experts()
    counts = [int(count) for count in _EXPERTS.value]
    yield from (family.with_experts(count) for count in counts)
    depths = (int(layers) for layers in _LAYERS.value)
    yield from (family.with_experts(counts[0], n) for n in depths if n != family.num_layers)


def read_curve(logdir: str | pathlib.Path) -> Curve:
    """Reads the curve of a run, with a point for each call from the first full window on.

    Raises:
      ValueError: the run is shorter than a window.
    """
    tokens, points, window = 0.0, [], []
    for line in read_lines(pathlib.Path(logdir, TRAIN_METRICS)):
        metrics, steps = line["metrics"], line["num_steps"]
        tokens += metrics["num_tokens"] * steps
        window.append((steps, metrics["nll"]))
        while sum(count for count, _ in window[1:]) >= _WINDOW_STEPS:
            window.pop(0)
        steps_in_window = sum(count for count, _ in window)
        if steps_in_window >= _WINDOW_STEPS:
            mean = sum(count * nll for count, nll in window) / steps_in_window
            points.append((tokens, mean))
    if not points:
        raise ValueError(f"{logdir}: fewer than {_WINDOW_STEPS} steps of training.")
    return Curve(*(tuple(column) for column in zip(*points, strict=True)))


def text(baseline: Runs, others: Sequence[Runs], shares: Sequence[float]) -> str:
    """Returns each run's millions of tokens to the baseline's losses, and the ratio of the two.

    The columns are the losses of the baseline's run with the same seed after `shares` of its
    tokens. A run that never reaches a loss shows its lowest instead.
    """
    rows = [("model", "MFLOP/token", "seed", *(f"loss at {share:.0%}" for share in shares))]
    for runs in (baseline, *others):
        mflop = f"{runs.flops_per_token / 1e6:.2f}"
        for seed, (curve, base) in enumerate(zip(runs.curves, baseline.curves, strict=True), 1):
            cells = (_cell(curve, base, share) for share in shares)
            rows.append((runs.name, mflop, str(seed), *cells))
    return table.text(rows)


def _cell(curve: Curve, base: Curve, share: float) -> str:
    index = max(round(share * len(base.nll)) - 1, 0)
    # Losses rise and fall, so the baseline may have reached this one earlier.
    first = base.tokens_to(base.nll[index])
    needed = curve.tokens_to(base.nll[index])
    if needed is None or first is None:
        return f"- ({min(curve.nll):.2f})"
    return f"{needed / 1e6:.2f}M ({needed / first:.2f})"


def _params(model: _Model, seed: int) -> Params:
    overrides = (
        *model.overrides,
        f"train.max_steps={_STEPS.value}",
        f"train.seed={seed}",
        f"input.seed={seed}",
        "optimizer.schedule.cool_down_steps=0",  # It would lower the last losses only.
    )
    facts = run.data_facts(_DATA_DIR.value)
    launch = run.Launch(model.experiment, overrides, _DATA_DIR.value, facts)
    return run.experiment_params(launch)


def _trained(model: _Model, seed: int) -> pathlib.Path:
    """Returns the folder of a finished run; trains the model first if necessary."""
    logdir = pathlib.Path(_OUT.value, f"{model.name}-seed{seed}")
    lines = read_lines(logdir / TRAIN_METRICS)
    if not lines or lines[-1]["step"] < _STEPS.value:
        estimator = run.make_estimator(_params(model, seed), str(logdir), num_partitions=1)
        estimator.train(lambda p: p.input.Instantiate(), max_steps=_STEPS.value)
    return logdir


def _flops_per_token(model: _Model) -> float:
    """Returns the flops of a training step on full rows, per target token."""
    params = _params(model, seed=1)
    task = TranslationModel(params, Partitioning(Mesh.flat(1), ())).task
    p = params.input
    step_flops = flops.train_step_flops(task, p.batch_size, p.source_len, p.target_len)
    return step_flops / (p.batch_size * p.target_len)


if __name__ == "__main__":
    app.run(main)
