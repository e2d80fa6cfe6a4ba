"""Where partial results pay: the bytes of sums that are taken at once, or taken later.

Each program is for 8 partitions, and splits a contracting dim over them. Compilers move some sums
by themselves, and differ in this, so each form is compiled.

A rows, K contracted and split, B and C columns, L length; G is a microbatch's rows, M and H are a
weight's dims. P counts terms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.partial import Partial
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.program import Program
from repro.tables.sbp import Compile
from xla_spmd.hlo.compiled_report import CompiledReport
from xla_spmd.mesh import Mesh

_NUM_MICROBATCHES = 4
_SIZES = {"A": 64, "L": 32, "K": 256, "B": 128, "C": 16, "M": 128, "H": 256, "G": 64, "_": 4}
# The rows of a microbatch are contracted in the gradient of a weight.
_PARTITIONING = Partitioning.from_dict(Mesh.flat(8), {"K": "d", "G": "d"})


@dataclasses.dataclass(frozen=True)
class LateSum:
    """A function in two forms, with the same arguments and the same result.

    `at_once` adds each product's terms before doing anything else. `later` keeps the terms, and
    adds them at the end.
    """

    name: str
    at_once: Callable[[NestedMap], tf.Tensor]
    later: Callable[[NestedMap], tf.Tensor]
    arguments: tuple[tuple[str, str], ...]  # Each argument's name and dims.
    has_gradients: bool = False  # Whether the program also computes all arguments' gradients.


@dataclasses.dataclass(frozen=True)
class Row:
    """A late sum, and one compiler's programs for both forms."""

    late_sum: LateSum
    at_once: CompiledReport
    later: CompiledReport


def measure(compile: Compile) -> Iterator[Row]:
    """Yields each of LATE_SUMS compiled. An error of `compile` passes through."""
    for late_sum in LATE_SUMS:
        at_once = compile(tracer.traced(export, late_sum.name, False))
        later = compile(tracer.traced(export, late_sum.name, True))
        yield Row(late_sum, at_once.report(), later.report())


def export(name: str, is_late: bool) -> Program:
    """Returns the program of one form of a late sum."""
    (late_sum,) = (late_sum for late_sum in LATE_SUMS if late_sum.name == name)
    form = late_sum.later if is_late else late_sum.at_once
    batch = NestedMap()
    for argument, dims in late_sum.arguments:
        batch[argument] = TensorSpec(tuple(_SIZES[letter] for letter in dims), "float32", dims)

    def fn(batch: NestedMap) -> NestedMap:
        if not late_sum.has_gradients:
            return NestedMap(y=form(batch))

        # Any nonlinear function of the result will do.
        with tf.GradientTape() as tape:
            tape.watch(batch.Flatten())
            y = form(batch)
            loss = tf.reduce_sum(tf.sin(y))
        return NestedMap(y=y, d=batch.Pack(tape.gradient(loss, batch.Flatten())))

    # An argument's gradient has the argument's dims.
    result_dims: dict[str, str] = {}
    if late_sum.has_gradients:
        result_dims = {f"d.{argument}": dims for argument, dims in late_sum.arguments}
    return lowering.export(
        AnnotatedFn("late", fn, ("batch",), (batch,), result_dims), _PARTITIONING
    )


def _now(equation: str, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Returns an einsum whose result is whole on each partition."""
    dims = equation.partition("->")[2]
    return Annotator(_PARTITIONING).annotate(tf.einsum(equation, a, b), dims)


def _later(equation: str, a: tf.Tensor, b: tf.Tensor, letter: str = "K") -> Partial:
    """Returns an einsum without its sum over the partitions."""
    return Partial.from_einsum(_PARTITIONING, equation, a, b, letter=letter)


def _sum_of_sums(batch: NestedMap) -> tf.Tensor:
    return _now("AK,KB->AB", batch.x, batch.v) + _now("AK,KB->AB", batch.y, batch.w)


def _one_sum(batch: NestedMap) -> tf.Tensor:
    xv_AB = _later("AK,KB->AB", batch.x, batch.v)
    yw_AB = _later("AK,KB->AB", batch.y, batch.w)
    return (xv_AB + yw_AB).reduce()


def _sum_then_product(batch: NestedMap) -> tf.Tensor:
    return tf.einsum("AB,BC->AC", _now("AK,KB->AB", batch.u, batch.v), batch.w)


def _product_then_sum(batch: NestedMap) -> tf.Tensor:
    return _later("AK,KB->AB", batch.u, batch.v).einsum("AB,BC->AC", batch.w).reduce()


def _sum_then_mean(batch: NestedMap) -> tf.Tensor:
    return tf.reduce_mean(_now("ALK,KB->ALB", batch.x, batch.v), 1)


def _mean_then_sum(batch: NestedMap) -> tf.Tensor:
    xv_ALB = _later("ALK,KB->ALB", batch.x, batch.v)
    mean_L = tf.fill([_SIZES["L"]], 1.0 / _SIZES["L"])
    return xv_ALB.einsum("ALB,L->AB", mean_L).reduce()


def _accumulated_sums(batch: NestedMap) -> tf.Tensor:
    """Returns the gradient of a weight, summed over partitions for each microbatch."""

    def add_microbatch(i: tf.Tensor, gradient_MH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x_GM = batch.x[i]
        gradient_MH += _now("GM,GH->MH", x_GM, _error(x_GM, batch.y[i], batch.w))
        return i + 1, gradient_MH

    return _over_microbatches(add_microbatch, tf.zeros_like(batch.w))


def _accumulated_terms(batch: NestedMap) -> tf.Tensor:
    """Returns the gradient of a weight, summed over partitions once, after all microbatches."""

    def add_microbatch(i: tf.Tensor, terms_PMH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x_GM = batch.x[i]
        error_GH = _error(x_GM, batch.y[i], batch.w)
        gradient_MH = _later("GM,GH->MH", x_GM, error_GH, letter="G")
        accumulated_MH = Partial.from_terms(_PARTITIONING, terms_PMH, "MH", "d") + gradient_MH
        return i + 1, accumulated_MH.terms

    zeros_MH = Partial.from_whole(_PARTITIONING, tf.zeros_like(batch.w), "MH", "d")
    terms_PMH = _over_microbatches(add_microbatch, zeros_MH.terms)
    return Partial.from_terms(_PARTITIONING, terms_PMH, "MH", "d").reduce()


def _error(x_GM: tf.Tensor, y_GH: tf.Tensor, w_MH: tf.Tensor) -> tf.Tensor:
    """Returns x W - y, the gradient of |x W - y|^2 / 2 with respect to x W."""
    return tf.einsum("GM,MH->GH", x_GM, w_MH) - y_GH


def _over_microbatches(
    body: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]], start: tf.Tensor
) -> tf.Tensor:
    def is_next(i: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return i < _NUM_MICROBATCHES

    _, result = tf.while_loop(
        is_next, body, [tf.constant(0), start], maximum_iterations=_NUM_MICROBATCHES
    )
    return result


LATE_SUMS = (
    LateSum(
        name="x V + y W",
        at_once=_sum_of_sums,
        later=_one_sum,
        arguments=(("x", "AK"), ("v", "KB"), ("y", "AK"), ("w", "KB")),
    ),
    LateSum(
        name="U V W, W narrow",
        at_once=_sum_then_product,
        later=_product_then_sum,
        arguments=(("u", "AK"), ("v", "KB"), ("w", "BC")),
    ),
    LateSum(
        name="mean of x V over a length of 32, with gradients",
        at_once=_sum_then_mean,
        later=_mean_then_sum,
        arguments=(("x", "ALK"), ("v", "KB")),
        has_gradients=True,
    ),
    LateSum(
        name="gradient of W over 4 microbatches, in a loop",
        at_once=_accumulated_sums,
        later=_accumulated_terms,
        arguments=(("x", "_GM"), ("y", "_GH"), ("w", "MH")),
    ),
)
