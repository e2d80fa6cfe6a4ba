"""What FProp takes besides weights and inputs, and what it reports besides its output.

Layers compute large products through the context, so that rematerialization can keep the result of
a product and recompute everything else (section 5.1). A pass over a layer computes its products,
computes and records them, or replays what an earlier pass has recorded: `context.product` is one
of the three functions below. It takes the equation of the product, a function that computes it, and
the factors that have gradients. The function must be linear in each of them, so that the gradients
do not need its result. Decisions, which have no gradient, are recorded like products of no factors.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Self

from lingvo_gshard.core.base_layer import fold_seed
from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.products import FLOAT32, Arithmetic, Rounded, result_dims
from lingvo_gshard.layers.routing import LOSSES, Routing, in_order
from lingvo_gshard.layers.stored_weights import Weight

Products = Callable[..., "tf.Tensor"]

# Odd, so that its multiples are all distinct in int32, whose arithmetic wraps around.
_INDEX_STRIDE = 0x3779B1B5


class Mode(enum.Enum):
    """What the program is for. Only TRAIN is random; PREDICT takes any number of tokens."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


def computed(equation: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
    """Computes the product and records nothing."""
    del equation
    return product(*factors)


def recording(results: list[tuple[str, tf.Tensor]]) -> Products:
    """Computes products and appends the dims and the value of each result to `results`."""

    def recorded(
        equation: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor
    ) -> tf.Tensor:
        result = product(*factors)
        results.append((result_dims(equation), result))
        return result

    return recorded


def replaying(results: Sequence[tf.Tensor]) -> Products:
    """Returns recorded results in the same order, with the gradients of the products."""
    remaining = list(results)

    def replay(equation: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
        del equation
        result = remaining.pop(0)
        if not factors:
            return result

        # Where the product would be computed, and where its gradients are then named: as those of
        # any other operation, and not as what is computed again.
        scope = f"gradient_tape/{tf.get_current_name_scope()}".rstrip("/")

        @tf.custom_gradient
        def replayed(
            *factors: tf.Tensor,
        ) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
            def gradient(d_result: tf.Tensor) -> list[tf.Tensor]:
                with tf.name_scope(f"{scope}/"), tf.GradientTape() as tape:
                    tape.watch(factors)
                    again = product(*factors)  # The value is unused, so it is never computed.
                    return tape.gradient(again, factors, d_result)

            # The value doesn't depend on the factors; only the gradient connects them.
            return tf.identity(result), gradient

        return replayed(*factors)

    return replay


@dataclasses.dataclass(frozen=True)
class Context:
    """What FProp needs besides weights and inputs."""

    mode: Mode  # What the program is for.
    seed: tf.Tensor | None = None  # int32 [2], different at every step; None unless training.
    scope: str = ""  # The path of the layer that the seed belongs to; empty: the whole model's.
    product: Products = computed  # Computes, records or replays a product; see above.
    arithmetic: Arithmetic = FLOAT32  # The numbers that products are made of.
    # The mean number of tokens of a batch's microbatches, if this is one; model/accumulation.py.
    mean_tokens: tf.Tensor | None = None

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

    def tokens_of_mean(self, num_tokens: tf.Tensor) -> tf.Tensor:
        """Returns by what a sum over tokens is divided, float32, given the tokens of the batch.

        They are none in a batch of padding. With the result, the mean over a batch's microbatches
        is the batch's own mean over tokens.
        """
        if self.mean_tokens is not None:
            return self.mean_tokens
        return tf.maximum(num_tokens, 1.0)

    def einsum(
        self,
        equation: str,
        x: tf.Tensor,
        weight: Weight,
        *,
        rounded: Rounded = Rounded.NOTHING,
    ) -> tf.Tensor:
        """Returns the product of x and a weight, which is recorded: see Arithmetic.project."""
        project = functools.partial(self.arithmetic.project, equation, rounded=rounded)
        return self.product(equation, project, x, weight)

    def decision(self, dims: str, value: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of these dims without its gradient, such as the experts of tokens.

        It is recorded like a product: a pass that computes a layer again takes what the first one
        has decided, and the compiler removes what is then unused.
        """
        return tf.stop_gradient(self.product(f"->{dims}", lambda: value))

    def unrecorded(self) -> Self:
        """Returns a context that records no products, for a loop that has no gradient."""
        return dataclasses.replace(self, product=computed)

    def in_layer(self, stack: str, index: int | tf.Tensor, path: str) -> Self:
        """Returns the context of layer `index`, an int or int32 scalar, of the stack at `stack`.

        The seed depends on the layer's index in the stack, not on its path. So a layer draws the
        same numbers whether the stack is unrolled or a loop, in which layers share one path.
        """
        if self.seed is None:
            return self

        # By index + 1, so that no layer has the key of the stack itself.
        key, salt = tf.unstack(fold_seed(self.seed, stack))
        layer_key = key + tf.convert_to_tensor(index + 1) * _INDEX_STRIDE
        return dataclasses.replace(self, seed=tf.stack([layer_key, salt]), scope=path)

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
    """The statistics of one layer and batch."""

    rms: tf.Tensor  # The root mean square of the layer's output, a float32 scalar.
    routing: Routing | None  # How an MoE layer routed its tokens; None for others.

    def tensors(self) -> list[tf.Tensor]:
        """Returns all fields as a flat list. Only losses have gradients; the others are metrics."""
        tensors = [tf.stop_gradient(self.rms)]
        if self.routing is None:
            return tensors

        for name, value in self.routing.by_name().items():
            tensors.append(value if name in LOSSES else tf.stop_gradient(value))
        return tensors

    @classmethod
    def from_tensors(
        cls, tensors: Iterator[tf.Tensor], routing_fields: Collection[str] | None
    ) -> Self:
        """Rebuilds a report from the next tensors of the iterator; the inverse of `tensors`.

        `routing_fields` are those of the layer's routing, None without experts.
        """
        rms = next(tensors)
        if routing_fields is None:
            return cls(rms, None)

        fields = {name: next(tensors) for name in in_order(routing_fields)}
        return cls(rms, Routing(**fields))
