"""The most and the fewest runs of each computation, where the data decide.

A conditional runs one of its branches, a search may end early, and a ragged product multiplies
only the given rows. For the most runs, the costliest branch runs and a loop takes all of its trips.
For the fewest, the cheapest branch runs and a loop ends at the first chance.

Which branch costs the most depends on the machine. Branches are compared on a machine that computes
200 flops in the time of accessing a byte of its memory, a ratio between the TPUs and the GPUs of
xla_plan/machines/machines.toml, and that needs ten times as long to send a byte to another device.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

from xla_spmd.hlo import accessed, products, trip_counts
from xla_spmd.hlo.hlo_module import COLLECTIVES, Computation, Instruction, Module
from xla_spmd.hlo.trip_counts import Runs

_FLOPS_PER_BYTE = 200
_BYTES_PER_SENT_BYTE = 10


@dataclasses.dataclass(frozen=True)
class Range:
    """The runs in one call of a program, for any data."""

    most: Runs
    least: Runs


@functools.lru_cache(maxsize=1)  # Both a program's report and its costs need it.
def runs(module: Module) -> Range:
    """Returns the most and the fewest runs of each computation of a program."""
    every = trip_counts.count(module)
    if not every.by_data:
        return Range(every, every)

    costliest = _Weights(every, max)
    cheapest = _Weights(every, min)
    return Range(
        most=trip_counts.count(module, costliest.branches(module)),
        least=trip_counts.count(module, cheapest.branches(module), fewest=True),
    )


class _Weights:
    """The cost of one run of each computation, in bytes of memory traffic."""

    def __init__(self, every: Runs, choose: Callable[[Iterable[int]], int]) -> None:
        """`choose` is max or min; it chooses among the branches of a conditional."""
        self._trips = every.trip_counts
        self._choose = choose
        self._known: dict[Computation, int] = {}

    def branches(self, module: Module) -> dict[str, int]:
        """Returns the chosen branch of each conditional, by the conditional's name."""
        chosen = {}
        for instruction in module.instructions():
            if instruction.opcode == "conditional":
                weights = list(map(self._of, instruction.called))
                chosen[instruction.name] = weights.index(self._choose(weights))
        return chosen

    def _of(self, computation: Computation) -> int:
        if computation not in self._known:
            weights = map(self._of_instruction, computation.instructions)
            self._known[computation] = sum(weights)
        return self._known[computation]

    def _of_instruction(self, instruction: Instruction) -> int:
        match instruction.opcode:
            case "while":
                trips = self._trips.get(instruction.name)
                return (1 if trips is None else trips) * sum(map(self._of, instruction.called))
            case "conditional":
                return self._choose(map(self._of, instruction.called))
            case "call" | "async-start":
                return sum(map(self._of, instruction.called))
            case "parameter" | "constant" | "tuple" | "get-tuple-element" | "bitcast":
                return 0

        size = accessed.accessed_bytes(instruction)
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            return _BYTES_PER_SENT_BYTE * size
        flops = sum(product.flops for product in products.of(instruction, {}))
        return max(size, flops // _FLOPS_PER_BYTE)
