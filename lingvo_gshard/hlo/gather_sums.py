"""Finds the all-gathers that the TPU's compiler turns into all-reduces, from 64 partitions on.

Every partition writes its part into zeros, at its own place, and the sum of all is the whole.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.hlo.hlo_module import Instruction, Module

_ALL_REDUCES = ("all-reduce", "all-reduce-start")
# They change at most the dtype and shape of a value.
_PASSING = frozenset(["bitcast", "convert", "copy", "reshape", "transpose"])


@dataclasses.dataclass(frozen=True)
class _Value:
    """An instruction's result; `fusion` is the fusion around it, if it is in one."""

    instruction: Instruction
    fusion: _Value | None = None


def find(module: Module) -> dict[str, int]:
    """The bytes that each gathering all-reduce gathers on a partition, by its name."""
    sizes = {
        each.name: sum(
            operand.num_bytes  # The compiler may join several all-reduces.
            for operand in each.operands
            if _is_part_in_zeros(_origin(_Value(operand)))
        )
        for computation in module.computations
        for each in computation.instructions
        if each.opcode in _ALL_REDUCES
    }
    return {name: size for name, size in sizes.items() if size}


def _is_part_in_zeros(value: _Value) -> bool:
    """Whether it is zeros but for a part whose place depends on the partition."""
    if value.instruction.opcode != "dynamic-update-slice":
        return False
    base, _, *indices = (
        _origin(_Value(each, value.fusion)).instruction for each in value.instruction.operands
    )
    is_empty = base.opcode in ("broadcast", "constant")
    return is_empty and any(index.opcode != "constant" for index in indices)


def _origin(value: _Value) -> _Value:
    """Follows a value to where it is computed: through fusions, tuples and changes of form."""
    instruction, fusion = value.instruction, value.fusion
    operands = instruction.operands
    if instruction.opcode in _PASSING:
        return _origin(_Value(operands[0], fusion))
    if instruction.opcode == "fusion":
        root = _Value(instruction.called[0].root, value)
        return _origin(root) if root.instruction.opcode in (*_PASSING, "fusion") else root
    if instruction.opcode == "parameter" and fusion is not None:
        argument = fusion.instruction.operands[instruction.proto.parameter_number]
        return _origin(_Value(argument, fusion.fusion))
    if instruction.opcode == "get-tuple-element":
        made = _origin(_Value(operands[0], fusion))
        if made.instruction.opcode == "tuple":
            element = made.instruction.operands[instruction.proto.tuple_index]
            return _origin(_Value(element, made.fusion))
    return value
