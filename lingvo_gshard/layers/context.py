"""What FProp takes besides weights and inputs, and what it reports besides its output.

A layer computes a product with a large weight by `context.product("BLH",
context.arithmetic.project, x, weight)`: the dims of the result, a function that is linear in each
of its factors, so that its gradients don't need its result, and all factors that have gradients. A
pass computes the product, computes and records it, or replays the record.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from lingvo_gshard.core.base_layer import fold_seed
from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.gating import Routing
from lingvo_gshard.layers.products import FLOAT32, Arithmetic

Products = Callable[..., "tf.Tensor"]

# Odd, so that its multiples are all distinct in int32, whose arithmetic wraps around.
_INDEX_STRIDE = 0x3779B1B5


class Mode(enum.Enum):
    """What the program is for. Only TRAIN is random; PREDICT takes any number of tokens."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


def computed(dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
    """Computes the product and records nothing."""
    del dims
    return product(*factors)


def recording(results: list[tuple[str, tf.Tensor]]) -> Products:
    """Computes products and appends the (dims, tensor) of each to `results`."""

    def recorded(dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
        results.append((dims, product(*factors)))
        return results[-1][1]

    return recorded


def replaying(results: Sequence[tf.Tensor]) -> Products:
    """Returns recorded results in the same order, with the gradients of the products."""
    remaining = list(results)

    def replay(dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
        del dims
        result, scope = remaining.pop(0), tf.get_current_name_scope()

        @tf.custom_gradient
        def replayed(*factors: tf.Tensor):
            def gradient(d_result: tf.Tensor) -> list[tf.Tensor]:
                with tf.name_scope(scope and f"{scope}/"), tf.GradientTape() as tape:
                    tape.watch(factors)
                    again = product(*factors)  # The value is unused, so it is never computed.
                    return tape.gradient(again, factors, d_result)

            return tf.identity(result), gradient

        return replayed(*factors)

    return replay


@dataclasses.dataclass(frozen=True)
class Context:
    """What FProp needs besides weights and inputs."""

    mode: Mode  # What the program is for.
    seed: tf.Tensor | None = None  # int32 [2], different at every step; None unless training.
    scope: str = ""  # The path of the layer that the seed belongs to; empty: the whole model's.
    product: Products = computed  # Computes products with large weights, or replays them.
    arithmetic: Arithmetic = FLOAT32  # The numbers that products are made of.

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

    def in_layer(self, stack: str, index: int | tf.Tensor, path: str) -> Self:
        """The context of layer `index` (an int or an int32 scalar) of the stack at path `stack`.

        The seed depends on the layer's index in the stack, not on its path. So a layer draws the
        same numbers whether the stack is unrolled or a loop, in which layers share one path.
        """
        if self.seed is None:
            return self
        key, salt = tf.unstack(fold_seed(self.seed, stack))
        seed = tf.stack([key + tf.convert_to_tensor(index + 1) * _INDEX_STRIDE, salt])
        return dataclasses.replace(self, seed=seed, scope=path)

    def in_microbatch(self, index: tf.Tensor) -> Self:
        """The context of microbatch `index`; the first one has the seed of a whole batch."""
        assert self.seed is not None
        step = tf.stack([0, index * _INDEX_STRIDE])
        return dataclasses.replace(self, seed=self.seed + step)

    def seed_for(self, path: str) -> tf.Tensor:
        """The seed, int32 [2], for the layer at `path`; only when training."""
        assert self.seed is not None and path.startswith(self.scope), (path, self.scope)
        return fold_seed(self.seed, path.removeprefix(self.scope))


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The statistics of one layer and batch."""

    rms: tf.Tensor  # The root mean square of the layer's output, a float32 scalar.
    routing: Routing | None  # How an MoE layer routed its tokens; None for others.

    def tensors(self) -> list[tf.Tensor]:
        """All fields as a flat list. Only l_aux has a gradient; the others are metrics."""
        fields = {"rms": self.rms, **(vars(self.routing) if self.routing else {})}
        return [x if name == "aux_loss" else tf.stop_gradient(x) for name, x in fields.items()]

    @classmethod
    def from_tensors(cls, tensors: Iterator[tf.Tensor], *, has_experts: bool) -> Self:
        """Rebuilds a report from the next tensors of the iterator; the inverse of `tensors`."""
        rms, fields = next(tensors), dataclasses.fields(Routing)
        return cls(rms, Routing(*(next(tensors) for _ in fields)) if has_experts else None)
