"""The matrix products and convolutions of a compiled program, with their flops and arithmetic.

XLA writes a product as a separate instruction, as part of a fusion, or as a call of a library
(cuBLAS, cuDNN). All of them are counted alike: two flops for a multiplication and an addition, and
zero for padding.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xla_spmd.hlo import kernels
from xla_spmd.hlo.hlo_module import Array, Instruction, Module

_CUBLAS = "__cublas$"
_CUDNN = "__cudnn$"
_CUDNN_ATTENTION = "__cudnn$fmha"
# For each convolution of cuDNN, the roles of its two operands and its result in the forward
# convolution.
_CUDNN_CONVOLUTIONS = {
    "__cudnn$convForward": ("input", "kernel", "output"),
    "__cudnn$convBiasActivationForward": ("input", "kernel", "output"),
    "__cudnn$convForwardGraph": ("input", "kernel", "output"),
    "__cudnn$convBackwardInput": ("output", "kernel", "input"),
    "__cudnn$convBackwardFilter": ("input", "output", "kernel"),
}

# The arithmetic for each dtype of the operands; all other dtypes count as bf16. Elements of 4 bits
# are multiplied as elements of 8 bits.
_ARITHMETIC = {
    "f32": "f32",
    "c64": "f32",
    "f64": "f64",
    "c128": "f64",
    "s4": "int8",
    "u4": "int8",
    "s8": "int8",
    "u8": "int8",
    "s32": "int32",
    "u32": "int32",
    "s64": "int32",
    "u64": "int32",
}
# Arithmetic that a program requests by name, for any operands.
_ALGORITHMS = {
    "ALG_DOT_BF16_BF16_BF16": "bf16",
    "ALG_DOT_BF16_BF16_F32": "bf16",
    "ALG_DOT_BF16_BF16_F32_X3": "bf16 x3",
    "ALG_DOT_BF16_BF16_F32_X6": "bf16 x6",
    "ALG_DOT_BF16_BF16_F32_X9": "bf16 x9",
    "ALG_DOT_TF32_TF32_F32": "tf32",
    "ALG_DOT_TF32_TF32_F32_X3": "tf32 x3",
    "ALG_DOT_F32_F32_F32": "f32 highest",
    "ALG_DOT_F64_F64_F64": "f64",
}
_PRECISIONS = ("", " high", " highest", "")  # Indexed by XLA's Precision.
_SLOWEST_FIRST = ("f64", "int32", "f32", "bf16", "int8", "fp8")


@dataclasses.dataclass(frozen=True)
class Product:
    """A product, a convolution, or a kernel whose flops are known."""

    instruction: Instruction
    flops: int
    # The dtype of the operands, and the required precision of float32: `bf16`, `fp8`, `int8`,
    # `int32`, `f64`, `tf32`, `f32`, `f32 high`, `f32 highest`, or `bf16 x3`, three products of
    # bfloat16.
    arithmetic: str
    pairs: int = 1  # The number of pairs of matrices that it multiplies at once.


def of(instruction: Instruction, kernel_flops: Mapping[str, int]) -> Iterator[Product]:
    """Yields each product that the instruction is, or that is fused into it.

    A custom call is one product if its flops are known; see kernels.flops_of.
    """
    match instruction.opcode:
        case "fusion" | "async-start":
            fused = instruction.called[0].instructions
            # A fusion around a ragged fusion repeats its note.
            groups = 1 if any(map(is_ragged, fused)) else _ragged_groups(instruction)
            for inner in fused:
                for product in of(inner, kernel_flops):
                    yield dataclasses.replace(product, flops=product.flops // groups)

        case "convolution":
            yield _product(instruction, _convolution_flops(instruction))

        case "dot":
            contracting = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
            yield _product(instruction, _dot_flops(instruction, contracting))

        case "ragged-dot":
            numbers = instruction.proto.ragged_dot_dimension_numbers.dot_dimension_numbers
            yield _product(instruction, _ragged_flops(instruction, numbers))

        case "triangular-solve":
            yield _product(instruction, _solve_flops(instruction))

        case "cholesky":
            (array,) = instruction.arrays
            pairs = math.prod(array.shape) * array.shape[-1] // 6
            yield _product(instruction, _flops_per_pair(array) * pairs)

        case "custom-call":
            flops = kernels.flops_of(instruction, kernel_flops)
            if flops is None:
                flops = library_flops(instruction)
            if flops is not None:
                yield _product(instruction, flops)


def uncounted(module: Module, kernel_flops: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the names of the custom calls whose flops are unknown, without duplicates."""
    names = [
        kernels.name_of(call)
        for call in kernels.calls(module)
        if kernels.flops_of(call, kernel_flops) is None and library_flops(call) is None
    ]
    return tuple(dict.fromkeys(names))


def library_flops(call: Instruction) -> int | None:
    """Returns the flops of a custom call of a known library; None for other calls."""
    target = call.proto.custom_call_target
    if is_gemm(call):
        numbers = gemm_config(call)["dot_dimension_numbers"]
        return _dot_flops(call, map(int, numbers.get("lhs_contracting_dimensions", ())))
    if target == "__cublas$triangularSolve":
        return _solve_flops(call)
    if target.startswith(_CUDNN_ATTENTION):
        return _attention_flops(call)
    if target in _CUDNN_CONVOLUTIONS:
        return _convolution_flops(call)
    return None


def has_workspace(call: Instruction) -> bool:
    """Returns whether a custom call's last result is only a library's workspace."""
    return call.proto.custom_call_target.startswith((_CUBLAS, _CUDNN))


def is_gemm(call: Instruction) -> bool:
    """Returns whether an instruction is a matrix product by cuBLAS."""
    is_cublas = call.proto.custom_call_target.startswith(_CUBLAS)
    return is_cublas and b"gemm_backend_config" in call.proto.backend_config


def gemm_config(gemm: Instruction) -> dict[str, Any]:
    """Returns the configuration of a cuBLAS product."""
    config: dict[str, Any] = json.loads(gemm.proto.backend_config)["gemm_backend_config"]
    return config


def _product(instruction: Instruction, flops: int) -> Product:
    return Product(instruction, flops, _arithmetic(instruction), num_pairs(instruction))


def num_pairs(instruction: Instruction) -> int:
    """Returns the number of pairs of matrices that an instruction multiplies."""
    match instruction.opcode:
        case "dot":
            batch = instruction.proto.dot_dimension_numbers.lhs_batch_dimensions
        case "custom-call" if is_gemm(instruction):
            numbers = gemm_config(instruction)["dot_dimension_numbers"]
            batch = list(map(int, numbers.get("lhs_batch_dimensions", ())))
        case "convolution":
            return _convolved_pairs(instruction)
        case _:
            return 1
    return math.prod(instruction.operands[0].arrays[0].shape[dim] for dim in batch)


def _convolved_pairs(convolution: Instruction) -> int:
    """Returns the number of pairs of matrices that a convolution multiplies.

    A batch of n pairs is a dim of n elements, dilated by n, and a window of n with stride n - 1, so
    that each position meets one element.
    """
    pairs = 1
    sizes = convolution.operands[0].arrays[0].shape
    dims = convolution.proto.convolution_dimension_numbers.input_spatial_dimensions
    for dim, window in zip(dims, convolution.proto.window.dimensions, strict=True):
        if window.size == window.base_dilation == window.stride + 1 == sizes[dim]:
            pairs *= window.size
    return pairs


def _arithmetic(instruction: Instruction) -> str:
    """Returns the arithmetic of a product, given its operands and requested precision."""
    arrays = [operand.arrays[0] for operand in instruction.operands if operand.arrays]
    if kernels.is_kernel(instruction):
        return _kernel_arithmetic(arrays)

    algorithm, precision = _asked_precision(instruction)
    if algorithm in _ALGORITHMS:
        return _ALGORITHMS[algorithm]

    # The slower operand's arithmetic decides, as the other operand is converted to it.
    of_operands = {_of_dtype(array.dtype) for array in arrays[:2]}
    slowest = next(name for name in _SLOWEST_FIRST if name in of_operands)
    return f"f32{_PRECISIONS[precision]}" if slowest == "f32" else slowest


def _kernel_arithmetic(operands: Sequence[Array]) -> str:
    """Returns the fastest arithmetic that a kernel's large operands allow.

    XLA does not know its products. Its small operands are masks, sizes and scales.
    """
    largest = max((math.prod(array.shape) for array in operands), default=0)
    large = [array.dtype for array in operands if 16 * math.prod(array.shape) >= largest]
    known = {_of_dtype(dtype) for dtype in large if dtype.startswith(("f", "bf", "s8", "u8"))}
    return next((name for name in ("fp8", "int8", "bf16", "f32") if name in known), "bf16")


def _asked_precision(instruction: Instruction) -> tuple[str, int]:
    """Returns the name of the requested algorithm, and an index into _PRECISIONS."""
    config = instruction.proto.precision_config
    kinds = config.DESCRIPTOR.enum_types_by_name
    if is_gemm(instruction):
        # Calls of cuBLAS name it in their own configuration.
        written = gemm_config(instruction).get("precision_config", {})
        numbers = kinds["Precision"].values_by_name
        precisions = [numbers[name].number for name in written.get("operand_precision", ())]
        return written.get("algorithm", ""), max(precisions, default=0)

    algorithm = kinds["Algorithm"].values_by_number[config.algorithm].name
    return algorithm, max(config.operand_precision, default=0)


def _of_dtype(dtype: str) -> str:
    return "fp8" if dtype.startswith(("f4", "f8")) else _ARITHMETIC.get(dtype, "bf16")


def _dot_flops(dot: Instruction, contracting: Iterable[int]) -> int:
    lhs = dot.operands[0].arrays[0]
    pairs = math.prod(dot.arrays[0].shape) * math.prod(lhs.shape[dim] for dim in contracting)
    return _flops_per_pair(lhs) * pairs


def _flops_per_pair(array: Array) -> int:
    """Returns the flops of multiplying two elements of this type and adding the result to a sum."""
    return 8 if array.dtype.startswith("c") else 2  # Complex numbers need four real products.


def _ragged_flops(dot: Instruction, numbers: Any) -> int:
    """Returns the flops of all rows, each multiplied by one group's matrix."""
    lhs = dot.operands[0].arrays[0]
    rhs = dot.operands[1].arrays[0].shape
    shared = {*numbers.rhs_contracting_dimensions, *numbers.rhs_batch_dimensions}
    shared |= set(dot.proto.ragged_dot_dimension_numbers.rhs_group_dimensions)
    own = math.prod(size for dim, size in enumerate(rhs) if dim not in shared)
    return _flops_per_pair(lhs) * math.prod(lhs.shape) * own


def _ragged_groups(fusion: Instruction) -> int:
    """Returns the number of row groups that share a fusion's products; 1 if it is not ragged.

    The TPU's compiler writes a ragged product as the product of every row with every group's
    matrix, with a note that each row meets only one of them.
    """
    config = fusion.proto.backend_config
    if b"is_ragged_dot" not in config:
        return 1
    algorithm = json.loads(config).get("convolution_algorithm_config", {})
    is_ragged = algorithm.get("is_ragged_dot", False)
    return int(algorithm.get("num_groups_in_ragged_dot", 1)) if is_ragged else 1


def is_ragged(instruction: Instruction) -> bool:
    """Returns whether an instruction's amount of work depends on sizes that are data.

    These are ragged products and exchanges, and Pallas kernels for TPUs whose grid size is given
    as their first operand.
    """
    if instruction.opcode in ("ragged-dot", "ragged-all-to-all"):
        return True
    if instruction.opcode == "fusion":
        return _ragged_groups(instruction) > 1
    return kernels.has_dynamic_grid(instruction)


def _solve_flops(solve: Instruction) -> int:
    """Returns the flops of solving with a triangle, which is half of the square matrix."""
    triangle, solved = (operand.arrays[0] for operand in solve.operands[:2])
    return _flops_per_pair(triangle) * math.prod(solved.shape) * triangle.shape[-1] // 2


def _attention_flops(call: Instruction) -> int:
    """Returns the flops of attention by cuDNN: two products forward, and five backward.

    The backward pass repeats the first product. With a causal mask or a window, only the remaining
    pairs of a query and a key are counted.
    """
    config = json.loads(call.proto.backend_config)["cudnn_fmha_backend_config"]
    batch, heads, queries, keys = map(int, config["intermediate_tensor_shape"]["dimensions"])
    query, _, value = (operand.arrays[0] for operand in call.operands[:3])
    is_backward = "Backward" in call.proto.custom_call_target

    # With a causal mask, a query sees the keys up to its own position.
    places = np.arange(queries)
    is_causal = "CAUSAL" in config.get("mask_type", "")
    last = np.minimum(places + 1, keys) if is_causal else np.full(queries, keys)
    window = int(config.get("sliding_window_length", 0))
    seen = np.minimum(last, window) if window else last
    pairs = batch * heads * int(seen.sum())

    # Latent attention has wider queries and keys than values.
    query_width = query.shape[-1]
    value_width = value.shape[-1]
    if is_backward:
        return 2 * pairs * (3 * query_width + 2 * value_width)
    return 2 * pairs * (query_width + value_width)


def _convolution_flops(convolution: Instruction) -> int:
    """Returns 2 * batch * inputs * outputs * (pairs of output and window positions), unpadded.

    The TPU's compiler turns products into convolutions; a batch of products becomes a convolution
    over a dilated dim. A gradient by cuDNN has as many flops as the forward convolution, whose
    window and dims it records.
    """
    dims = convolution.proto.convolution_dimension_numbers
    roles = _CUDNN_CONVOLUTIONS.get(
        convolution.proto.custom_call_target, ("input", "kernel", "output")
    )
    arrays = [operand.arrays[0] for operand in convolution.operands[:2]]
    tensors = dict(zip(roles, [*arrays, convolution.arrays[0]], strict=True))
    lhs = tensors["input"].shape
    rhs = tensors["kernel"].shape
    out = tensors["output"].shape

    pairs = 1
    for lhs_dim, rhs_dim, out_dim, window in zip(
        dims.input_spatial_dimensions,
        dims.kernel_spatial_dimensions,
        dims.output_spatial_dimensions,
        convolution.proto.window.dimensions,
        strict=True,
    ):
        pairs *= _valid_pairs(lhs[lhs_dim], rhs[rhs_dim], out[out_dim], window)

    batch = lhs[dims.input_batch_dimension] // max(1, convolution.proto.batch_group_count)
    inputs = rhs[dims.kernel_input_feature_dimension]  # Inputs of one feature group.
    outputs = out[dims.output_feature_dimension]
    return _flops_per_pair(arrays[0]) * batch * inputs * outputs * pairs


def _valid_pairs(size: int, kernel: int, out: int, window: Any) -> int:
    """Counts the pairs of output and window positions along a dim that read an input element.

    The other pairs read padding, or the gaps that base dilation puts between input elements.
    """
    # Window position k of output o reads position first[k] + o * stride of the dilated input, which
    # is inside for the outputs from lowest[k] to highest[k].
    first = np.arange(kernel) * window.window_dilation - window.padding_low
    last_position = (size - 1) * window.base_dilation
    lowest = np.maximum(0, -(first // window.stride))
    highest = np.minimum(out - 1, (last_position - first) // window.stride)

    # It is an element, not a gap, for every period-th output, if for any.
    common = math.gcd(window.stride, window.base_dilation)
    period = window.base_dilation // common
    inverse = pow(window.stride // common, -1, period)
    remainder = -first // common * inverse % period
    counts = (highest - remainder) // period - (lowest - 1 - remainder) // period
    return int(counts[first % common == 0].clip(min=0).sum())
