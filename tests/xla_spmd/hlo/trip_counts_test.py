"""Trip counts that a program itself determines."""

import jax
import jax.numpy as jnp
import pytest
import tensorflow as tf
from jax import lax

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from tests.xla_spmd.hlo import programs
from xla_spmd.hlo import trip_counts
from xla_spmd.hlo.hlo_module import Module

_N = 10


def _loop(step, condition, start):
    """Returns a loop over (counter i, bound n = 10, array x), given i's step and the condition.

    If `start` is None, only a call of the program gives the start.
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
        (_next, _until_n, None, None),
        (lambda i, n: n * n, _until_n, 0, 1),
        (lambda i, n: i - 1, lambda i, n, x: i > 5, 9, 4),
        (_next, lambda i, n, x: i != 5, 0, 5),
        # The smaller of two bounds counts.
        (_next, lambda i, n, x: (i < n) & (i <= 5), 0, 6),
        # A bound, and a flag that depends on the data and may end the loop earlier.
        (_next, lambda i, n, x: (i < n) & (x[0] > 0), 0, 10),
        # Only the data decide.
        (_next, lambda i, n, x: x[0] > 0, 0, None),
        (lambda i, n: i, lambda i, n, x: x[0] > 0, 0, None),
        (_next, lambda i, n, x: (i < n) & (x[0] > 0), 12, 0),
        (lambda i, n: jnp.where(i > 1, n, 1), _until_n, 2, 1),
        # The counter decides the branch: in twos to 4, then in ones.
        (lambda i, n: i + lax.cond(i > 3, lambda: 1, lambda: 2), _until_n, 0, 8),
        # An endless loop, and an overflow of the counter: 6 * 2^29 is negative.
        (lambda i, n: jnp.maximum(i, i), _until_n, 0, None),
        (lambda i, n: i + i, lambda i, n, x: i > 5, 6, 29),
    ],
)
def test_trip_counts_of_loops(monkeypatch, step, condition, start, trips):
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


def _counter(dtype, shape=()):
    return jnp.zeros(shape, dtype)


def _second_plus_two(i):
    return lax.dynamic_update_slice(i, i[1:] + 2, (1,))


@pytest.mark.parametrize(
    ("start", "step", "condition"),
    [
        (_counter(jnp.int8), lambda i: i + jnp.int8(1), lambda i: i < 100),
        # int8 wraps around from 127 to -128.
        (_counter(jnp.int8), lambda i: i + jnp.int8(5), lambda i: i >= 0),
        (_counter(jnp.float32), lambda i: i + 0.1, lambda i: i < 1.0),
        # The counter is in an array, beside another number.
        (_counter(jnp.int32, (2,)), lambda i: i + jnp.array([0, 2]), lambda i: i[1] < 9),
        (_counter(jnp.int32, (2,)), _second_plus_two, lambda i: i[1] < 9),
        (jnp.int32(1000), lambda i: i // 3, lambda i: i > 0),
        (jnp.uint32(1 << 31), lambda i: i >> jnp.uint32(3), lambda i: i > 0),
        (jnp.int32(3), lambda i: i << 2, lambda i: i % 7 != 5),
        (jnp.int32(0), lambda i: i + 1, lambda i: jnp.int8(i) < 17),
    ],
)
def test_counters_of_any_dtype_and_form_have_as_many_trips_as_jax_runs(start, step, condition):
    def fn():
        """Counts the trips in a separate number, which decides nothing."""
        return lax.while_loop(
            lambda state: condition(state[0]),
            lambda state: (step(state[0]), state[1] + 1),
            (jnp.asarray(start), jnp.int32(0)),
        )[1]

    module = programs.lowered(fn)
    runs = trip_counts.count(module)
    (loop,) = programs.every(module, "while")
    assert runs.trip_counts == {loop.name: int(jax.jit(fn)())}


@pytest.mark.parametrize(("trips", "taken"), [(20, 2), (31, 3), (9, 0)])
def test_a_branch_that_the_trip_decides_counts_as_often_as_it_is_taken(trips, taken):
    def body(i, x):
        return lax.cond(i % 10 == 9, lambda y: jnp.tanh(y @ y), lambda y: y, x)

    module = programs.lowered(lambda x: lax.fori_loop(0, trips, body, x), jnp.ones((4, 4)))
    runs = trip_counts.count(module)
    assert not runs.by_data
    (product,) = [
        computation
        for computation in module.computations
        if any(instruction.opcode == "dot" for instruction in computation.instructions)
    ]
    assert runs.times[product] == taken


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
    """Runs three times a loop to 7, or to the counter, and then one to the outer loop's result."""

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


@pytest.mark.slow
def test_a_bound_that_changes_between_trips_counts_in_each_trip():
    module = _nested(changes=True)
    runs = trip_counts.count(module)
    assert list(runs.trip_counts.values()) == [3, 1, 2]  # The inner one has 0, 1 and 1 trips.
    called = {fusion.called[0] for fusion in programs.every(module, "fusion")}
    assert sum(runs.times[fused] for fused in called) == 0 + 1 + 1 + 2


def _layers(state: NestedMap, count: int, **loop) -> tf.Tensor:
    def body(i, x_BM):
        return i + 1, tf.tanh(x_BM @ state.w_LMM[i])

    return tf.while_loop(lambda i, _: i < count, body, [tf.constant(0), state.x_BM], **loop)[1]


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


@pytest.mark.parametrize(("fn", "trips"), [(_gradient, [6, 6]), (_early, [6])])
def test_compiled_loops(fn, trips):
    args = NestedMap(
        w_LMM=functions.f32((6, 5, 5), "___"), x_BM=TensorSpec((8, 5), "float32", "B_")
    )
    annotated = AnnotatedFn("loops", fn, ("state",), (args,))
    report = compile_program(lowering.export(annotated, functions.partitioning(2))).report()
    assert list(report.loops.values()) == trips


@pytest.mark.parametrize("name", ["tpu_step", "gpu_step"])
def test_the_layers_of_kept_programs(name):
    """Encoder and decoder, forward and backward, have six layers in blocks of two."""
    runs = trip_counts.count(programs.kept(name))
    assert list(runs.trip_counts.values()) == [3, 3, 3, 3]
