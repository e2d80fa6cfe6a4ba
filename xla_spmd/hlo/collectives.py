"""The collectives of a compiled program: their partitions, bytes and number of runs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from xla_spmd.hlo import data_dependence, schedules, slices
from xla_spmd.hlo.hlo_module import (
    COLLECTIVES,
    Computation,
    Instruction,
    Module,
    arrays_of,
    num_bytes,
)
from xla_spmd.hlo.schedules import Flight

# The partitions of each group, or the (source, target) pairs of a collective-permute.
Groups = tuple[tuple[int, ...], ...]
_START = "-start"
# Operations that change at most the dtype and shape of a value.
_PASSING = frozenset(
    {
        "bitcast",
        "convert",
        "copy",
        "reshape",
        "transpose",
    }
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective in one partition's program. A start and its done count as one."""

    kind: str
    result_bytes: int  # The bytes of all results on one partition, for one run.
    groups: Groups
    times: int  # The most runs in one call of the program.
    # Not compared, so that equal collectives of several operations can be counted together.
    op_name: str = dataclasses.field(default="", compare=False)
    # The fewest runs in one call, if they depend on the data; otherwise None.
    least_times: int | None = dataclasses.field(default=None, compare=False)
    # The names of the instructions in the same computation that run while it is under way.
    beside: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    # Whether an equal permute in the reverse direction is under way at the same time, as in the
    # loops of bidirectional rings. Only one of the two permutes is marked.
    is_beside_reverse: bool = dataclasses.field(default=False, compare=False)

    @property
    def group_size(self) -> int:
        """The number of partitions in each group, which is 2 for a collective-permute."""
        return len(self.groups[0])


def find(module: Module) -> tuple[Collective, ...]:
    """Returns all collectives of a program, in the order of its computations.

    Collectives between slices of TPUs are included; see slices.py. Raises ValueError if XLA's
    attributes of such a collective are unknown.
    """
    runs = data_dependence.runs(module)
    times = runs.most.times
    flights = schedules.flights(module)
    devices_per_slice = slices.devices_per_slice(module)

    found: dict[Instruction, Collective] = {}
    least_times: dict[Instruction, int] = {}
    for computation in module.computations:
        for instruction in computation.instructions:
            # The data decide how much a ragged exchange sends.
            is_ragged = instruction.opcode.startswith("ragged")
            least_times[instruction] = 0 if is_ragged else runs.least.times[computation]

            is_collective = instruction.opcode.removesuffix(_START) in COLLECTIVES
            if is_collective and not _continues(instruction, computation):
                found[instruction] = _collective(
                    instruction, computation, module.num_partitions, times[computation]
                )
            elif instruction.opcode == "recv" and slices.is_between_slices(instruction):
                found[instruction] = _between_slices(
                    instruction, devices_per_slice, times[computation]
                )

    reversed_permutes = _reversed_permutes(found, flights)
    return tuple(
        dataclasses.replace(
            collective,
            least_times=least_times[instruction],
            beside=_names_beside(flights.get(instruction)),
            is_beside_reverse=instruction in reversed_permutes,
        )
        for instruction, collective in found.items()
    )


def _names_beside(flight: Flight | None) -> tuple[str, ...]:
    """Returns the names of the instructions beside a collective; () if it is synchronous."""
    if flight is None:
        return ()
    return tuple(instruction.name for instruction in flight.beside)


def _reversed_permutes(
    found: Mapping[Instruction, Collective], flights: Mapping[Instruction, Flight]
) -> set[Instruction]:
    """Returns one permute of each pair that runs together in opposite directions."""
    waiting: list[Instruction] = []
    marked: set[Instruction] = set()
    for instruction, collective in found.items():
        if collective.kind != "collective-permute" or instruction not in flights:
            continue

        partner = next(
            (
                other
                for other in waiting
                if _are_reverse(collective, found[other])
                and flights[instruction].overlaps(flights[other])
            ),
            None,
        )
        if partner is None:
            waiting.append(instruction)
        else:
            waiting.remove(partner)
            marked.add(instruction)
    return marked


def _are_reverse(a: Collective, b: Collective) -> bool:
    """Returns whether two permutes send equally many bytes over the same links, in reverse.

    Within a group of two, one permute uses each link in both directions: it is its own reverse.
    """
    pairs = set(a.groups)
    others = set(b.groups)
    backwards = {(target, source) for source, target in others}
    return a.result_bytes == b.result_bytes and pairs == backwards and pairs != others


def _between_slices(receive: Instruction, devices_per_slice: int, times: int) -> Collective:
    """Returns the collective between slices that ends with a `recv` from the host."""
    transfer = slices.transfer(receive)
    return Collective(
        kind=transfer.kind,
        result_bytes=num_bytes(receive.arrays[:1]),  # The other results are a number and a token.
        groups=transfer.partitions(devices_per_slice),
        times=times,
        op_name=receive.op_name,
    )


def _collective(
    instruction: Instruction, computation: Computation, num_partitions: int, times: int
) -> Collective:
    """Returns the collective that an instruction of `computation` runs or starts."""
    kind = instruction.opcode.removesuffix(_START)
    results = instruction.arrays
    if computation.name.startswith("all-reduce-scatter"):
        # The TPU's compiler writes a reduce-scatter as an all-reduce, fused with a slice of it.
        kind = "reduce-scatter"
        results = computation.root.arrays
    elif instruction.opcode.endswith(_START) and kind != "all-reduce":
        # A start returns (operands, results, ...), but an all-reduce's start only the results.
        results = arrays_of(instruction.proto.shape.tuple_shapes[1])

    all_partitions = tuple(range(num_partitions))
    return Collective(
        kind=kind,
        result_bytes=num_bytes(results),
        groups=groups_of(instruction.proto) or (all_partitions,),
        times=times,
        op_name=instruction.op_name,
    )


def _continues(instruction: Instruction, computation: Computation) -> bool:
    """Returns whether another computation has started the collective.

    The TPU's compiler fuses parts of a collective with the computations that run meanwhile. The
    collective then occurs in the fusions that start, continue and end it, with one chain id.
    """
    targets = (other.proto.custom_call_target for other in computation.instructions)
    is_chained = "chain_id" in instruction.proto.frontend_attributes.map
    return is_chained and "AsyncCollectiveStart" not in targets


# --- The groups of a collective ---


def groups_of(proto: Any) -> Groups:
    """Returns the groups of a collective's HloInstructionProto; () if all partitions are one group.

    XLA writes groups as (source, target) pairs, along axes of a mesh, as a transposed iota, or as
    lists. Either of two fields stores an iota or a list.
    """
    if proto.source_target_pairs:
        return tuple((pair.source, pair.target) for pair in proto.source_target_pairs)

    if proto.HasField("mesh_axes_replica_group_list"):
        return _along_axes(proto.mesh_axes_replica_group_list)

    device_list = proto.collective_device_list
    for iota in (proto.iota_collective_device_list, device_list.iota_replica_group_list):
        if iota.num_replica_groups:
            return _transposed(iota)

    listed = device_list.replica_groups or proto.replica_groups
    return tuple(tuple(group.replica_ids) for group in listed if group.replica_ids)


def _transposed(iota: Any) -> Groups:
    """Returns the groups of an IotaReplicaGroupListProto: rows of a transposed grid of 0, 1, 2, ...

    XLA's text `[4,2]<=[2,4]T(1,0)` is a [2, 4] grid, transposed and read as 4 rows of 2:

        0 1 2 3    ->    (0, 4), (1, 5), (2, 6), (3, 7)
        4 5 6 7
    """
    grid_shape = tuple(iota.iota_reshape_dims)
    order = tuple(iota.iota_transpose_perm) or tuple(range(len(grid_shape)))
    grid = np.arange(math.prod(grid_shape)).reshape(grid_shape)
    return _rows(grid.transpose(order), iota.num_devices_per_group)


def _along_axes(groups: Any) -> Groups:
    """Returns the groups of a MeshAxesReplicaGroupListProto: partitions along some axes of a mesh.

    Take 8 partitions on a mesh whose axes are x of size 2 (down) and y of size 4 (across):

        0 1 2 3        along y          (0, 1, 2, 3), (4, 5, 6, 7)
        4 5 6 7        along x          (0, 4), (1, 5), (2, 6), (3, 7)
                       along y, then x  (0, 4, 1, 5, 2, 6, 3, 7)

    The groups may use only a factor of an axis, which Shardy calls a sub-axis. If y has an outer
    factor of 2 and an inner factor of 2:

                       outer factor     (0, 2), (1, 3), (4, 6), (5, 7)
                       inner factor     (0, 1), (2, 3), (4, 5), (6, 7)
    """
    sizes = [axis.size for axis in groups.mesh.axes]
    partitions = np.array(groups.mesh.device_ids or range(math.prod(sizes)))
    if groups.mesh.HasField("transposed"):
        grid = partitions.reshape(groups.mesh.transposed.reshape_dims)
        partitions = grid.transpose(groups.mesh.transposed.transpose_perm).ravel()

    # Row i has each partition's coordinate along axis i. The loop moves the part of a coordinate
    # that numbers the members of a group to `member`; the remaining coordinates number the groups.
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    member = np.zeros_like(partitions)
    for axis in groups.axes:
        index = axis.mesh_axis_index

        # The axis is a product of an outer, a middle and an inner factor. Only the middle factor
        # takes part; without a sub-axis, it is the whole axis.
        if axis.HasField("sub_axis_info"):
            outer = axis.sub_axis_info.pre_size or 1
            middle = axis.sub_axis_info.size
        else:
            outer = 1
            middle = sizes[index]
        inner = sizes[index] // (outer * middle)

        digit = coordinates[index] // inner % middle
        coordinates[index] -= digit * inner
        member = member * middle + digit

    # Sorted by group, in the order of the mesh, then by member; lexsort's last key comes first.
    by_group = np.lexsort([member, *coordinates[::-1]])
    return _rows(partitions[by_group], int(member.max()) + 1)


def _rows(partitions: np.ndarray, group_size: int) -> Groups:
    """Returns partitions, listed in row-major order, as groups of equal size."""
    return tuple(tuple(row) for row in partitions.reshape(-1, group_size).tolist())


# --- All-gathers written as all-reduces ---


def gathered_bytes(module: Module) -> dict[str, int]:
    """Returns, by name, the bytes on a partition of each all-reduce that is an all-gather.

    For 64 or more partitions, the TPU's compiler writes an all-gather as a sum: each partition
    writes its part into zeros, at a different index, and the sum over all partitions is the whole.
    """
    sizes: dict[str, int] = {}
    for instruction in module.instructions():
        if instruction.opcode.removesuffix(_START) != "all-reduce":
            continue

        # The compiler may join several all-reduces into one with several operands.
        gathered = sum(
            operand.num_bytes
            for operand in instruction.operands
            if _is_part_in_zeros(_origin(_Value(operand)))
        )
        if gathered:
            sizes[instruction.name] = gathered
    return sizes


@dataclasses.dataclass(frozen=True)
class _Value:
    """The result of an instruction, which is in `fusion` if it is fused."""

    instruction: Instruction
    fusion: "_Value | None" = None

    @property
    def operands(self) -> "list[_Value]":
        return [_Value(operand, self.fusion) for operand in self.instruction.operands]


def _is_part_in_zeros(value: _Value) -> bool:
    """Returns whether a value is zeros except for a part whose index depends on the partition."""
    if value.instruction.opcode != "dynamic-update-slice":
        return False

    # Zeros are a broadcast or a constant. A constant index is the same on all partitions.
    base, _, *indices = (_origin(operand).instruction.opcode for operand in value.operands)
    is_zeros = base in ("broadcast", "constant")
    return is_zeros and any(opcode != "constant" for opcode in indices)


def _origin(value: _Value) -> _Value:
    """Follows a value to its origin: through fusions, tuples and changes of form."""
    instruction = value.instruction
    fusion = value.fusion
    if instruction.opcode in _PASSING:
        return _origin(value.operands[0])

    # Into a fusion, from its result to the root of its computation ...
    if instruction.opcode == "fusion":
        return _origin(_Value(instruction.called[0].root, value))

    # ... and out of it, from a parameter to the operand of the fusion.
    if instruction.opcode == "parameter" and fusion is not None:
        return _origin(fusion.operands[instruction.proto.parameter_number])

    if instruction.opcode == "get-tuple-element":
        whole = _origin(value.operands[0])
        if whole.instruction.opcode == "tuple":
            return _origin(whole.operands[instruction.proto.tuple_index])
    return value
