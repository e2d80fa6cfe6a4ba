"""Helpers that build layers, give them random weights, and compile and compare functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from tests.spmd import functions
from xla_spmd.mesh import Mesh

# Four experts, each on two devices; B and G are split over all eight devices.
REPLICATED_EXPERTS = Partitioning.from_dict(
    Mesh(("r", "d"), (2, 4)), {"B": ("r", "d"), "G": ("r", "d"), "E": "d"}
)


class Unannotated:
    """An annotator for tests of a layer's arithmetic alone, which run eagerly."""

    stack = ""

    def in_stack(self, stack: str) -> Unannotated:
        """This one: no stack is split."""
        return self

    def annotate(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Checks the number of dims and returns the tensor."""
        assert len(tensor.shape) == len(dims), (tensor.shape, dims)
        return tensor

    def annotate_as(self, tensor: tf.Tensor, spec: TensorSpec) -> tf.Tensor:
        """Checks the number of the spec's dims and returns the tensor."""
        return self.annotate(tensor, spec.dims)

    def gradient_dims(self, dims: str) -> str:
        """The same dims: a gradient is whole."""
        return dims

    def locally(self, fn: Callable, arguments: list, dims: str) -> tf.Tensor:
        """Applies fn to the whole tensors, which are the only part."""
        return self.annotate(fn(*(self.annotate(*argument) for argument in arguments)), dims)

    def locally_all(self, fn: Callable, arguments: list, dims: list[str]) -> list[tf.Tensor]:
        """Applies fn to the whole tensors, for several results."""
        results = fn(*(self.annotate(*argument) for argument in arguments))
        return [self.annotate(result, own) for result, own in zip(results, dims, strict=True)]

    def factor(self, dims: str) -> tuple[int, ...]:
        """1 for each dim: the dims are whole."""
        return (1,) * len(dims)


def theta_specs(layer: BaseLayer) -> NestedMap:
    """The TensorSpecs of a layer's weights."""
    return layer.weight_specs.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims))


def random_theta(layer: BaseLayer, seed: int = 1) -> NestedMap:
    """Normal weights with the layer's own scale; constants are random as well."""
    rng = np.random.default_rng(seed)
    return layer.weight_specs.Transform(
        lambda w: (rng.standard_normal(w.shape) * min(w.scale or 0.5, 0.8)).astype("float32")
    )


def run_eagerly(fn: Callable[..., NestedMap], **args: NestedMap) -> NestedMap:
    """Applies `fn`, whose layers are unannotated, to named trees of arrays without compilation.

    This is an oracle for partitioned programs that shares neither XLA nor the annotations with
    them.
    """
    tensors = {name: tree.Transform(tf.constant) for name, tree in args.items()}
    # The gradient of a gather is not a tensor.
    return fn(**tensors).Transform(lambda x: np.asarray(tf.convert_to_tensor(x)))


def compile_fn(
    fn: Callable[..., NestedMap],
    partitions: int | Partitioning,
    result_dims: dict[str, str] | None = None,
    **args: NestedMap,
) -> Executable:
    """Compiles `fn` of the named trees of specs; `export_fn` describes the arguments."""
    return compile_program(export_fn(fn, partitions, result_dims, **args))


def export_fn(
    fn: Callable[..., NestedMap],
    partitions: int | Partitioning,
    result_dims: dict[str, str] | None = None,
    **args: NestedMap,
) -> Program:
    """Returns the program of `fn` of the named trees of specs.

    Args:
      fn: the function.
      partitions: the partitioning, or the number of devices for the paper's table.
      result_dims: the dims of results by path.
      **args: trees of TensorSpecs by the names of fn's arguments.
    """
    if isinstance(partitions, int):
        partitions = functions.partitioning(partitions)
    annotated = AnnotatedFn("f", fn, tuple(args), tuple(args.values()), result_dims or {})
    return lowering.export(annotated, partitions)


def dims_of(**trees: NestedMap) -> dict[str, str]:
    """The dims of results that are named trees of specs, by path."""
    return {path: spec.dims for path, spec in NestedMap(trees).FlattenItems()}


def assert_close(got: NestedMap, want: NestedMap, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Fails unless both trees have the same paths and close arrays."""
    for (path, a), (expected, b) in zip(got.FlattenItems(), want.FlattenItems(), strict=True):
        assert path == expected
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=path)


def routed_output(theta, logits_NE, x_BLM, valid_BL, group_size, capacity):
    """Algorithms 1 and 2 in NumPy, token by token, given the logits; all ask for both experts."""
    x_NM = x_BLM.reshape(-1, x_BLM.shape[-1]).astype(np.float64)
    y_NM = np.zeros(x_NM.shape)
    valid_N = valid_BL.reshape(-1)
    best_N2 = np.argsort(-logits_NE, -1, kind="stable")[:, :2]
    for start in range(0, len(x_NM), group_size):
        taken_E = [0] * logits_NE.shape[-1]
        for choice in (0, 1):
            for n in range(start, start + group_size):
                if not valid_N[n]:
                    continue
                e = best_N2[n, choice]
                taken_E[e] += 1
                if taken_E[e] <= capacity:
                    both = np.exp(logits_NE[n, best_N2[n]])
                    hidden = np.maximum(x_NM[n] @ theta.wi[e], 0)
                    y_NM[n] += both[choice] / both.sum() * (hidden @ theta.wo[e])
    return y_NM.reshape(x_BLM.shape)
