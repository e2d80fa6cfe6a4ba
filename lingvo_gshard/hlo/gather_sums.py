"""All-gathers that the TPU's compiler writes as all-reduces, from 64 partitions on.

Every partition writes its part into zeros, at its own place, and the sum of all is the whole.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.hlo import compiled_text
from lingvo_gshard.hlo.hlo_text import Computation, Instruction, Module

_ALL_REDUCES = ("all-reduce", "all-reduce-start")
# What a value passes through on its way unchanged, but for its dtype and shape.
_PASSING = frozenset(["bitcast", "convert", "copy", "reshape", "transpose"])


@dataclasses.dataclass(frozen=True)
class _Value:
    """An instruction where it stands: in a computation, and for a fused one the fusion around."""

    computation: Computation
    instruction: Instruction
    fusion: _Value | None = None


def find(module: Module) -> dict[str, int]:
    """Names of the all-reduces that gather, and the bytes that each gathers on a partition."""
    found = {}
    for computation in module.computations.values():
        for each in computation.instructions.values():
            if each.opcode in _ALL_REDUCES:
                size = _gathered_bytes(module, _Value(computation, each))
                if size:
                    found[each.name] = size
    return found


def _gathered_bytes(module: Module, all_reduce: _Value) -> int:
    """Of those of its operands that are gathered; the compiler joins several all-reduces."""
    return sum(
        compiled_text.type_bytes(all_reduce.computation.instructions[name].type)
        for name in all_reduce.instruction.operands
        if _is_part_in_zeros(module, _operand(module, all_reduce, name))
    )


def _is_part_in_zeros(module: Module, value: _Value) -> bool:
    """Whether it is zeros but for a part, whose place is no constant of the program."""
    if value.instruction.opcode != "dynamic-update-slice":
        return False
    base, _, *places = (
        _operand(module, value, name).instruction for name in value.instruction.operands
    )
    is_empty = base.opcode in ("broadcast", "constant")
    return is_empty and any(place.opcode != "constant" for place in places)


def _operand(module: Module, user: _Value, name: str) -> _Value:
    """Where an operand is made, through fusions, tuples and what changes only its form."""
    value = dataclasses.replace(user, instruction=user.computation.instructions[name])
    instruction = value.instruction
    if instruction.opcode in _PASSING:
        return _operand(module, value, instruction.operands[0])
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        root = _Value(inner, inner.instructions[inner.root], value)
        if root.instruction.opcode in (*_PASSING, "fusion"):
            return _operand(module, root, inner.root)
        return root
    if instruction.opcode == "parameter" and value.fusion is not None:
        outer = value.fusion.instruction.operands[int(instruction.argument)]
        return _operand(module, value.fusion, outer)
    if instruction.opcode == "get-tuple-element":
        made = _operand(module, value, instruction.operands[0])
        if made.instruction.opcode == "tuple":
            element = made.instruction.operands[int(instruction.attribute("index"))]
            return _operand(module, made, element)
    return value
