"""What runs while a collective is under way, as far as the schedule of a compiled program says.

The compilers split a collective into a start and a done, and what they put between runs meanwhile.
The TPU's compiler may instead fuse its parts into several fusions, with one chain id. A done whose
start is elsewhere, such as in the loop's previous trip, has nothing beside it here: no more is
claimed than the order of instructions shows.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from lingvo_gshard.hlo.hlo_module import Computation, Instruction, Module

_START = "-start"
_DONE = "-done"
_RECEIVE = "recv"  # It starts what its recv-done ends.
_CHAIN_ID = "chain_id"


@dataclasses.dataclass(frozen=True)
class Flight:
    """A collective under way in a computation, from one place in its order to another."""

    computation: Computation
    start: int
    done: int

    @property
    def beside(self) -> tuple[Instruction, ...]:
        """The instructions that run meanwhile.

        They are those between its start and its end, or a single fusion that has all of it.
        """
        if self.start == self.done:
            return (self.computation.instructions[self.start],)
        return self.computation.instructions[self.start + 1 : self.done]

    def overlaps(self, other: "Flight") -> bool:
        """Returns whether both are under way at one time."""
        is_same = self.computation is other.computation
        return is_same and self.start < other.done and other.start < self.done


def flights(module: Module) -> dict[Instruction, Flight]:
    """Returns where each asynchronous collective is under way, by the instruction that it is.

    That is its start, or the collective within what an `async-start` or a fusion calls.
    """
    found: dict[Instruction, Flight] = {}
    for computation in module.computations:
        found.update(_split(computation))
        found.update(_chained(computation))
    return found


def _split(computation: Computation) -> Iterator[tuple[Instruction, Flight]]:
    """Yields each instruction of a computation that has a start and a done, with its flight."""
    places = {instruction: i for i, instruction in enumerate(computation.instructions)}
    for i, instruction in enumerate(computation.instructions):
        if not instruction.opcode.endswith(_DONE):
            continue

        # The updates between an async-start and its done take the one before as their operand.
        start = instruction.operands[0]
        while start.opcode == "async-update":
            start = start.operands[0]
        is_start = start.opcode.endswith(_START) or start.opcode == _RECEIVE
        if not is_start or start not in places:
            continue

        collective = start.called[0].root if start.opcode == "async-start" else start
        yield collective, Flight(computation, places[start], i)


def _chained(computation: Computation) -> Iterator[tuple[Instruction, Flight]]:
    """Yields each collective that several fusions of a computation run, with its flight."""
    first: dict[str, tuple[int, Instruction]] = {}
    last: dict[str, int] = {}
    for i, instruction in enumerate(computation.instructions):
        if instruction.opcode != "fusion":
            continue
        for inner in _all_within(instruction.called):
            chain_id = inner.proto.frontend_attributes.map.get(_CHAIN_ID)
            if chain_id is not None and not inner.proto.custom_call_target:
                first.setdefault(chain_id, (i, inner))
                last[chain_id] = i

    for chain_id, (start, collective) in first.items():
        yield collective, Flight(computation, start, last[chain_id])


def _all_within(computations: Iterable[Computation]) -> Iterator[Instruction]:
    """Yields the instructions of computations and of those that they call."""
    for computation in computations:
        for instruction in computation.instructions:
            yield instruction
            yield from _all_within(instruction.called)
