"""Measures the costs of uneven sizes, halos and repairs, each beside a program without them.

    python -m bench.uneven [--rows=16,256] [--rounds=3] [--num_partitions=8]

Section 3.3.3 of the paper calls the cost of masks and halos negligible. Each row of the table is a
pair of programs with the same arithmetic:

    uneven   rows that the devices do not divide (1 and 3 fewer) beside rows that they divide
    halo     windows along a split dim beside windows along a whole dim
    repair   a program with the repairs of xla_spmd/repairs/uneven_parts.py beside the same program
             without them, in which XLA computes wrong values

The two programs of a pair run in turns. The table has the ratio of their shortest times in each
round, the bytes that a device receives from collectives, and the instructions of its program.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import numpy as np
import tensorflow as tf
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable, compile_program
from xla_spmd.files import table
from xla_spmd.hlo import collectives
from xla_spmd.mesh import Mesh
from xla_spmd.repairs import uneven_parts

_ROWS = flags.DEFINE_list("rows", ["16", "256"], "Rows that the devices divide.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Ratios of each pair.", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 15, "Calls of each program in a round.", lower_bound=1)
cli.define_devices()
flags.adopt_module_key_flags(cli)

_DEVICES = 8  # The default.
_WARM_UP = 2  # Calls that are not timed.
_WIDTH = 256
_FEWER = (1, 3)
# Shapes are [rows, columns, channels] for images, with a batch of 1 in front.
_CHANNELS = 16
_WINDOW = 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """A compiled program with its arguments, its collectives' bytes and its instructions."""

    executable: Executable
    batch: NestedMap
    collective_bytes: int
    instructions: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """A program beside one without an uneven size, a halo or a repair."""

    kind: str
    name: str
    plain: Callable[[], Measured]
    costly: Callable[[], Measured]


def main() -> None:
    if not _ROWS.value or not all(text.isdecimal() and int(text) for text in _ROWS.value):
        raise ValueError(f"--rows={','.join(_ROWS.value)}: expected whole numbers from 1.")
    num_devices = flags.FLAGS.num_partitions or _DEVICES
    for text in _ROWS.value:
        if int(text) % num_devices or int(text) < 2 * num_devices:
            raise ValueError(
                f"--rows={text}: expected a multiple of the {num_devices} devices, with at least 2 "
                "rows on each."
            )

    with cli.joined(num_devices):
        _, description = cli.start_devices("", num_devices)
        print(description)
        rows = [
            ("", "program", "time / time without", "bytes", "without", "instructions", "without")
        ]
        for text in _ROWS.value:
            for pair in pairs(int(text), num_devices):
                rows.append(_row(pair))
        print(table.text(rows))


def _row(pair: Pair) -> tuple[str, ...]:
    plain = pair.plain()
    costly = pair.costly()
    times = ", ".join(
        f"{ratio:.2f}" for ratio in ratios(plain, costly, _ROUNDS.value, _CALLS.value)
    )
    counts = [costly.collective_bytes, plain.collective_bytes]
    counts += [costly.instructions, plain.instructions]
    return (pair.kind, pair.name, times, *map(str, counts))


def ratios(plain: Measured, costly: Measured, rounds: int, calls: int) -> list[float]:
    """Returns the ratio of the two programs' shortest times in each round; they run in turns.

    Other work on the machine only makes a call longer.
    """
    found = []
    for _ in range(rounds):
        plain_secs = []
        costly_secs = []
        for _ in range(_WARM_UP + calls):
            plain_secs.append(_call_secs(plain))
            costly_secs.append(_call_secs(costly))
        found.append(min(costly_secs[_WARM_UP:]) / min(plain_secs[_WARM_UP:]))
    return found


def _call_secs(measured: Measured) -> float:
    began = time.perf_counter()
    jax.block_until_ready(measured.executable(measured.batch).Flatten())
    return time.perf_counter() - began


# --- The programs ---


def pairs(rows: int, num_devices: int) -> Iterator[Pair]:
    """Yields the pairs for a number of rows that the devices divide."""
    measure = _Measure(num_devices)
    for name, (fn, shape) in _UNEVEN.items():
        for fewer in _FEWER:
            yield Pair(
                "uneven",
                f"{name}, {rows - fewer} rows beside {rows}",
                lambda fn=fn, shape=shape: measure(fn, (rows, *shape)),
                lambda fn=fn, shape=shape, fewer=fewer: measure(fn, (rows - fewer, *shape)),
            )

    # The image is square, so that both windows do the same work.
    for name, fn in _HALO.items():
        shape = (rows, rows, _CHANNELS)
        yield Pair(
            "halo",
            f"{name}, {rows} rows",
            lambda fn=fn, shape=shape: measure(lambda x: fn(x, 1), shape),
            lambda fn=fn, shape=shape: measure(lambda x: fn(x, 0), shape),
        )

    for name, fn in _REPAIRED.items():
        shape = (rows - 3, _WIDTH)
        yield Pair(
            "repair",
            f"{name}, {rows - 3} rows",
            lambda fn=fn, shape=shape: measure(fn, shape, is_repaired=False),
            lambda fn=fn, shape=shape: measure(fn, shape),
        )


class _Measure:
    """Compiles functions of one tensor, whose rows the devices split, with their gradients."""

    def __init__(self, num_devices: int) -> None:
        self._parts = Partitioning.from_dict(Mesh.flat(num_devices), {"B": "d"})

    def __call__(
        self,
        fn: Callable[[tf.Tensor], tf.Tensor],
        shape: tuple[int, ...],
        is_repaired: bool = True,
    ) -> Measured:
        """Returns the program of a function, and of the gradient of its result's sum of sines."""
        num_devices = self._parts.mesh.num_partitions

        def with_gradient(batch: NestedMap) -> NestedMap:
            with tf.GradientTape() as tape:
                tape.watch(batch.x)
                y = annotate.split(fn(tf.exp(batch.x)), 0, num_devices)
                loss = tf.reduce_sum(tf.sin(y))
            return NestedMap(y=loss, d=tape.gradient(loss, batch.x))

        dims = "B" + "_" * (len(shape) - 1)
        specs = NestedMap(x=TensorSpec(shape, "float32", dims))
        annotated = AnnotatedFn("uneven", with_gradient, ("batch",), (specs,), {"d": dims})
        if is_repaired:
            program = lowering.export(annotated, self._parts)
        else:
            with mock.patch.object(uneven_parts, "repair", autospec=True):
                program = lowering.export(annotated, self._parts)

        executable = compile_program(program)
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        found = collectives.find(executable.module)
        return Measured(
            executable,
            executable.place("batch", NestedMap(x=x)),
            sum(collective.result_bytes * collective.times for collective in found),
            sum(1 for _ in executable.module.instructions()),
        )


def _dense(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(x @ tf.cos(tf.reshape(tf.range(_WIDTH**2, dtype=x.dtype), [_WIDTH, _WIDTH])))


def _convolution(x: tf.Tensor, dim: int) -> tf.Tensor:
    window = [1, 1]
    window[dim] = _WINDOW
    shape = [*window, _CHANNELS, _CHANNELS]
    kernel = tf.cos(tf.reshape(tf.range(_WINDOW * _CHANNELS**2, dtype=x.dtype), shape))
    return tf.nn.conv2d(x[None], kernel, 1, "SAME")[0]


def _cut(x: tf.Tensor, dim: int) -> tf.Tensor:
    """Cuts off rows, or columns, so that 8 divides their number."""
    begin = [0, 0, 0]
    begin[dim] = 4
    size = x.shape.as_list()
    size[dim] -= 8
    return tf.slice(x, begin, size)


# The functions of a device's own rows, and the functions of all rows.
_UNEVEN: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], tuple[int, ...]]] = {
    "dense layer": (_dense, (_WIDTH,)),
    "softmax over rows": (lambda x: tf.nn.softmax(x, axis=0), (_WIDTH,)),
    "convolution": (lambda x: _convolution(x, 0), (32, _CHANNELS)),
}
_HALO: dict[str, Callable[[tf.Tensor, int], tf.Tensor]] = {
    "convolution": _convolution,
    "slice": _cut,
}
_REPAIRED: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "concat": lambda x: tf.concat([x, tf.sin(x)], 0),
    "reverse": lambda x: tf.reverse(x, [0]),
    "roll": lambda x: tf.roll(x, 1, 0),
    "gather": lambda x: tf.gather(x, tf.range(x.shape[0])[::-1]),
    "segment sum": lambda x: tf.math.unsorted_segment_sum(x, tf.range(x.shape[0]), x.shape[0]),
}


if __name__ == "__main__":
    cli.run("uneven", main)
