"""The collectives of a compiled program: who exchanges how many bytes with whom, and how often."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
# The TPU's compiler fuses a collective with the computations that run meanwhile. It then occurs
# in the fusion that starts it, in those that it goes on in and in the last, with one chain id.
_CHAIN_ID, _CHAIN_START = "chain_id", "AsyncCollectiveStart"
# The TPU's fusion of an all-reduce with a slice of its result.
_REDUCE_SCATTER = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one partition's program.

    Attributes:
      kind: one of COLLECTIVES; a start and its done are one collective, and so is a chain.
      result_bytes: bytes of its results on one partition, each time it runs; several tensors may
        share one collective.
      groups: the partitions that exchange with each other; of a collective-permute, the
        (source, target) pairs.
      times: how often it runs in one call of the program; None if a loop around it has no known
        trip count.
      op_name: as Instruction's; not compared.
    """

    kind: str
    result_bytes: int
    groups: Groups
    times: int | None
    op_name: str = dataclasses.field(default="", compare=False)

    @property
    def group_size(self) -> int:
        """Partitions in each group; 2 for a collective-permute."""
        return len(self.groups[0])


def find(module: Module, times: Mapping[Computation, int | None]) -> tuple[Collective, ...]:
    """All collectives of a program, whose computations run `times`."""
    return tuple(
        _collective(instruction, computation, module.num_partitions, times[computation])
        for computation in module.computations
        for instruction in computation.instructions
        if _kind(instruction) in COLLECTIVES and not _continues(instruction, computation)
    )


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix(_START)


def _continues(instruction: Instruction, computation: Computation) -> bool:
    """Whether it goes on with a collective that another computation has started."""
    if _CHAIN_ID not in instruction.proto.frontend_attributes.map:
        return False
    return all(each.proto.custom_call_target != _CHAIN_START for each in computation.instructions)


def _collective(
    instruction: Instruction, computation: Computation, num_partitions: int, times: int | None
) -> Collective:
    kind, results = _kind(instruction), instruction.arrays
    if computation.name.startswith(_REDUCE_SCATTER):
        kind, results = "reduce-scatter", computation.root.arrays
    elif instruction.opcode.endswith(_START) and kind != "all-reduce":
        results = arrays_of(instruction.proto.shape.tuple_shapes[1])  # After its operands.
    groups = _groups(instruction.proto) or (tuple(range(num_partitions)),)
    return Collective(kind, num_bytes(results), groups, times, instruction.op_name)


def _groups(proto: Any) -> Groups:
    """The groups of a collective's HloInstructionProto; none if all partitions are one group."""
    if proto.source_target_pairs:
        return tuple((pair.source, pair.target) for pair in proto.source_target_pairs)
    if proto.HasField("mesh_axes_replica_group_list"):
        return _rows(_along_axes(proto.mesh_axes_replica_group_list))
    iotas = [
        proto.iota_collective_device_list,
        proto.collective_device_list.iota_replica_group_list,
    ]
    for iota in iotas:
        if iota.num_replica_groups:
            ids = _iota(iota.iota_reshape_dims, iota.iota_transpose_perm)
            return _rows(ids.reshape(iota.num_replica_groups, iota.num_devices_per_group))
    listed = proto.collective_device_list.replica_groups or proto.replica_groups
    return tuple(tuple(group.replica_ids) for group in listed if group.replica_ids)


def _along_axes(groups: Any) -> np.ndarray:
    """[group, member] of a MeshAxesReplicaGroupListProto: groups along some axes of a mesh.

    An axis may take part with some of its factors only, as in Shardy's sub-axes.
    """
    sizes = [axis.size for axis in groups.mesh.axes]
    inside = [
        (axis.mesh_axis_index, axis.sub_axis_info.pre_size or 1, axis.sub_axis_info.size)
        if axis.HasField("sub_axis_info")
        else (axis.mesh_axis_index, 1, sizes[axis.mesh_axis_index])
        for axis in groups.axes
    ]
    # An axis is divided where one of its parts begins or ends.
    factors: list[tuple[int, int, int]] = []
    for index, whole in enumerate(sizes):
        cuts = {1, whole}
        cuts |= {cut for axis, pre, size in inside if axis == index for cut in (pre, pre * size)}
        factors += [(index, pre, end // pre) for pre, end in itertools.pairwise(sorted(cuts))]
    ids = np.array(groups.mesh.device_ids or range(math.prod(sizes)))
    last = [factors.index(part) for part in inside if part[2] > 1]
    first = [i for i in range(len(factors)) if i not in last]
    grid = ids.reshape([size for _, _, size in factors]).transpose(first + last)
    return grid.reshape(-1, math.prod(factors[i][2] for i in last))


def _iota(sizes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """0, 1, 2, ... in a grid of `sizes`, its dimensions transposed."""
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order or range(len(sizes)))


def _rows(groups: np.ndarray) -> Groups:
    return tuple(map(tuple, groups.tolist()))
