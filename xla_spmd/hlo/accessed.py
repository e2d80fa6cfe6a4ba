"""The bytes of the device's memory that each instruction of a compiled program reads and writes.

They are counted as in XLA's own cost analysis: if an instruction slices an operand, only the slice
counts. Data that a TPU keeps on its chip (VMEM, CMEM) and data that is passed on are left out.
"""

from collections.abc import Mapping

from xla_spmd.hlo import products
from xla_spmd.hlo.hlo_module import COLLECTIVES, Array, Computation, Instruction, num_bytes

# These names occur in fusions that start, continue or end a collective that spans several fusions.
_ASYNC_COLLECTIVE = "AsyncCollective"
# The instructions that read each result, each with the index of the operand that it reads.
_Users = Mapping[Instruction, list[tuple[Instruction, int]]]


def accessed_bytes(instruction: Instruction) -> int:
    """Returns the bytes of the device's memory that an instruction reads and writes."""
    match instruction.opcode:
        case "fusion":
            return _called_bytes(instruction)
        case "async-start" if instruction.called[0].root.opcode not in COLLECTIVES:
            return _called_bytes(instruction)
        case "broadcast":
            return _written_bytes(instruction)

        # These instructions read no more than they write.
        case "dynamic-slice" | "slice":
            return _moved_bytes(instruction, instruction.operands[0], instruction.num_bytes)
        case "gather":
            table, indices = instruction.operands
            moved = _moved_bytes(instruction, table, instruction.num_bytes)
            return moved + _own_bytes(indices)
        case "dynamic-update-slice":
            update = instruction.operands[1]
            return _moved_bytes(instruction, update, _bytes_as(instruction, update))

        case "scatter":
            moved = sum(map(_own_bytes, instruction.operands[len(instruction.arrays) :]))
            for number, array in enumerate(instruction.arrays):
                if not array.is_on_chip:
                    moved += 2 * _scattered_bytes(instruction, number)
            return moved

        # Its result is a tuple of the copy, the operand and a semaphore.
        case "copy-start":
            copied = num_bytes(instruction.arrays[:1])
            return _moved_bytes(instruction, instruction.operands[0], copied)

        # To or from the host: the sent data is among the results, with a number and a token.
        case "send" | "recv":
            return num_bytes(instruction.arrays[:1])

    read = sum(map(_own_bytes, instruction.operands))
    return _written_bytes(instruction) + read


def _own_bytes(value: Instruction) -> int:
    """Returns the bytes that a value takes in the device's memory."""
    return num_bytes(array for array in value.arrays if not array.is_on_chip)


def _moved_bytes(result: Instruction, source: Instruction, size: int) -> int:
    """Returns the bytes accessed to read `size` bytes of `source` and write them to `result`."""
    ends = [result.arrays[0], source.arrays[0]]
    return size * len([array for array in ends if not array.is_on_chip])


def _scattered_bytes(scatter: Instruction, number: int) -> int:
    """Returns the bytes of one array that a scatter reads, and writes again in place.

    Its operands are the arrays, the indices, and the updates of each array.
    """
    updates = scatter.operands[len(scatter.arrays) + 1 + number]
    return min(updates.num_bytes, num_bytes([scatter.arrays[number]]))


def _called_bytes(caller: Instruction) -> int:
    """Returns the bytes that a fusion, or the computation of an async-start, accesses."""
    inner = caller.called[0]
    passed_on = _passed_on(caller)

    # The caller knows in which memory operands and results are placed.
    total = 0
    for number, read in _parameter_bytes(inner, passed_on).items():
        # libtpu leaves out the operands of calls to a TPU's SparseCore, which are in HBM.
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
    """Returns the parts of a computation's result: its tuple's elements, or the result itself."""
    root = computation.root
    return root.operands if root.opcode == "tuple" else (root,)


def _passed_on(caller: Instruction) -> frozenset[int]:
    """Returns the results of a fusion that are one of its parameters, in the same buffer.

    A fusion that runs beside a collective passes on the collective's buffers in this way, or as
    results of the collective or its steps. If the buffers differed, the parameter would be copied;
    if only the value differed, the buffer would be updated in place.
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
    """Returns the bytes that a fusion reads from each of its parameters, by parameter number.

    The results in `passed_on` read nothing.
    """
    # Several instructions of the fusion may read a parameter.
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
    """Returns the bytes of `value` that its users read, in a fusion with this root."""
    whole = value.num_bytes
    if value is root:
        # The result of an inner fusion, which the outer fusion reads.
        return 0 if _is_of_collective(root) else whole

    read = 0
    for user, index in users[value]:
        if user.opcode in ("dynamic-slice", "gather", "slice") and index == 0:
            read += _bytes_as(value, user)  # A dynamic-slice may convert the slice.
        elif user.opcode == "dynamic-update-slice" and index == 0:
            continue  # Overwritten in place.
        elif user.opcode == "scatter" and index < len(user.arrays):
            read += _scattered_bytes(user, index)
        elif _is_in_chain(user):
            continue  # The network reads and writes it.
        elif _is_step_of_collective(user):
            # The fusion may read the results that share the collective's buffers.
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
    """Returns whether a value in a fusion is a buffer of a collective that runs beside it."""
    if result.opcode == "get-tuple-element":
        (result,) = result.operands
    return _is_in_chain(result) or _is_step_of_collective(result)


def _is_in_chain(instruction: Instruction) -> bool:
    """Returns whether it is a collective that spans several fusions; see collectives.find."""
    is_collective = instruction.opcode in COLLECTIVES
    return is_collective and "chain_id" in instruction.proto.frontend_attributes.map


def _is_step_of_collective(instruction: Instruction) -> bool:
    """Returns whether it starts, continues or ends such a collective."""
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
        case "scatter":
            return sum(_scattered_bytes(result, i) for i in range(len(result.arrays)))
        case "custom-call" if result.proto.custom_call_target == "AllocateBuffer":
            return 0  # It reserves memory and does not write it.
        case "fusion":
            return _written_bytes(result.called[0].root)
        case "custom-call" if products.has_workspace(result):
            return num_bytes(result.arrays[:1])  # Without the workspace.
    return _own_bytes(result)
