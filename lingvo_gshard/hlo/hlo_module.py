"""A compiled program as records, read from the HloModuleProto that every XLA compiler provides."""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from lingvo_gshard.core.late import hlo_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """The type of an array: its dtype by XLA's name, such as `bf16`, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def num_bits(self) -> int:
        """The bits of all its elements, by the first number in the dtype's name; 0 for a token."""
        width = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(width[0]) if width else 8 * (self.dtype == "pred"))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One instruction."""

    name: str  # Unique in its program.
    opcode: str
    op_name: str  # The operation it was made from, with scopes; merged ones joined by semicolons.
    arrays: tuple[Array, ...]  # Its result, or all arrays in its tuple and the tuples inside.
    operands: tuple["Instruction", ...]
    # What it runs; a while loop has its body, then its condition.
    called: tuple["Computation", ...]
    proto: Any  # Its HloInstructionProto, with what belongs to single opcodes, such as a window.

    @property
    def is_tuple(self) -> bool:
        """Whether its result is a tuple, even of one array."""
        return bool(self.proto.shape.tuple_shapes)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.arrays)

    def __repr__(self) -> str:
        return f"{self.opcode} {self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A function of the program: its instructions in the order they run; `root` is its result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """The program of one partition; a call runs `entry`. Computations follow those they call."""

    computations: tuple[Computation, ...]
    entry: Computation
    num_partitions: int


def read(compiled: Any) -> Module:
    """Reads the program of a jax.stages.Compiled."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return parse(module.as_serialized_hlo_module_proto())


def parse(serialized: bytes) -> Module:
    """Reads a serialized HloModuleProto."""
    proto = hlo_pb2.HloModuleProto.FromString(serialized)
    schedules = proto.schedule.sequences
    computations: dict[int, Computation] = {}
    for each in proto.computations:  # Those that are called come first, and so do operands.
        found: dict[int, Instruction] = {}
        for instruction in each.instructions:
            found[instruction.id] = Instruction(
                instruction.name,
                instruction.opcode,
                instruction.metadata.op_name,
                arrays_of(instruction.shape),
                tuple(map(found.__getitem__, instruction.operand_ids)),
                tuple(map(computations.__getitem__, instruction.called_computation_ids)),
                instruction,
            )
        order = schedules[each.id].instruction_ids if each.id in schedules else found
        in_order = tuple(map(found.__getitem__, order))
        computations[each.id] = Computation(each.name, in_order, found[each.root_id])
    return Module(
        tuple(computations.values()),
        computations[proto.entry_computation_id],
        max(1, proto.device_assignment.computation_count),
    )


def num_bytes(arrays: Iterable[Array]) -> int:
    """Bytes of several arrays together."""
    return -(-sum(each.num_bits for each in arrays) // 8)


def arrays_of(shape: Any) -> tuple[Array, ...]:
    """The arrays in a ShapeProto, those in tuples included."""
    if shape.tuple_shapes:
        return tuple(array for each in shape.tuple_shapes for array in arrays_of(each))
    names = shape.DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_number
    dtype = names[shape.element_type].name.lower()
    return () if dtype == "tuple" else (Array(dtype, tuple(shape.dimensions)),)
