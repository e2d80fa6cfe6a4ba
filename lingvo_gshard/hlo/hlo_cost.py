"""What each instruction of a compiled program computes and moves.

Counted as in XLA's own cost analysis, except that a loop's body counts as often as it runs, and
for each instruction, so that costs can be summed by the operations they come from.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_gshard.hlo import trip_counts
from lingvo_gshard.hlo.collectives import COLLECTIVES
from lingvo_gshard.hlo.hlo_module import Array, Computation, Instruction, Module

# They only name or pass on existing values.
_FREE = frozenset(
    [
        *("after-all", "bitcast", "constant", "copy-done", "get-tuple-element", "iota"),
        *("optimization-barrier", "parameter", "partition-id", "replica-id", "tuple"),
        *(f"{kind}-done" for kind in COLLECTIVES),
    ]
)
_CONTROL = frozenset(["call", "conditional", "while"])
_SLICES = frozenset(["dynamic-slice", "gather", "slice"])


@dataclasses.dataclass(frozen=True)
class Cost:
    """One instruction, each time that it runs on one partition.

    Attributes:
      name, opcode: the instruction's; a fusion is one instruction.
      op_name: the operation it was made from; of a fusion with products, its largest product's.
        Unnamed instructions inherit an operand's name, else a user's.
      flops: of its products, two for a multiplication and addition; padding is not counted.
      accessed_bytes: operands read and results written in memory; if an operand is sliced, only
        the slice counts.
      arrays: the types of its results.
      times: how often one call of the program runs it.
    """

    name: str
    opcode: str
    op_name: str
    flops: int
    accessed_bytes: int
    arrays: tuple[Array, ...]
    times: int


def costs(module: Module) -> tuple[Cost, ...]:
    """The cost of each instruction that runs by itself: of those that are not part of a fusion.

    Raises:
      ValueError: a loop's trip count is unknown.
    """
    times = trip_counts.count(module).times
    found = []
    for computation in _running(module):
        repeated = times[computation]
        if repeated is None:
            raise ValueError(
                f"costs: how often {computation.name} runs is unknown: it is in a loop."
            )
        names = _op_names(computation)
        found += [
            _cost(instruction, names[instruction], repeated)
            for instruction in computation.instructions
            if _opcode(instruction) not in _FREE | _CONTROL
        ]
    return tuple(found)


def _running(module: Module) -> Iterator[Computation]:
    """The computations whose instructions run one by one.

    They are the entry, the bodies and conditions of loops, branches, and called functions.
    """
    waiting, seen = [module.entry], set[Computation]()
    while waiting:
        computation = waiting.pop()
        if computation in seen:
            continue
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
    """The operation of every instruction; a parameter's own name is that of an argument."""
    instructions = computation.instructions
    names = {i: i.op_name if i.opcode != "parameter" else "" for i in instructions}
    for each in instructions:  # Operands come before their users.
        inherited = (names[operand] for operand in each.operands if names[operand])
        names[each] = names[each] or next(inherited, "")
    for each in reversed(instructions):
        for operand in each.operands:
            names[operand] = names[operand] or names[each]
    return names


def _cost(instruction: Instruction, op_name: str, times: int) -> Cost:
    products = list(_products(instruction))
    largest = max(products, key=lambda product: product[1], default=(instruction, 0))
    return Cost(
        name=instruction.name,
        opcode=_opcode(instruction),
        op_name=largest[0].op_name or op_name,
        flops=sum(flops for _, flops in products),
        accessed_bytes=_accessed_bytes(instruction),
        arrays=instruction.arrays,
        times=times,
    )


def _products(instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
    """Each product that the instruction is, or that is fused into it, with its flops."""
    match instruction.opcode:
        case "fusion":
            for each in instruction.called[0].instructions:
                yield from _products(each)
        case "convolution":
            yield instruction, _convolution_flops(instruction)
        case "dot":
            yield instruction, _dot_flops(instruction)


def _dot_flops(dot: Instruction) -> int:
    lhs = _shape(dot.operands[0])
    summed = dot.proto.dot_dimension_numbers.lhs_contracting_dimensions
    return 2 * math.prod(_shape(dot)) * math.prod(lhs[dim] for dim in summed)


def _convolution_flops(convolution: Instruction) -> int:
    """2 * batch * inputs * outputs * the pairs of output and window positions outside padding.

    The TPU's compiler turns every product into a convolution, and a batch of products into one
    over a dilated dim.
    """
    dims = convolution.proto.convolution_dimension_numbers
    lhs, rhs, out = *map(_shape, convolution.operands[:2]), _shape(convolution)
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
    """Pairs of an output's and a window's position that read an input, in one WindowDimension.

    The others read padding, or the gaps of a dilation.
    """
    last = (size - 1) * window.base_dilation
    if kernel == 1 and window.padding_low == 0 and window.base_dilation == 1:
        return min(out, last // window.stride + 1)
    count = 0
    for position in range(kernel):
        first = position * window.window_dilation - window.padding_low
        reads = (first + i * window.stride for i in range(out))
        count += sum(0 <= at <= last and at % window.base_dilation == 0 for at in reads)
    return count


def _accessed_bytes(instruction: Instruction) -> int:
    written = instruction.num_bytes
    match instruction.opcode:
        case "fusion":
            inner = instruction.called[0]
            return sum(_parameter_bytes(inner).values()) + _written_bytes(inner.root)
        case opcode if opcode in _SLICES:
            return 2 * written
        case "dynamic-update-slice":
            return 2 * instruction.operands[1].num_bytes
        case "broadcast":
            return written
    return written + sum(operand.num_bytes for operand in instruction.operands)


def _parameter_bytes(inner: Computation) -> dict[int, int]:
    """Bytes that a fusion reads of each of its parameters, by the parameter's number."""
    users: dict[Instruction, list[tuple[Instruction, int]]] = {i: [] for i in inner.instructions}
    for each in inner.instructions:
        for index, operand in enumerate(each.operands):
            users[operand].append((each, index))
    return {
        each.proto.parameter_number: _read_bytes(each, users, each.num_bytes)
        for each in inner.instructions
        if each.opcode == "parameter"
    }


def _read_bytes(
    value: Instruction, users: Mapping[Instruction, list[tuple[Instruction, int]]], whole: int
) -> int:
    """Bytes that the users of `value` read of it, a parameter of `whole` bytes."""
    read = 0
    for user, index in users[value]:
        if user.opcode in _SLICES and index == 0:
            read += user.num_bytes
        elif user.opcode == "dynamic-update-slice" and index == 0:
            continue  # Overwritten in place.
        elif user.opcode == "bitcast":
            read += _read_bytes(user, users, whole)
        elif user.opcode == "fusion":
            read += _parameter_bytes(user.called[0])[index]
        else:
            return whole
    return min(read, whole)


def _written_bytes(result: Instruction) -> int:
    """Bytes that a fusion writes to make `result`."""
    match result.opcode:
        case "tuple":
            return sum(map(_written_bytes, result.operands))
        case "bitcast":
            return _written_bytes(result.operands[0])
        case "dynamic-update-slice":
            return result.operands[1].num_bytes
        case "fusion":
            return _written_bytes(result.called[0].root)
    return result.num_bytes


def _shape(instruction: Instruction) -> tuple[int, ...]:
    return instruction.arrays[0].shape
