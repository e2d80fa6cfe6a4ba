"""Trip counts, from what a program itself determines."""

import jax
import jax.numpy as jnp
import pytest
import tensorflow as tf
from jax import lax

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import trip_counts
from lingvo_gshard.hlo.hlo_module import Module
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.hlo import programs
from tests.spmd import functions

_N = 10


def _loop(step, condition, start):
    """A loop over (counter i, bound n = 10, array x): what it does to i, and while what holds.

    `start` is None for one that only a call of the program gives.
    """

    def fn(x, given):
        def body(state):
            i, n, x = state
            return step(i, n), n, 2 * x

        first = given if start is None else jnp.int32(start)
        return lax.while_loop(lambda state: condition(*state), body, (first, jnp.int32(_N), x))

    return programs.lowered(fn, jnp.ones(4), jnp.int32(0))


def _next(i, _):
    return i + 1


def _until_n(i, n, _):
    return i < n


@pytest.mark.parametrize(
    ("step", "condition", "start", "trips"),
    [
        (_next, _until_n, 0, 10),
        (_next, _until_n, -3, 13),
        (_next, _until_n, 10, 0),
        (_next, _until_n, None, None),
        (lambda i, n: n * n, _until_n, 0, 1),
        (lambda i, n: i - 1, lambda i, n, x: i > 5, 9, 4),
        (_next, lambda i, n, x: i != 5, 0, 5),
        # The smaller of two bounds.
        (_next, lambda i, n, x: (i < n) & (i <= 5), 0, 6),
        # A bound, and a flag that depends on the data and may end the loop before it.
        (_next, lambda i, n, x: (i < n) & (x[0] > 0), 0, 10),
        # The data alone.
        (_next, lambda i, n, x: x[0] > 0, 0, None),
        (lambda i, n: i, lambda i, n, x: x[0] > 0, 0, None),
        (_next, lambda i, n, x: (i < n) & (x[0] > 0), 12, 0),
        (lambda i, n: jnp.where(i > 1, n, 1), _until_n, 2, 1),
        (_next, lambda i, n, x: ~(i >= 7), 0, 7),
        # A branch without operands.
        (lambda i, n: i + lax.cond(i > 3, lambda: 1, lambda: 2), _until_n, 0, None),
        # Endless, and past what a counter can hold.
        (lambda i, n: jnp.maximum(i, i), _until_n, 0, None),
        (lambda i, n: i + i, lambda i, n, x: i > 5, 6, None),
    ],
)
def test_what_decides_the_end(monkeypatch, step, condition, start, trips):
    monkeypatch.setattr(trip_counts, "_MOST_TRIPS", 50)
    module = _loop(step, condition, start)
    runs = trip_counts.count(module)
    (loop,) = programs.every(module, "while")
    assert runs.trip_counts == {loop.name: trips}
    body, condition = loop.called
    assert runs.times[module.entry] == 1
    counted = 1 if trips is None else trips
    assert runs.times[body] == counted
    assert runs.times[condition] == counted + 1


@pytest.mark.parametrize(("start", "trips"), [(0, 10), (-1, None)])
def test_a_loop_is_run_no_longer_than_the_limit(monkeypatch, start, trips):
    monkeypatch.setattr(trip_counts, "_MOST_TRIPS", 10)
    runs = trip_counts.count(_loop(_next, _until_n, start))
    assert list(runs.trip_counts.values()) == [trips]


def test_a_noted_trip_count_needs_no_run():
    body, condition = (programs.computation(name, _unknown()) for name in ("body", "condition"))
    notes = b'{"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    loop = programs.instruction("while", _unknown(), called=(body, condition), backend_config=notes)
    entry = programs.computation("main", loop)
    runs = trip_counts.count(Module((body, condition, entry), entry, 1))
    assert runs.times == {entry: 1, body: 7, condition: 8}


def _unknown():
    return programs.instruction("custom-call")


@jax.jit  # A fusion.
def _plus_two(i):
    return i + 2


def _count_to(bound):
    """Counts in twos from 0 to `bound`."""
    return lax.while_loop(
        lambda state: state[0] < state[1], lambda state: (_plus_two(state[0]), state[1]), (0, bound)
    )[0]


def _nested(changes):
    """Three times a loop to 7, or to the counter, and then one to the outer loop's result."""

    def fn():
        def body(state):
            i, seven, _ = state
            return i + 1, seven, _count_to(i if changes else seven)

        outer = lax.while_loop(lambda state: state[0] < 3, body, (0, 7, 0))
        return _count_to(outer[0]), outer[2]

    return programs.lowered(fn)


def test_loops_within_loops_and_a_bound_that_a_loop_has_made():
    module = _nested(changes=False)
    runs = trip_counts.count(module)
    assert list(runs.trip_counts.values()) == [3, 4, 2]
    times = {}
    for fusion in programs.every(module, "fusion"):
        times[fusion.called[0]] = runs.times[fusion.called[0]]
    assert sum(times.values()) == 3 * 4 + 2


def test_a_bound_that_changes_from_trip_to_trip_is_unknown():
    runs = trip_counts.count(_nested(changes=True))
    assert list(runs.trip_counts.values()) == [3, None, 2]


def _layers(state: NestedMap, count: int, **loop) -> tf.Tensor:
    def body(i, x_BM):
        return i + 1, tf.tanh(x_BM @ state.w_LMM[i])

    return tf.while_loop(lambda i, _: i < count, body, [tf.constant(0), state.x_BM], **loop)[1]


def _forward(state: NestedMap) -> NestedMap:
    return NestedMap(y=_layers(state, 6, maximum_iterations=6))


def _shortened(state: NestedMap) -> NestedMap:
    return NestedMap(y=_layers(state, 6, maximum_iterations=4))


def _gradient(state: NestedMap) -> NestedMap:
    with tf.GradientTape() as tape:
        tape.watch(state.w_LMM)
        loss = tf.reduce_sum(_layers(state, 6, maximum_iterations=6) ** 2)
    return NestedMap(d=tape.gradient(loss, state.w_LMM))


def _early(state: NestedMap) -> NestedMap:
    def body(i, x_BM):
        return i + 1, tf.tanh(x_BM @ state.w_LMM[i])

    def condition(i, x_BM):
        return tf.logical_and(i < 6, tf.reduce_sum(x_BM) < 1.0)

    return NestedMap(y=tf.while_loop(condition, body, [tf.constant(0), state.x_BM])[1])


@pytest.mark.parametrize(
    ("fn", "trips"),
    [(_forward, [6]), (_shortened, [4]), (_gradient, [6, 6]), (_early, [6])],
)
def test_compiled_loops(fn, trips):
    args = NestedMap(
        w_LMM=functions.f32((6, 5, 5), "___"), x_BM=TensorSpec((8, 5), "float32", "B_")
    )
    annotated = AnnotatedFn("loops", fn, ("state",), (args,))
    report = compile_program(lowering.export(annotated, functions.partitioning(2))).report()
    assert list(report.loops.values()) == trips


@pytest.mark.parametrize("name", ["tpu_step", "gpu_step"])
def test_the_layers_of_kept_programs(name):
    """Encoder and decoder, forward and backward: six layers in blocks of two."""
    runs = trip_counts.count(programs.kept(name))
    assert list(runs.trip_counts.values()) == [3, 3, 3, 3]
