"""The values of small arrays that a compiled program computes from its own constants.

A loop's length depends on a counter, a bound or a flag: a scalar or a few elements, of any dtype.
`apply` computes one instruction with NumPy, as XLA defines it: integers wrap around, and integer
division rounds towards zero.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from xla_spmd.hlo.hlo_module import Array, Instruction

# An array, a tuple of values, or None if it is unknown.
Value = Any

# Larger arrays are not followed.
_MOST_ELEMENTS = 256
_DTYPES: Mapping[str, Any] = {
    "pred": np.bool_,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}

# Instructions whose result is their first operand, perhaps in another shape or dtype.
_SAME = frozenset(
    {
        "bitcast",
        "convert",
        "copy",
        "copy-done",
        "copy-start",
        "optimization-barrier",
        "reshape",
    }
)


def is_small(array: Array) -> bool:
    """Returns whether the values of arrays of this type are followed."""
    return array.dtype in _DTYPES and int(np.prod(array.shape)) <= _MOST_ELEMENTS


def constant(instruction: Instruction) -> Value:
    """Returns the value of a constant, or None if its type is not followed or it is cut."""
    (array,) = instruction.arrays
    if not is_small(array):
        return None
    dtype = np.dtype(_DTYPES[array.dtype])
    # A literal of dtype s32 has its elements in the field `s32s`. Elements of one or two bytes,
    # except flags, are stored as bytes.
    elements = getattr(instruction.proto.literal, array.dtype + "s")
    is_packed = isinstance(elements, bytes)
    values = np.frombuffer(elements, dtype) if is_packed else np.array(list(elements), dtype)
    is_whole = values.size == int(np.prod(array.shape))
    return values.reshape(array.shape) if is_whole else None


def apply(instruction: Instruction, operands: Sequence[Value]) -> Value:
    """Returns the result of an instruction without calls; None if unknown."""
    opcode = instruction.opcode

    # Known operands may decide the result even if others are unknown.
    if opcode in ("and", "or"):
        deciding = [operand for operand in operands if _decides(opcode, operand)]
        if deciding:
            return deciding[0]
    if opcode == "select" and isinstance(operands[0], np.ndarray) and operands[0].shape == ():
        return operands[1] if operands[0] else operands[2]

    if not all(isinstance(operand, np.ndarray) for operand in operands):
        return None
    (array,) = instruction.arrays[:1]
    with np.errstate(all="ignore"):
        result = _apply(instruction, array, operands)
    if result is None:
        return None
    return np.asarray(result).astype(_DTYPES[array.dtype]).reshape(array.shape)


def is_false(value: Value) -> bool:
    """Returns whether a value is known, and is a single false flag or zero."""
    return isinstance(value, np.ndarray) and value.size == 1 and not value.any()


def _decides(opcode: str, operand: Value) -> bool:
    """Returns whether one operand of `and` or `or` decides the result."""
    if opcode == "and":
        return is_false(operand)
    is_flag = isinstance(operand, np.ndarray) and operand.dtype == np.bool_ and operand.size == 1
    return is_flag and bool(operand.all())


def are_same(a: Value, b: Value) -> bool:
    """Returns whether two values are equal wherever both are known."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(are_same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a is None and b is None


def common(a: Value, b: Value) -> Value:
    """Returns the common part of two values; all other elements are unknown."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(common, a, b))
    return a if are_same(a, b) else None


def _apply(instruction: Instruction, array: Array, operands: Sequence[np.ndarray]) -> Any:
    """Returns the result of an instruction with known operands, of any dtype and shape."""
    opcode = instruction.opcode
    if opcode in _SAME:
        # A bitcast may read the bits as another type, or in another layout's order.
        is_plain = operands[0].size == np.prod(array.shape) and sum(n > 1 for n in array.shape) < 2
        return operands[0] if opcode != "bitcast" or is_plain else None
    if opcode in _ELEMENTWISE:
        return _ELEMENTWISE[opcode](*operands)
    if opcode in _SHAPING:
        return _SHAPING[opcode](instruction, array, operands)
    if opcode == "compare":
        # The comparison direction is the name of Python's operator, in upper case.
        return getattr(operator, instruction.proto.comparison_direction.lower())(*operands)
    return None


# --- Operations that move elements ---


def _iota(instruction: Instruction, array: Array, _: Sequence[np.ndarray]) -> Any:
    if len(instruction.proto.dimensions) != 1:
        return None
    (dim,) = instruction.proto.dimensions
    shape = [1] * len(array.shape)
    shape[dim] = array.shape[dim]
    return np.broadcast_to(np.arange(array.shape[dim]).reshape(shape), array.shape)


def _broadcast(instruction: Instruction, array: Array, operands: Sequence[np.ndarray]) -> Any:
    # Operand dim i becomes dim dimensions[i] of the result.
    dimensions = instruction.proto.dimensions
    if len(dimensions) != operands[0].ndim:
        return None
    shape = [1] * len(array.shape)
    for size, dim in zip(operands[0].shape, dimensions, strict=True):
        shape[dim] = size
    return np.broadcast_to(operands[0].reshape(shape), array.shape)


def _transpose(instruction: Instruction, _: Array, operands: Sequence[np.ndarray]) -> Any:
    return operands[0].transpose(tuple(instruction.proto.dimensions))


def _concatenate(instruction: Instruction, _: Array, operands: Sequence[np.ndarray]) -> Any:
    return np.concatenate(list(operands), axis=instruction.proto.dimensions[0])


def _slice(instruction: Instruction, _: Array, operands: Sequence[np.ndarray]) -> Any:
    dims = instruction.proto.slice_dimensions
    return operands[0][tuple(slice(dim.start, dim.limit, dim.stride) for dim in dims)]


def _dynamic_slice(_: Instruction, array: Array, operands: Sequence[np.ndarray]) -> Any:
    return operands[0][_window(operands[0], operands[1:], array.shape)]


def _dynamic_update_slice(_: Instruction, __: Array, operands: Sequence[np.ndarray]) -> Any:
    result = operands[0].copy()
    result[_window(result, operands[2:], operands[1].shape)] = operands[1]
    return result


def _window(
    whole: np.ndarray, starts: Sequence[np.ndarray], shape: tuple[int, ...]
) -> tuple[slice, ...]:
    """Returns the slices of a window in an array; XLA moves a window that exceeds it inside."""
    window = []
    for size, start, length in zip(whole.shape, starts, shape, strict=True):
        first = min(max(int(start), 0), size - length)
        window.append(slice(first, first + length))
    return tuple(window)


_SHAPING: Mapping[str, Callable[[Instruction, Array, Sequence[np.ndarray]], Any]] = {
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "iota": _iota,
    "slice": _slice,
    "transpose": _transpose,
}


# --- Elementwise operations ---


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not np.issubdtype(a.dtype, np.integer):
        return np.asarray(a / b)
    # XLA defines division by zero as -1, all bits set.
    is_zero = b == 0
    divisor = np.where(is_zero, 1, b)
    quotient = (a - np.fmod(a, divisor)) // divisor
    return np.where(is_zero, np.array(-1).astype(a.dtype), quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not np.issubdtype(a.dtype, np.integer):
        return np.asarray(np.fmod(a, b))
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _shift_left(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(_is_too_far(a, b), 0, np.left_shift(a, b))


def _shift_right_arithmetic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    signed = a.view(f"i{a.itemsize}")
    farthest = np.array(8 * a.itemsize - 1).astype(signed.dtype)
    return np.right_shift(signed, np.where(_is_too_far(a, b), farthest, b).astype(signed.dtype))


def _shift_right_logical(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unsigned = a.view(f"u{a.itemsize}")
    return np.where(_is_too_far(a, b), 0, np.right_shift(unsigned, b.astype(unsigned.dtype)))


def _is_too_far(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns whether a shift moves all bits out."""
    return np.asarray((b < 0) | (b >= 8 * a.itemsize))


def _not(a: np.ndarray) -> np.ndarray:
    return np.asarray(np.logical_not(a) if a.dtype == np.bool_ else np.invert(a))


def _clamp(low: np.ndarray, a: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(np.maximum(a, low), high))


_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "clamp": _clamp,
    "divide": _divide,
    "floor": np.floor,
    "is-finite": np.isfinite,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "not": _not,
    "or": np.bitwise_or,
    "remainder": _remainder,
    "round-nearest-even": np.rint,
    "select": np.where,
    "shift-left": _shift_left,
    "shift-right-arithmetic": _shift_right_arithmetic,
    "shift-right-logical": _shift_right_logical,
    "sign": np.sign,
    "subtract": np.subtract,
    "xor": np.bitwise_xor,
}
