"""The orders of dims that decide how fast a compiled product or copy runs, read from its layouts.

A product is `nn` if its left operand's contracted dim is the minor one in memory and its right
operand's is not, as in the product of two row-major matrices. A `t` in the first or second place
says that the operand is the other way around.
"""

from typing import Any

from xla_spmd.hlo import products
from xla_spmd.hlo.hlo_module import Instruction

FORMS = ("nn", "nt", "tn", "tt")
TRANSPOSING = "transposing"  # A copy with another order of dims in memory.


def of_product(instruction: Instruction) -> str:
    """Returns the form of a dot or a call of cuBLAS; an empty string for other products."""
    if instruction.opcode == "dot":
        numbers = instruction.proto.dot_dimension_numbers
        left_dims = list(numbers.lhs_contracting_dimensions)
        right_dims = list(numbers.rhs_contracting_dimensions)
    elif products.is_gemm(instruction):
        written = products.gemm_config(instruction)["dot_dimension_numbers"]
        left_dims = [int(dim) for dim in written.get("lhs_contracting_dimensions", ())]
        right_dims = [int(dim) for dim in written.get("rhs_contracting_dimensions", ())]
    else:
        return ""

    left, right = instruction.operands[:2]
    left_form = "n" if _minor(left) in left_dims else "t"
    right_form = "t" if _minor(right) in right_dims else "n"
    return left_form + right_form


def is_transposing(instruction: Instruction) -> bool:
    """Returns whether an instruction, or one that is fused into it, moves a minor dim."""
    match instruction.opcode:
        case "fusion" | "async-start":
            return any(map(is_transposing, instruction.called[0].instructions))
        case "copy":
            return _minor(instruction) != _minor(instruction.operands[0])
        case "transpose":
            minor = _minor(instruction)
            if minor is None:
                return False
            return instruction.proto.dimensions[minor] != _minor(instruction.operands[0])
        case _:
            return False


def _minor(instruction: Instruction) -> int | None:
    """Returns the dim of an array with adjacent elements, if any has more than one."""
    shape: Any = instruction.proto.shape
    # Dims of one element have no order.
    dims = (dim for dim in shape.layout.minor_to_major if shape.dimensions[dim] > 1)
    return next(dims, None)
