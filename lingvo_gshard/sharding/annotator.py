"""Annotator: what a layer knows of the partitioning.

Layers name a tensor's dims by letters; the table of the experiment says how each is split. The
letters are listed in sharding/layout.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.core import tf_private
from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.sharding import annotate, manual
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec, check_named_once
from lingvo_gshard.sharding.mesh import Axis

# The attribute of an annotation's operation that keeps its letters, for readers of the graph.
DIMS_ATTRIBUTE = "_dims"


@dataclasses.dataclass(frozen=True)
class Annotator:
    """Applies a partitioning to the tensors of a traced function.

    `mapped` is the letter of the dim over which tf.vectorized_map maps the function, or empty. The
    map moves each annotation to the tensor with this leading dim, so annotations inside the map
    include it.
    """

    partitioning: Partitioning
    # Whether a weight's gradient is summed only where the weight is updated.
    scatter_gradients: bool = True
    mapped: str = ""
    stack: str = ""  # Whose rows the partitioning has; empty for those of the whole model.

    def annotate(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Annotates `tensor` of rank len(dims) with the sharding that the table gives its dims.

        Raises ValueError outside a traced function, for another rank, and for a repeated letter.
        """
        annotate.check_rank("annotate", tensor, len(dims), f"dims {dims!r} name {len(dims)}")
        dims = self.mapped + dims
        check_named_once(f"annotate: {tensor.name} of shape {tensor.shape}", dims)
        return self._annotated(tensor, dims, self.partitioning.axes(dims))

    def annotate_as(self, tensor: tf.Tensor, spec: TensorSpec | WeightSpec) -> tf.Tensor:
        """Annotates `tensor` by the dims of its spec and the table of the spec's stack."""
        return self.in_stack(spec.stack).annotate(tensor, spec.dims)

    def in_stack(self, stack: str) -> Annotator:
        """Returns the annotator of a stack's layers; this one if the table has no rows for it."""
        if stack not in self.partitioning.stacks:
            return self
        return dataclasses.replace(
            self, partitioning=self.partitioning.in_stack(stack), stack=stack
        )

    def annotate_outside(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Annotates a tensor outside the map, which every application of the function may read.

        It has no mapped dim of its own, but is whole along the mesh axes of the mapped dim.
        """
        # As `annotate` would split it inside the map: the mapped dim takes its axes first.
        axes = self.partitioning.axes(self.mapped + dims)[len(self.mapped) :]
        return self._annotated(tensor, dims, axes)

    def _annotated(self, tensor: tf.Tensor, dims: str, axes: tuple[Axis | None, ...]) -> tf.Tensor:
        # A program's annotations count partitions in the order of the grid, not devices.
        sharding = annotate.mesh_sharding(self.partitioning.mesh.grid, axes)
        annotated = sharding.apply_to_tensor(tensor, use_sharding_op=True)
        tf_private.set_text_attribute(annotated.op, DIMS_ATTRIBUTE, dims)
        return annotated

    def gradient_dims(self, dims: str) -> str:
        """Returns the dims of the gradient of a weight with these dims.

        With `scatter_gradients` they are those in the optimizer, so that each partition sums only
        the part of the gradient that it updates.
        """
        return dims.lower() if self.scatter_gradients else dims

    def locally(
        self,
        fn: Callable[..., tf.Tensor],
        arguments: Sequence[tuple[tf.Tensor, str]],
        dims: str,
    ) -> tf.Tensor:
        """Applies `fn` to each partition's own parts of the arguments, with no communication.

        `arguments` are whole tensors with their dims; `dims` are those of the whole result. See
        manual.py for what `fn` may do. If the mesh does not divide a dim, the last parts end with
        zeros, and what `fn` makes of those is cut off its result.
        """
        (whole,) = self.locally_all(lambda *parts: [fn(*parts)], arguments, [dims])
        return whole

    def locally_all(
        self,
        fn: Callable[..., Sequence[tf.Tensor]],
        arguments: Sequence[tuple[tf.Tensor, str]],
        dims: Sequence[str],
    ) -> list[tf.Tensor]:
        """As `locally`, for a function of several results: `dims` has those of each."""
        mesh = self.partitioning.mesh.grid
        logical_sizes: dict[str, int] = {}  # By letter, of the dims that are padded.
        parts = []
        for tensor, argument_dims in arguments:
            even = self._padded(tensor, argument_dims)
            sizes = zip(argument_dims, tensor.shape, even.shape, strict=True)
            logical_sizes |= {letter: size for letter, size, end in sizes if size != end}
            axes = self.partitioning.axes(argument_dims)
            parts.append(manual.auto_to_manual_spmd_partition(even, mesh, axes))

        wholes = []
        for result, result_dims in zip(fn(*parts), dims, strict=True):
            axes = self.partitioning.axes(result_dims)
            whole = manual.manual_to_auto_spmd_partition(result, mesh, axes)
            if logical_sizes:
                named = zip(result_dims, whole.shape, strict=True)
                ends = [logical_sizes.get(letter, size) for letter, size in named]
                whole = tf.slice(whole, [0] * len(ends), ends)
            wholes.append(whole)
        return wholes

    def _padded(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Returns `tensor` with zeros at the ends of the dims that the mesh does not divide."""
        shape = annotate.static_shape(f"locally: {tensor.name}", tensor.shape)
        factors = self.partitioning.factor(dims)
        missing = [-size % factor for size, factor in zip(shape, factors, strict=True)]
        if not any(missing):
            return tensor
        return tf.pad(tensor, [(0, count) for count in missing])

    def factor(self, dims: str) -> tuple[int, ...]:
        """Returns how many ways each dim is split."""
        return self.partitioning.factor(dims)

    def over(self, dim: str) -> Annotator:
        """Returns the annotator for a function that is mapped over the leading dim `dim`.

        Its `locally` can't be used.
        """
        return dataclasses.replace(self, mapped=dim)
