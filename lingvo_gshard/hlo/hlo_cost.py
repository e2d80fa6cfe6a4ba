"""What each instruction of a compiled program computes and moves, and how often it runs.

Costs are counted as in XLA's own cost analysis, but for each instruction, so that they can be
summed by the operations they come from, and with the number of runs of a loop's body. Bytes are
those of the device's memory: neither what a TPU keeps on its chip (VMEM, CMEM) nor what an
instruction only passes on.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.hlo import kernels, trip_counts
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
# The cost of what runs asynchronously is that of its start.
_LATER = ("-update", "-done")
# Instructions that only name or pass on existing values, or whose values cost nothing to make.
_PASSING = frozenset(
    {
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "iota",
        "optimization-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
_FREE = _CONTROL | _PASSING
# In fusions, the starts, steps and ends of a collective that runs beside several of them.
_ASYNC_COLLECTIVE = "AsyncCollective"
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


def costs(module: Module, kernel_flops: Mapping[str, int] | None = None) -> tuple[Cost, ...]:
    """Returns the cost of each instruction that runs by itself and is not part of a fusion.

    `kernel_flops` has the flops of kernels by their names, as kernels.flops_of takes them.
    """
    times = trip_counts.count(module).times
    found: list[Cost] = []
    for computation in _running(module):
        for instruction, op_name in _op_names(computation).items():
            opcode = opcode_of(instruction)
            if opcode not in _FREE and not opcode.endswith(_LATER):
                products = list(_products(instruction, kernel_flops or {}))
                found.append(_cost(instruction, opcode, op_name, products, times[computation]))
    return tuple(found)


def _cost(
    instruction: Instruction,
    opcode: str,
    op_name: str,
    products: Sequence[tuple[Instruction, int]],
    times: int,
) -> Cost:
    """Returns the cost of an instruction with these products, each with its flops."""
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


def _products(
    instruction: Instruction, kernel_flops: Mapping[str, int]
) -> Iterator[tuple[Instruction, int]]:
    """Yields each product that the instruction is, or that is fused into it, with its flops.

    A kernel is one product, if its flops are known.
    """
    match instruction.opcode:
        case "fusion" | "async-start":
            for inner in instruction.called[0].instructions:
                yield from _products(inner, kernel_flops)

        case "convolution":
            yield instruction, _convolution_flops(instruction)

        case "dot":
            contracting = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
            yield instruction, _dot_flops(instruction, contracting)

        case "custom-call" if _is_cublas(instruction):
            config = json.loads(instruction.proto.backend_config)["gemm_backend_config"]
            contracting = config["dot_dimension_numbers"]["lhs_contracting_dimensions"]
            yield instruction, _dot_flops(instruction, map(int, contracting))

        case "custom-call" if kernels.is_kernel(instruction):
            flops = kernels.flops_of(instruction, kernel_flops)
            if flops is not None:
                yield instruction, flops


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
    """Returns the bytes of the device's memory that an instruction reads and writes."""
    match instruction.opcode:
        case "fusion":
            return _called_bytes(instruction)
        case "async-start" if instruction.called[0].root.opcode not in COLLECTIVES:
            return _called_bytes(instruction)
        case "broadcast":
            return _written_bytes(instruction)

        # They read no more than they write.
        case "dynamic-slice" | "gather" | "slice":
            return _moved_bytes(instruction, instruction.operands[0], instruction.num_bytes)
        case "dynamic-update-slice":
            update = instruction.operands[1]
            return _moved_bytes(instruction, update, _bytes_as(instruction, update))

        # Its result is a tuple of the copy, the operand and a semaphore.
        case "copy-start":
            copied = num_bytes(instruction.arrays[:1])
            return _moved_bytes(instruction, instruction.operands[0], copied)

        # To and from the host: what is sent is among the results, with a number and a token.
        case "send" | "recv":
            return num_bytes(instruction.arrays[:1])

    read = sum(map(_own_bytes, instruction.operands))
    return _written_bytes(instruction) + read


def _own_bytes(value: Instruction) -> int:
    """Returns the bytes that a value has in the device's memory."""
    return num_bytes(array for array in value.arrays if not array.is_on_chip)


def _moved_bytes(result: Instruction, source: Instruction, size: int) -> int:
    """Returns the bytes accessed to write `size` bytes of `result` that are read of `source`."""
    ends = [result.arrays[0], source.arrays[0]]
    return size * len([array for array in ends if not array.is_on_chip])


def _called_bytes(caller: Instruction) -> int:
    """Returns the bytes that a fusion accesses, or the computation that an async-start runs."""
    inner = caller.called[0]
    passed_on = _passed_on(caller)

    # Where the operands and results lie is known outside, where they are made and used.
    total = 0
    for number, read in _parameter_bytes(inner, passed_on).items():
        # libtpu leaves out the operands of calls to a TPU's SparseCore, which lie in HBM.
        arrays = caller.operands[number].arrays if caller.operands else ()
        if not arrays or not all(array.is_on_chip for array in arrays):
            total += read

    results = _results(inner)
    is_each_known = caller.opcode == "fusion" and len(results) == len(caller.arrays)
    for i, result in enumerate(results):
        arrays = caller.arrays[i : i + 1] if is_each_known else result.arrays
        if i not in passed_on and not all(array.is_on_chip for array in arrays):
            total += _written_bytes(result)
    return total


def _results(computation: Computation) -> tuple[Instruction, ...]:
    """Returns the parts of a computation's result: those of its tuple, or the result itself."""
    root = computation.root
    return root.operands if root.opcode == "tuple" else (root,)


def _passed_on(caller: Instruction) -> frozenset[int]:
    """Returns which results of a fusion are a parameter of it, in its own buffer.

    Fusions that run beside a collective pass on its buffers in this way, or as results of the
    collective or its steps. Without the same buffer a parameter would be copied; with the same
    buffer and another value it is updated in place.
    """
    same_buffers = {
        (tuple(alias.output_shape_index), alias.operand_index)
        for alias in caller.proto.output_operand_aliasing
    }
    inner = caller.called[0]
    passed_on = set()
    for i, result in enumerate(_results(inner)):
        index = (i,) if inner.root.opcode == "tuple" else ()
        while result.opcode == "bitcast":
            (result,) = result.operands
        is_parameter = result.opcode == "parameter"
        is_same = is_parameter and (index, result.proto.parameter_number) in same_buffers
        if is_same or _is_of_collective(result):
            passed_on.add(i)
    return frozenset(passed_on)


def _parameter_bytes(inner: Computation, passed_on: frozenset[int] = frozenset()) -> dict[int, int]:
    """Returns the bytes that a fusion reads of each of its parameters, by parameter number.

    The results that are in `passed_on` read nothing.
    """
    # A parameter may be read by several instructions of the fusion.
    users: _Users = {instruction: [] for instruction in inner.instructions}
    for instruction in inner.instructions:
        is_root = instruction is inner.root
        for index, operand in enumerate(instruction.operands):
            if not (is_root and index in passed_on):
                users[operand].append((instruction, index))

    return {
        instruction.proto.parameter_number: _read_bytes(instruction, users, inner.root)
        for instruction in inner.instructions
        if instruction.opcode == "parameter"
    }


def _read_bytes(value: Instruction, users: _Users, root: Instruction) -> int:
    """Returns the bytes that users of `value`, in a fusion with this root, read of it."""
    whole = value.num_bytes
    if value is root:
        # The result of a fusion within another one, which reads it there.
        return 0 if _is_of_collective(root) else whole

    read = 0
    for user, index in users[value]:
        if user.opcode in ("dynamic-slice", "gather", "slice") and index == 0:
            read += _bytes_as(value, user)  # A dynamic-slice may convert what it reads.
        elif user.opcode == "dynamic-update-slice" and index == 0:
            continue  # Overwritten in place.
        elif _is_in_chain(user):
            continue  # The network reads and writes it.
        elif _is_step_of_collective(user):
            # What it returns of the collective's buffers may be read here.
            results = [element for element, _ in users[user]] if user.is_tuple else [user]
            for result in results:
                if result.arrays == value.arrays:
                    read += _read_bytes(result, users, root)
        elif user.opcode == "bitcast":
            read += _read_bytes(user, users, root)
        elif user.opcode == "fusion":
            read += _parameter_bytes(user.called[0])[index]
        else:
            return whole
    return min(read, whole)


def _is_of_collective(result: Instruction) -> bool:
    """Whether a value of a fusion is a buffer of a collective that runs beside it."""
    if result.opcode == "get-tuple-element":
        (result,) = result.operands
    return _is_in_chain(result) or _is_step_of_collective(result)


def _is_in_chain(instruction: Instruction) -> bool:
    """Whether it is a collective that runs beside several fusions; see collectives.find."""
    is_collective = instruction.opcode in COLLECTIVES
    return is_collective and "chain_id" in instruction.proto.frontend_attributes.map


def _is_step_of_collective(instruction: Instruction) -> bool:
    """Whether it starts, continues or ends such a collective."""
    return instruction.proto.custom_call_target.startswith(_ASYNC_COLLECTIVE)


def _bytes_as(typed: Instruction, shaped: Instruction) -> int:
    """Returns the bytes of an array with the dtype of `typed` and the shape of `shaped`."""
    return num_bytes([Array(typed.arrays[0].dtype, shaped.arrays[0].shape)])


def _written_bytes(result: Instruction) -> int:
    """Returns the bytes that are written to make `result`."""
    if _is_of_collective(result):
        return 0  # The network writes it.

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
    return _own_bytes(result)
