"""The instructions that run while a collective is under way, according to a program's schedule.

The compilers split a collective into a start and a done; the instructions between them run
meanwhile. The TPU's compiler may instead fuse parts of the collective into several fusions, with
one chain id. If the start is elsewhere, for example in the loop's previous trip, nothing counts as
beside the collective: the order of the instructions shows no overlap.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from xla_spmd.hlo.hlo_module import Computation, Instruction, Module

_START = "-start"
_DONE = "-done"
_RECEIVE = "recv"  # The start of a recv-done.
_CHAIN_ID = "chain_id"


@dataclasses.dataclass(frozen=True)
class Flight:
    """A collective under way in a computation, from one position in its order to another."""

    computation: Computation
    start: int
    done: int

    @property
    def beside(self) -> tuple[Instruction, ...]:
        """The instructions that run meanwhile.

        They are the instructions between its start and its end, or one fusion that contains it.
        """
        if self.start == self.done:
            return (self.computation.instructions[self.start],)
        return self.computation.instructions[self.start + 1 : self.done]

    def overlaps(self, other: "Flight") -> bool:
        """Returns whether both are under way at the same time."""
        is_same = self.computation is other.computation
        return is_same and self.start < other.done and other.start < self.done


def flights(module: Module) -> dict[Instruction, Flight]:
    """Returns the flight of each asynchronous collective, by its instruction.

    This is the collective's start, or the collective that an `async-start` or a fusion calls.
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

        # Each update between an async-start and its done takes the previous step as its operand.
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
    """Yields the instructions of computations and of their callees."""
    for computation in computations:
        for instruction in computation.instructions:
            yield instruction
            yield from _all_within(instruction.called)
