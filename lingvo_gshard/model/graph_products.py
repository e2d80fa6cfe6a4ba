"""The products in a traced graph, with the letters of their dims.

A layer may multiply by any of TensorFlow's operations. So the letters of dims are followed through
the graph: from features and weights, whose specs name them, and from annotations, through products,
transposes, reshapes and elementwise operations. A dim that loses its letter, for example by a
slice, gets a new one in each product, which no table splits.

A tensor that was computed from weights alone, such as a slice of a stack in 16 bits, is a weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import tf_private
from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.numerics import NOTED
from lingvo_gshard.model import graph_dims
from lingvo_gshard.model.graph_dims import Axis, Dim, Known, Letters, is_named, size
from lingvo_gshard.sharding import layout
from lingvo_gshard.sharding.annotator import DIMS_ATTRIBUTE
from lingvo_gshard.sharding.layout import TensorSpec

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CONDITIONS = ("If", "StatelessIf")
_LOOPS = ("StatelessWhile", "While")
_MATMULS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
_REDUCTIONS = ("All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum")
_RESHAPES = ("ExpandDims", "Reshape", "Squeeze")
# TensorFlow numbers a scope that is entered again.
_NOTED = re.compile(rf"(?:.*/)?{NOTED}(?:_\d+)?/.*")


@dataclasses.dataclass(frozen=True)
class GraphProduct:
    """A product, an elementwise product with a weight, or a lookup of a weight's rows."""

    # The equation, such as `BLM,MH->BLH`, or `BLM,M->BLM` with a vector. A lookup has the equation
    # of the product with a one-hot mask, such as `BLV,VM->BLM`.
    equation: str
    sizes: Mapping[str, int]
    times: int  # How often it runs, from the loops around it with a fixed number of iterations.
    left: tf.Tensor
    result: tf.Tensor
    weight: WeightSpec | None  # The declaration of the right factor, if it is a weight.
    is_lookup: bool = False

    @property
    def scope(self) -> str:
        """The scope of its layer and part, such as `encoder/layers_1/feed_forward`."""
        scope, _, _ = self.result.op.name.rpartition("/")
        return scope


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A factor of a product: its tensor, the labels of its axes in an equation, and its dims."""

    tensor: tf.Tensor
    labels: str
    known: Known


class GraphReader:
    """Reads a function's graph, with its loops and calls, in the order of its operations.

    A loop without a fixed number of iterations counts as one iteration, and a condition as both of
    its branches.
    """

    def __init__(
        self,
        graph: tf.Graph,
        specs: Sequence[TensorSpec | WeightSpec],
        noted: Iterable[tf.Tensor] = (),
    ) -> None:
        """Reads the graph of a function that was traced with static shapes.

        Args:
          graph: The graph of the function.
          specs: The spec of each of its inputs.
          noted: The results of lookups that a Record has noted.
        """
        # The products do not include a Record's notes.
        self.products: list[GraphProduct] = []
        self._noted = {tensor.ref() for tensor in noted}
        self._known: dict[Any, Known] = {}
        self._numbers = itertools.count(1)
        self._times = 1
        self._rules: dict[str, Callable[[Any], Known]] = {
            "Conv2D": self._convolution,
            "Einsum": self._einsum,
            "GatherV2": self._gather,
            "Mul": self._multiplication,
            "Transpose": self._transpose,
            "XlaSharding": self._annotation,
            **dict.fromkeys(_MATMULS, self._matmul),
            **dict.fromkeys(_REDUCTIONS, self._reduction),
            **dict.fromkeys(_RESHAPES, self._reshape),
        }

        inputs = []
        for tensor, spec in zip(graph.inputs, specs, strict=True):
            weight = spec if isinstance(spec, WeightSpec) else None
            inputs.append(Known(self._lettered(tensor, spec.dims), weight))
        self._read(graph, inputs, times=1)

    def weight_of(self, tensor: tf.Tensor) -> WeightSpec | None:
        """Returns the declaration of the weight from which alone a tensor was computed, if any."""
        return self._of(tensor).weight

    def _read(self, graph: tf.Graph, inputs: Sequence[Known], times: int) -> list[Known]:
        """Reads a function's graph that runs `times` times; returns its outputs."""
        outer_times = self._times
        self._times = times
        for tensor, known in zip(graph.inputs, inputs, strict=True):
            self._known[tensor.ref()] = known

        for op in graph.get_operations():
            if op.type == "Placeholder":
                continue
            for tensor, known in zip(op.outputs, self._results(op), strict=True):
                self._known[tensor.ref()] = known

        self._times = outer_times
        return [self._of(tensor) for tensor in graph.outputs]

    def _lettered(self, tensor: tf.Tensor, letters: str) -> tuple[Axis, ...]:
        """Returns the axes of a tensor with these letters; `_` is an unknown one."""
        axes = []
        for length, letter in zip(tensor.shape, letters, strict=True):
            axes.append(self._lost(length) if letter == "_" else (Dim(length, letter),))
        return tuple(axes)

    def _lost(self, length: int) -> Axis:
        """Returns an axis of a dim without a letter."""
        return (Dim(length, "", next(self._numbers)),)

    def _of(self, tensor: tf.Tensor) -> Known:
        return self._known[tensor.ref()]

    # --- Operations ---

    def _results(self, op: Any) -> Sequence[Known]:
        operands = [self._of(tensor) for tensor in op.inputs]
        if op.type in self._rules:
            return [self._rules[op.type](op)]
        if op.type == "IdentityN":
            return operands

        # Functions.
        if op.type in _LOOPS:
            body = tf_private.function_graph(op, "body")
            return self._read(body, operands, self._times * _num_iterations(op))
        if op.type in _CALLS:
            return self._read(tf_private.function_graph(op, "f"), operands, self._times)
        if op.type in _CONDITIONS:
            _, *inputs = operands
            self._read(tf_private.function_graph(op, "else_branch"), inputs, self._times)
            return self._read(tf_private.function_graph(op, "then_branch"), inputs, self._times)

        return [self._alike(op, tensor) for tensor in op.outputs]

    def _alike(self, op: Any, result: tf.Tensor) -> Known:
        """The rule of elementwise operations: a dim is an operand's dim, if the sizes are equal."""
        # Indices and shapes do not determine the dims of other tensors.
        numbers = [tensor for tensor in op.inputs if tensor.dtype != tf.int32]
        operands = [self._of(tensor) for tensor in numbers or op.inputs]
        axes = self._broadcast([operand.axes for operand in operands], list(result.shape))
        return Known(axes, graph_dims.only_weight(operands))

    def _broadcast(
        self, operands: Sequence[Sequence[Axis]], shape: Sequence[int]
    ) -> tuple[Axis, ...]:
        """Returns the axes of a result of this shape; operands are aligned at their last axes."""
        ranks = [len(axes) for axes in operands]
        if max(ranks, default=0) != len(shape):
            return tuple(map(self._lost, shape))

        result = []
        for index, length in enumerate(shape):
            from_end = len(shape) - index
            candidates = [axes[-from_end] for axes in operands if len(axes) >= from_end]
            alike = [axis for axis in candidates if size(axis) == length]
            named = [axis for axis in alike if is_named(axis)]
            result.append((named or alike or [self._lost(length)])[0])
        return tuple(result)

    def _annotation(self, op: Any) -> Known:
        operand = self._of(op.inputs[0])
        letters = tf_private.text_attribute(op, DIMS_ATTRIBUTE)
        if letters is None:
            return operand

        # An axis that merges several dims is annotated by the letter of the first, as in E(GC)H.
        axes = []
        named = self._lettered(op.outputs[0], letters.upper())
        for axis, known in zip(named, operand.axes, strict=True):
            is_merged = len(known) > 1 and known[0].letter == axis[0].letter
            axes.append(known if is_merged else axis)
        return dataclasses.replace(operand, axes=tuple(axes))

    def _transpose(self, op: Any) -> Known:
        operand = self._of(op.inputs[0])
        order = tf.get_static_value(op.inputs[1])
        return dataclasses.replace(operand, axes=tuple(operand.axes[axis] for axis in order))

    def _reduction(self, op: Any) -> Known:
        operand = self._of(op.inputs[0])
        (result,) = op.outputs
        if result.shape.rank == len(operand.axes):
            return self._alike(op, result)
        indices = tf.get_static_value(op.inputs[1])
        reduced = {int(index) % len(operand.axes) for index in indices.ravel()}
        axes = [axis for index, axis in enumerate(operand.axes) if index not in reduced]
        return Known(tuple(axes), operand.weight)

    def _reshape(self, op: Any) -> Known:
        operand = self._of(op.inputs[0])
        dims = graph_dims.dims_of(operand.axes)
        axes: list[Axis] = []
        for lengths, merged in graph_dims.regrouped(list(op.outputs[0].shape), dims):
            if len(lengths) == 1:
                axes.append(tuple(merged))
            else:
                axes += map(self._lost, lengths)
        return dataclasses.replace(operand, axes=tuple(axes))

    # --- Products ---

    def _matmul(self, op: Any) -> Known:
        is_plain = op.type == "MatMul"
        transposes_left = op.get_attr("transpose_a" if is_plain else "adj_x")
        transposes_right = op.get_attr("transpose_b" if is_plain else "adj_y")
        left = "km" if transposes_left else "mk"
        right = "nk" if transposes_right else "kn"
        return self._product(op, f"...{left},...{right}->...mn")

    def _einsum(self, op: Any) -> Known:
        equation = op.get_attr("equation").decode()
        if len(op.inputs) == 2:
            return self._product(op, equation)

        # A transpose and sums of a single operand.
        known = self._of(op.inputs[0])
        operand, result = graph_dims.expanded(equation, [len(known.axes)])
        by_label = dict(zip(operand, known.axes, strict=True))
        return dataclasses.replace(known, axes=tuple(by_label[label] for label in result))

    def _product(self, op: Any, equation: str) -> Known:
        """Notes a product; each label of its equation is an axis with one or more dims."""
        knowns = [self._of(tensor) for tensor in op.inputs]
        *labels, result = graph_dims.expanded(equation, [len(known.axes) for known in knowns])
        factors = [_Factor(*factor) for factor in zip(op.inputs, labels, knowns, strict=True)]

        # The weight is the right factor, and its letters take precedence over the left factor's.
        left, right = sorted(factors, key=lambda factor: factor.known.weight is not None)
        by_label = self._by_label([left, right] if right.known.weight is None else [right, left])
        known = Known(tuple(by_label[label] for label in result))
        if left.known.weight is not None:
            return dataclasses.replace(known, weight=left.known.weight)

        weight = right.known.weight
        right_axes = graph_dims.as_declared(_axes(right, by_label), weight)
        self._note(op, [_axes(left, by_label), right_axes, known.axes], left.tensor, weight)
        return known

    def _by_label(self, factors: Sequence[_Factor]) -> dict[str, Axis]:
        """Returns the axis of each label, from the first factor that knows its letters."""
        axes: dict[str, Axis] = {}
        for factor in factors:
            for label, axis in zip(factor.labels, factor.known.axes, strict=True):
                known = axes.get(label)
                is_better = (
                    known is None
                    or size(known) < size(axis)
                    or (is_named(axis) and not is_named(known))
                )
                if is_better:
                    axes[label] = axis

        # Two dims with the same letter, such as queries and keys of the same tokens, are different
        # dims.
        used: set[str] = set()
        for label, axis in axes.items():
            letters = {dim.letter for dim in axis if dim.letter}
            is_letter = label in layout.DIMS and label not in used
            if letters & used:
                axes[label] = self._lost(size(axis))
            elif not letters and len(axis) == 1 and is_letter:
                axes[label] = (Dim(size(axis), label),)  # The equation's name of it.
                letters = {label}
            used |= letters
        return axes

    def _multiplication(self, op: Any) -> Known:
        left, right = sorted(op.inputs, key=lambda tensor: self.weight_of(tensor) is not None)
        activation = self._of(left)
        weight = self._of(right)
        known = self._alike(op, op.outputs[0])

        if weight.weight and activation.has_rows and not activation.weight:
            # The weight's axes are the last ones of the result.
            last_axes = known.axes[len(known.axes) - len(weight.axes) :]
            axes = []
            for axis, result_axis in zip(weight.axes, last_axes, strict=True):
                if size(axis) > 1:
                    axes.append(result_axis)
            self._note(op, [known.axes, axes, known.axes], left, weight.weight)
        return known

    def _gather(self, op: Any) -> Known:
        table = self._of(op.inputs[0])
        indices = self._of(op.inputs[1])
        axis = int(tf.get_static_value(op.inputs[2])) % len(table.axes)
        batch_dims = op.get_attr("batch_dims")

        before = table.axes[:axis]
        after = table.axes[axis + 1 :]
        known = Known((*before, *indices.axes[batch_dims:], *after))
        if not indices.axes:  # One element of a stack.
            return dataclasses.replace(known, weight=table.weight)
        if table.weight and table.weight.is_matrix:
            mask = [*indices.axes, table.axes[axis]]
            factors = [mask, table.axes, known.axes]
            self._note(op, factors, op.inputs[1], table.weight, is_lookup=True)
        return known

    def _convolution(self, op: Any) -> Known:
        """The rule of convolutions: each place is a product of a window and the kernel."""
        image = self._of(op.inputs[0])
        kernel = self._of(op.inputs[1])
        batch, *image_places, _ = image.axes
        *window, channels = kernel.axes

        # The places of the result have the image's letters, even if their sizes differ.
        (result,) = op.outputs
        places = []
        for axis, length in zip(image_places, result.shape[1:-1], strict=True):
            has_letter = len(axis) == 1 and is_named(axis)
            places.append((Dim(length, axis[0].letter),) if has_letter else self._lost(length))
        known = Known((batch, *places, channels))
        factors = [[batch, *places, *window], kernel.axes, known.axes]
        self._note(op, factors, op.inputs[0], kernel.weight)
        return known

    def _note(
        self,
        op: Any,
        axes: Sequence[Sequence[Axis]],
        left: tf.Tensor,
        weight: WeightSpec | None,
        is_lookup: bool = False,
    ) -> None:
        """Notes a product with the axes of its left and right factor and of its result."""
        (result,) = op.outputs
        if _NOTED.fullmatch(op.name) or result.ref() in self._noted:
            return

        letters = Letters()
        left_dims, right_dims, result_dims = map(letters.text, axes)
        self.products.append(
            GraphProduct(
                equation=f"{left_dims},{right_dims}->{result_dims}",
                sizes=letters.sizes,
                times=self._times,
                left=left,
                result=result,
                weight=weight,
                is_lookup=is_lookup,
            )
        )


def _num_iterations(loop: Any) -> int:
    """Returns a loop's number of iterations, or 1 if it is not fixed."""
    _, max_iterations, *_ = loop.inputs
    count = tf.get_static_value(max_iterations)
    return int(count) if count is not None and count > 0 else 1


def _axes(factor: _Factor, by_label: Mapping[str, Axis]) -> list[Axis]:
    """Returns the axes of a factor in a product, without the axes along which it is repeated."""
    axes = []
    for label, axis in zip(factor.labels, factor.known.axes, strict=True):
        is_repeated = size(axis) < size(by_label[label])
        if not is_repeated:
            axes.append(by_label[label])
    return axes
