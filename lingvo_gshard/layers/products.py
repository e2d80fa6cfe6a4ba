"""Products of two large factors, written as einsum equations.

A CPU with matrix units, a TPU and a GPU multiply bfloat16 numbers several times as fast as float32
ones, and add up the results in float32. So float32 factors may be rounded for their product alone.
A result that is a factor of another product, such as hidden units, may be rounded at once: it then
takes half the memory traffic, which is what limits such a product on a CPU.

The letters of equations are those of sharding/layout.py. Letters in parentheses are dims that are
merged into one: a tensor `E(GC)H` has the shape [E, G * C, H].
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.metadata
import math
import re
from collections.abc import Callable, Sequence
from typing import Self

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers import stored_weights
from lingvo_gshard.layers.stored_weights import Weight

_MERGED_DIMS = re.compile(r"\((\w)\w*\)")


def result_dims(equation: str) -> str:
    """Returns the letters by which an equation's result is annotated.

    Merged dims are split as the first of them is: "EGH" for `EGCM,EMH->E(GC)H`.
    """
    result = equation.rpartition("->")[2]
    return _MERGED_DIMS.sub(r"\1", result)


class Rounded(enum.Flag):
    """Which tensors of a product are rounded as its factors are, because products take them.

    LEFT and RIGHT are the gradients to the factors. A tensor between two products, such as hidden
    units, is the RESULT of the first, and the gradient to the LEFT factor of the second.
    """

    NOTHING = 0
    RESULT = enum.auto()
    LEFT = enum.auto()
    RIGHT = enum.auto()


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Computes products in the dtype of their first factor, and the gradients likewise.

    If `dtype` is `bfloat16`, float32 factors are rounded to it before they are multiplied, and so
    are those of the gradients. Results and their sums over partitions are float32 all the same; but
    those that the caller names in `rounded` are summed in float32 on each partition, then rounded
    to bfloat16, and returned as float32.
    """

    dtype: str = "float32"
    has_gradients: bool = True  # Whether gradients are computed, too: not in decoding.

    def project(
        self,
        equation: str,
        x: tf.Tensor,
        weight: Weight,
        *,
        rounded: Rounded = Rounded.NOTHING,
    ) -> tf.Tensor:
        """Returns the product of an activation and a weight, such as `BLM,MH->BLH`.

        The weight is float32, or is kept as decoders keep it, and then decides what x is rounded
        to: see stored_weights.product.

        The last dims of x are contracted with the first ones of the weight, for each element of
        their common first dims: E in `EGCM,EMH->E(GC)H`, none in `BLND,NDM->BLM`. The dims in
        between are the rows, which may be merged in the result, and must be if they are in x.
        Raises ValueError for an equation of another form.

        This is one matrix product of all rows. The gradient of an einsum would contract several
        dims, such as B and L, for which XLA transposes both operands on a CPU: a tenth of the time
        of a train step.
        """
        letters = _Equation.parse(equation)
        if not letters.is_projection:
            raise ValueError(
                "project: expected rows times a weight, such as BLM,MH->BLH, BLND,NDM->BLM or "
                f"EGCM,EMH->E(GC)H, got {equation!r}."
            )
        if letters.batch:  # The experts, whose layer has a scope of their own.
            return self._project(letters, x, weight, rounded)
        with tf.name_scope("project"):
            return self._project(letters, x, weight, rounded)

    def _project(
        self, letters: _Equation, x: tf.Tensor, weight: Weight, rounded: Rounded
    ) -> tf.Tensor:
        num_batch = len(letters.batch)
        num_contracted = len(letters.contracted)
        first_column = num_batch + num_contracted
        shape = stored_weights.shape(weight, num_batch, num_contracted)
        batch = shape[:num_batch]
        depth = math.prod(shape[num_batch:first_column])
        columns = shape[first_column:]
        rows = x.shape[num_batch : len(x.shape) - num_contracted]

        # Both factors as matrices. With a batch, the weight is a stack of matrices already.
        if "(" not in letters.left:
            x = tf.reshape(x, [*batch, -1, depth])
        if not letters.batch:
            weight = stored_weights.as_matrix(weight, depth)

        result = self.matmul_weight(x, weight, rounded=rounded)
        if "(" in letters.result:
            return result
        return tf.reshape(result, [*batch, *rows, *columns])

    def einsum(
        self,
        equation: str,
        a: tf.Tensor,
        b: tf.Tensor,
        *,
        name: str,
        rounded: Rounded = Rounded.NOTHING,
    ) -> tf.Tensor:
        """Returns the product of two activations, such as `BNLD,BNTD->BNLT`, in scope `name`.

        Each factor begins with the letters that both factors and the result have; the letters that
        are contracted, and those of its own, follow in either order. Raises ValueError otherwise.
        """
        letters = _Equation.parse(equation)
        if not letters.is_batch_of_products:
            raise ValueError(
                "einsum: expected a batch of matrix products, such as BNLD,BNTD->BNLT or "
                f"GSEC,GSM->EGCM, got {equation!r}."
            )
        if self._rounds(a):
            with tf.name_scope(name):
                return _rounded_einsum(letters, a, b, rounded)

        if letters.is_matmul:
            return tf.matmul(a, b, transpose_b=letters.transposes_right, name=name)
        return tf.einsum(equation, a, b, name=name)

    def matmul_weight(
        self, x: tf.Tensor, weight: Weight, *, rounded: Rounded = Rounded.NOTHING
    ) -> tf.Tensor:
        """Returns x [..., rows, depth] times a weight [..., depth, columns], kept or float32.

        The weight's gradient contracts all rows, with one factor transposed: x^T d_y, or
        (d_y^T x)^T. A CPU copies the transposed factor element by element, so it should be the
        narrower one. That makes a train step 4 % faster than always transposing x. Without a
        gradient nothing is transposed: a CPU would do it at every step, for a single row.
        """
        if isinstance(weight, NestedMap):
            return stored_weights.product(x, weight)
        if self._rounds(x):
            return _rounded(x, weight, rounded)

        weight = tf.cast(weight, x.dtype)
        depth, columns = weight.shape[-2:]
        if depth <= columns or not self.has_gradients:
            return tf.matmul(x, weight)
        return tf.matmul(x, tf.custom_gradient(_transposed)(weight), transpose_b=True)

    def _rounds(self, factor: tf.Tensor) -> bool:
        return self.dtype == "bfloat16" and factor.dtype == tf.float32


FLOAT32 = Arithmetic()


@dataclasses.dataclass(frozen=True)
class _Equation:
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

    @property
    def batch(self) -> str:
        """The letters of both factors and of the result."""
        return self._letters(in_left=True, in_right=True, in_result=True)

    @property
    def contracted(self) -> str:
        """The letters of both factors over which products are summed."""
        return self._letters(in_left=True, in_right=True, in_result=False)

    @property
    def rows(self) -> str:
        """The letters of the left factor alone."""
        return self._letters(in_left=True, in_right=False, in_result=True)

    @property
    def columns(self) -> str:
        """The letters of the right factor alone."""
        return self._letters(in_left=False, in_right=True, in_result=True)

    def _letters(self, *, in_left: bool, in_right: bool, in_result: bool) -> str:
        """Returns the letters that are in exactly these parts, in the order of a factor."""
        factor = self.left if in_left else self.right
        return "".join(
            letter
            for letter in factor
            if letter.isalpha()
            and (letter in self.left) == in_left
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
    def is_projection(self) -> bool:
        """Whether this is a product of rows and a weight, as `Arithmetic.project` computes it."""
        rows = self.batch + self.rows
        merged_rows = f"{self.batch}({self.rows})"
        x = self.left.removesuffix(self.contracted)
        result = self.result.removesuffix(self.columns)
        has_rows_first = (x, result) in {
            (rows, rows),
            (rows, merged_rows),
            (merged_rows, merged_rows),
        }
        is_in_order = (
            self.left == x + self.contracted
            and self.right == self.batch + self.contracted + self.columns
            and self.result == result + self.columns
        )

        # Only the weight itself, and a result with all its dims, are reshaped to several letters.
        is_matrix = len(self.contracted) == len(self.columns) == 1
        may_have_more = not self.batch and "(" not in self.result
        return has_rows_first and is_in_order and (is_matrix or may_have_more)

    @property
    def is_batch_of_products(self) -> bool:
        """Whether this is a batch of matrix products, of factors that may be transposed."""
        has_left = self.left == self.batch + self.rows + self.contracted or self.transposes_left
        has_right = (
            self.right == self.batch + self.contracted + self.columns or self.transposes_right
        )
        is_complete = sorted(self.result) == sorted(self.batch + self.rows + self.columns)
        return has_left and has_right and is_complete

    @property
    def is_matmul(self) -> bool:
        """Whether this is a product of matrices as they are, or with the right one transposed."""
        has_single_dims = len(self.rows) == len(self.contracted) == len(self.columns) == 1
        in_order = self.result == self.batch + self.rows + self.columns
        return has_single_dims and in_order and not self.transposes_left


def _rounded_einsum(letters: _Equation, a: tf.Tensor, b: tf.Tensor, rounded: Rounded) -> tf.Tensor:
    """Returns the einsum of a and b as a product of bfloat16 matrices, in float32."""
    sizes = dict(zip(letters.left, a.shape, strict=True))
    sizes |= zip(letters.right, b.shape, strict=True)

    # Each factor becomes a matrix for each element of the batch, either way round.
    left_dims = [letters.rows, letters.contracted]
    if letters.transposes_left:
        left_dims.reverse()
    right_dims = [letters.contracted, letters.columns]
    if letters.transposes_right:
        right_dims.reverse()
    batch = _sizes_of(letters.batch, sizes)
    a = _reshaped(a, [*batch, *_merged_sizes(left_dims, sizes)])
    b = _reshaped(b, [*batch, *_merged_sizes(right_dims, sizes)])

    product = _rounded(
        a,
        b,
        rounded,
        transpose_a=letters.transposes_left,
        transpose_b=letters.transposes_right,
    )

    # The matrices of the result, in the order of its own letters.
    computed = letters.batch + letters.rows + letters.columns
    result = _reshaped(product, _sizes_of(computed, sizes))
    if letters.result == computed:
        return result
    return tf.transpose(result, [computed.index(letter) for letter in letters.result])


def _sizes_of(dims: str, sizes: dict[str, int]) -> list[int]:
    return [sizes[letter] for letter in dims]


def _merged_sizes(dims: Sequence[str], sizes: dict[str, int]) -> list[int]:
    return [math.prod(_sizes_of(merged, sizes)) for merged in dims]


def _reshaped(x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    return x if x.shape == shape else tf.reshape(x, shape)


def _rounded(
    a: tf.Tensor,
    b: tf.Tensor,
    rounded: Rounded,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tf.Tensor:
    """Returns the product of a [..., rows, depth] and b [..., depth, columns] in bfloat16.

    The last two dims of a factor are swapped if it is to be transposed. The result is float32.
    """
    y_rounded = Rounded.RESULT in rounded
    a_rounded = Rounded.LEFT in rounded
    b_rounded = Rounded.RIGHT in rounded

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
                d_a = dot(b, d, transpose_b=True, rounded=a_rounded)
                d_b = dot(a, d, rounded=b_rounded)
            elif transpose_b:  # y = a b^T: d_a = d b, d_b = d^T a
                d_a = dot(d, b, rounded=a_rounded)
                d_b = _columns_times(d, a, rounded=b_rounded)
            else:  # y = a b: d_a = d b^T, d_b = a^T d
                d_a = dot(d, b, transpose_b=True, rounded=a_rounded)
                d_b = _columns_times(a, d, rounded=b_rounded)
            return [d_a, d_b]

        left = transposed_copy(a) if transpose_a else a
        return dot(left, b, transpose_b=transpose_b, rounded=y_rounded), gradient

    return product(a, b)


def _columns_times(a: tf.Tensor, b: tf.Tensor, *, rounded: bool) -> tf.Tensor:
    """Returns a^T b for two factors [..., rows, columns]; the narrower one is transposed."""
    if a.shape[-1] <= b.shape[-1]:
        return dot(transposed_copy(a), b, rounded=rounded)
    # Held, so that the transpose is a copy of its own. As part of the loops of an optimizer, which
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
    """Swaps the last two dims, [..., rows, columns], in an operation of its own.

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


def with_bias(product: tf.Tensor, theta: NestedMap, name: str) -> tf.Tensor:
    """Returns the product with weight `name` plus that weight's bias, if theta has one.

    The bias has the last dims of the product, and is added in its dtype.
    """
    bias = theta.get(f"{name}_bias")
    return product if bias is None else product + tf.cast(bias, product.dtype)
