"""Counts how often a compiled program runs each of its computations.

The compilers for CPUs and GPUs note the trip count of a loop whose counter they recognize, the
TPU's never does. Trip counts that the program itself determines are found by running the part of a
loop that decides when it ends: counters, bounds and flags, all scalar integers. All other values
are unknown. A loop that the data may end early, such as a search, counts with the most trips that
it can take. A loop that only the data can end is of unknown length and counts as one trip.
"""

import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.hlo.hlo_module import Array, Computation, Instruction, Module

# Longer loops are not run: their trip counts are unknown.
_MOST_TRIPS = 20_000
# An integer (a flag is 0 or 1), a tuple of values, or None if unknown.
_Value = int | tuple | None
# The types that are followed, and the values that each can hold; overflows are not followed.
_RANGES = {
    Array("pred", ()): range(2),
    Array("s32", ()): range(-(2**31), 2**31),
    Array("s64", ()): range(-(2**63), 2**63),
    Array("u32", ()): range(2**32),
    Array("u64", ()): range(2**64),
}
# Instructions whose result is their first operand.
_SAME = frozenset(
    {
        "bitcast",
        "convert",
        "copy",
        "copy-done",
        "copy-start",
        "optimization-barrier",
    }
)
_ARITHMETIC: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "and": operator.and_,
    "maximum": max,
    "minimum": min,
    "multiply": operator.mul,
    "negate": operator.neg,
    "or": operator.or_,
    "subtract": operator.sub,
    "xor": operator.xor,
}


@dataclasses.dataclass(frozen=True)
class Runs:
    """What one call of a program runs at most, except for loops of unknown length."""

    # How often each computation runs. Every branch of a conditional counts as taken; the function
    # of a reduction, sort or scatter counts once for each of these.
    times: dict[Computation, int]
    # The most times that each while instruction, by its name, runs its body each time; None if its
    # length is unknown or not always the same. The outermost loops come first.
    trip_counts: dict[str, int | None]


@functools.lru_cache(maxsize=1)  # A program's report needs it, and then its costs.
def count(module: Module) -> Runs:
    """Returns how often each computation and loop runs, following calls from the module's entry."""
    runs = Runs(dict.fromkeys(module.computations, 0), {})
    _follow(_Frame(module.entry, ()), 1, runs)
    return runs


class _Frame:
    """A computation and its arguments. Computes the values of its instructions on demand."""

    def __init__(self, computation: Computation, arguments: Sequence[_Value]) -> None:
        """`arguments` may be fewer than the computation's parameters; the others are unknown."""
        self.computation = computation
        self._arguments = dict(enumerate(arguments))
        self._values: dict[Instruction, _Value] = {}

    def result(self) -> _Value:
        """Returns the value of the computation's root."""
        return self.value(self.computation.root)

    def operands(self, instruction: Instruction) -> tuple[_Value, ...]:
        """Returns the values of an instruction's operands."""
        return tuple(map(self.value, instruction.operands))

    def value(self, instruction: Instruction) -> _Value:
        """Returns the value of an instruction, which is computed once."""
        if instruction not in self._values:
            value: _Value = None
            if instruction.is_tuple or _RANGES.keys() & instruction.arrays:
                value = self._compute(instruction)
            if isinstance(value, int) and value not in _RANGES[instruction.arrays[0]]:
                value = None  # It overflows.
            self._values[instruction] = value
        return self._values[instruction]

    def _compute(self, instruction: Instruction) -> _Value:
        proto = instruction.proto
        match instruction.opcode:
            case "constant":
                if instruction.is_tuple:
                    return None
                # A literal of dtype s32 has its values in the field `s32s`.
                values = getattr(proto.literal, instruction.arrays[0].dtype + "s")
                return int(values[0])
            case "parameter":
                return self._arguments.get(proto.parameter_number)

            case "tuple":
                return self.operands(instruction)
            case "get-tuple-element":
                (whole,) = self.operands(instruction)
                return whole[proto.tuple_index] if isinstance(whole, tuple) else None

            # What calls other computations.
            case "fusion" | "call":
                (called,) = instruction.called
                return _Frame(called, self.operands(instruction)).result()
            case "while":
                _, state = _run_loop(self, instruction)
                return state
        return _apply(instruction, self.operands(instruction))


def _apply(instruction: Instruction, operands: tuple[_Value, ...]) -> _Value:
    """Returns the result of an instruction that calls nothing."""
    opcode = instruction.opcode
    if opcode in _SAME:
        return operands[0]

    # Known operands may decide the result, whatever the others are.
    if opcode == "and" and 0 in operands:
        return 0
    if opcode == "select" and operands[0] is not None:
        return operands[1] if operands[0] else operands[2]

    if not all(isinstance(operand, int) for operand in operands):
        return None
    if opcode == "compare":  # Its direction is the name of Python's operator, in upper case.
        compare = getattr(operator, instruction.proto.comparison_direction.lower())
        return int(compare(*operands))
    if opcode == "not" and instruction.arrays[0].dtype == "pred":
        return int(not operands[0])
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](*operands)
    return None


def _run_loop(frame: _Frame, loop: Instruction) -> tuple[int | None, _Value]:
    """Returns the most trips of a loop, None if unknown, and its final state as far as known."""
    (state,) = frame.operands(loop)
    body, condition = loop.called

    # Whether every condition so far is known, so that the loop ends after as many trips for sure.
    is_certain = True
    for trips in range(_MOST_TRIPS + 1):
        goes_on = _Frame(condition, [state]).result()
        if goes_on == 0:
            return trips, state if is_certain else _unchanged(frame, loop)
        is_certain = is_certain and goes_on is not None

        state_before = state
        state = _Frame(body, [state]).result()
        if state == state_before:  # Nor would any further trip change it.
            break
    return None, None


def _follow(frame: _Frame, times: int, runs: Runs) -> None:
    """Adds `times` runs of a frame's computation, and of all that it calls, to `runs`."""
    runs.times[frame.computation] += times
    for instruction in frame.computation.instructions:
        match instruction.opcode:
            case "while":
                _follow_loop(frame, instruction, times, runs)
            case "fusion" | "call":
                (called,) = instruction.called
                _follow(_Frame(called, frame.operands(instruction)), times, runs)
            case "async-update" | "async-done":
                pass  # Their start has run the computations that they name.
            case _:
                for called in instruction.called:
                    _follow(_Frame(called, ()), times, runs)


def _follow_loop(frame: _Frame, loop: Instruction, times: int, runs: Runs) -> None:
    """Adds `times` runs of a loop in a frame to `runs`."""
    # The compiler's own count, or that of a run.
    config = json.loads(loop.proto.backend_config or "{}")
    known = config.get("known_trip_count")
    if known:
        trips: int | None = int(known["n"])
    else:
        trips, _ = _run_loop(frame, loop)

    # The same loop may have been met before, within a loop or function that runs more than once.
    if runs.trip_counts.setdefault(loop.name, trips) != trips:
        runs.trip_counts[loop.name] = None

    # The condition is computed once more than the body, each time the loop runs.
    state = _unchanged(frame, loop)
    body, condition = loop.called
    all_trips = times * (1 if trips is None else trips)
    _follow(_Frame(body, [state]), all_trips, runs)
    _follow(_Frame(condition, [state]), times + all_trips, runs)


def _unchanged(frame: _Frame, loop: Instruction) -> _Value:
    """Returns a loop's state in every run of its body: values that a run changes are unknown."""
    (state,) = frame.operands(loop)
    body, _ = loop.called

    # With fewer known values, a run may change further ones, until no more are lost.
    while True:
        common = _common(state, _Frame(body, [state]).result())
        if common == state:
            return state
        state = common


def _common(a: _Value, b: _Value) -> _Value:
    """Returns what two values have in common; the rest is unknown."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(_common, a, b))
    return a if a == b else None
