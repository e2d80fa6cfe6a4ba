"""The models of many languages that benchmarks compare: dense ones, and mixtures of experts."""

import dataclasses
from collections.abc import Iterator, Sequence

STACKS = ("encoder", "decoder")


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

    def models(self, counts: Sequence[int], depths: Sequence[int] = ()) -> Iterator[Model]:
        """Yields the dense model, those with `counts` experts, and the first in other depths."""
        yield Model(f"T({self.num_layers}L)", self.dense, self.settings)
        yield from (self._with_experts(count, self.num_layers) for count in counts)
        others = (depth for depth in depths if depth != self.num_layers)
        yield from (self._with_experts(counts[0], depth) for depth in others)

    def _with_experts(self, count: int, num_layers: int) -> Model:
        each = (f"moe.num_experts={count}", f"num_layers={num_layers // 2}", *self.stack_settings)
        stacks = [f"task.{stack}.{setting}" for stack in STACKS for setting in each]
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
# Rows as long as the longest pair. Small batches learn more from equally many tokens, at first.
BATCHES = ("input.batch_size=16", "input.source_len=128")
SMALL = Family(
    "small.Dense6LLong",
    "small.MoE8E6LLong",
    6,
    settings=("input.temperature=2.0", *BATCHES, *schedule(STEPS, STEPS // 2)),
)
# Its experts would cost twice as much as dense layers.
TOY = Family(
    "toy.Dense4L",
    "toy.MoE8E4L",
    4,
    settings=("optimizer.schedule.cool_down_steps=0",),
    stack_settings=("moe.hidden_dim=256", "moe.group_size=32"),
)
