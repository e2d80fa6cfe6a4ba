"""How often a compiled program runs each of its computations.

The compilers for CPUs and GPUs note the trip count of a loop whose counter they recognize, the
TPU's never does. What the program itself determines is found by running the part of a loop that
decides when it ends: counters, bounds and flags, all scalar integers. Other values are unknown.
"""

import dataclasses
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.hlo.hlo_module import Array, Computation, Instruction, Module

# Longer loops are not run: their trip counts are unknown.
_MOST_TRIPS = 100_000

# An integer (a flag is 0 or 1), a tuple of values, or None where unknown.
_Value = int | tuple | None

_INTEGER = re.compile(r"(s|u)(\d+)")
# The field of a literal that holds a scalar of the dtype.
_LITERALS = {"pred": "preds", "s32": "s32s", "s64": "s64s", "u32": "u32s", "u64": "u64s"}
# Their result is their first operand.
_SAME = frozenset(["bitcast", "convert", "copy", "copy-done", "copy-start", "optimization-barrier"])
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
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
    "NE": operator.ne,
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop: its instruction's name, and its trip count; None if unknown."""

    name: str
    trip_count: int | None


@dataclasses.dataclass(frozen=True)
class Runs:
    """What one call of a program runs.

    Attributes:
      times: how often each computation runs; None if unknown. Every branch of a conditional
        counts as taken; the function of a reduction, sort or scatter counts once for each
        reduction, sort or scatter.
      trip_counts: by a while instruction's name, how often its body runs each time; None if
        unknown, or not always the same.
    """

    times: dict[Computation, int | None]
    trip_counts: dict[str, int | None]

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops, from the outermost inwards."""
        return tuple(Loop(name, trips) for name, trips in self.trip_counts.items())


def count(module: Module) -> Runs:
    """Follows every call from the module's entry."""
    runs = Runs(dict.fromkeys(module.computations, 0), {})
    _follow(_Frame(module.entry, ()), 1, runs)
    return runs


class _Frame:
    """A computation and its arguments: the values of its instructions, computed when wanted."""

    def __init__(self, computation: Computation, arguments: Sequence[_Value]) -> None:
        self.computation, self._arguments = computation, arguments
        self._values: dict[Instruction, _Value] = {}

    def result(self) -> _Value:
        """The computation's result."""
        return self.value(self.computation.root)

    def operands(self, instruction: Instruction) -> tuple[_Value, ...]:
        """The values of an instruction's operands."""
        return tuple(map(self.value, instruction.operands))

    def value(self, instruction: Instruction) -> _Value:
        """An instruction's result."""
        if instruction not in self._values:
            value = None
            if instruction.is_tuple:
                value = self._compute(instruction)
            elif _is_scalar_integer(instruction.arrays[0]):
                value = self._compute(instruction)
                if isinstance(value, int) and not _fits(value, instruction.arrays[0].dtype):
                    value = None
            self._values[instruction] = value
        return self._values[instruction]

    def _compute(self, instruction: Instruction) -> _Value:
        proto = instruction.proto
        match instruction.opcode:
            case "constant":
                return _literal(instruction)
            case "parameter":
                known = proto.parameter_number < len(self._arguments)
                return self._arguments[proto.parameter_number] if known else None
            case "tuple":
                return self.operands(instruction)
            case "get-tuple-element":
                (whole,) = self.operands(instruction)
                return whole[proto.tuple_index] if isinstance(whole, tuple) else None
            case "fusion" | "call":
                (called,) = instruction.called
                return _Frame(called, self.operands(instruction)).result()
            case "while":
                return _run_loop(self, instruction)[1]
        return _apply(instruction, self.operands(instruction))


def _literal(constant: Instruction) -> int | None:
    field = None if constant.is_tuple else _LITERALS.get(constant.arrays[0].dtype)
    return int(getattr(constant.proto.literal, field)[0]) if field else None


def _is_scalar_integer(array: Array) -> bool:
    return not array.shape and bool(array.dtype == "pred" or _INTEGER.fullmatch(array.dtype))


def _fits(value: int, dtype: str) -> bool:
    """Whether a dtype can hold a value; an overflow is not followed."""
    if dtype == "pred":
        return value in (0, 1)
    bits = int(dtype[1:])
    low = -(2 ** (bits - 1)) if dtype[0] == "s" else 0
    return low <= value < low + 2**bits


def _apply(instruction: Instruction, operands: tuple[_Value, ...]) -> _Value:
    """The result of an instruction that calls nothing."""
    opcode = instruction.opcode
    if opcode in _SAME:
        return operands[0]
    if opcode == "and" and 0 in operands:
        return 0  # Whatever the other is.
    if opcode == "select" and operands[0] is not None:
        return operands[1] if operands[0] else operands[2]
    integers = [each for each in operands if isinstance(each, int)]
    if len(integers) < len(operands):
        return None
    if opcode == "compare":
        return int(_COMPARISONS[instruction.proto.comparison_direction](*integers))
    return _ARITHMETIC[opcode](*integers) if opcode in _ARITHMETIC else None


def _run_loop(frame: _Frame, loop: Instruction) -> tuple[int | None, _Value]:
    """A loop's trip count, and its final state as far as it is known."""
    (state,) = frame.operands(loop)
    body, condition = loop.called
    for trips in range(_MOST_TRIPS + 1):
        goes_on = _Frame(condition, [state]).result()
        if goes_on is None:
            break
        if not goes_on:
            return trips, state
        state = _Frame(body, [state]).result()
    return None, None


def _trip_count(frame: _Frame, loop: Instruction) -> int | None:
    notes = json.loads(loop.proto.backend_config or "{}")
    if "known_trip_count" in notes:
        return int(notes["known_trip_count"]["n"])
    return _run_loop(frame, loop)[0]


def _follow(frame: _Frame, times: int | None, runs: Runs) -> None:
    """Adds `times` runs of a frame's computation, and of all that it calls, to `runs`."""
    computation = frame.computation
    runs.times[computation] = _sum(runs.times[computation], times)
    for instruction in computation.instructions:
        match instruction.opcode:
            case "while":
                trips = _trip_count(frame, instruction)
                if runs.trip_counts.setdefault(instruction.name, trips) != trips:
                    runs.trip_counts[instruction.name] = None
                state = [_unchanged(frame, instruction)]
                body, condition = instruction.called
                _follow(_Frame(body, state), _product(times, trips), runs)
                _follow(_Frame(condition, state), _product(times, _sum(trips, 1)), runs)
            case "fusion" | "call":
                (called,) = instruction.called
                _follow(_Frame(called, frame.operands(instruction)), times, runs)
            case "async-update" | "async-done":
                pass  # Their start has run what they name.
            case _:
                for called in instruction.called:
                    _follow(_Frame(called, ()), times, runs)


def _unchanged(frame: _Frame, loop: Instruction) -> _Value:
    """A loop's state as every run of its body finds it: values that no run changes are known."""
    (state,) = frame.operands(loop)
    result = loop.called[0].root
    if not isinstance(state, tuple) or result.opcode != "tuple":
        return None
    return tuple(
        value if _is_element(operand, index) else None
        for index, (value, operand) in enumerate(zip(state, result.operands, strict=True))
    )


def _is_element(instruction: Instruction, index: int) -> bool:
    """Whether an instruction of a loop's body is the element `index` of the body's argument."""
    while instruction.opcode in _SAME:
        instruction = instruction.operands[0]
    return (
        instruction.opcode == "get-tuple-element"
        and instruction.proto.tuple_index == index
        and instruction.operands[0].opcode == "parameter"
    )


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b
