"""Annotator: what a layer knows of the partitioning. Layers name dims, and the table decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.sharding import annotate, manual
from lingvo_gshard.sharding.layout import Partitioning, check_named_once
from lingvo_gshard.sharding.mesh import Axis

# The attribute of an annotation's operation that keeps its letters, for readers of the graph.
DIMS_ATTRIBUTE = "_dims"


@dataclasses.dataclass(frozen=True)
class Annotator:
    """Applies a partitioning to the tensors of a traced function.

    `mapped` is the dim over which tf.vectorized_map maps the function, or empty. The map hands each
    annotation on to the tensor with this leading dim, so it must be that tensor's.
    """

    partitioning: Partitioning
    # Whether a weight's gradient is summed only where the weight is updated.
    scatter_gradients: bool = True
    mapped: str = ""

    def annotate(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Annotates `tensor` of rank len(dims) with the sharding that the table gives its dims.

        Raises ValueError outside a traced function, and for another rank or a letter twice.
        """
        annotate.check_rank("annotate", tensor, len(dims), f"dims {dims!r} name {len(dims)}")
        dims = self.mapped + dims
        check_named_once(f"annotate: {tensor.name} of shape {tensor.shape}", dims)
        return self._annotated(tensor, dims, self.partitioning.axes(dims))

    def annotate_outside(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Annotates a tensor that each application of a mapped function reads whole or in part.

        It is outside the map, and replicated over the axes of the mapped dim.
        """
        axes = self.partitioning.axes(self.mapped + dims)[len(self.mapped) :]
        return self._annotated(tensor, dims, axes)

    def _annotated(self, tensor: tf.Tensor, dims: str, axes: tuple[Axis | None, ...]) -> tf.Tensor:
        sharding = annotate.mesh_sharding(self.partitioning.mesh.grid, axes)
        annotated = sharding.apply_to_tensor(tensor, use_sharding_op=True)
        annotated.op._set_attr(DIMS_ATTRIBUTE, tf.compat.v1.AttrValue(s=dims.encode()))
        return annotated

    def gradient_dims(self, dims: str) -> str:
        """The dims of the gradient of a weight with these dims."""
        return dims.lower() if self.scatter_gradients else dims

    def locally(
        self,
        fn: Callable[..., tf.Tensor],
        arguments: Sequence[tuple[tf.Tensor, str]],
        dims: str,
    ) -> tf.Tensor:
        """Applies `fn` to each partition's own parts of the arguments, with no communication.

        `arguments` are whole tensors and their dims, `dims` the result's. See manual.py for `fn`.
        """
        mesh, axes = self.partitioning.mesh.grid, self.partitioning.axes
        parts = [manual.auto_to_manual_spmd_partition(x, mesh, axes(d)) for x, d in arguments]
        return manual.manual_to_auto_spmd_partition(fn(*parts), mesh, axes(dims))

    def factor(self, dims: str) -> tuple[int, ...]:
        """How many ways each dim is split."""
        return self.partitioning.factor(dims)

    def over(self, dim: str) -> Annotator:
        """The annotator inside a map over the leading dim `dim`; it can't be used for `locally`."""
        return dataclasses.replace(self, mapped=dim)
