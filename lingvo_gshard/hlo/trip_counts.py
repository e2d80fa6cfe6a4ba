"""How often a compiled program runs each of its computations, from its text alone.

The CPU's compiler notes the trip count of a loop whose counter it recognizes, the TPU's of none.
What the text determines is found by running the part of a loop that decides when it ends: its
counters, bounds and flags, integers without dimensions. All other values are unknown.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.hlo.hlo_text import Computation, Instruction, Module

# Longer loops are not run: their trip counts are unknown.
_MOST_TRIPS = 100_000

# An integer (a flag is 0 or 1), a tuple of values, or None where unknown.
_Value = int | tuple | None

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"(?P<sort>pred|[su])(?P<bits>\d*)\[\]")
_FLAGS = {"false": 0, "true": 1}
# What comes out is their first operand.
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
class Runs:
    """What one call of a program runs.

    Attributes:
      times: by a computation's name, how often it runs; None where the text does not tell. Every
        branch of a conditional counts as taken; what a reduction, sort or scatter does with two
        elements counts once for each reduction, sort or scatter.
      trip_counts: by a while instruction's name, how often its body runs each time; None where
        the text does not tell.
    """

    times: dict[str, int | None]
    trip_counts: dict[str, int | None]


def count(module: Module) -> Runs:
    """Follows every call from the module's entry."""
    runs = Runs(dict.fromkeys(module.computations, 0), {})
    if module.entry:
        _follow(_Frame(module, module.entry, ()), 1, runs)
    return runs


class _Frame:
    """A computation and its arguments: the values of its instructions, computed when wanted."""

    def __init__(self, module: Module, name: str, arguments: Sequence[_Value]) -> None:
        self.computation: Computation = module.computations[name]
        self._module, self._arguments = module, arguments
        self._values: dict[str, _Value] = {}

    def call(self, name: str, arguments: Sequence[_Value]) -> _Frame:
        """A frame of a computation that this one calls."""
        return _Frame(self._module, name, arguments)

    def result(self) -> _Value:
        """What the computation makes."""
        return self.value(self.computation.root)

    def operands(self, instruction: Instruction) -> tuple[_Value, ...]:
        """The values of an instruction's operands."""
        return tuple(map(self.value, instruction.operands))

    def value(self, name: str) -> _Value:
        """What an instruction makes."""
        if name not in self._values:
            instruction = self.computation.instructions[name]
            integer = _INTEGER.match(instruction.type)
            value = None
            if integer or instruction.type.startswith("("):
                value = self._compute(instruction)
            if integer and isinstance(value, int) and not _fits(value, *integer.groups()):
                value = None
            self._values[name] = value
        return self._values[name]

    def _compute(self, instruction: Instruction) -> _Value:
        match instruction.opcode:
            case "constant":
                text = instruction.argument
                return _FLAGS[text] if text in _FLAGS else int(text)
            case "parameter":
                place = int(instruction.argument)
                return self._arguments[place] if place < len(self._arguments) else None
            case "tuple":
                return self.operands(instruction)
            case "get-tuple-element":
                (whole,) = self.operands(instruction)
                place = int(instruction.attribute("index"))
                return whole[place] if isinstance(whole, tuple) else None
            case "fusion" | "call":
                (called,) = instruction.called
                return self.call(called, self.operands(instruction)).result()
            case "while":
                return _run_loop(self, instruction)[1]
        return _apply(instruction, self.operands(instruction))


def _fits(value: int, sort: str, bits: str) -> bool:
    """Whether a type can hold a value: what overflows is not followed."""
    if sort == "pred":
        return value in (0, 1)
    low = -(2 ** (int(bits) - 1)) if sort == "s" else 0
    return low <= value < low + 2 ** int(bits)


def _apply(instruction: Instruction, operands: tuple[_Value, ...]) -> _Value:
    """The value of an instruction that calls nothing."""
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
        return int(_COMPARISONS[instruction.attribute("direction")](*integers))
    return _ARITHMETIC[opcode](*integers) if opcode in _ARITHMETIC else None


def _run_loop(frame: _Frame, loop: Instruction) -> tuple[int | None, _Value]:
    """How often a loop's body runs, and what the loop makes of what is known before it."""
    (state,) = frame.operands(loop)
    for trips in range(_MOST_TRIPS + 1):
        goes_on = frame.call(loop.attribute("condition"), [state]).result()
        if goes_on is None:
            break
        if not goes_on:
            return trips, state
        state = frame.call(loop.attribute("body"), [state]).result()
    return None, None


def _trip_count(frame: _Frame, loop: Instruction) -> int | None:
    noted = _KNOWN.search(loop.metadata)
    return int(noted[1]) if noted else _run_loop(frame, loop)[0]


def _follow(frame: _Frame, times: int | None, runs: Runs) -> None:
    """Adds `times` runs of a frame's computation, and of all that it calls, to `runs`."""
    name = frame.computation.name
    runs.times[name] = _sum(runs.times[name], times)
    for instruction in frame.computation.instructions.values():
        match instruction.opcode:
            case "while":
                trips = _trip_count(frame, instruction)
                if runs.trip_counts.setdefault(instruction.name, trips) != trips:
                    runs.trip_counts[instruction.name] = None
                state = [_unchanged(frame, instruction)]
                body, condition = map(instruction.attribute, ("body", "condition"))
                _follow(frame.call(body, state), _product(times, trips), runs)
                _follow(frame.call(condition, state), _product(times, _sum(trips, 1)), runs)
            case "fusion" | "call":
                (called,) = instruction.called
                _follow(frame.call(called, frame.operands(instruction)), times, runs)
            case "async-update" | "async-done":
                pass  # What it names, its start has run.
            case _:
                for called in instruction.called:
                    _follow(frame.call(called, ()), times, runs)


def _unchanged(frame: _Frame, loop: Instruction) -> _Value:
    """A loop's state as every run of its body finds it: known is what no run changes."""
    (state,) = frame.operands(loop)
    body = frame.call(loop.attribute("body"), ()).computation
    result = body.instructions[body.root]
    if not isinstance(state, tuple) or result.opcode != "tuple":
        return None
    return tuple(
        value if _hands_on(body, operand, place) else None
        for place, (value, operand) in enumerate(zip(state, result.operands, strict=True))
    )


def _hands_on(body: Computation, name: str, place: int) -> bool:
    """Whether instruction `name` is the element at `place` of the body's argument."""
    instruction = body.instructions[name]
    while instruction.opcode in _SAME:
        instruction = body.instructions[instruction.operands[0]]
    return (
        instruction.opcode == "get-tuple-element"
        and int(instruction.attribute("index")) == place
        and body.instructions[instruction.operands[0]].opcode == "parameter"
    )


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b
