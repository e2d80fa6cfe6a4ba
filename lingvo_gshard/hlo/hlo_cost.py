"""What each instruction of a compiled program computes and moves, read from its text.

Counted as XLA's own cost analysis does, but with every loop's body as often as it runs, and
instruction by instruction, so that costs can be summed by the operations they come from.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from lingvo_gshard.hlo import compiled_text, trip_counts
from lingvo_gshard.hlo.hlo_text import Computation, Instruction, Module, array_types

# They name or pass on what is there already.
_FREE = frozenset(
    [
        *("after-all", "bitcast", "constant", "copy-done", "get-tuple-element", "iota"),
        *("optimization-barrier", "parameter", "partition-id", "replica-id", "tuple"),
        *(f"{kind}-done" for kind in compiled_text.COLLECTIVES),
    ]
)
_CONTROL = frozenset(["call", "conditional", "while"])
_SLICES = frozenset(["dynamic-slice", "gather", "slice"])
_SHAPE = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_DIM_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_SUMMED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_BATCH_GROUPS = re.compile(r"\bbatch_group_count=(\d+)")


@dataclasses.dataclass(frozen=True)
class Cost:
    """One instruction, each time that it runs on one partition.

    Attributes:
      name, opcode: the instruction's; a fusion is one.
      op_name: the operation it was made of; of a fusion with products, its largest product's. An
        instruction without takes the name of what it reads, or else of what reads it.
      flops: of its products, two for a multiplication and addition; padding is not counted.
      accessed_bytes: operands read and results written in memory; of an operand that is sliced,
        the slice.
      type: of its results, as the text writes it.
      result_bytes: of its results.
      times: how often a call of the program runs it.
    """

    name: str
    opcode: str
    op_name: str
    flops: int
    accessed_bytes: int
    type: str
    result_bytes: int
    times: int


def costs(module: Module) -> tuple[Cost, ...]:
    """The cost of each instruction that runs by itself, in the text's order.

    Raises:
      ValueError: the text does not tell how often a loop runs.
    """
    times = trip_counts.count(module).times
    found = []
    for name in _running(module):
        repeated = times[name]
        if repeated is None:
            raise ValueError(f"costs: the text does not tell how often it runs {name}.")
        computation = module.computations[name]
        names = _op_names(computation)
        found += [
            _cost(module, computation, instruction, names[instruction.name], repeated)
            for instruction in computation.instructions.values()
            if instruction.opcode not in _FREE | _CONTROL
        ]
    return tuple(found)


def _running(module: Module) -> Iterator[str]:
    """Names of the computations whose instructions run one by one.

    They are the entry, loops' bodies and conditions, branches and what is called.
    """
    waiting, seen = [module.entry], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        for instruction in module.computations[name].instructions.values():
            if instruction.opcode in _CONTROL:
                waiting += instruction.called


def _op_names(computation: Computation) -> dict[str, str]:
    """Of every instruction; parameters, which are named by their places, have none of their own."""
    instructions = computation.instructions
    names = {i.name: i.op_name if i.opcode != "parameter" else "" for i in instructions.values()}
    for each in instructions.values():  # What is read comes before.
        read = (names[operand] for operand in each.operands if names[operand])
        names[each.name] = names[each.name] or next(read, "")
    for each in reversed(instructions.values()):
        for operand in each.operands:
            names[operand] = names[operand] or names[each.name]
    return names


def _cost(
    module: Module, computation: Computation, instruction: Instruction, op_name: str, times: int
) -> Cost:
    products = list(_products(module, computation, instruction))
    largest = max(products, key=lambda product: product[1], default=(instruction, 0))
    return Cost(
        name=instruction.name,
        opcode=instruction.opcode,
        op_name=largest[0].op_name or op_name,
        flops=sum(flops for _, flops in products),
        accessed_bytes=_accessed_bytes(module, computation, instruction),
        type=instruction.type,
        result_bytes=compiled_text.type_bytes(instruction.type),
        times=times,
    )


def _products(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Instruction, int]]:
    """Each product that the instruction is or that is fused in it, with its flops."""
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        for each in inner.instructions.values():
            yield from _products(module, inner, each)
    elif instruction.opcode == "convolution":
        yield instruction, _convolution_flops(computation, instruction)
    elif instruction.opcode == "dot":
        yield instruction, _dot_flops(computation, instruction)


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    lhs = _shape(computation.instructions[instruction.operands[0]].type)
    found = _SUMMED.search(instruction.attributes)
    summed = [lhs[int(dim)] for dim in found[1].split(",") if dim] if found else []
    return 2 * math.prod(_shape(instruction.type)) * math.prod(summed)


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """2 * batch * inputs * outputs * the pairs of window and place that don't meet padding.

    The TPU's compiler writes every product as a convolution, a batch of products as one over a
    dilated dim.
    """
    lhs, rhs = (_shape(computation.instructions[name].type) for name in instruction.operands[:2])
    out = _shape(instruction.type)
    labels = _DIM_LABELS.search(instruction.attributes)
    assert labels is not None, instruction
    groups = _BATCH_GROUPS.search(instruction.attributes)
    window = dict(
        item.split("=") for item in (_WINDOW.search(instruction.attributes) or ["", ""])[1].split()
    )
    spatial = [letter for letter in labels[1] if letter.isdigit()]
    pairs = math.prod(
        _valid_pairs(
            lhs[labels[1].index(letter)],
            rhs[labels[2].index(letter)],
            out[labels[3].index(letter)],
            _Window.read(window, int(letter)),
        )
        for letter in spatial
    )
    batch = lhs[labels[1].index("b")] // (int(groups[1]) if groups else 1)
    inputs = rhs[labels[2].index("i")]  # Of one feature group.
    return 2 * batch * inputs * out[labels[3].index("f")] * pairs


@dataclasses.dataclass(frozen=True)
class _Window:
    """One spatial dim of a convolution's window."""

    stride: int
    low: int
    lhs_dilation: int
    rhs_dilation: int

    @staticmethod
    def read(window: dict[str, str], dim: int) -> _Window:
        def at(name: str, default: str) -> str:
            return window[name].split("x")[dim] if name in window else default

        return _Window(
            stride=int(at("stride", "1")),
            low=int(at("pad", "0_0").split("_")[0]),
            lhs_dilation=int(at("lhs_dilate", "1")),
            rhs_dilation=int(at("rhs_dilate", "1")),
        )


def _valid_pairs(size: int, kernel: int, out: int, window: _Window) -> int:
    """Pairs of a result's place and a window's place that read an element, neither padding nor
    the gaps of a dilation."""
    last = (size - 1) * window.lhs_dilation
    if kernel == 1 and window.low == 0 and window.lhs_dilation == 1:
        return min(out, last // window.stride + 1)
    count = 0
    for place in range(kernel):
        first = place * window.rhs_dilation - window.low
        reads = (first + i * window.stride for i in range(out))
        count += sum(0 <= at <= last and at % window.lhs_dilation == 0 for at in reads)
    return count


def _accessed_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, module.computations[instruction.called[0]])
    operands = [computation.instructions[name].type for name in instruction.operands]
    written = compiled_text.type_bytes(instruction.type)
    match instruction.opcode:
        case opcode if opcode in _SLICES:
            return 2 * written
        case "dynamic-update-slice":
            return 2 * compiled_text.type_bytes(operands[1])
        case "broadcast":
            return written
    return written + sum(map(compiled_text.type_bytes, operands))


def _fusion_bytes(module: Module, inner: Computation) -> int:
    """Of each parameter what its users read; of the results what is written."""
    read = sum(_parameter_bytes(module, inner).values())
    return read + _written_bytes(module, inner, inner.instructions[inner.root])


def _parameter_bytes(module: Module, inner: Computation) -> dict[int, int]:
    """Bytes that a fusion reads of each of its parameters, by its place."""
    users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in inner.instructions}
    for each in inner.instructions.values():
        for place, operand in enumerate(each.operands):
            users[operand].append((each, place))
    return {
        int(each.argument): _read_bytes(module, each, users, compiled_text.type_bytes(each.type))
        for each in inner.instructions.values()
        if each.opcode == "parameter"
    }


def _read_bytes(
    module: Module,
    value: Instruction,
    users: dict[str, list[tuple[Instruction, int]]],
    whole: int,
) -> int:
    """Bytes read of a parameter of `whole` bytes, by the users of `value`, which is it."""
    read = 0
    for user, place in users[value.name]:
        if user.opcode in _SLICES and place == 0:
            read += compiled_text.type_bytes(user.type)
        elif user.opcode == "dynamic-update-slice" and place == 0:
            continue  # Written over in place.
        elif user.opcode == "bitcast":
            read += _read_bytes(module, user, users, whole)
        elif user.opcode == "fusion":
            read += _parameter_bytes(module, module.computations[user.called[0]])[place]
        else:
            return whole
    return min(read, whole)


def _written_bytes(module: Module, inner: Computation, result: Instruction) -> int:
    match result.opcode:
        case "tuple":
            results = (inner.instructions[name] for name in result.operands)
            return sum(_written_bytes(module, inner, each) for each in results)
        case "bitcast":
            return _written_bytes(module, inner, inner.instructions[result.operands[0]])
        case "dynamic-update-slice":
            return compiled_text.type_bytes(inner.instructions[result.operands[1]].type)
        case "fusion":
            within = module.computations[result.called[0]]
            return _written_bytes(module, within, within.instructions[within.root])
    return compiled_text.type_bytes(result.type)


def _shape(type_text: str) -> list[int]:
    """The sizes of an array's dims."""
    found = _SHAPE.search(array_types(type_text)[0])
    assert found is not None, type_text
    return [int(size) for size in found[1].split(",") if size]
