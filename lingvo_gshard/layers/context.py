"""The context that FProp takes besides weights and inputs, and the report beside its output."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from lingvo_gshard.core.base_layer import fold_seed
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.numerics import PLAIN, Numerics
from lingvo_gshard.layers.routing import LOSSES, Routing, at_least_one

# Odd, so that its multiples are all distinct in int32, whose arithmetic wraps around.
_INDEX_STRIDE = 0x3779B1B5


class Mode(enum.Enum):
    """The purpose of a program. Only TRAIN is random; PREDICT takes any number of tokens."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


@dataclasses.dataclass(frozen=True)
class Whole:
    """The batch that microbatches are parts of."""

    features: NestedMap
    count: int  # The number of microbatches.
    graph: tf.Graph  # Outside of the loop over the microbatches.


@dataclasses.dataclass(frozen=True)
class Context:
    """The state of a pass that FProp needs besides weights and inputs."""

    mode: Mode  # The purpose of the program.
    seed: tf.Tensor | None = None  # int32 [2], different at every step; None unless training.
    scope: str = ""  # The path of the layer that the seed belongs to; empty: the whole model's.
    numerics: Numerics = PLAIN  # How layers multiply, and which results the gradient keeps.
    # In an encoder's layer, float32 [B, L, L]: 1 where two tokens are of one sentence.
    sentence_mask: tf.Tensor | None = None
    # In an encoder's layer, int32 [B, L]: the piece that begins each token's sentence.
    first_pieces: tf.Tensor | None = None
    # In a microbatch, the mean number of tokens of all microbatches: of the labels' tokens or, in a
    # layer, of the stack's. See model/accumulation.py and layers/pipeline.py.
    mean_tokens: tf.Tensor | None = None
    # The same by the paths of stacks.
    stack_tokens: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    whole: Whole | None = None  # The batch that this is a microbatch of, in model/accumulation.py.

    def __post_init__(self) -> None:
        if (self.mode is Mode.TRAIN) != (self.seed is not None):
            raise ValueError(
                "Context: a seed is required in mode TRAIN and not allowed in any other, got "
                f"{self.mode.name} and seed {self.seed}."
            )

    @property
    def training(self) -> bool:
        """Whether dropout and random routing are on."""
        return self.mode is Mode.TRAIN

    @property
    def einsum(self) -> Callable[..., tf.Tensor]:
        """Returns Numerics.einsum: all products of layers go through it."""
        return self.numerics.einsum

    def tokens_of_mean(self, num_tokens: tf.Tensor) -> tf.Tensor:
        """Returns the divisor, float32, that turns a sum over tokens into a mean.

        `num_tokens` is the number of tokens of this batch, which may be 0. In a microbatch the
        result is such that the mean of its means over all microbatches is the batch's own.
        """
        return at_least_one(num_tokens) if self.mean_tokens is None else self.mean_tokens

    def in_layer(self, stack: str, index: int | tf.Tensor, path: str) -> Self:
        """Returns the context of layer `index`, an int or int32 scalar, of the stack at `stack`.

        The seed depends on the layer's index in the stack, not on its path. So a layer draws the
        same numbers whether the stack is unrolled or a loop, in which layers share one path. Means
        are over the tokens of the stack.
        """
        if self.seed is None:
            return self

        # By index + 1, so that no layer has the key of the stack itself.
        key, salt = tf.unstack(fold_seed(self.seed, stack))
        layer_key = key + tf.convert_to_tensor(index + 1) * _INDEX_STRIDE
        return dataclasses.replace(
            self,
            seed=tf.stack([layer_key, salt]),
            scope=path,
            mean_tokens=self.stack_tokens.get(stack),
        )

    def counted(self, num_tokens: Callable[[NestedMap], Mapping[str, tf.Tensor]]) -> Self:
        """Returns the context with the tokens of each stack, if this is a microbatch.

        `num_tokens` returns the number of tokens without padding that each stack sees, by its path,
        float32 scalars, given the features of a batch.
        """
        whole = self.whole
        if whole is None:
            return self
        with whole.graph.as_default():  # So they are computed once.
            totals = NestedMap(num_tokens(whole.features))
            means = totals.Transform(lambda total: at_least_one(total) / whole.count)
        return dataclasses.replace(self, stack_tokens=means)

    def divided(self, stack: str, valid_mask: tf.Tensor, count: int) -> Self:
        """Returns the context in which the batch of the stack at `stack` is `count` microbatches.

        `valid_mask` [B, L] is 1 for the tokens of the whole batch.
        """
        num_tokens = self.stack_tokens.get(stack)
        if num_tokens is None:
            num_tokens = at_least_one(tf.reduce_sum(valid_mask))
        return dataclasses.replace(
            self, stack_tokens={**self.stack_tokens, stack: num_tokens / count}
        )

    def in_microbatch(self, index: tf.Tensor) -> Self:
        """Returns the context of microbatch `index`; the first has the seed of a whole batch."""
        assert self.seed is not None
        step = tf.stack([0, index * _INDEX_STRIDE])
        return dataclasses.replace(self, seed=self.seed + step)

    def seed_for(self, path: str) -> tf.Tensor:
        """Returns the seed, int32 [2], for the layer at `path`; only when training."""
        assert self.seed is not None and path.startswith(self.scope), (path, self.scope)
        return fold_seed(self.seed, path.removeprefix(self.scope))


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The statistics of one layer and batch.

    Their means over a batch's microbatches, as a pipeline takes them, are the batch's own.
    """

    mean_square: tf.Tensor  # The mean square of the layer's output, a float32 scalar.
    routing: Routing | None  # How an MoE layer routed its tokens; None for others.

    def tensors(self) -> list[tf.Tensor]:
        """Returns all fields as a flat list. Only losses have gradients; the others are metrics."""
        tensors = [tf.stop_gradient(self.mean_square)]
        if self.routing is None:
            return tensors

        for name, value in self.routing.by_name().items():
            tensors.append(value if name in LOSSES else tf.stop_gradient(value))
        return tensors

    def with_tensors(self, tensors: Iterator[tf.Tensor]) -> Self:
        """Returns a report with the same fields, of the next tensors: the inverse of `tensors`."""
        mean_square = next(tensors)
        if self.routing is None:
            return dataclasses.replace(self, mean_square=mean_square)

        fields = {name: next(tensors) for name in self.routing.by_name()}
        return dataclasses.replace(self, mean_square=mean_square, routing=Routing(**fields))
