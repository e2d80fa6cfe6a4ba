"""Numerics: how layers multiply, which tensors they round, and which their gradients keep.

All products of layers go through `Numerics.einsum`. The letters of its equations, which
sharding/layout.py lists, name the kind of each tensor, and so decide three things:

- A product of float32 factors may round them to bfloat16. A tensor that does not leave its layer
  (`is_inside`) is then rounded where it is computed, since other products round it in any case.
- Rematerialization keeps the results of some products for the gradient (`kept_by`).
- A planner reads a model's products from a Record.

A CPU with matrix units, a TPU and a GPU multiply bfloat16 numbers several times as fast as float32
ones, and add up the results in float32. A rounded result takes half the memory traffic, which is
the limit of such a product on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import products
from lingvo_gshard.layers.products import Equation, Rounding
from lingvo_gshard.layers.weight import Theta, Weight
from lingvo_gshard.sharding.layout import is_weight

_MERGED_DIMS = re.compile(r"\((\w)\w*\)")


class Remat(enum.Enum):
    """How much the backward pass recomputes to save memory (rematerialization, section 5.1)."""

    NONE = "none"
    # As ALL_BUT_PRODUCTS, except queries, keys and values, and the experts and places of tokens.
    ALL_BUT_PROJECTIONS = "all_but_projections"
    ALL_BUT_PRODUCTS = "all_but_products"  # As BLOCK, except products with M or H in the result.
    BLOCK = "block"  # Each block of layers, from its input.
    # The first of the others whose step fits; model/remats.py finds it before layers are made.
    AUTO = "auto"

    @classmethod
    def order(cls) -> tuple[Remat, ...]:
        """Returns all except AUTO; each saves more memory than the one before it."""
        return (cls.NONE, cls.ALL_BUT_PROJECTIONS, cls.ALL_BUT_PRODUCTS, cls.BLOCK)

    def keeps(self, kept_by: Remat) -> bool:
        """Returns whether this keeps a tensor, given the most saving Remat that does."""
        order = Remat.order()
        return order.index(self) <= order.index(kept_by)


# The scope of operations that are noted in a Record.
NOTED = "noted"


def is_inside(dims: str) -> bool:
    """Returns whether a tensor of these dims is an activation that does not leave its layer.

    Hidden units, queries, keys and values, and experts' buffers do not. So a block of layers that
    is computed again gives each layer the same input, and chooses the same experts, whatever these
    tensors are rounded to.
    """
    has_inner_dims = "H" in dims or "D" in dims or {"E", "M"} <= set(dims)
    return has_inner_dims and not is_weight(dims)


def kept_by(equation: Equation) -> Remat:
    """Returns the most saving Remat that keeps the result of a product."""
    result = set(equation.result)

    # Hidden units, buffers of experts, and the outputs of layers.
    if "H" in result or ("M" in result and (equation.has_weight or "E" in result)):
        return Remat.ALL_BUT_PRODUCTS

    # Queries, keys and values.
    if "D" in result and equation.has_weight:
        return Remat.ALL_BUT_PROJECTIONS

    # Attention's products of two activations, a router's logits, and what gates combine are cheap.
    return Remat.NONE


@dataclasses.dataclass(frozen=True)
class Product:
    """A product or lookup of a traced forward pass."""

    # Such as `EGCM,EMH->EGCH`, without merged dims. A lookup has the equation of the product with a
    # one-hot mask that it replaces: `BLV,VM->BLM` for an embedding. Where the result's letters are
    # not in the order of the factors' rows and columns, as in `GSEC,GSM->EGCM`, the tensor changes
    # its sharding: an all-to-all.
    equation: str
    sizes: Mapping[str, float]  # The size of each letter. C is a mean for experts without places.
    # The scope of its layer and part, such as `encoder/layers_1/feed_forward/experts`:
    # base_layer.scope_of(path) is the beginning, given a layer's path.
    scope: str
    times: int  # How often it runs: R in a LOOP of R blocks.
    kept_by: Remat  # The most saving Remat that keeps its result for the gradient.
    is_lookup: bool = False  # Whether it reads rows of its right factor, without any flops.
    # Its tensors, as far as they are known.
    left: tf.Tensor | None = dataclasses.field(default=None, compare=False)
    right: tf.Tensor | None = dataclasses.field(default=None, compare=False)
    result: tf.Tensor | None = dataclasses.field(default=None, compare=False)


class Record:
    """The products and lookups of a forward pass, in their order, as `Numerics` notes them.

    To plan a model, trace its loss once, and read `products` afterwards:

        record = Record()
        context = Context(Mode.TRAIN, seed, numerics=Numerics(record=record))
        task.Loss(theta, features, labels, context)  # Within a tf.function.

    A block of a LOOP is noted once, with its number of times. Operations that a gradient computes
    again are not noted, and neither are norms, biases and others that work element by element.

    Noted operations are in a scope NOTED, so that a reader of the graph finds the others.
    """

    def __init__(self) -> None:
        self.products: list[Product] = []


# (dims, tensor) -> the tensor, or the one that an earlier pass kept in its place.
_Keep = Callable[[str, "tf.Tensor"], "tf.Tensor"]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How a pass over layers multiplies, and which results it keeps for its gradient.

    Products are computed in the dtype of their left factor, and the gradients likewise. If `dtype`
    is `bfloat16`, float32 factors are rounded to it before they are multiplied, also in the
    gradients. Results and their sums over partitions are float32 all the same. But a result
    inside a layer is summed in float32 on each partition, then rounded to bfloat16, and returned as
    float32.
    """

    dtype: str = "float32"
    is_decoding: bool = False  # Whether products have few rows, and no gradients.
    remat: Remat = Remat.NONE  # What gradients compute again.
    hidden_dtype: str | None = None  # They keep tensors inside layers in it, if it is set.
    record: Record | None = None  # Notes all products, for a planner.
    times: int = 1  # How often the pass runs.
    _keep: _Keep | None = None

    def einsum(
        self,
        equation: str,
        a: tf.Tensor,
        b: Theta,
        *,
        exact: bool = False,
        wide: bool = False,
        transpose: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Returns the product of an activation with a weight or with another activation.

        With a weight, as in `BLM,MH->BLH`, the last dims of a are contracted with the first ones of
        the weight, for each element of their common first dims: E in `EGCM,EMH->EGCH`, none in
        `BLND,NDM->BLM`. The dims in between are the rows. Letters in parentheses are merged into
        one dim: `EGCM,EMH->E(GC)H` has the shape [E, G * C, H], and is annotated as EGH. A weight
        that a decoder keeps in another form decides how a is rounded: see Weight.product.

        With an activation, as in `BNLD,BNTD->BNLT` or `GSEC,GSM->EGCM`, each factor begins with the
        letters that both factors and the result have; the letters that are contracted, and the
        factor's own, follow in either order.

        Args:
          equation: In one of these forms.
          a: The left factor.
          b: The right factor.
          exact: Whether to compute in float32 without rounding: many of a router's logits would be
            equal in 16 bits.
          wide: Whether 16-bit factors have a float32 result.
          transpose: Computes the result of a product with a weight from one with the left factor's
            rows, such as GECM from E(GC)M. Without it, they must be equal.

        Raises:
          ValueError: for an equation of another form.
        """
        letters = Equation.parse(equation)
        with self.noting():
            factor = tf.cast(a, tf.float32) if exact or wide else a
            rounding = self._rounding(letters, a, factor, exact=exact)

            product = letters
            if transpose is not None:
                product = dataclasses.replace(letters, result=letters.projected)

            # Experts, whose weights are a batch of matrices, have another scope.
            is_plain = letters.has_weight and not letters.batch
            with tf.name_scope("project") if is_plain else contextlib.nullcontext():
                result = products.einsum(
                    product,
                    factor,
                    Weight.of(b).read(),
                    rounding,
                    has_gradients=not self.is_decoding,
                )
            if transpose is not None:
                result = transpose(result)

        sizes = _sizes(letters.left, a) | _sizes(letters.result, result)
        tensors = {"left": a, "right": Weight.of(b).tensor}
        with_all_dims = equation.replace("(", "").replace(")", "")
        self.note(with_all_dims, sizes, kept_by=kept_by(letters), tensors=tensors)
        return self._kept(letters, result)

    def project(
        self,
        equation: str,
        x: tf.Tensor,
        theta: NestedMap,
        name: str,
        *,
        transpose: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Returns `einsum` of x and theta's weight `name`, plus that weight's bias, if it has one.

        The bias, theta's `<name>_bias`, has the product's last dims, and is added in its dtype.
        """
        product = self.einsum(equation, x, theta[name], transpose=transpose)
        bias = theta.get(f"{name}_bias")
        if bias is None:
            return product
        return product + tf.cast(Weight.of(bias).read().tensor, product.dtype)

    def lookup(self, equation: str, result: tf.Tensor, **sizes: int) -> tf.Tensor:
        """Returns `result`, which was read by indices in place of a product with a one-hot mask.

        For an embedding's rows the equation is `BLV,VM->BLM`. Gradients keep the result as they
        would keep the product's. `sizes` has the letters that the result does not have.
        """
        letters = Equation.parse(equation)
        sizes |= _sizes(letters.result, result)
        tensors = {"result": result}
        self.note(equation, sizes, kept_by=kept_by(letters), is_lookup=True, tensors=tensors)
        return self._kept(letters, result)

    def note(
        self,
        equation: str,
        sizes: Mapping[str, float],
        *,
        kept_by: Remat = Remat.NONE,
        is_lookup: bool = False,
        tensors: Mapping[str, tf.Tensor] | None = None,
    ) -> None:
        """Notes a product or lookup for a planner, in the present scope: see Product and Record.

        `tensors` are fields of Product. Operations outside `einsum` and `lookup` go in `noting`.
        """
        if self.record is None:
            return
        product = Product(
            equation=equation,
            sizes=sizes,
            scope=tf.get_current_name_scope(),
            times=self.times,
            kept_by=kept_by,
            is_lookup=is_lookup,
            **(tensors or {}),
        )
        self.record.products.append(product)

    def noting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope of noted operations, if there is a Record."""
        return contextlib.nullcontext() if self.record is None else tf.name_scope(NOTED)

    def once(self, dims: str, choice: tf.Tensor) -> tf.Tensor:
        """Returns integers that a gradient may keep, such as the experts of tokens."""
        is_kept = self.remat.keeps(Remat.ALL_BUT_PROJECTIONS)
        return self._keep(dims, choice) if is_kept and self._keep is not None else choice

    def keeping(self, kept: list[tuple[str, tf.Tensor]]) -> Self:
        """Returns numerics that append the tensors that a gradient needs, with their dims."""

        def keep(dims: str, tensor: tf.Tensor) -> tf.Tensor:
            is_narrow = self.hidden_dtype is not None and is_inside(dims)
            kept.append((dims, tf.cast(tensor, self.hidden_dtype) if is_narrow else tensor))
            return tensor

        return dataclasses.replace(self, _keep=keep)

    def replaying(self, kept: Iterable[tf.Tensor]) -> Self:
        """Returns numerics for a gradient, which computes all again except these tensors.

        An earlier pass kept them. Each replaces the result of the same product, in the same order.
        The product is still written down, since its gradient is needed. But the gradient does not
        need the result, so the compiler removes the product itself.
        """
        remaining = list(kept)

        def keep(dims: str, tensor: tf.Tensor) -> tf.Tensor:
            return _replaced(tensor, remaining.pop(0))

        return dataclasses.replace(self, _keep=keep, record=None)

    def in_loop(self, times: int) -> Self:
        """Returns the numerics of a loop of `times` iterations, outside which nothing is kept."""
        return dataclasses.replace(self, _keep=None, times=self.times * times)

    def unrecorded(self) -> Self:
        """Returns numerics that neither note nor keep products, for a trace beside the program."""
        return dataclasses.replace(self, record=None, _keep=None)

    def _rounding(
        self, letters: Equation, a: tf.Tensor, factor: tf.Tensor, *, exact: bool
    ) -> Rounding | None:
        """Returns the rounding of a product of `factor`, which is a or its float32 copy, if any."""
        is_narrow = "bfloat16" in (self.dtype, a.dtype.name)
        if exact or not is_narrow or factor.dtype != tf.float32:
            return None

        # A step of decoding has few queries: to round the cache would take longer than its
        # products. So what attention multiplies with it stays float32, too.
        rounds_heads = not self.is_decoding
        if not rounds_heads and not letters.has_weight and "D" in letters.right:
            return None
        return Rounding(
            result=is_inside(letters.result) and (rounds_heads or "D" not in letters.result),
            left=is_inside(letters.left),
            right=is_inside(letters.right),
        )

    def _kept(self, letters: Equation, result: tf.Tensor) -> tf.Tensor:
        if self._keep is None or not self.remat.keeps(kept_by(letters)):
            return result
        # Merged dims are split by the first of them.
        return self._keep(_MERGED_DIMS.sub(r"\1", letters.result), result)


def _sizes(dims: str, tensor: tf.Tensor) -> dict[str, int]:
    """Returns the sizes of the letters of a tensor's dims, except merged ones."""
    separate = _MERGED_DIMS.sub("_", dims)
    sizes = zip(separate, tensor.shape, strict=True)
    return {letter: size for letter, size in sizes if letter != "_"}


def _replaced(computed: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """Returns the value of `kept` in the dtype of `computed`, with the gradient of `computed`."""
    value = tf.cast(kept, computed.dtype)
    if not computed.dtype.is_floating:
        return value

    @tf.custom_gradient
    def replaced(computed: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda d_value: d_value

    return replaced(computed)


# Products of float32 factors in float32, of which nothing is kept.
PLAIN = Numerics()
