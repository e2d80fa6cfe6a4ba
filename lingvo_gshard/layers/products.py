"""Products of two factors as matrix products, in the order that a compiler multiplies fastest.

numerics.py decides which tensors are rounded. sharding/layout.py lists the letters of equations.
Letters in parentheses are dims that are merged into one: a tensor `E(GC)H` has the shape
[E, G * C, H].
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from typing import Self

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.weight import Weight
from lingvo_gshard.sharding.layout import is_weight


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A product in bfloat16, and which of its float32 tensors are rounded to it besides.

    Factors are rounded in any case. These are the result, and the gradients to both factors.
    """

    result: bool = False
    left: bool = False
    right: bool = False


@dataclasses.dataclass(frozen=True)
class Equation:
    """The letters of an einsum equation, by their role in a batch of matrix products.

    In `GSEC,GSM->EGCM` the batch is G, the rows are EC, S is contracted, and the columns are M.
    Each of the three parts keeps its parentheses, which mark merged dims.
    """

    left: str
    right: str
    result: str

    @classmethod
    def parse(cls, equation: str) -> Self:
        """Reads an equation of two factors."""
        factors, result = equation.split("->")
        left, right = factors.split(",")
        return cls(left, right, result)

    def __str__(self) -> str:
        return f"{self.left},{self.right}->{self.result}"

    @property
    def has_weight(self) -> bool:
        """Whether the right factor is a weight."""
        return is_weight(self.right)

    @functools.cached_property
    def batch(self) -> str:
        """The letters of both factors and of the result."""
        return self._letters(self.left, in_right=True, in_result=True)

    @functools.cached_property
    def contracted(self) -> str:
        """The letters of both factors over which products are summed."""
        return self._letters(self.left, in_right=True, in_result=False)

    @functools.cached_property
    def rows(self) -> str:
        """The letters of the left factor alone."""
        return self._letters(self.left, in_right=False, in_result=True)

    @functools.cached_property
    def columns(self) -> str:
        """The letters of the right factor alone."""
        own = self._letters(self.right, in_right=True, in_result=True)
        return "".join(letter for letter in own if letter not in self.left)

    def _letters(self, factor: str, *, in_right: bool, in_result: bool) -> str:
        """Returns the letters of a factor that are in both or neither of the other parts."""
        return "".join(
            letter
            for letter in factor
            if letter.isalpha()
            and (letter in self.right) == in_right
            and (letter in self.result) == in_result
        )

    @property
    def transposes_left(self) -> bool:
        """Whether the left factor's rows are its last dims."""
        return self.left == self.batch + self.contracted + self.rows

    @property
    def transposes_right(self) -> bool:
        """Whether the right factor's columns come before the contracted dims."""
        return self.right == self.batch + self.columns + self.contracted

    @property
    def in_order(self) -> str:
        """The letters of the result as a batch of matrix products has them."""
        return self.batch + self.rows + self.columns

    @property
    def projected(self) -> str:
        """The result of rows and a weight, with the rows of the left factor: `E(GC)M`."""
        return self.left.removesuffix(self.contracted) + self.columns

    @property
    def is_projection(self) -> bool:
        """Whether this is a product of rows and a weight, as `project` computes it."""
        merged_rows = f"{self.batch}({self.rows}){self.columns}"
        lefts = (self.batch + self.rows, f"{self.batch}({self.rows})")
        has_order = (
            self.has_weight
            and self.left.removesuffix(self.contracted) in lefts
            and self.left.endswith(self.contracted)
            and self.right == self.batch + self.contracted + self.columns
            and self.result in (self.projected, merged_rows)
        )
        # Only a weight without a batch, and a result with all its dims, have several letters.
        is_matrix = len(self.contracted) == len(self.columns) == 1
        may_have_more = not self.batch and "(" not in self.result
        return has_order and (is_matrix or may_have_more)

    @property
    def is_batch_of_products(self) -> bool:
        """Whether this is a batch of matrix products, of factors that may be transposed."""
        has_left = self.left == self.batch + self.rows + self.contracted or self.transposes_left
        has_right = (
            self.right == self.batch + self.contracted + self.columns or self.transposes_right
        )
        is_complete = sorted(self.result) == sorted(self.in_order)
        return has_left and has_right and is_complete

    @property
    def is_matmul(self) -> bool:
        """Whether this is a product of matrices as they are, or with the right one transposed."""
        has_single_dims = len(self.rows) == len(self.contracted) == len(self.columns) == 1
        return has_single_dims and self.result == self.in_order and not self.transposes_left


def einsum(
    letters: Equation,
    a: tf.Tensor,
    b: Weight,
    rounding: Rounding | None,
    *,
    has_gradients: bool = True,
) -> tf.Tensor:
    """Returns the product of rows and a weight, or of two activations.

    Args:
      letters: One of the forms that Numerics.einsum takes.
      a: The left factor.
      b: A weight that is not part of a stack, or an activation.
      rounding: The rounding of float32 factors to bfloat16; None multiplies them unchanged.
      has_gradients: Whether there will be gradients.

    Raises:
      ValueError: for an equation of another form.
    """
    if letters.is_projection:
        return _project(letters, a, b, rounding, has_gradients=has_gradients)
    if letters.has_weight or not letters.is_batch_of_products:
        raise ValueError(
            "einsum: expected rows times a weight, such as BLM,MH->BLH, BLND,NDM->BLM or "
            "EGCM,EMH->E(GC)H, or a batch of matrix products, such as BNLD,BNTD->BNLT or "
            f"GSEC,GSM->EGCM, got {str(letters)!r}."
        )
    if rounding is not None:
        return _rounded_einsum(letters, a, b.tensor, rounding)

    # A plain product of matrices stays one; TensorFlow would transpose for some einsums.
    if letters.is_matmul:
        return tf.matmul(a, b.tensor, transpose_b=letters.transposes_right)
    return tf.einsum(str(letters), a, b.tensor)


def _project(
    letters: Equation,
    x: tf.Tensor,
    weight: Weight,
    rounding: Rounding | None,
    *,
    has_gradients: bool,
) -> tf.Tensor:
    """Returns the product of rows and a weight.

    This is one matrix product of all rows. The gradient of an einsum would contract several dims,
    such as B and L, for which XLA transposes both operands on a CPU: a tenth of the time of a train
    step.
    """
    laid_out = letters.batch + letters.columns + letters.contracted
    sizes = _sizes(laid_out if weight.is_laid_out else letters.right, weight.tensor)
    batch = _sizes_of(letters.batch, sizes)
    columns = _sizes_of(letters.columns, sizes)
    rows = x.shape[len(batch) : len(x.shape) - len(letters.contracted)]
    depth = math.prod(_sizes_of(letters.contracted, sizes))

    # Both factors as matrices. With a batch, the weight is a stack of matrices already.
    x = _reshaped(x, [*batch, math.prod(rows), depth])
    if not letters.batch:
        weight = weight.as_matrix(depth)

    result = _matmul_weight(x, weight, rounding, has_gradients=has_gradients)
    if "(" in letters.result:
        return result
    return _reshaped(result, [*batch, *rows, *columns])


def _matmul_weight(
    x: tf.Tensor, weight: Weight, rounding: Rounding | None, *, has_gradients: bool
) -> tf.Tensor:
    """Returns x [..., rows, depth] times a weight [..., depth, columns].

    The weight's gradient contracts all rows, with one factor transposed: x^T d_y, or (d_y^T x)^T. A
    CPU copies the transposed factor element by element, so it should be the narrower one. That
    makes a train step 4 % faster than always transposing x. Without a gradient nothing is
    transposed: a CPU would do it at every step, for a single row.
    """
    if weight.is_laid_out:
        return weight.product(x)
    if rounding is not None:
        return _rounded(x, weight.tensor, rounding)

    factor = tf.cast(weight.tensor, x.dtype)
    depth, columns = factor.shape[-2:]
    if depth <= columns or not has_gradients:
        return tf.matmul(x, factor)
    return tf.matmul(x, tf.custom_gradient(_transposed)(factor), transpose_b=True)


def _rounded_einsum(letters: Equation, a: tf.Tensor, b: tf.Tensor, rounding: Rounding) -> tf.Tensor:
    """Returns the einsum of a and b as a product of bfloat16 matrices, in float32."""
    sizes = _sizes(letters.left, a) | _sizes(letters.right, b)

    # Each factor becomes a matrix for each element of the batch, either way round.
    left_dims = [letters.rows, letters.contracted]
    if letters.transposes_left:
        left_dims.reverse()
    right_dims = [letters.contracted, letters.columns]
    if letters.transposes_right:
        right_dims.reverse()
    batch = _sizes_of(letters.batch, sizes)
    left_matrix = [math.prod(_sizes_of(dims, sizes)) for dims in left_dims]
    right_matrix = [math.prod(_sizes_of(dims, sizes)) for dims in right_dims]

    product = _rounded(
        _reshaped(a, [*batch, *left_matrix]),
        _reshaped(b, [*batch, *right_matrix]),
        rounding,
        transpose_a=letters.transposes_left,
        transpose_b=letters.transposes_right,
    )

    # The matrices of the result, in the order of its own letters.
    result = _reshaped(product, _sizes_of(letters.in_order, sizes))
    if letters.result == letters.in_order:
        return result
    return tf.transpose(result, [letters.in_order.index(letter) for letter in letters.result])


def _sizes(dims: str, tensor: tf.Tensor) -> dict[str, int]:
    return dict(zip(dims, tensor.shape, strict=True))


def _sizes_of(dims: str, sizes: dict[str, int]) -> list[int]:
    return [sizes[letter] for letter in dims]


def _reshaped(x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    return x if x.shape == shape else tf.reshape(x, shape)


def _rounded(
    a: tf.Tensor,
    b: tf.Tensor,
    rounding: Rounding,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tf.Tensor:
    """Returns the product of a [..., rows, depth] and b [..., depth, columns] in bfloat16.

    The last two dims of a factor are swapped if it is to be transposed. The result is float32.
    """

    @tf.custom_gradient
    def product(
        wide_a: tf.Tensor, wide_b: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        a = tf.cast(wide_a, tf.bfloat16)
        b = tf.cast(wide_b, tf.bfloat16)

        # The factors of the gradients are rounded, too.
        def gradient(d_wide: tf.Tensor) -> list[tf.Tensor]:
            d = tf.cast(d_wide, tf.bfloat16)
            if transpose_a:  # y = a^T b: d_a = b d^T, d_b = a d
                d_a = dot(b, d, transpose_b=True, rounded=rounding.left)
                d_b = dot(a, d, rounded=rounding.right)
            elif transpose_b:  # y = a b^T: d_a = d b, d_b = d^T a
                d_a = dot(d, b, rounded=rounding.left)
                d_b = _columns_times(d, a, rounded=rounding.right)
            else:  # y = a b: d_a = d b^T, d_b = a^T d
                d_a = dot(d, b, transpose_b=True, rounded=rounding.left)
                d_b = _columns_times(a, d, rounded=rounding.right)
            return [d_a, d_b]

        left = transposed_copy(a) if transpose_a else a
        return dot(left, b, transpose_b=transpose_b, rounded=rounding.result), gradient

    return product(a, b)


def _columns_times(a: tf.Tensor, b: tf.Tensor, *, rounded: bool) -> tf.Tensor:
    """Returns a^T b for two factors [..., rows, columns]; the narrower one is transposed."""
    if a.shape[-1] <= b.shape[-1]:
        return dot(transposed_copy(a), b, rounded=rounded)
    # Held, so that the transpose is a separate copy. As part of the loops of an optimizer, which
    # read the gradient several times column by column, it would take longer than the product.
    (held,) = xla.optimization_barrier(transposed_copy(dot(transposed_copy(b), a, rounded=rounded)))
    return held


def dot(
    a: tf.Tensor, b: tf.Tensor, *, transpose_b: bool = False, rounded: bool = False
) -> tf.Tensor:
    """Multiplies bfloat16 [..., rows, depth] with [..., depth, columns]; the result is float32.

    With `transpose_b`, the second factor is [..., columns, depth]. If `rounded`, the numbers of the
    result are rounded to bfloat16, where XLA can do so within the product.
    """
    if not (rounded and _has_bfloat16_results()):
        return tf.raw_ops.BatchMatMulV3(x=a, y=b, adj_y=transpose_b, Tout=tf.float32)
    result = tf.raw_ops.BatchMatMulV3(x=a, y=b, adj_y=transpose_b, Tout=tf.bfloat16)
    return tf.cast(result, tf.float32)


@functools.cache
def _has_bfloat16_results() -> bool:
    """Whether XLA's library for CPUs has products with bfloat16 results.

    An older XLA would widen the factors and multiply in float32, four times as slowly.
    """
    major, minor, *_ = importlib.metadata.version("jaxlib").split(".")
    return (int(major), int(minor)) >= (0, 12)


def transposed_copy(x: tf.Tensor) -> tf.Tensor:
    """Swaps the last two dims, [..., rows, columns], in a separate operation.

    A plain transpose would become part of the product that takes the result. XLA's CPU compiler
    then finds that its library can't do it, and multiplies in float32 after all.
    """
    *batch, rows, columns = x.shape
    if columns % 2:
        return tf.linalg.matrix_transpose(x)

    # With the columns in pairs this is a transpose of three dims, which stays on its own.
    pairs = tf.reshape(x, [*batch, rows, columns // 2, 2])
    axis = len(batch)
    swapped = tf.transpose(pairs, [*range(axis), axis + 1, axis + 2, axis])
    return tf.reshape(swapped, [*batch, columns, rows])


def _transposed(weight: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Transposes [..., depth, columns]; its gradient is transposed only once it is computed."""

    def gradient(d_transposed: tf.Tensor) -> tf.Tensor:
        # The barrier keeps the compiler from transposing the factors instead.
        (held,) = xla.optimization_barrier(d_transposed)
        return tf.linalg.matrix_transpose(held)

    return tf.linalg.matrix_transpose(weight), gradient
