"""The collectives of a compiled program: their partitions, their bytes, how often they run."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_gshard.hlo import schedules, slices, trip_counts
from lingvo_gshard.hlo.hlo_module import Computation, Instruction, Module, arrays_of, num_bytes
from lingvo_gshard.hlo.schedules import Flight

COLLECTIVES = (
    "all-to-all",
    "all-reduce",
    "all-gather",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
    "collective-broadcast",
)
# The partitions of each group; of a collective-permute, (source, target) pairs.
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
    """One collective of one partition's program. A start and its done count as one."""

    kind: str
    result_bytes: int  # Of its results, of one or more tensors, on one partition each time it runs.
    groups: Groups
    times: int  # How often a call of the program runs it.
    # Not compared, so that equal collectives of several operations can be counted together.
    op_name: str = dataclasses.field(default="", compare=False)
    # The instructions of the same computation that run while it is under way, by their names.
    beside: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    # Whether it is a permute that is under way together with an equal one whose pairs are its own
    # reversed, as in the loops of bidirectional rings. Of two such permutes one is marked.
    is_beside_reverse: bool = dataclasses.field(default=False, compare=False)

    @property
    def group_size(self) -> int:
        """The number of partitions in each group; 2 for a collective-permute."""
        return len(self.groups[0])


def find(module: Module) -> tuple[Collective, ...]:
    """Returns all collectives of a program, in the order of its computations.

    Those between slices of TPUs are among them; see slices.py. Raises ValueError as
    slices.transfer.
    """
    times = trip_counts.count(module).times
    flights = schedules.flights(module)
    devices_per_slice = slices.devices_per_slice(module)

    found: dict[Instruction, Collective] = {}
    for computation in module.computations:
        for instruction in computation.instructions:
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
            beside=_names_beside(flights.get(instruction)),
            is_beside_reverse=instruction in reversed_permutes,
        )
        for instruction, collective in found.items()
    )


def _names_beside(flight: Flight | None) -> tuple[str, ...]:
    """Returns the names of what runs beside a collective; () if it is not asynchronous."""
    if flight is None:
        return ()
    return tuple(instruction.name for instruction in flight.beside)


def _reversed_permutes(
    found: Mapping[Instruction, Collective], flights: Mapping[Instruction, Flight]
) -> set[Instruction]:
    """Returns one of each two permutes that run together and are each other's reverse."""
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
    """Whether two permutes send as much, over the same links in opposite directions.

    Between two members each link is used both ways by one permute, which is its own reverse.
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
        result_bytes=num_bytes(receive.arrays[:1]),  # The others are a number and a token.
        groups=transfer.partitions(devices_per_slice),
        times=times,
        op_name=receive.op_name,
    )


def _collective(
    instruction: Instruction, computation: Computation, num_partitions: int, times: int
) -> Collective:
    """Returns the collective that an instruction of `computation` is or starts."""
    kind = instruction.opcode.removesuffix(_START)
    results = instruction.arrays
    if computation.name.startswith("all-reduce-scatter"):
        # The TPU's compiler writes a reduce-scatter as an all-reduce, fused with a slice of it.
        kind = "reduce-scatter"
        results = computation.root.arrays
    elif instruction.opcode.endswith(_START) and kind != "all-reduce":
        # A start returns (operands, results, ...); that of an all-reduce, the results alone.
        results = arrays_of(instruction.proto.shape.tuple_shapes[1])

    all_partitions = tuple(range(num_partitions))
    return Collective(
        kind=kind,
        result_bytes=num_bytes(results),
        groups=_groups(instruction.proto) or (all_partitions,),
        times=times,
        op_name=instruction.op_name,
    )


def _continues(instruction: Instruction, computation: Computation) -> bool:
    """Whether another computation has started the collective.

    The TPU's compiler fuses a collective with the computations that run meanwhile. It then occurs
    in the fusions that start, continue and end it, with one chain id.
    """
    targets = (other.proto.custom_call_target for other in computation.instructions)
    is_chained = "chain_id" in instruction.proto.frontend_attributes.map
    return is_chained and "AsyncCollectiveStart" not in targets


# --- The groups of a collective ---


def _groups(proto: Any) -> Groups:
    """Returns the groups of a collective's HloInstructionProto; () if all partitions are one group.

    XLA writes groups as pairs, along axes of a mesh, as a transposed iota, or as lists, the latter
    two in either of two fields.
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

    The groups may lie along a factor of an axis, which Shardy calls a sub-axis. With y as an outer
    factor of 2 and an inner factor of 2:

                       outer factor     (0, 2), (1, 3), (4, 6), (5, 7)
                       inner factor     (0, 1), (2, 3), (4, 5), (6, 7)
    """
    sizes = [axis.size for axis in groups.mesh.axes]
    partitions = np.array(groups.mesh.device_ids or range(math.prod(sizes)))

    # Row i has each partition's coordinate along axis i. In the loop, the part of a coordinate that
    # numbers the members of a group moves to `member`; what remains tells the groups apart.
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    member = np.zeros_like(partitions)
    for axis in groups.axes:
        index = axis.mesh_axis_index

        # The axis is a product of an outer, a middle and an inner factor, of which the middle one
        # takes part: all of the axis, unless a sub-axis is named.
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

    # By group, in the order of the mesh, and then by member; lexsort's last key comes first.
    by_group = np.lexsort([member, *coordinates[::-1]])
    return _rows(partitions[by_group], int(member.max()) + 1)


def _rows(partitions: np.ndarray, group_size: int) -> Groups:
    """Returns partitions, in row-major order, as groups of equal size."""
    return tuple(tuple(row) for row in partitions.reshape(-1, group_size).tolist())


# --- All-gathers that are written as all-reduces ---


def gathered_bytes(module: Module) -> dict[str, int]:
    """Returns the bytes on a partition of each all-reduce that is an all-gather, by its name.

    From 64 partitions on, the TPU's compiler writes an all-gather as a sum: each partition writes
    its part into zeros, at an index of its own, and the sum over all partitions is the whole.
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
    """An instruction's result; `fusion` is the fusion around it, if it is in one."""

    instruction: Instruction
    fusion: "_Value | None" = None

    @property
    def operands(self) -> "list[_Value]":
        return [_Value(operand, self.fusion) for operand in self.instruction.operands]


def _is_part_in_zeros(value: _Value) -> bool:
    """Whether a value is zeros except for a part, whose index depends on the partition."""
    if value.instruction.opcode != "dynamic-update-slice":
        return False

    # Zeros are a broadcast or a constant. A constant index is the same on all partitions.
    base, _, *indices = (_origin(operand).instruction.opcode for operand in value.operands)
    is_zeros = base in ("broadcast", "constant")
    return is_zeros and any(opcode != "constant" for opcode in indices)


def _origin(value: _Value) -> _Value:
    """Follows a value to where it is computed: through fusions, tuples and changes of form."""
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
