"""The memory of a device during a call of a program: Figure 7, section 5.1."""

import dataclasses
import re
from collections.abc import Iterable

from xla_plan.cost.scopes import source
from xla_plan.machines.hardware import GIB
from xla_spmd.hlo.compiled_report import CompiledReport
from xla_spmd.hlo.hlo_cost import Cost
from xla_spmd.hlo.hlo_module import num_bytes

# The refusal says `Used 16.50G of 15.48G hbm`, or names temporaries alone; then its buffers.
_USED = re.compile(r"Used (\S+) of \S+ hbm|\((\S+)\) exceeds available HBM")
_ALLOCATION = re.compile(
    r"Size: (?P<size>\S+)\n(?:\s+Operator: op_name=\"(?P<op_name>[^\"]*)\".*\n)?"
    r"\s+Shape: (?P<shape>[\w\[\],]+)"
)
_UNITS = "BKMGT"
_NUM_BUFFERS = 8  # How many of the largest a plan lists.


@dataclasses.dataclass(frozen=True)
class RoleMemory:
    """The tensors of one role, on one device."""

    arguments: int  # The number of tensors.
    gib: float
    donated_gib: float  # The part whose memory the results may take.
    host_gib: float = 0.0  # The part in the host's memory, which `gib` does not count.


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB of one device in a call of a program: Figure 7, where weights and slots are roles."""

    capacity: float  # The memory that the compiler leaves to a program.
    roles: dict[str, RoleMemory]
    outputs: float  # Results outside donated arguments.
    temporaries: float  # Activations and all other tensors made during the call.
    # The most memory held at once. For a refused program, it is the memory that the compiler wanted
    # when it gave up. It may be less than the parts' sum, since temporaries may reuse donated
    # arguments that are no longer needed.
    peak: float


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor on one core: its GiB, its shape there, and the layer that it comes from."""

    gib: float
    shape: str
    source: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The compiler's refusal of a program that is too large."""

    gib: float  # The memory that it needs on a core.
    temporaries_alone: bool  # Whether `gib` is the temporaries', which are too large already.
    buffers: tuple[Buffer, ...]  # The largest; empty if `gib` is the temporaries' alone.


def of_compiled(
    report: CompiledReport, roles: dict[str, RoleMemory], capacity_gib: float
) -> Memory:
    """Returns the memory of one device in a call of a compiled program."""
    return Memory(
        capacity=capacity_gib,
        roles=roles,
        outputs=(report.output_bytes - report.alias_bytes) / GIB,
        temporaries=report.temp_bytes / GIB,
        peak=report.peak_bytes / GIB,
    )


def of_refused(refusal: Refusal, roles: dict[str, RoleMemory], capacity_gib: float) -> Memory:
    """Returns the memory that a call of a refused program would need on one device."""
    # The compiler gives up at the temporaries if these are too large without the arguments.
    temporaries = refusal.gib
    if not refusal.temporaries_alone:
        temporaries -= sum(role.gib for role in roles.values())
    return Memory(capacity_gib, roles, outputs=0.0, temporaries=temporaries, peak=refusal.gib)


def largest(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """Returns the largest buffers, the largest first."""
    ranked = sorted(buffers, key=lambda buffer: (-buffer.gib, buffer.source))
    return tuple(ranked[:_NUM_BUFFERS])


def largest_results(costs: Iterable[Cost]) -> tuple[Buffer, ...]:
    """Returns the largest results of instructions, one for each shape and layer."""
    # Many instructions of a layer have results of one shape. Among results of equal size, the
    # program's first one is listed.
    buffers: dict[Buffer, None] = {}
    for instruction in costs:
        layer = source(instruction.op_name)
        for array in instruction.arrays:
            buffers[Buffer(num_bytes([array]) / GIB, str(array), layer)] = None
    return largest(buffers)


def parse_refusal(details: str) -> Refusal:
    """Returns the figures in the compiler's refusal of a program that is too large.

    Raises ValueError if the refusal has an unknown form.
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
        buffers=tuple(buffers[:_NUM_BUFFERS]),  # The compiler lists the largest first.
    )


def _parse_gib(size: str) -> float:
    """Returns the GiB of a number of bytes such as `512`, `16.50G` or `17.02GB`."""
    number = size.rstrip(_UNITS)
    unit = size[len(number) :] or "B"
    return float(number) * 1024.0 ** (_UNITS.index(unit[0]) - _UNITS.index("G"))
