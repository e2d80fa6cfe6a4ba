"""Counts how often a compiled program runs each of its computations.

The compilers for CPUs and GPUs record the trip count of a loop if they recognize its counter; the
TPU's compiler never does. If the program itself determines a trip count, it is found by running the
part of the loop that decides when it ends: counters, bounds and flags, in small arrays
(small_values.py). All other values are unknown. A loop that the data may end early, for example a
search, counts with its most or its fewest trips. A loop that only the data can end has an unknown
length and counts as one trip.

If the program determines the branch of a conditional, only this branch counts. If the data decide,
the caller chooses the branch; see data_dependence.py.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from xla_spmd.hlo import small_values
from xla_spmd.hlo.hlo_module import Computation, Instruction, Module
from xla_spmd.hlo.small_values import Value

# Longer loops are not run: their trip counts are unknown.
_MOST_TRIPS = 20_000
# The most instructions that are run to follow a loop's branches trip by trip.
_MOST_FOLLOWED = 500_000


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs in one call of a program, except for loops of unknown length."""

    # The number of runs of each computation. The function of a reduction, sort or scatter counts
    # once per instruction.
    times: dict[Computation, int]
    # The most times that each while instruction, by name, runs its body; None if its length is
    # unknown. The outermost loops come first.
    trip_counts: dict[str, int | None]
    # The names of the conditionals whose branch depends on the data, and of the loops that the data
    # may end early.
    by_data: set[str] = dataclasses.field(default_factory=set)


def count(
    module: Module, branches: Mapping[str, int] | None = None, *, fewest: bool = False
) -> Runs:
    """Counts the runs of each computation and loop, following calls from the module's entry.

    Args:
      module: the program.
      branches: the branch that each conditional takes, by name, if the data decide. Without it,
        every branch counts as taken.
      fewest: whether loops that the data may end take their fewest trips rather than their most.
    """
    runs = Runs(dict.fromkeys(module.computations, 0), {})
    _Follower(runs, branches, fewest).follow(_Frame(module.entry, ()), 1)
    return runs


class _Frame:
    """A computation and its arguments. Computes the values of its instructions on demand."""

    def __init__(self, computation: Computation, arguments: Sequence[Value]) -> None:
        """`arguments` may be fewer than the computation's parameters; the others are unknown."""
        self.computation = computation
        self._arguments = dict(enumerate(arguments))
        self._values: dict[Instruction, Value] = {}

    def result(self) -> Value:
        """Returns the value of the computation's root."""
        return self.value(self.computation.root)

    def operands(self, instruction: Instruction) -> tuple[Value, ...]:
        """Returns the values of an instruction's operands."""
        return tuple(map(self.value, instruction.operands))

    def value(self, instruction: Instruction) -> Value:
        """Returns the value of an instruction, computing it at most once."""
        # Operands come first. An explicit stack is used, because chains of operands can be longer
        # than Python's recursion limit.
        waiting = [instruction]
        while waiting:
            top = waiting[-1]
            missing = [other for other in _wanted(top) if other not in self._values]
            if top not in self._values and missing:
                waiting += missing
                continue
            waiting.pop()
            if top not in self._values:
                self._values[top] = self._compute(top) if _is_followed(top) else None
        return self._values[instruction]

    def elements(self, whole: Instruction, numbers: frozenset[int]) -> Value:
        """Returns some elements of a tuple, with None in place of the others."""
        if whole.opcode == "tuple":
            operands = enumerate(whole.operands)
            return tuple(self.value(part) if i in numbers else None for i, part in operands)
        return self.value(whole)

    def branch(self, conditional: Instruction) -> int | None:
        """Returns the index of the branch that a conditional takes; None if the data decide."""
        chosen = self.value(conditional.operands[0])
        if not isinstance(chosen, np.ndarray):
            return None

        # A true flag takes the first branch. An index out of range takes the last branch.
        if chosen.dtype == np.bool_:
            return 0 if chosen else 1
        last = len(conditional.called) - 1
        number = int(chosen)
        return number if 0 <= number <= last else last

    def _compute(self, instruction: Instruction) -> Value:
        match instruction.opcode:
            case "parameter":
                return self._arguments.get(instruction.proto.parameter_number)
            case "tuple":
                return self.operands(instruction)
            case "get-tuple-element":
                return self._element(instruction)

            # Instructions that call other computations.
            case "fusion" | "call":
                (called,) = instruction.called
                return _Frame(called, self.operands(instruction)).result()
            case "conditional":
                return self._taken(instruction)
            case "reduce":
                return self._reduce(instruction)
            case "while":
                return _run_loop(self, instruction).result

        # For constants and computing instructions, only arrays are followed.
        if instruction.is_tuple:
            return None
        if instruction.opcode == "constant":
            return small_values.constant(instruction)
        return small_values.apply(instruction, self.operands(instruction))

    def _element(self, instruction: Instruction) -> Value:
        """Returns an element of a tuple."""
        number = instruction.proto.tuple_index
        (source,) = instruction.operands
        if source.opcode == "tuple":
            return self.value(source.operands[number])
        whole = self.value(source)
        return whole[number] if isinstance(whole, tuple) else None

    def _taken(self, conditional: Instruction) -> Value:
        """Returns the result of the branch that a conditional takes."""
        branch = self.branch(conditional)
        if branch is None:
            return None
        argument = self.value(conditional.operands[1 + branch])
        return _Frame(conditional.called[branch], [argument]).result()

    def _reduce(self, reduce: Instruction) -> Value:
        """Returns the reduction of all elements of one small array."""
        values = self.operands(reduce)
        if len(values) != 2 or reduce.arrays[0].shape != ():
            return None
        array, result = values
        if not isinstance(array, np.ndarray) or result is None:
            return None
        for element in array.flat:
            (called,) = reduce.called
            result = _Frame(called, [result, np.asarray(element)]).result()
        return result


def _is_followed(instruction: Instruction) -> bool:
    """Returns whether an instruction's value can be known: a tuple or a small array."""
    return instruction.is_tuple or any(map(small_values.is_small, instruction.arrays))


def _wanted(instruction: Instruction) -> tuple[Instruction, ...]:
    """Returns the operands that an instruction's value always needs."""
    if not _is_followed(instruction):
        return ()
    match instruction.opcode:
        case "get-tuple-element":
            (source,) = instruction.operands
            if source.opcode == "tuple":
                return (source.operands[instruction.proto.tuple_index],)
        case "conditional":
            return instruction.operands[:1]
        case "while":
            return ()
    return instruction.operands


@dataclasses.dataclass(frozen=True)
class _Trips:
    """The trips of a loop, as far as the program determines them."""

    most: int | None  # None if only the data can end it.
    fewest: int  # The trips before the data may first end it.
    result: Value  # Its final state.
    states: tuple[Value, ...]  # Its state before each trip.


def _run_loop(frame: _Frame, loop: Instruction) -> _Trips:
    """Returns the trips of a loop, and its final state as far as it is known."""
    body, condition = loop.called
    needed = _needed(loop)
    state = frame.elements(loop.operands[0], needed)

    # The trips before the first unknown condition.
    fewest: int | None = None
    states: list[Value] = []
    for trips in range(_MOST_TRIPS + 1):
        goes_on = _Frame(condition, [state]).result()
        if small_values.is_false(goes_on):
            result = state if fewest is None else _unchanged(frame, loop)
            return _Trips(trips, trips if fewest is None else fewest, result, tuple(states))
        if goes_on is None and fewest is None:
            fewest = trips

        states.append(state)
        state_before = state
        state = _Frame(body, [state]).elements(body.root, needed)
        if small_values.are_same(state, state_before):  # No further trip would change it.
            break
    return _Trips(None, 1, None, ())


# --- The values that decide how a loop runs ---


@functools.lru_cache(maxsize=1024)
def _needed(loop: Instruction) -> frozenset[int]:
    """Returns the elements of a loop's state that decide its trips and branches.

    The other elements, such as arrays that it computes and random seeds, need not be followed.
    """
    body, condition = loop.called
    all_elements = frozenset(range(len(loop.proto.shape.tuple_shapes)))
    if body.root.opcode != "tuple":
        return all_elements

    needed: set[int] = set()
    waiting = [condition.root, *_deciding(body)]
    while waiting:
        found = _elements_behind(waiting)
        if found is None:
            return all_elements

        # An element of the next trip may be computed from other elements.
        added = found - needed
        needed |= found
        waiting = [body.root.operands[number] for number in sorted(added)]
    return frozenset(needed)


def _deciding(computation: Computation) -> list[Instruction]:
    """Returns the instructions of a computation that decide which computations run."""
    found: list[Instruction] = []
    for instruction in computation.instructions:
        if instruction.opcode == "conditional":
            found.append(instruction.operands[0])
        elif instruction.opcode == "while":
            (state,) = instruction.operands
            if state.opcode == "tuple":
                found += [state.operands[number] for number in _needed(instruction)]
            else:
                found.append(state)
        elif instruction.opcode in ("fusion", "call"):
            (called,) = instruction.called
            if _has_control(called):
                numbers = _parameters_behind(_deciding(called))
                found += [instruction.operands[number] for number in numbers]
    return found


def _parameters_behind(values: Sequence[Instruction]) -> list[int]:
    """Returns the numbers of the parameters on which some values of a computation depend."""
    numbers = set()
    for source in _sources(values):
        parameter = source if source.opcode == "parameter" else source.operands[0]
        numbers.add(parameter.proto.parameter_number)
    return sorted(numbers)


def _elements_behind(values: Sequence[Instruction]) -> frozenset[int] | None:
    """Returns the elements of a loop's state on which values depend; None for all of it."""
    sources = list(_sources(values))
    if any(source.opcode == "parameter" for source in sources):
        return None
    return frozenset(source.proto.tuple_index for source in sources)


def _sources(values: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yields the parameters, or elements of parameters, on which values depend."""
    waiting = list(values)
    seen: set[Instruction] = set()
    while waiting:
        instruction = waiting.pop()
        if instruction in seen:
            continue
        seen.add(instruction)

        is_element = instruction.opcode == "get-tuple-element"
        is_source = is_element and instruction.operands[0].opcode == "parameter"
        if is_source or instruction.opcode == "parameter":
            yield instruction
        else:
            waiting += _wanted(instruction) or instruction.operands


class _Follower:
    """Counts the runs of everything that a program calls."""

    def __init__(self, runs: Runs, branches: Mapping[str, int] | None, fewest: bool) -> None:
        self._runs = runs
        self._branches = branches
        self._fewest = fewest

    def follow(self, frame: _Frame, times: int) -> None:
        """Adds `times` runs of a frame's computation, and of its callees."""
        self._runs.times[frame.computation] += times
        for instruction in frame.computation.instructions:
            match instruction.opcode:
                case "while":
                    self._follow_loop(frame, instruction, times)
                case "conditional":
                    self._follow_branches(frame, instruction, times)
                case "fusion" | "call":
                    (called,) = instruction.called
                    arguments = frame.operands(instruction) if _has_control(called) else ()
                    self.follow(_Frame(called, arguments), times)
                case "async-update" | "async-done":
                    pass  # Their start has already run their computations.
                case _:
                    for called in instruction.called:
                        self.follow(_Frame(called, ()), times)

    def _follow_branches(self, frame: _Frame, conditional: Instruction, times: int) -> None:
        """Adds `times` runs of a conditional's branch, or of all branches if it is undecided."""
        branch = frame.branch(conditional)
        if branch is None:
            self._runs.by_data.add(conditional.name)
            if self._branches is not None:
                branch = self._branches[conditional.name]
        taken = range(len(conditional.called)) if branch is None else [branch]
        for number in taken:
            argument = frame.value(conditional.operands[1 + number])
            self.follow(_Frame(conditional.called[number], [argument]), times)

    def _follow_loop(self, frame: _Frame, loop: Instruction, times: int) -> None:
        """Adds `times` runs of a loop in a frame."""
        run = _run_loop(frame, loop)
        # The compiler's own count takes precedence.
        config = json.loads(loop.proto.backend_config or "{}")
        known = config.get("known_trip_count")
        most = int(known["n"]) if known else run.most
        trips = most
        if most is not None and not known and run.fewest < most:
            self._runs.by_data.add(loop.name)
            trips = run.fewest if self._fewest else most

        # The loop may have been met before, within a loop or function that runs more than once.
        before = self._runs.trip_counts.get(loop.name, most)
        if most is None or before is None:
            self._runs.trip_counts[loop.name] = None
        else:
            self._runs.trip_counts[loop.name] = max(most, before)

        # In each run of the loop, the condition is computed once more than the body.
        body, condition = loop.called
        trips = 1 if trips is None else trips
        state = _unchanged(frame, loop)
        self.follow(_Frame(condition, [state]), times * (1 + trips))

        # A trip's branches and inner loops may depend on the trip's number.
        is_short = 0 < len(run.states) * _size(body) <= _MOST_FOLLOWED
        if trips == len(run.states) and is_short and _varies(body, run.states[0], state):
            for state in run.states:
                self.follow(_Frame(body, [state]), times)
        else:
            self.follow(_Frame(body, [state]), times * trips)


def _unchanged(frame: _Frame, loop: Instruction) -> Value:
    """Returns a loop's state in every run of its body; changing values are unknown."""
    body, _ = loop.called
    needed = _needed(loop)
    state = frame.elements(loop.operands[0], needed)

    # With fewer known values, a run may change further values. Repeat until all known ones stay.
    while True:
        after = _Frame(body, [state]).elements(body.root, needed)
        common = small_values.common(state, after)
        if small_values.are_same(common, state):
            return state
        state = common


def _varies(body: Computation, first: Value, unchanged: Value) -> bool:
    """Returns whether a loop's body may take other branches, or inner trips, in other trips.

    `first` is the loop's state before its first trip, and `unchanged` its state in every trip.
    """
    if _has_branches(body):
        return True
    for loop in body.instructions:
        # Data may also decide the length of an inner loop; it is then unknown in the first trip.
        if loop.opcode == "while" and _run_loop(_Frame(body, [unchanged]), loop).most is None:
            if _run_loop(_Frame(body, [first]), loop).most is not None:
                return True
    return False


def _within(computation: Computation) -> Iterator[Instruction]:
    """Yields the instructions of a computation and of its callees."""
    for instruction in computation.instructions:
        yield instruction
        for called in instruction.called:
            yield from _within(called)


@functools.lru_cache(maxsize=1024)
def _has_control(computation: Computation) -> bool:
    opcodes = {instruction.opcode for instruction in _within(computation)}
    return not opcodes.isdisjoint({"conditional", "while"})


@functools.lru_cache(maxsize=1024)
def _has_branches(computation: Computation) -> bool:
    return any(instruction.opcode == "conditional" for instruction in _within(computation))


@functools.lru_cache(maxsize=1024)
def _size(computation: Computation) -> int:
    return sum(1 for _ in _within(computation))
