"""The collectives of a compiled program: their partitions, their bytes, how often they run."""

import dataclasses
import math
from typing import Any

import numpy as np

from lingvo_gshard.hlo import trip_counts
from lingvo_gshard.hlo.hlo_module import Computation, Instruction, Module, arrays_of, num_bytes

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
# They change at most the dtype and shape of a value.
_PASSING = frozenset(["bitcast", "convert", "copy", "reshape", "transpose"])


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one partition's program. A start and its done count as one."""

    kind: str
    result_bytes: int  # Of its results, of one or more tensors, on one partition each time it runs.
    groups: Groups
    times: int  # How often a call of the program runs it.
    op_name: str = dataclasses.field(default="", compare=False)

    @property
    def group_size(self) -> int:
        """Partitions in each group; 2 for a collective-permute."""
        return len(self.groups[0])


def find(module: Module) -> tuple[Collective, ...]:
    """All collectives of a program."""
    found, times = [], trip_counts.count(module).times
    for computation in module.computations:
        for instruction in computation.instructions:
            kind, results = instruction.opcode.removesuffix(_START), instruction.arrays
            if kind not in COLLECTIVES or _continues(instruction, computation):
                continue
            if computation.name.startswith("all-reduce-scatter"):  # The TPU's fusion with a slice.
                kind, results = "reduce-scatter", computation.root.arrays
            elif instruction.opcode.endswith(_START) and kind != "all-reduce":
                results = arrays_of(instruction.proto.shape.tuple_shapes[1])  # After its operands.
            groups = _groups(instruction.proto) or (tuple(range(module.num_partitions)),)
            size, runs = num_bytes(results), times[computation]
            found.append(Collective(kind, size, groups, runs, instruction.op_name))
    return tuple(found)


def gathered_bytes(module: Module) -> dict[str, int]:
    """The bytes on a partition of each all-reduce that stands for an all-gather, by its name.

    From 64 partitions on, the TPU's compiler writes an all-gather so: every partition writes its
    part into zeros, at its own place, and the sum of all is the whole.
    """
    sizes = {
        each.name: sum(
            operand.num_bytes  # The compiler may join several all-reduces.
            for operand in each.operands
            if _is_part_in_zeros(_origin(_Value(operand)))
        )
        for computation in module.computations
        for each in computation.instructions
        if each.opcode.removesuffix(_START) == "all-reduce"
    }
    return {name: size for name, size in sizes.items() if size}


def _continues(instruction: Instruction, computation: Computation) -> bool:
    """Whether another computation has started the collective.

    The TPU's compiler fuses a collective with the computations that run meanwhile. It then occurs
    in the fusions that start, continue and end it, with one chain id.
    """
    targets = (each.proto.custom_call_target for each in computation.instructions)
    is_chained = "chain_id" in instruction.proto.frontend_attributes.map
    return is_chained and "AsyncCollectiveStart" not in targets


def _groups(proto: Any) -> Groups:
    """The groups of a collective's HloInstructionProto; empty if all partitions are one group."""
    if proto.source_target_pairs:
        return tuple((pair.source, pair.target) for pair in proto.source_target_pairs)
    if proto.HasField("mesh_axes_replica_group_list"):
        return _along_axes(proto.mesh_axes_replica_group_list)
    listed = proto.collective_device_list
    for iota in (proto.iota_collective_device_list, listed.iota_replica_group_list):
        if iota.num_replica_groups:
            # 0, 1, 2, ... in a grid whose dims are transposed.
            sizes, order = iota.iota_reshape_dims, iota.iota_transpose_perm
            ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order or range(len(sizes)))
            rows = ids.reshape(iota.num_replica_groups, iota.num_devices_per_group)
            return tuple(map(tuple, rows.tolist()))
    groups = listed.replica_groups or proto.replica_groups
    return tuple(tuple(group.replica_ids) for group in groups if group.replica_ids)


def _along_axes(groups: Any) -> Groups:
    """Those of a MeshAxesReplicaGroupListProto, along some axes of a mesh.

    Only some factors of an axis may take part, as in Shardy's sub-axes.
    """
    sizes = [axis.size for axis in groups.mesh.axes]
    ids = np.array(groups.mesh.device_ids or range(math.prod(sizes)))
    # A device's place along each axis is its group's, once the digits that number the members of
    # a group are taken out of it.
    places, members = np.indices(sizes).reshape(len(sizes), -1), np.zeros_like(ids)
    for axis in groups.axes:
        index, pre, size = axis.mesh_axis_index, 1, sizes[axis.mesh_axis_index]
        if axis.HasField("sub_axis_info"):
            pre, size = axis.sub_axis_info.pre_size or 1, axis.sub_axis_info.size
        stride = sizes[index] // (pre * size)
        digits = places[index] // stride % size
        places[index] -= digits * stride
        members = members * size + digits
    rows = ids[np.lexsort([members, *places[::-1]])].reshape(-1, members.max() + 1)
    return tuple(map(tuple, rows.tolist()))


@dataclasses.dataclass(frozen=True)
class _Value:
    """An instruction's result; `fusion` is the fusion around it, if it is in one."""

    instruction: Instruction
    fusion: "_Value | None" = None

    @property
    def operands(self) -> "list[_Value]":
        return [_Value(each, self.fusion) for each in self.instruction.operands]


def _is_part_in_zeros(value: _Value) -> bool:
    """Whether it is zeros but for a part whose place depends on the partition."""
    if value.instruction.opcode != "dynamic-update-slice":
        return False
    base, _, *indices = (_origin(each).instruction.opcode for each in value.operands)
    return base in ("broadcast", "constant") and any(each != "constant" for each in indices)


def _origin(value: _Value) -> _Value:
    """Follows a value to where it is computed: through fusions, tuples and changes of form."""
    instruction, fusion = value.instruction, value.fusion
    if instruction.opcode in _PASSING:
        return _origin(value.operands[0])
    if instruction.opcode == "fusion":
        return _origin(_Value(instruction.called[0].root, value))
    if instruction.opcode == "parameter" and fusion is not None:
        return _origin(fusion.operands[instruction.proto.parameter_number])
    if instruction.opcode == "get-tuple-element":
        made = _origin(value.operands[0])
        if made.instruction.opcode == "tuple":
            return _origin(made.operands[instruction.proto.tuple_index])
    return value
