"""A training step as it ran, by category, beside its roofline: Figure 8, section 5.2.

Every moment of a device counts once. If several instructions run at the same time, one of them gets
it: a computation before a collective, and a collective before a loop around both; among equals, the
one that began last. So a collective gets only the time in which the device does nothing else, and
the parts of a step add up to its wall time. Times are the means over the devices of this process.
"""

import bisect
import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.plans.categories import FIGURE_8, Category, category
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.spmd.traces import InstructionRun, Interval, Trace
from lingvo_gshard.train.profiling import ProfiledCall
from xla_plan.cost import compiled_step, roofline
from xla_plan.machines.networks import Network
from xla_spmd.hlo import hlo_cost
from xla_spmd.hlo.hlo_module import COLLECTIVES

IDLE = "idle"  # No instruction runs: the host starts the call, or a device waits for work.
INPUT = "wait for input"

_COMPUTES = 0
_EXCHANGES = 1
_CONTROLS = 2


@dataclasses.dataclass(frozen=True)
class Part:
    """A category of a step, or a kind of collective, and its costs on one device in a step."""

    secs: float
    flops: float = 0.0  # The flops of matrix products.
    roofline_secs: float | None = None  # None if the machine's figures are unknown.


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """The mean of the steps in a trace."""

    steps: range
    num_devices: int  # The number of devices in the trace, all of this process.
    secs: float  # From the start of a call to its results, and the wait for its input.
    parts: dict[str, Part]  # By category or kind of collective, then INPUT and IDLE.


@dataclasses.dataclass(frozen=True)
class _Role:
    """The role of an instruction in the step."""

    part: str
    rank: int


_UNKNOWN = _Role(Category.OTHER, _CONTROLS)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The work of one device in a call of a program, by part."""

    roles: dict[str, _Role]  # The role of each instruction that it runs by itself, by name.
    flops: dict[str, float]
    roofline_secs: dict[str, float]


def measure(calls: Sequence[ProfiledCall], trace: Trace, network: Network | None) -> MeasuredStep:
    """Returns the mean step of consecutive calls, with rooflines of the machine of `network`.

    Raises ValueError if the trace lacks a call, or the instructions of a device.
    """
    num_devices = len({run.device for run in trace.runs})
    if num_devices == 0:
        raise ValueError("the trace has no instruction of any device.")

    # The last call may be a different program, in which the same names denote other instructions.
    programs = {call.executable: _program(call.executable, network) for call in calls}
    busy_ns: dict[str, float] = collections.defaultdict(float)
    flops: dict[str, float] = collections.defaultdict(float)
    roofline_secs: dict[str, float] = collections.defaultdict(float)
    call_ns = 0.0
    runs = sorted(trace.runs, key=lambda run: run.start_ns)
    for call in calls:
        if call.number not in trace.calls:
            raise ValueError(f"the trace lacks the call that ends with step {call.number}.")
        interval = trace.calls[call.number]
        call_ns += interval.end_ns - interval.start_ns

        program = programs[call.executable]
        _add(busy_ns, _busy_ns(_within(runs, interval), interval, program.roles))
        _add(flops, program.flops)
        _add(roofline_secs, program.roofline_secs)

    # Divide the sums over the devices and the calls: the result is for one device and one step.
    steps = range(calls[0].steps.start, calls[-1].steps.stop)
    parts: dict[str, Part] = {}
    for name in map(str, (*Category, *COLLECTIVES)):
        if name in busy_ns or name in roofline_secs:
            parts[name] = Part(
                secs=busy_ns[name] / num_devices / len(steps) / 1e9,
                flops=flops[name] / len(steps),
                roofline_secs=None if network is None else roofline_secs[name] / len(steps),
            )

    # The rest of the wall time.
    call_secs = call_ns / len(steps) / 1e9
    input_secs = sum(call.input_wait_secs for call in calls) / len(steps)
    busy_secs = sum(part.secs for part in parts.values())
    parts[INPUT] = Part(input_secs)
    parts[IDLE] = Part(call_secs - busy_secs)
    return MeasuredStep(steps, num_devices, call_secs + input_secs, parts)


def _add(total: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        total[name] += value


def _program(executable: Executable, network: Network | None) -> _Program:
    """Reads a compiled program; rooflines need a network."""
    step = compiled_step.read(executable)
    roles: dict[str, _Role] = {}
    flops: dict[str, float] = collections.defaultdict(float)
    for cost in step.costs:
        part = category(cost.op_name)
        roles[cost.name] = _Role(part, _COMPUTES)
        flops[part] += cost.times * cost.flops

    # The end of an asynchronous collective costs nothing, but the device may wait there.
    for instruction in executable.module.instructions():
        opcode = hlo_cost.opcode_of(instruction)
        kind = opcode.removesuffix("-start").removesuffix("-done")
        if kind in COLLECTIVES:
            roles[instruction.name] = _Role(kind, _EXCHANGES)

    roofline_secs: dict[str, float] = {}
    if network is not None:
        cost_of_call = roofline.cost(step, network, FIGURE_8)
        for name, times in cost_of_call.roofline_secs_by_category.items():
            roofline_secs[name] = times.step - times.network
        roofline_secs |= cost_of_call.network_secs_by_kind
    return _Program(roles, flops, roofline_secs)


# --- Each moment once ---


def _within(runs: Sequence[InstructionRun], interval: Interval) -> Sequence[InstructionRun]:
    """Returns the runs that begin in an interval; `runs` are sorted by their start."""
    first = bisect.bisect_left(runs, interval.start_ns, key=lambda run: run.start_ns)
    end = bisect.bisect_left(runs, interval.end_ns, key=lambda run: run.start_ns)
    return runs[first:end]


def _busy_ns(
    runs: Sequence[InstructionRun], interval: Interval, roles: Mapping[str, _Role]
) -> dict[str, float]:
    """Returns the time of each part, over all devices together; runs are sorted by their start."""
    by_device: dict[int, list[InstructionRun]] = collections.defaultdict(list)
    for run in runs:
        by_device[run.device].append(run)

    total: dict[str, float] = collections.defaultdict(float)
    for device_runs in by_device.values():
        for part, part_ns in _device_ns(device_runs, interval, roles):
            total[part] += part_ns
    return total


def _device_ns(
    runs: Sequence[InstructionRun], interval: Interval, roles: Mapping[str, _Role]
) -> Iterator[tuple[str, float]]:
    """Yields (part, time) for each stretch in which one device runs the same instructions."""
    moments = set()
    for run in runs:
        moments |= {run.start_ns, min(run.end_ns, interval.end_ns)}

    # The first run in the heap gets the time. Ended runs leave the heap when they become the first.
    upcoming = collections.deque(runs)
    running: list[tuple[int, float, float, str]] = []
    for start_ns, end_ns in itertools.pairwise(sorted(moments)):
        while upcoming and upcoming[0].start_ns <= start_ns:
            run = upcoming.popleft()
            role = roles.get(run.instruction, _UNKNOWN)
            heapq.heappush(running, (role.rank, -run.start_ns, run.end_ns, role.part))
        while running and running[0][2] <= start_ns:
            heapq.heappop(running)
        if running:
            yield running[0][3], end_ns - start_ns
