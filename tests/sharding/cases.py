"""Operators with split inputs, many in one program, beside the same operators unpartitioned."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import executable, lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program

# Along two, the first is split two ways.
Split = int | tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Input:
    """An input: its shape, and the dimension it is split along, or two, None: replicated.

    With `below` it holds integers from 0 to below - 1, else standard normal numbers.
    """

    shape: tuple[int, ...]
    split: Split = None
    below: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, its inputs, and what its result is split along.

    It is compared with `unpartitioned` where that is given, else with itself unpartitioned.
    """

    fn: Callable[..., tf.Tensor]
    inputs: tuple[Input, ...]
    result_split: Split = 0
    unpartitioned: Callable[..., tf.Tensor] | None = None


def check(cases: Mapping[str, Case], num_partitions: int) -> executable.Executable:
    """Asserts that partitioned values and gradients equal TensorFlow's own kernels'."""
    batch = NestedMap(
        {
            name: NestedMap({f"x{i}": _array(x, i) for i, x in enumerate(case.inputs)})
            for name, case in cases.items()
        }
    )
    compiled = compile_program(
        lowering.export(_fn(cases, batch, num_partitions), _flat(num_partitions))
    )
    got = compiled(batch)
    for name, case in cases.items():
        want = _evaluate(case, [tf.constant(x) for x in batch[name].Flatten()], None)
        for (path, a), b in zip(got[name].FlattenItems(), want.Flatten(), strict=True):
            what = f"{name}: {path}, {num_partitions} partitions"
            assert np.abs(b).max() > 0, f"{what}: nothing to compare"
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4, err_msg=what)
    return compiled


def _flat(num_partitions: int) -> Partitioning:
    return Partitioning(Mesh.flat(num_partitions), ())


def _array(given: Input, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if given.below is not None:
        return rng.integers(0, given.below, given.shape).astype(np.int32)
    return rng.standard_normal(given.shape).astype(np.float32)


def _fn(cases: Mapping[str, Case], batch: NestedMap, num_partitions: int) -> AnnotatedFn:
    # Arguments and results are replicated, so that any size may be split inside.
    specs = batch.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "_" * x.ndim))

    def fn(batch: NestedMap) -> NestedMap:
        return NestedMap(
            {
                name: _evaluate(case, batch[name].Flatten(), num_partitions)
                for name, case in cases.items()
            }
        )

    return AnnotatedFn("cases", fn, ("batch",), (specs,))


def _evaluate(case: Case, inputs: list[tf.Tensor], num_partitions: int | None) -> NestedMap:
    """The result, and the gradients of a weighted sum of it; unpartitioned where None."""

    def place(tensor: tf.Tensor, split: Split) -> tf.Tensor:
        if num_partitions is None:
            return tensor
        if split is None:
            return annotate.replicate(tensor)
        if isinstance(split, int):
            return annotate.split(tensor, split, num_partitions)
        grid = [1] * tensor.shape.rank
        grid[split[0]], grid[split[1]] = min(2, num_partitions), max(1, num_partitions // 2)
        return annotate.shard(tensor, np.arange(num_partitions).reshape(grid))

    floats = [tensor for tensor in inputs if tensor.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        placed = [place(x, given.split) for x, given in zip(inputs, case.inputs, strict=True)]
        fn = case.unpartitioned if num_partitions is None and case.unpartitioned else case.fn
        y = place(fn(*placed), case.result_split)
        if not y.dtype.is_floating:
            return NestedMap(y=y)
        weights = tf.cos(tf.reshape(tf.range(tf.size(y), dtype=tf.float32), tf.shape(y)))
        weighted = tf.reduce_sum(weights * y)
    return NestedMap(y=y, d=[tf.convert_to_tensor(d) for d in tape.gradient(weighted, floats)])
