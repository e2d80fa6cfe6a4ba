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

# They run other instructions, or only name or pass on existing values.
_CONTROL = ("call", "conditional", "while")
_FREE = frozenset(
    [
        *("after-all", "bitcast", "constant", "copy-done", "get-tuple-element", "iota"),
        *("optimization-barrier", "parameter", "partition-id", "replica-id", "tuple"),
        *(*_CONTROL, *(f"{kind}-done" for kind in COLLECTIVES)),
    ]
)
# For each instruction, those that read its result and which operand of theirs it is.
_Users = Mapping[Instruction, list[tuple[Instruction, int]]]


@dataclasses.dataclass(frozen=True)
class Cost:
    """One instruction or fusion, each of the `times` that it runs on one partition in a call."""

    name: str
    opcode: str
    # The operation it was made from; of a fusion with products, its largest product's. Unnamed
    # instructions inherit an operand's name, else a user's.
    op_name: str
    flops: int  # Of products, two for a multiplication and addition, without padding.
    accessed_bytes: int  # Of an operand that is sliced, only those of the slice.
    arrays: tuple[Array, ...]  # The types of its results.
    times: int


def costs(module: Module) -> tuple[Cost, ...]:
    """The cost of each instruction that runs by itself and is not part of a fusion."""
    runs, found = trip_counts.count(module), []
    for computation in _running(module):
        for each, op_name in _op_names(computation).items():
            if (opcode := _opcode(each)) in _FREE:
                continue
            products = list(_products(each))
            largest = max(products, key=lambda product: product[1], default=(each, 0))
            found.append(
                Cost(
                    name=each.name,
                    opcode=opcode,
                    op_name=largest[0].op_name or op_name,
                    flops=sum(flops for _, flops in products),
                    accessed_bytes=_accessed_bytes(each),
                    arrays=each.arrays,
                    times=runs.times[computation],
                )
            )
    return tuple(found)


def _running(module: Module) -> Iterator[Computation]:
    """The entry, loops' bodies and conditions, branches, and called functions."""
    waiting, seen = [module.entry], set[Computation]()
    while waiting:
        computation = waiting.pop()
        if computation not in seen:
            seen.add(computation)
            yield computation
            for instruction in computation.instructions:
                if instruction.opcode in _CONTROL:
                    waiting += reversed(instruction.called)


def _opcode(instruction: Instruction) -> str:
    """The opcode; of an asynchronous call, as in XLA's text, such as `all-to-all-start`."""
    step = instruction.opcode.removeprefix("async")
    if step not in ("-start", "-update", "-done"):
        return instruction.opcode
    start = instruction
    while not start.called:
        start = start.operands[0]
    return start.called[0].root.opcode + step


def _op_names(computation: Computation) -> dict[Instruction, str]:
    """Each instruction's op_name, its own or inherited; a parameter's own is an argument's name."""
    instructions = computation.instructions
    names = {i: i.op_name if i.opcode != "parameter" else "" for i in instructions}
    for each in instructions:  # Operands come before their users.
        inherited = (names[operand] for operand in each.operands if names[operand])
        names[each] = names[each] or next(inherited, "")
    for each in reversed(instructions):
        for operand in each.operands:
            names[operand] = names[operand] or names[each]
    return names


def _products(instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
    """Each product that the instruction is, or that is fused into it, with its flops."""
    match instruction.opcode:
        case "fusion":
            for each in instruction.called[0].instructions:
                yield from _products(each)
        case "convolution":
            yield instruction, _convolution_flops(instruction)
        case "dot":
            summed = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
            yield instruction, _dot_flops(instruction, summed)
        case "custom-call" if _is_cublas(instruction):
            config = json.loads(instruction.proto.backend_config)["gemm_backend_config"]
            summed = map(int, config["dot_dimension_numbers"]["lhs_contracting_dimensions"])
            yield instruction, _dot_flops(instruction, summed)


def _is_cublas(instruction: Instruction) -> bool:
    """Whether it is a product by NVIDIA's library; its results are the product and a workspace."""
    return instruction.proto.custom_call_target.startswith("__cublas$")


def _dot_flops(dot: Instruction, summed: Iterable[int]) -> int:
    lhs, out = dot.operands[0].arrays[0].shape, dot.arrays[0].shape
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim in summed)


def _convolution_flops(convolution: Instruction) -> int:
    """2 * batch * inputs * outputs * the pairs of output and window positions outside padding.

    The TPU's compiler turns products into convolutions, a batch of them over a dilated dim.
    """
    dims = convolution.proto.convolution_dimension_numbers
    tensors = *convolution.operands[:2], convolution
    lhs, rhs, out = (each.arrays[0].shape for each in tensors)
    spatial = zip(
        dims.input_spatial_dimensions,
        dims.kernel_spatial_dimensions,
        dims.output_spatial_dimensions,
        convolution.proto.window.dimensions,
        strict=True,
    )
    pairs = math.prod(_valid_pairs(lhs[i], rhs[k], out[o], window) for i, k, o, window in spatial)
    batch = lhs[dims.input_batch_dimension] // max(1, convolution.proto.batch_group_count)
    inputs = rhs[dims.kernel_input_feature_dimension]  # Of one feature group.
    return 2 * batch * inputs * out[dims.output_feature_dimension] * pairs


def _valid_pairs(size: int, kernel: int, out: int, window: Any) -> int:
    """Pairs of output and window positions that read an input, not padding or a dilation's gap."""
    first = np.arange(kernel) * window.window_dilation - window.padding_low
    reads = first[:, None] + np.arange(out) * window.stride
    inside = (reads >= 0) & (reads <= (size - 1) * window.base_dilation)
    return int(np.count_nonzero(inside & (reads % window.base_dilation == 0)))


def _accessed_bytes(instruction: Instruction) -> int:
    written = _written_bytes(instruction)
    match instruction.opcode:
        case "fusion":
            return written + sum(_parameter_bytes(instruction.called[0]).values())
        case "broadcast":
            return written
        case "dynamic-slice" | "dynamic-update-slice" | "gather" | "slice":
            return 2 * written
    return written + sum(operand.num_bytes for operand in instruction.operands)


def _parameter_bytes(inner: Computation) -> dict[int, int]:
    """Bytes that a fusion reads of each of its parameters, by the parameter's number."""
    users: _Users = {each: [] for each in inner.instructions}
    for each in inner.instructions:
        for index, operand in enumerate(each.operands):
            users[operand].append((each, index))
    return {
        each.proto.parameter_number: _read_bytes(each, users, each.num_bytes)
        for each in inner.instructions
        if each.opcode == "parameter"
    }


def _read_bytes(value: Instruction, users: _Users, whole: int) -> int:
    """Bytes that the users of `value` read of a parameter of `whole` bytes."""
    read = 0 if users[value] else whole  # The root of a fusion within another one.
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
    """Bytes of an array with the dtype of `typed` and the shape of `shaped`."""
    return num_bytes([Array(typed.arrays[0].dtype, shaped.arrays[0].shape)])


def _written_bytes(result: Instruction) -> int:
    """Bytes that are written to make `result`."""
    match result.opcode:
        case "tuple":
            return sum(map(_written_bytes, result.operands))
        case "bitcast":
            return _written_bytes(result.operands[0])
        case "dynamic-update-slice":
            return _bytes_as(result, result.operands[1])
        case "custom-call" if result.proto.custom_call_target == "AllocateBuffer":
            return 0
        case "fusion":
            return _written_bytes(result.called[0].root)
        case "custom-call" if _is_cublas(result):
            return num_bytes(result.arrays[:1])
    return result.num_bytes
