"""Compares many partitioned operators, in one program, with the unpartitioned operators."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import executable, lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.program import Program
from xla_spmd.mesh import Mesh

# The dim that all partitions split; or the dim that two of them split, with copies on the others;
# or the dim that two split, and the dim that the others split.
Split = int | tuple[int] | tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Input:
    """An input: its shape, and its split, or None if it is replicated.

    With `below` it holds integers from 0 to below - 1, otherwise standard normal numbers.
    """

    shape: tuple[int, ...]
    split: Split = None
    below: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, its inputs, and its result's split.

    It is compared with `unpartitioned`, which defaults to the same operator unpartitioned. Without
    `has_gradient`, only values are compared.
    """

    fn: Callable[..., tf.Tensor]
    inputs: tuple[Input, ...]
    result_split: Split = 0
    unpartitioned: Callable[..., tf.Tensor] | None = None
    has_gradient: bool = True


def check(cases: Mapping[str, Case], num_partitions: int) -> executable.Executable:
    """Asserts that partitioned values and gradients equal TensorFlow's own kernels'."""
    compiled = compile_program(exported(cases, num_partitions))
    batch = arrays(cases)
    got = compiled(batch)
    for name, case in cases.items():
        want = _evaluate(case, [tf.constant(x) for x in batch[name].Flatten()], None)
        for (path, a), b in zip(got[name].FlattenItems(), want.Flatten(), strict=True):
            what = f"{name}: {path}, {num_partitions} partitions"
            assert np.abs(b).max() > 0, f"{what}: nothing to compare"
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4, err_msg=what)
    return compiled


def exported(cases: Mapping[str, Case], num_partitions: int) -> Program:
    """Returns one program of all cases."""
    return lowering.export(annotated(cases, num_partitions), flat(num_partitions))


def arrays(cases: Mapping[str, Case]) -> NestedMap:
    """Returns the inputs, the same every time: name.x0, name.x1 ..."""
    batch = NestedMap()
    for name, case in cases.items():
        batch[name] = NestedMap({f"x{i}": _array(x, i) for i, x in enumerate(case.inputs)})
    return batch


def flat(num_partitions: int) -> Partitioning:
    return Partitioning(Mesh.flat(num_partitions), ())


def _array(given: Input, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if given.below is not None:
        return rng.integers(0, given.below, given.shape).astype(np.int32)
    return rng.standard_normal(given.shape).astype(np.float32)


def annotated(cases: Mapping[str, Case], num_partitions: int) -> AnnotatedFn:
    """Returns all cases in one function."""
    # Arguments and results are replicated, so that any size may be split inside.
    specs = arrays(cases).Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "_" * x.ndim))

    def fn(batch: NestedMap) -> NestedMap:
        return NestedMap(
            {
                name: _evaluate(case, batch[name].Flatten(), num_partitions)
                for name, case in cases.items()
            }
        )

    return AnnotatedFn("cases", fn, ("batch",), (specs,))


def _evaluate(case: Case, inputs: list[tf.Tensor], num_partitions: int | None) -> NestedMap:
    """Returns the result, and the gradients of a weighted sum of it; None is unpartitioned."""

    def place(tensor: tf.Tensor, split: Split) -> tf.Tensor:
        if num_partitions is None:
            return tensor
        if split is None:
            return annotate.replicate(tensor)
        if isinstance(split, int):
            return annotate.split(tensor, split, num_partitions)
        two = min(2, num_partitions)
        mesh = Mesh(("x", "y"), (two, num_partitions // two))
        axes: list[str | None] = [None] * tensor.shape.rank
        for dim, axis in zip(split, mesh.axis_names, strict=False):
            axes[dim] = axis
        return annotate.mesh_split(tensor, mesh, axes)

    floats = [tensor for tensor in inputs if tensor.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        placed = [place(x, given.split) for x, given in zip(inputs, case.inputs, strict=True)]
        fn = case.unpartitioned if num_partitions is None and case.unpartitioned else case.fn
        y = place(fn(*placed), case.result_split)
        if not (y.dtype.is_floating and case.has_gradient):
            return NestedMap(y=y)
        weights = tf.cos(tf.reshape(tf.range(tf.size(y), dtype=tf.float32), tf.shape(y)))
        weighted = tf.reduce_sum(weights * y)
    return NestedMap(y=y, d=[tf.convert_to_tensor(d) for d in tape.gradient(weighted, floats)])
