"""Layers built, given random weights, and compiled for a number of partitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable, compile_program
from tests.spmd import functions


class Unannotated:
    """An annotator for tests of a layer's arithmetic alone, which then runs eagerly."""

    def annotate(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """The tensor itself, if the dims are as many as its own."""
        assert len(tensor.shape) == len(dims), (tensor.shape, dims)
        return tensor

    def locally(self, fn: Callable, arguments: list, dims: str) -> tf.Tensor:
        """All parts are one."""
        return self.annotate(fn(*(self.annotate(*argument) for argument in arguments)), dims)

    def factor(self, dims: str) -> tuple[int, ...]:
        """No dim is split."""
        return (1,) * len(dims)


def theta_specs(layer: BaseLayer) -> NestedMap:
    """The TensorSpecs of a layer's weights."""
    return layer.weight_specs.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims))


def random_theta(layer: BaseLayer, seed: int = 1) -> NestedMap:
    """Normal weights, scaled as the layer's own would be; constants are moved off 0 and 1."""
    rng = np.random.default_rng(seed)
    return layer.weight_specs.Transform(
        lambda w: (rng.standard_normal(w.shape) * min(w.scale or 0.5, 0.8)).astype("float32")
    )


def compile_fn(
    fn: Callable[..., NestedMap],
    num_partitions: int,
    result_dims: dict[str, str] | None = None,
    **args: NestedMap,
) -> Executable:
    """Compiles `fn` of the named trees of specs for the paper's table on a number of devices."""
    annotated = AnnotatedFn("f", fn, tuple(args), tuple(args.values()), result_dims or {})
    return compile_program(lowering.export(annotated, functions.partitioning(num_partitions)))
