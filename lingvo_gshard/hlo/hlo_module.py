"""A compiled program as records, read from the HloModuleProto that every XLA compiler provides."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from lingvo_gshard.hlo import hlo_proto

# Memory spaces of XLA's layouts for TPUs, where 0 is the device's memory: the vector memory of a
# core (VMEM), and the common memory of a chip of v4 (CMEM).
_ON_CHIP = (1, 3)


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """The type of an array: its dtype by XLA's name, such as `bf16`, and its shape."""

    dtype: str
    shape: tuple[int, ...]
    # Whether it lies in a memory on a TPU's chip, and not in the device's memory. It is no part of
    # the type, so types that differ in it are equal.
    is_on_chip: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def num_bits(self) -> int:
        """The bits of all elements, by the first number in the dtype's name; 0 for a token."""
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
    op_name: str  # The operation it was made from, with scopes; merged ones joined by semicolons.
    arrays: tuple[Array, ...]  # Its result, or all arrays in its tuple and the tuples inside.
    operands: tuple["Instruction", ...]
    # The computations that it runs; those of a while loop are its body, then its condition.
    called: tuple["Computation", ...]
    proto: Any  # Its HloInstructionProto, with the fields of single opcodes, such as a window.

    @property
    def is_tuple(self) -> bool:
        """Whether the result is a tuple, even of one array."""
        return bool(self.proto.shape.tuple_shapes)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays of the result."""
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

    def instructions(self) -> Iterator[Instruction]:
        """Yields the instructions of all computations, those inside fusions included."""
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

    # A computation comes after those that it calls, so their records exist already.
    computations: dict[int, Computation] = {}
    for computation in proto.computations:
        instructions = _instructions(computation, computations)

        # Only some compilers give a schedule; elsewhere instructions run in the order of the proto.
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

    `computations` has, by id, at least those that the instructions call.
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
    """Returns the bytes of several arrays together, rounded up."""
    bits = sum(array.num_bits for array in arrays)
    return -(-bits // 8)


def arrays_of(shape: Any) -> tuple[Array, ...]:
    """Returns the arrays in a ShapeProto, those in tuples included."""
    if shape.tuple_shapes:
        arrays: list[Array] = []
        for inner in shape.tuple_shapes:
            arrays += arrays_of(inner)
        return tuple(arrays)

    dtypes = shape.DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_number
    dtype = dtypes[shape.element_type].name.lower()
    if dtype == "tuple":  # An empty one.
        return ()
    return (Array(dtype, tuple(shape.dimensions), _is_on_chip(shape.layout)),)


def _is_on_chip(layout: Any) -> bool:
    """Whether a layout is in a memory on a TPU's chip.

    A GPU's memory space 1 is a part of its memory for collectives; its layouts have no tiles, and
    those of a TPU's own memories do.
    """
    return layout.memory_space in _ON_CHIP and bool(layout.tiles)
