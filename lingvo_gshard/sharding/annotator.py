"""Annotator: the layers' view of the partitioning.

Layers name a tensor's dims by letters, and the experiment's table states how each letter is split.
The letters are listed in sharding/layout.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import tf_private
from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.sharding import annotate, manual
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec, check_named_once
from xla_spmd.mesh import Axis, names_of

# The attribute of an annotation's operation that holds its letters, for readers of the graph.
DIMS_ATTRIBUTE = "_dims"


@dataclasses.dataclass(frozen=True)
class Annotator:
    """Applies a partitioning to the tensors of a traced function.

    If tf.vectorized_map maps the function, `mapped` is the letter of the mapped dim; otherwise it
    is empty. The map moves each annotation to the tensor with this leading dim, so annotations
    inside the map include it.
    """

    partitioning: Partitioning
    # Whether a weight's gradient is summed only where the weight is updated.
    scatter_gradients: bool = True
    mapped: str = ""
    stack: str = ""  # The stack whose rows are used; empty for the whole model's rows.

    def annotate(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Annotates `tensor` of rank len(dims) with the sharding that the table gives its dims.

        Raises ValueError outside a traced function, for a rank other than len(dims), and for a
        repeated letter.
        """
        annotate.check_rank("annotate", tensor, len(dims), f"dims {dims!r} name {len(dims)}")
        dims = self.mapped + dims
        check_named_once(f"annotate: {tensor.name} of shape {tensor.shape}", dims)
        return self._annotated(tensor, dims, self.partitioning.axes(dims))

    def annotate_as(self, tensor: tf.Tensor, spec: TensorSpec | WeightSpec) -> tf.Tensor:
        """Annotates `tensor` by the dims of its spec and the table of the spec's stack."""
        return self.in_stack(spec.stack).annotate(tensor, spec.dims)

    def in_stack(self, stack: str) -> Annotator:
        """Returns the annotator of a stack's layers, or this one if the table lacks rows for it."""
        if stack not in self.partitioning.stacks:
            return self
        return dataclasses.replace(
            self, partitioning=self.partitioning.in_stack(stack), stack=stack
        )

    def annotate_outside(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Annotates a tensor outside the map, which every application of the function may read.

        The tensor lacks the mapped dim, and is whole along the mapped dim's mesh axes.
        """
        # The split that `annotate` uses inside the map: the mapped dim takes its axes first.
        axes = self.partitioning.axes(self.mapped + dims)[len(self.mapped) :]
        return self._annotated(tensor, dims, axes)

    def _annotated(self, tensor: tf.Tensor, dims: str, axes: tuple[Axis | None, ...]) -> tf.Tensor:
        # A program's annotations count partitions in the order of the grid, not by device number.
        sharding = annotate.mesh_sharding(self.partitioning.mesh.grid, axes)
        annotated = sharding.apply_to_tensor(tensor, use_sharding_op=True)
        tf_private.set_text_attribute(annotated.op, DIMS_ATTRIBUTE, dims)
        return annotated

    def gradient_dims(self, dims: str) -> str:
        """Returns the dims of the gradient of a weight with these dims.

        With `scatter_gradients` they are the dims in the optimizer, so that each partition sums
        only the part of the gradient that it updates.
        """
        return dims.lower() if self.scatter_gradients else dims

    def locally(
        self,
        fn: Callable[..., tf.Tensor],
        arguments: Sequence[tuple[tf.Tensor, str]],
        dims: str,
    ) -> tf.Tensor:
        """Applies `fn` to each partition's own parts of the arguments, without communication.

        `arguments` are whole tensors with their dims, and `dims` the whole result's dims. See
        manual.py for the operations that `fn` may use. If the mesh does not divide a dim, zeros pad
        the last parts, and the corresponding end of the result is cut off.

        Raises ValueError if a letter is split along other axes in one of the dims than in another,
        as where it shares its axes with an earlier letter: its parts would not fit together.
        """
        (whole,) = self.locally_all(lambda *parts: [fn(*parts)], arguments, [dims])
        return whole

    def locally_all(
        self,
        fn: Callable[..., Sequence[tf.Tensor]],
        arguments: Sequence[tuple[tf.Tensor, str]],
        dims: Sequence[str],
    ) -> list[tf.Tensor]:
        """Applies `fn` like `locally`, but returns several tensors, each with an item of `dims`."""
        tensors = [tensor for tensor, _ in arguments]
        argument_dims = [letters for _, letters in arguments]

        # The gradient computes `fn` again from the whole arguments. So a partition's part never
        # leaves its manual region, even if a loop keeps tensors for the gradient.
        @tf.custom_gradient
        def region(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            def gradient(*d_results: tf.Tensor) -> list[tf.Tensor | None]:
                with tf.GradientTape() as tape:
                    tape.watch([tensor for tensor in tensors if tensor.dtype.is_floating])
                    again = self._in_region(fn, tensors, argument_dims, dims)
                return tape.gradient(again, tensors, d_results)

            return self._in_region(fn, tensors, argument_dims, dims), gradient

        return list(region(*tensors))

    def _in_region(
        self,
        fn: Callable[..., Sequence[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        argument_dims: Sequence[str],
        dims: Sequence[str],
    ) -> list[tf.Tensor]:
        """Returns the whole results, with these `dims`, of `fn` on each partition's parts."""
        self._check_splits([*argument_dims, *dims])
        mesh = self.partitioning.mesh.grid
        # The logical and the padded size of each padded dim, by its letter.
        logical_sizes: dict[str, tuple[int, int]] = {}
        parts = []
        for tensor, letters in zip(tensors, argument_dims, strict=True):
            even = self._padded(tensor, letters)
            for letter, size, padded_size in zip(letters, tensor.shape, even.shape, strict=True):
                if size != padded_size:
                    logical_sizes[letter] = (size, padded_size)
            axes = self.partitioning.axes(letters)
            parts.append(manual.auto_to_manual_spmd_partition(even, mesh, axes))

        wholes = []
        for result, result_dims in zip(fn(*parts), dims, strict=True):
            axes = self.partitioning.axes(result_dims)
            whole = manual.manual_to_auto_spmd_partition(result, mesh, axes)
            if logical_sizes:
                ends = []
                for letter, size in zip(result_dims, whole.shape, strict=True):
                    end, padded_size = logical_sizes.get(letter, (size, size))
                    if size != padded_size:
                        raise ValueError(
                            f"locally: dim {letter} of an argument is padded from {end} to "
                            f"{padded_size}, but in the result of dims {result_dims!r} it has "
                            f"size {size}; use a different letter for that dim."
                        )
                    ends.append(end)
                whole = tf.slice(whole, [0] * len(ends), ends)
            wholes.append(whole)
        return wholes

    def _check_splits(self, all_dims: Sequence[str]) -> None:
        """Raises ValueError if a letter's split depends on the dims that it is in."""
        first: dict[str, tuple[str, Axis | None]] = {}
        for dims in all_dims:
            for letter, axis in zip(dims, self.partitioning.axes(dims), strict=True):
                if letter == "_":
                    continue
                other_dims, other_axis = first.setdefault(letter, (dims, axis))
                if axis != other_axis:
                    raise ValueError(
                        f"locally: dim {letter} is split along {_text(other_axis)} in "
                        f"{other_dims!r}, but along {_text(axis)} in {dims!r}: name the dims by "
                        "letters that share no axis."
                    )

    def _padded(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Returns `tensor` with zeros at the ends of the dims that the mesh does not divide."""
        shape = annotate.static_shape(f"locally: {tensor.name}", tensor.shape)
        factors = self.partitioning.factor(dims)
        missing = [-size % factor for size, factor in zip(shape, factors, strict=True)]
        if not any(missing):
            return tensor
        return tf.pad(tensor, [(0, count) for count in missing])

    def factor(self, dims: str) -> tuple[int, ...]:
        """Returns the number of parts that each dim is split into."""
        return self.partitioning.factor(dims)

    def over(self, dim: str) -> Annotator:
        """Returns the annotator for a function that is mapped over the leading dim `dim`.

        Its `locally` cannot be used.
        """
        return dataclasses.replace(self, mapped=dim)


def _text(axis: Axis | None) -> str:
    """Returns axes as in a table, or "no axis"."""
    return "+".join(names_of([axis])) or "no axis"
