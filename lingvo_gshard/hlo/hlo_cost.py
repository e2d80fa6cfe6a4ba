"""What each instruction of a compiled program computes and moves, and how often it runs.

Costs are counted as in XLA's own cost analysis, but for each instruction, so that they can be
summed by the operations they come from, and with the number of runs of a loop's body.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lingvo_gshard.hlo import trip_counts
from lingvo_gshard.hlo.collectives import COLLECTIVES
from lingvo_gshard.hlo.hlo_module import Array, Computation, Instruction, Module, num_bytes

# Instructions that run those of other computations.
_CONTROL = frozenset(
    {
        "call",
        "conditional",
        "while",
    }
)
# The cost of a collective is that of its start.
_DONE = frozenset(f"{kind}-done" for kind in COLLECTIVES)
# Instructions that only name or pass on existing values, or whose values cost nothing to make.
_PASSING = frozenset(
    {
        "after-all",
        "bitcast",
        "constant",
        "copy-done",
        "get-tuple-element",
        "iota",
        "optimization-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
_FREE = _CONTROL | _DONE | _PASSING
# The instructions that read each result, each with the number of the operand that it is.
_Users = Mapping[Instruction, list[tuple[Instruction, int]]]


@dataclasses.dataclass(frozen=True)
class Cost:
    """One instruction or fusion, each of the `times` that it runs on one partition in a call."""

    name: str
    opcode: str
    # The operation it was made from; of a fusion with products, that of the largest. Instructions
    # without one have an operand's name, else a user's.
    op_name: str
    flops: int  # Of products, two for a multiplication and addition, without padding.
    accessed_bytes: int  # Of an operand that is sliced, only those of the slice.
    arrays: tuple[Array, ...]  # The types of its results.
    times: int


def costs(module: Module) -> tuple[Cost, ...]:
    """Returns the cost of each instruction that runs by itself and is not part of a fusion."""
    times = trip_counts.count(module).times
    found: list[Cost] = []
    for computation in _running(module):
        for instruction, op_name in _op_names(computation).items():
            opcode = opcode_of(instruction)
            if opcode not in _FREE:
                found.append(_cost(instruction, opcode, op_name, times[computation]))
    return tuple(found)


def _cost(instruction: Instruction, opcode: str, op_name: str, times: int) -> Cost:
    products = list(_products(instruction))

    # A fusion has the name of its largest product, where most of its time goes.
    if products:
        largest, _ = max(products, key=lambda product: product[1])
        op_name = largest.op_name or op_name

    return Cost(
        name=instruction.name,
        opcode=opcode,
        op_name=op_name,
        flops=sum(flops for _, flops in products),
        accessed_bytes=_accessed_bytes(instruction),
        arrays=instruction.arrays,
        times=times,
    )


def _running(module: Module) -> Iterator[Computation]:
    """Yields the entry, loops' bodies and conditions, branches, and called functions."""
    waiting = [module.entry]
    seen: set[Computation] = set()
    while waiting:
        computation = waiting.pop()
        if computation in seen:
            continue  # Several instructions may call it.
        seen.add(computation)
        yield computation

        for instruction in computation.instructions:
            if instruction.opcode in _CONTROL:
                waiting += reversed(instruction.called)  # The first one is popped first.


def opcode_of(instruction: Instruction) -> str:
    """Returns the opcode; that of an asynchronous call as in XLA's text, `all-to-all-start`."""
    step = instruction.opcode.removeprefix("async")
    if step not in ("-start", "-update", "-done"):
        return instruction.opcode

    # The start calls the wrapped instruction; a later step has the one before it as its operand.
    start = instruction
    while not start.called:
        start = start.operands[0]
    return start.called[0].root.opcode + step


def _op_names(computation: Computation) -> dict[Instruction, str]:
    """Returns each instruction's op_name or, if it has none, an operand's or else a user's."""
    names: dict[Instruction, str] = {}

    # From operands, which come before their users.
    for instruction in computation.instructions:
        if instruction.opcode == "parameter":
            names[instruction] = ""  # Its op_name is the name of an argument, not an operation.
            continue
        inherited = [names[operand] for operand in instruction.operands if names[operand]]
        names[instruction] = instruction.op_name or (inherited[0] if inherited else "")

    # From users, which come after their operands.
    for instruction in reversed(computation.instructions):
        for operand in instruction.operands:
            names[operand] = names[operand] or names[instruction]
    return names


# --- Flops ---


def _products(instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
    """Yields each product that the instruction is, or that is fused into it, with its flops."""
    match instruction.opcode:
        case "fusion":
            for inner in instruction.called[0].instructions:
                yield from _products(inner)

        case "convolution":
            yield instruction, _convolution_flops(instruction)

        case "dot":
            contracting = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
            yield instruction, _dot_flops(instruction, contracting)

        case "custom-call" if _is_cublas(instruction):
            config = json.loads(instruction.proto.backend_config)["gemm_backend_config"]
            contracting = config["dot_dimension_numbers"]["lhs_contracting_dimensions"]
            yield instruction, _dot_flops(instruction, map(int, contracting))


def _is_cublas(instruction: Instruction) -> bool:
    """Whether it is a product by NVIDIA's library; its results are the product and a workspace."""
    return instruction.proto.custom_call_target.startswith("__cublas$")


def _dot_flops(dot: Instruction, contracting: Iterable[int]) -> int:
    lhs = dot.operands[0].arrays[0].shape
    out = dot.arrays[0].shape
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracting)


def _convolution_flops(convolution: Instruction) -> int:
    """Returns 2 * batch * inputs * outputs * pairs of output and window positions, no padding.

    The TPU's compiler turns products into convolutions, a batch of them over a dilated dim.
    """
    dims = convolution.proto.convolution_dimension_numbers
    lhs = convolution.operands[0].arrays[0].shape
    rhs = convolution.operands[1].arrays[0].shape
    out = convolution.arrays[0].shape

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
    inputs = rhs[dims.kernel_input_feature_dimension]  # Of one feature group.
    outputs = out[dims.output_feature_dimension]
    return 2 * batch * inputs * outputs * pairs


def _valid_pairs(size: int, kernel: int, out: int, window: Any) -> int:
    """Counts the pairs of output and window positions along a dim that read an input's element.

    The others read padding, or the gaps that a base dilation puts between the input's elements.
    """
    # reads[k, o]: the position in the dilated input that window position k reads for output o.
    first = np.arange(kernel) * window.window_dilation - window.padding_low
    reads = first[:, None] + np.arange(out) * window.stride

    is_inside = (reads >= 0) & (reads <= (size - 1) * window.base_dilation)
    is_element = reads % window.base_dilation == 0
    return int(np.count_nonzero(is_inside & is_element))


# --- Bytes ---


def _accessed_bytes(instruction: Instruction) -> int:
    written = _written_bytes(instruction)
    match instruction.opcode:
        case "fusion":
            return written + sum(_parameter_bytes(instruction.called[0]).values())
        case "broadcast":
            return written
        case "dynamic-slice" | "dynamic-update-slice" | "gather" | "slice":
            return 2 * written  # It reads no more than it writes.
    return written + sum(operand.num_bytes for operand in instruction.operands)


def _parameter_bytes(inner: Computation) -> dict[int, int]:
    """Returns the bytes that a fusion reads of each of its parameters, by parameter number."""
    # A parameter may be read by several instructions of the fusion.
    users: _Users = {instruction: [] for instruction in inner.instructions}
    for instruction in inner.instructions:
        for index, operand in enumerate(instruction.operands):
            users[operand].append((instruction, index))

    return {
        instruction.proto.parameter_number: _read_bytes(instruction, users, instruction.num_bytes)
        for instruction in inner.instructions
        if instruction.opcode == "parameter"
    }


def _read_bytes(value: Instruction, users: _Users, whole: int) -> int:
    """Returns the bytes that the users of `value` read of a parameter of `whole` bytes."""
    if not users[value]:
        return whole  # The root of a fusion within another one.

    read = 0
    for user, index in users[value]:
        if user.opcode in ("dynamic-slice", "gather", "slice") and index == 0:
            read += _bytes_as(value, user)  # A dynamic-slice may convert what it reads.
        elif user.opcode == "dynamic-update-slice" and index == 0:
            continue  # Overwritten in place.
        elif user.opcode == "bitcast":
            read += _read_bytes(user, users, whole)
        elif user.opcode == "fusion":
            read += _parameter_bytes(user.called[0])[index]
        else:
            return whole
    return min(read, whole)


def _bytes_as(typed: Instruction, shaped: Instruction) -> int:
    """Returns the bytes of an array with the dtype of `typed` and the shape of `shaped`."""
    return num_bytes([Array(typed.arrays[0].dtype, shaped.arrays[0].shape)])


def _written_bytes(result: Instruction) -> int:
    """Returns the bytes that are written to make `result`."""
    match result.opcode:
        case "tuple":
            return sum(map(_written_bytes, result.operands))
        case "bitcast":
            return _written_bytes(result.operands[0])
        case "dynamic-update-slice":
            return _bytes_as(result, result.operands[1])  # In place: only the update.
        case "custom-call" if result.proto.custom_call_target == "AllocateBuffer":
            return 0  # Memory is reserved, not written.
        case "fusion":
            return _written_bytes(result.called[0].root)
        case "custom-call" if _is_cublas(result):
            return num_bytes(result.arrays[:1])  # Without the workspace.
    return result.num_bytes
