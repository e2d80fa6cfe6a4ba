"""Trip counts from the text alone."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import hlo_text, trip_counts
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions


def _loop(body: str, condition: str, start: str = "constant(0)") -> str:
    """A loop over (counter %i, bound %n = 10, array %x): what it does to %i, and while what."""
    return f"""
%body (p: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {{
  %p = (s32[], s32[], f32[4]{{0}}) parameter(0)
  %i = s32[]{{:T(256)}} get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %x = f32[4]{{0}} get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  {body}
  %kept = s32[] copy(%n)
  ROOT %t = (s32[], s32[], f32[4]{{0}}) tuple(%next, %kept, %x)
}}

%condition (p: (s32[], s32[], f32[4])) -> pred[] {{
  %p = (s32[], s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %x = f32[4]{{0}} get-tuple-element(%p), index=2
  %five = s32[] constant(5)
  %true = pred[] constant(true)
  {condition}
}}

ENTRY %main (x: f32[4], k: s32[]) -> (s32[], s32[], f32[4]) {{
  %x = f32[4]{{0}} parameter(0)
  %k = s32[] parameter(1)
  %start = s32[] {start}
  %ten = s32[] constant(10)
  %init = (s32[], s32[], f32[4]{{0}}) tuple(%start, %ten, %x)
  ROOT %while.1 = (s32[], s32[], f32[4]{{0}}) while(%init), condition=%condition, body=%body
}}
"""


_STEP = "%next = s32[] add(%i, %one)"
_UNTIL_N = "ROOT %go = pred[] compare(%i, %n), direction=LT"
_ASK = "%ask = pred[] custom-call(%x)"


@pytest.mark.parametrize(
    ("body", "condition", "start", "trips"),
    [
        (_STEP, _UNTIL_N, "constant(0)", 10),
        (_STEP, _UNTIL_N, "constant(-3)", 13),
        (_STEP, _UNTIL_N, "constant(10)", 0),
        (_STEP, _UNTIL_N, "parameter(2)", None),
        ("%next = s32[] multiply(%n, %n)", _UNTIL_N, "constant(0)", 1),
        ("%next = s32[] subtract(%i, %one)", "ROOT %go = pred[] compare(%i, %five), direction=GT",
         "constant(9)", 4),
        (_STEP, "ROOT %go = pred[] compare(%i, %five), direction=NE", "constant(0)", 5),
        # The smaller of two bounds.
        (_STEP, "%a = pred[] compare(%i, %n), direction=LT\n %b = pred[] compare(%i, %five), "
         "direction=LE\n ROOT %go = pred[] and(%a, %b)", "constant(0)", 6),
        # A bound and a flag that is known, or not.
        (_STEP, "%a = pred[] compare(%i, %n), direction=LT\n ROOT %go = pred[] and(%true, %a)",
         "constant(0)", 10),
        (_STEP, f"{_ASK}\n %a = pred[] compare(%i, %n), direction=LT\n "
         "ROOT %go = pred[] and(%a, %ask)", "constant(0)", None),
        (_STEP, f"{_ASK}\n %a = pred[] compare(%i, %n), direction=LT\n "
         "ROOT %go = pred[] and(%a, %ask)", "constant(12)", 0),
        ("%more = pred[] compare(%i, %one), direction=GT\n "
         "%next = s32[] select(%more, %n, %one)", _UNTIL_N, "constant(2)", 1),
        # Endless, and past what a counter can hold.
        ("%next = s32[] maximum(%i, %i)", _UNTIL_N, "constant(0)", None),
        ("%next = s32[] add(%i, %i)", "ROOT %go = pred[] compare(%i, %five), direction=GT",
         "constant(6)", None),
    ],
)  # fmt: skip
def test_what_decides_the_end(monkeypatch, body, condition, start, trips):
    monkeypatch.setattr(trip_counts, "_MOST_TRIPS", 50)
    runs = trip_counts.count(hlo_text.parse(_loop(body, condition, start)))
    assert runs.trip_counts == {"while.1": trips}
    assert runs.times == {
        "main": 1,
        "body": trips,
        "condition": None if trips is None else trips + 1,
    }


def test_a_long_loop_ends_where_it_should(monkeypatch):
    monkeypatch.setattr(trip_counts, "_MOST_TRIPS", 10)
    assert _only(_loop(_STEP, _UNTIL_N)) == 10
    assert _only(_loop(_STEP, _UNTIL_N, "constant(-1)")) is None


def _only(text: str) -> int | None:
    (trips,) = trip_counts.count(hlo_text.parse(text)).trip_counts.values()
    return trips


_NESTED = """
%inner (q: (s32[], s32[])) -> (s32[], s32[]) {
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  %two = s32[] constant(2)
  %next = s32[] fusion(%j, %two), kind=kLoop, calls=%sum
  ROOT %t = (s32[], s32[]) tuple(%next, %m)
}

%sum (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %s = s32[] add(%a, %b)
}

%less (q: (s32[], s32[])) -> pred[] {
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %go = pred[] compare(%j, %m), direction=LT
}

%outer (p: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {
  %p = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %m = s32[] get-tuple-element(%p), index=2
  %zero = s32[] constant(0)
  %given = (s32[], s32[]) tuple(%zero, %BOUND)
  %while.inner = (s32[], s32[]) while(%given), condition=%less, body=%inner
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[], s32[]) tuple(%next, %n, %m)
}

%below (p: (s32[], s32[], s32[])) -> pred[] {
  %p = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %go = pred[] compare(%i, %n), direction=LT
}

ENTRY %main () -> s32[] {
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %seven = s32[] constant(7)
  %init = (s32[], s32[], s32[]) tuple(%zero, %three, %seven)
  %while.outer = (s32[], s32[], s32[]) while(%init), condition=%below, body=%outer
  %made = s32[] get-tuple-element(%while.outer), index=0
  %again = (s32[], s32[]) tuple(%zero, %made)
  %while.last = (s32[], s32[]) while(%again), condition=%less, body=%inner
  ROOT %r = s32[] get-tuple-element(%while.last), index=0
}
"""


def test_loops_within_loops_and_a_bound_that_a_loop_has_made():
    runs = trip_counts.count(hlo_text.parse(_NESTED.replace("%BOUND", "%m")))
    # The inner loop counts to 7 in twos, three times; the last to the 3 of the outer's counter.
    assert runs.trip_counts["while.outer"] == 3
    assert runs.trip_counts["while.inner"] == 4
    assert runs.trip_counts["while.last"] == 2
    assert runs.times["inner"] == runs.times["sum"] == 3 * 4 + 2
    assert runs.times["less"] == 3 * 5 + 3


def test_a_bound_that_changes_from_trip_to_trip_is_unknown():
    runs = trip_counts.count(hlo_text.parse(_NESTED.replace("%BOUND", "%i")))
    assert runs.trip_counts == {"while.outer": 3, "while.inner": None, "while.last": 2}
    assert (runs.times["outer"], runs.times["inner"], runs.times["main"]) == (3, None, 1)


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
    [(_forward, [6]), (_shortened, [4]), (_gradient, [6, 6]), (_early, [None])],
)
def test_compiled_loops(fn, trips):
    args = NestedMap(
        w_LMM=functions.f32((6, 5, 5), "___"), x_BM=TensorSpec((8, 5), "float32", "B_")
    )
    annotated = AnnotatedFn("loops", fn, ("state",), (args,))
    text = compile_program(lowering.export(annotated, functions.partitioning(2))).as_text()
    assert list(trip_counts.count(hlo_text.parse(text)).trip_counts.values()) == trips
