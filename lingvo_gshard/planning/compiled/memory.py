"""What a core's memory holds during a call of a program: Figure 7, section 5.1."""

import dataclasses
import re
from collections.abc import Iterable

from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.hlo.hlo_module import num_bytes
from lingvo_gshard.planning.compiled.categories import source
from lingvo_gshard.planning.estimate import state_memory
from lingvo_gshard.planning.estimate.state_memory import StateGib
from lingvo_gshard.planning.plan import GIB, Buffer, Memory

# The refusal says `Used 16.50G of 15.48G hbm`, or names temporaries alone; then its buffers.
_USED = re.compile(r"Used (\S+) of \S+ hbm|\((\S+)\) exceeds available HBM")
_ALLOCATION = re.compile(
    r"Size: (?P<size>\S+)\n(?:\s+Operator: op_name=\"(?P<op_name>[^\"]*)\".*\n)?"
    r"\s+Shape: (?P<shape>[\w\[\],]+)"
)
_UNITS = "BKMGT"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The compiler's refusal of a program that is too large."""

    gib: float  # What it needs on a core.
    temporaries_alone: bool  # Whether `gib` is only those, which are too large already.
    buffers: tuple[Buffer, ...]  # The largest; empty if `gib` is that of temporaries alone.


def of_compiled(report: CompiledReport, state: StateGib, capacity_gib: float) -> Memory:
    """Returns the memory of one core in a call of a compiled program."""
    return Memory(
        capacity=capacity_gib,
        replicated_weights=state.replicated_weights,
        expert_weights=state.expert_weights,
        optimizer_slots=state.optimizer_slots,
        temporaries=report.temp_bytes / GIB,
        peak=report.peak_bytes / GIB,
    )


def of_refused(refusal: Refusal, state: StateGib, capacity_gib: float) -> Memory:
    """Returns the memory that a call of a refused program would need on one core."""
    # The compiler gives up at the temporaries if these are too large without the state.
    temporaries = refusal.gib
    if not refusal.temporaries_alone:
        temporaries -= state.total
    return Memory(
        capacity=capacity_gib,
        replicated_weights=state.replicated_weights,
        expert_weights=state.expert_weights,
        optimizer_slots=state.optimizer_slots,
        temporaries=temporaries,
        peak=refusal.gib,
    )


def largest_results(costs: Iterable[Cost]) -> tuple[Buffer, ...]:
    """Returns the largest results of instructions, one for each shape and layer."""
    # Many instructions of a layer have results of one shape. Of equally large ones, the program's
    # first is listed.
    buffers: dict[Buffer, None] = {}
    for instruction in costs:
        layer = source(instruction.op_name)
        for array in instruction.arrays:
            buffers[Buffer(num_bytes([array]) / GIB, str(array), layer)] = None
    return state_memory.largest(buffers)


def parse_refusal(details: str) -> Refusal:
    """Returns what the compiler's refusal of too large a program says.

    Raises ValueError if it has no known form.
    """
    used = _USED.search(details)
    if used is None:
        raise ValueError(f"the compiler's message about memory is not understood: {details[:300]}")
    with_state, temporaries_alone = used.groups()  # One of them is None.

    # A buffer without an operator is one that the compiler made for itself.
    buffers = [
        Buffer(
            gib=_parse_gib(allocation["size"]),
            shape=allocation["shape"],
            source=source(allocation["op_name"] or ""),
        )
        for allocation in _ALLOCATION.finditer(details)
    ]
    return Refusal(
        gib=_parse_gib(with_state or temporaries_alone),
        temporaries_alone=with_state is None,
        buffers=tuple(buffers[: state_memory.NUM_BUFFERS]),  # It lists the largest first.
    )


def _parse_gib(size: str) -> float:
    """Returns the GiB of a number of bytes such as `512`, `16.50G` or `17.02GB`."""
    number = size.rstrip(_UNITS)
    unit = size[len(number) :] or "B"
    return float(number) * 1024.0 ** (_UNITS.index(unit[0]) - _UNITS.index("G"))
