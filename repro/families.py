"""The multilingual models that benchmarks compare: dense models, and mixtures of experts."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

STACKS = ("encoder", "decoder")


@dataclasses.dataclass(frozen=True)
class Model:
    """A registered experiment, its settings, and the steps of its training."""

    name: str
    experiment: str
    settings: tuple[str, ...]
    steps: int


@dataclasses.dataclass(frozen=True)
class Family:
    """A dense model, a model with experts and as many layers, and the settings of both.

    A token goes to two experts, which together cost as much as the dense layer that they replace.
    """

    dense: str
    moe: str
    num_layers: int
    steps: int  # The steps of a whole training.
    settings: tuple[str, ...]
    # A suffix of names, without "=", which ends a name in compare's --run=NAME=LOGDIR.
    detail: str = ""
    dense_stack: tuple[str, ...] = ()  # Settings of the dense model's encoder and decoder.
    moe_stack: tuple[str, ...] = ()  # The same, with experts.
    expert_dropout: float = 0.0  # The dropout of an expert's hidden units.

    def models(
        self, counts: Sequence[int], depths: Sequence[int] = (), shares: Sequence[float] = ()
    ) -> Iterator[Model]:
        """Yields the dense model, the models with `counts` experts, and variants.

        The variants have the first count of experts, and another depth or a share of the steps
        (Table 2).
        """
        yield self._dense(self.num_layers)
        yield from (self._with_experts(count, self.num_layers) for count in counts)
        others = (depth for depth in depths if depth != self.num_layers)
        yield from (self._with_experts(counts[0], depth) for depth in others)
        whole = self._with_experts(counts[0], self.num_layers)
        yield from (with_steps(whole, round(share * self.steps)) for share in shares)

    def grid(
        self, counts: Sequence[int], depths: Sequence[int], dense_depths: Sequence[int]
    ) -> Iterator[Model]:
        """Yields the dense model, each number of experts in each depth, and deep dense models.

        The depths are the family's depth and `depths`, so that the grid has both axes of Figure 6.
        The figure's deep dense model is T(96L).
        """
        yield self._dense(self.num_layers)
        all_depths = dict.fromkeys([self.num_layers, *depths])
        for depth, count in itertools.product(all_depths, counts):
            yield self._with_experts(count, depth)
        for depth in dense_depths:
            if depth != self.num_layers:
                yield self._dense(depth)

    def _dense(self, num_layers: int) -> Model:
        settings = (*self.settings, *of_stacks(*self.dense_stack))
        if num_layers != self.num_layers:
            settings = (*settings, *of_stacks(f"num_layers={num_layers // 2}"))
        return Model(f"T({num_layers}L{self.detail})", self.dense, settings, self.steps)

    def _with_experts(self, count: int, num_layers: int) -> Model:
        each = (f"moe.num_experts={count}", f"num_layers={num_layers // 2}", *self.moe_stack)
        if count > 64:  # With groups of 256 tokens, each of 128 experts would have only 4 places.
            each = (*each, f"moe.group_size={4 * count}")
        detail = self.detail
        if self.expert_dropout:
            each = (*each, f"moe.hidden_dropout.rate={self.expert_dropout}")
            detail += f", d{self.expert_dropout}"
        settings = (*self.settings, *of_stacks(*each))
        return Model(f"MoE({count}E, {num_layers}L{detail})", self.moe, settings, self.steps)


def with_steps(model: Model, steps: int) -> Model:
    """Returns `model` with a whole training, and its schedule, of `steps` steps."""
    name = f"{model.name[:-1]}, {steps} steps)"
    return Model(name, model.experiment, (*model.settings, *schedule(steps)), steps)


def of_stacks(*settings: str) -> tuple[str, ...]:
    """Returns settings of the encoder and of the decoder."""
    both = itertools.product(STACKS, settings)
    return tuple(f"task.{stack}.{setting}" for stack, setting in both)


def schedule(steps: int) -> tuple[str, ...]:
    """Returns the settings of a learning rate that falls to zero in the second half of `steps`."""
    return (
        f"optimizer.schedule.total_steps={steps}",
        f"optimizer.schedule.cool_down_steps={steps // 2}",
        f"train.save_checkpoints_steps={max(steps // 12, 1)}",
    )


# Rows are as long as the longest pair. At first, small batches learn more from as many tokens.
BATCHES = ("input.batch_size=16", "input.source_len=128")
SMALL = Family(
    "small.Dense6LLong",
    "small.MoE8E6LLong",
    6,
    9600,
    settings=("input.temperature=2.0", *BATCHES, *schedule(9600)),
)
# Half the width: a quarter of the weights in each layer and expert, too few to memorize much.
NARROW = dataclasses.replace(
    SMALL,
    steps=6400,
    settings=(
        "input.temperature=2.0",
        *BATCHES,
        *schedule(6400),
        "task.dim=64",
        *of_stacks("layer.attention.head_dim=16"),
    ),
    detail=", M64",
    dense_stack=("dense.hidden_dim=340",),
    moe_stack=("dense.hidden_dim=256", "moe.hidden_dim=256"),
)
# At the default size, experts would cost twice as much as dense layers.
TOY = Family(
    "toy.Dense4L",
    "toy.MoE8E4L",
    4,
    800,
    settings=("optimizer.schedule.cool_down_steps=0",),
    moe_stack=("moe.hidden_dim=256", "moe.group_size=32"),
)
BY_NAME = {"small": SMALL, "narrow": NARROW, "toy": TOY}
