"""A compiled program as records, read from the HloModuleProto that every XLA compiler provides."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from xla_spmd.hlo import hlo_proto

# Memory spaces of XLA's layouts for TPUs, besides 0, the device's memory: the vector memory of a
# core (VMEM), and the common memory of a v4 chip (CMEM).
_ON_CHIP = (1, 3)

# The opcodes of collectives. The opcode of an asynchronous collective begins with one of them.
COLLECTIVES = (
    "all-to-all",
    "all-reduce",
    "all-gather",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """The type of an array: its dtype by XLA's name, for example `bf16`, and its shape."""

    dtype: str
    shape: tuple[int, ...]
    # Whether it is placed in a memory on a TPU's chip rather than in the device's memory. It does
    # not belong to the type: types that differ only in it are equal.
    is_on_chip: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def num_bits(self) -> int:
        """The bits of all elements, from the first number in the dtype's name; 0 for a token."""
        if self.dtype == "pred":
            element_bits = 8
        elif width := re.search(r"\d+", self.dtype):
            element_bits = int(width[0])
        else:
            element_bits = 0
        return math.prod(self.shape) * element_bits


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One instruction of a computation."""

    name: str  # Unique in its program.
    opcode: str
    op_name: str  # The original operation with its scopes; merged names have semicolons.
    arrays: tuple[Array, ...]  # Its result, or all arrays in a (nested) tuple.
    operands: tuple["Instruction", ...]
    # The computations that it runs. A while loop runs its body and its condition, in this order.
    called: tuple["Computation", ...]
    proto: Any  # Its HloInstructionProto, with fields of single opcodes.

    @property
    def is_tuple(self) -> bool:
        """Returns whether the result is a tuple, even of one array."""
        return bool(self.proto.shape.tuple_shapes)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays in the result."""
        return num_bytes(self.arrays)

    def __repr__(self) -> str:
        return f"{self.opcode} {self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A function of the program: its instructions in execution order; `root` is its result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """The program of one partition. A call runs `entry`. A computation follows its callees."""

    computations: tuple[Computation, ...]
    entry: Computation
    num_partitions: int

    def instructions(self) -> Iterator[Instruction]:
        """Yields the instructions of all computations, including instructions inside fusions."""
        for computation in self.computations:
            yield from computation.instructions


def read(compiled: Any) -> Module:
    """Returns the program of a jax.stages.Compiled."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return parse(module.as_serialized_hlo_module_proto())


def parse(serialized: bytes) -> Module:
    """Returns the program in a serialized HloModuleProto."""
    proto = hlo_proto.messages()["xla.HloModuleProto"].FromString(serialized)
    schedules = proto.schedule.sequences

    # A computation follows its callees, so their records exist already.
    computations: dict[int, Computation] = {}
    for computation in proto.computations:
        instructions = _instructions(computation, computations)

        # Only some compilers give a schedule. Otherwise instructions run in the order of the proto.
        if computation.id in schedules:
            order = list(schedules[computation.id].instruction_ids)
        else:
            order = list(instructions)

        computations[computation.id] = Computation(
            name=computation.name,
            instructions=tuple(instructions[id_] for id_ in order),
            root=instructions[computation.root_id],
        )

    return Module(
        computations=tuple(computations.values()),
        entry=computations[proto.entry_computation_id],
        num_partitions=max(1, proto.device_assignment.computation_count),
    )


def _instructions(proto: Any, computations: dict[int, Computation]) -> dict[int, Instruction]:
    """Returns the instructions of a HloComputationProto by id, in the proto's order.

    `computations` has, by id, at least the computations that the instructions call.
    """
    instructions: dict[int, Instruction] = {}
    for instruction in proto.instructions:  # Operands come before their users.
        instructions[instruction.id] = Instruction(
            name=instruction.name,
            opcode=instruction.opcode,
            op_name=instruction.metadata.op_name,
            arrays=arrays_of(instruction.shape),
            operands=tuple(instructions[id_] for id_ in instruction.operand_ids),
            called=tuple(computations[id_] for id_ in instruction.called_computation_ids),
            proto=instruction,
        )
    return instructions


def num_bytes(arrays: Iterable[Array]) -> int:
    """Returns the total bytes of several arrays, rounded up."""
    bits = sum(array.num_bits for array in arrays)
    return -(-bits // 8)


def arrays_of(shape: Any) -> tuple[Array, ...]:
    """Returns the arrays in a ShapeProto, including the arrays in tuples."""
    if shape.tuple_shapes:
        arrays: list[Array] = []
        for inner in shape.tuple_shapes:
            arrays += arrays_of(inner)
        return tuple(arrays)

    dtypes = shape.DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_number
    dtype = dtypes[shape.element_type].name.lower()
    if dtype == "tuple":  # An empty tuple.
        return ()
    return (Array(dtype, tuple(shape.dimensions), _is_on_chip(shape.layout)),)


def _is_on_chip(layout: Any) -> bool:
    """Returns whether a layout is in a memory on a TPU's chip.

    A GPU's memory space 1 is the part of its memory for collectives. Layouts in it have no tiles,
    but layouts in a TPU's own memories have tiles.
    """
    return layout.memory_space in _ON_CHIP and bool(layout.tiles)
