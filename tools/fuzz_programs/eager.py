"""The oracle: TensorFlow executes a program eagerly on one CPU, without its annotations.

The program is executed exactly, and again with a little random noise in each intermediate result,
more than the rounding errors of a compiler. The effect of the noise is the difference that two
correct computations may have, so that a tie, a comparison or a cancellation is not a false alarm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tools.fuzz_programs.operators import images
from tools.fuzz_programs.program import FLOATS, Argument, Program, Record

# TensorFlow's exceptions for an operator without a kernel, or for shapes that do not fit.
ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, tf.errors.OpError)

_NUM_NOISY_RUNS = 3
_NOISE = {"float32": 1e-5, "bfloat16": 2.0**-8}
_ROUNDING = {"float32": 2e-5, "bfloat16": 2.0**-6}


class _WholeTensors:
    """Replaces lingvo_gshard, and an Annotator, where tensors are not partitioned."""

    class Partial:
        """The complete sum, in the place of a partial one."""

        def __init__(self, whole: tf.Tensor) -> None:
            self._whole = whole

        @classmethod
        def from_einsum(
            cls, partitioning: Any, equation: str, a: tf.Tensor, b: tf.Tensor, *, letter: str
        ) -> Any:
            """Stands for gshard.Partial.from_einsum."""
            del partitioning, letter
            return cls(tf.einsum(equation, a, b))

        def reduce(self, split: str | None = None) -> tf.Tensor:
            """Stands for gshard.Partial.reduce."""
            del split
            return self._whole

    def replicate(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stands for gshard.replicate."""
        return tensor

    def split(self, tensor: tf.Tensor, *_: Any) -> tf.Tensor:
        """Stands for gshard.split."""
        return tensor

    shard = split
    annotate = split

    def convolution(
        self,
        tensor: tf.Tensor,
        kernel: tf.Tensor,
        strides: Sequence[int],
        padding: str,
        dilations: Sequence[int],
    ) -> tf.Tensor:
        """Stands for gshard.convolution."""
        layout = images.LAYOUTS[len(strides)]
        return tf.nn.convolution(
            tensor, kernel, strides, padding, data_format=layout, dilations=dilations
        )

    def max_pool(
        self, tensor: tf.Tensor, window: Sequence[int], strides: Sequence[int], padding: str
    ) -> tf.Tensor:
        """Stands for gshard.max_pool."""
        layout = images.LAYOUTS[len(strides)]
        return tf.nn.pool(
            tensor, window, "MAX", strides=strides, padding=padding, data_format=layout
        )

    def locally(
        self,
        fn: Callable[..., tf.Tensor],
        arguments: Sequence[tuple[tf.Tensor, str]],
        dims: str,
    ) -> tf.Tensor:
        """Stands for Annotator.locally."""
        del dims
        return fn(*[tensor for tensor, _ in arguments])


def whole_namespace() -> dict[str, Any]:
    """Returns the names that expressions use where tensors are not partitioned."""
    whole = _WholeTensors()
    return {"tf": tf, "np": np, "gshard": whole, "annotator": whole, "partitioning": None}


def array(argument: Argument, seed: int) -> np.ndarray:
    """Returns the values of an argument, which depend on the seed, its name and its shape."""
    rng = np.random.default_rng([seed, *argument.name.encode()])
    if argument.dtype == "bool":
        return rng.random(argument.shape) < 0.5
    if argument.dtype == "int32":
        return rng.integers(0, argument.below, argument.shape, dtype=np.int32)
    numbers = rng.normal(0.1, 0.8, argument.shape).astype(np.float32)
    return numbers.astype(tf.as_dtype(argument.dtype).as_numpy_dtype)


def arrays(program: Program, seed: int) -> dict[str, np.ndarray]:
    """Returns the values of all arguments by name."""
    return {argument.name: array(argument, seed) for argument in program.arguments}


def execute(record: Record, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns a record's result, computed eagerly."""
    return tf.convert_to_tensor(eval(record.expression, {**whole_namespace(), **values}))


def compute(
    program: Program,
    tensors: Mapping[str, tf.Tensor],
    namespace: Mapping[str, Any],
    changed: Callable[[Record, tf.Tensor], tf.Tensor] = lambda record, tensor: tensor,
) -> dict[str, tf.Tensor]:
    """Returns the program's results and gradients, `g_NAME`, computed or traced.

    `changed` takes each record and its tensor, and returns the tensor for the next records.
    """
    values = {**namespace, **tensors}
    watched = [tensors[name] for name in program.gradients]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        for record in program.records:
            tensor = tf.convert_to_tensor(eval(record.expression, values))
            values[record.name] = changed(record, tensor)

    results = {name: values[name] for name in program.results}
    if watched:
        cotangents = program.cotangents
        gradients = tape.gradient(
            [values[name] for name in cotangents],
            watched,
            output_gradients=[tensors[f"d_{name}"] for name in cotangents],
            unconnected_gradients="zero",
        )
        for name, gradient in zip(program.gradients, gradients, strict=True):
            results[f"g_{name}"] = tf.convert_to_tensor(gradient)
    return results


@dataclasses.dataclass(frozen=True)
class Expected:
    """A result, and how far another correct computation may be from each element."""

    values: np.ndarray  # float64.
    tolerance: np.ndarray  # Infinite where the result is not compared.

    def differs(self, other: np.ndarray) -> np.ndarray:
        """Returns a mask of the elements at which another computation is too far from this one."""
        distance = np.abs(_float64(other) - self.values)
        return ~(distance <= self.tolerance) & np.isfinite(self.tolerance)


def expected(program: Program, seed: int) -> dict[str, Expected]:
    """Returns the results of a program with their tolerances.

    Raises one of ERRORS if TensorFlow cannot execute the program.
    """
    given = arrays(program, seed)
    first = _run(program, given, noise_seed=None)
    noisy = []
    for i in range(_NUM_NOISY_RUNS):
        noisy.append(_run(program, given, noise_seed=seed * _NUM_NOISY_RUNS + i))

    results = {}
    for name, tensor in first.items():
        runs = [_float64(run[name].numpy()) for run in noisy]
        results[name] = _expected(tensor, runs)
    return results


def _run(
    program: Program, given: Mapping[str, np.ndarray], noise_seed: int | None
) -> dict[str, tf.Tensor]:
    """Executes a program, with noise unless `noise_seed` is None."""
    tensors = {name: tf.constant(values) for name, values in given.items()}
    if noise_seed is None:
        return compute(program, tensors, whole_namespace())

    rng = np.random.default_rng(noise_seed)

    def noisy(tensor: tf.Tensor) -> tf.Tensor:
        if tensor.dtype.name not in FLOATS:
            return tensor
        factors = rng.normal(1.0, _NOISE[tensor.dtype.name], tensor.shape)
        return tensor * tf.constant(factors, tensor.dtype)

    for name in program.cotangents:
        tensors[f"d_{name}"] = noisy(tensors[f"d_{name}"])
    return compute(program, tensors, whole_namespace(), lambda _, tensor: noisy(tensor))


def _expected(tensor: tf.Tensor, noisy: Sequence[np.ndarray]) -> Expected:
    """Returns a result with its tolerance, computed from the runs with noise."""
    values = _float64(tensor.numpy())
    if not values.size:
        return Expected(values, values)

    runs = np.stack(noisy)
    is_finite = np.isfinite(values) & np.all(np.isfinite(runs), 0)
    values = np.where(is_finite, values, 0.0)
    spread = np.max(np.abs(np.where(is_finite, runs, 0.0) - values), 0)
    if tensor.dtype.name in FLOATS:
        sizes = np.abs(values)
        rounding = _ROUNDING[tensor.dtype.name] * (sizes + np.mean(sizes))
        tolerance = 8 * spread + 4 * np.median(spread) + rounding
    else:
        tolerance = np.where(spread > 0, np.inf, 0.0)
    return Expected(values, np.where(is_finite, tolerance, np.inf))


def _float64(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype(np.float64)
