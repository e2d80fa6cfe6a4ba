"""The computation and memory traffic of each instruction of a program, and its number of runs.

Costs are counted as in XLA's own cost analysis, but separately for each instruction, so that they
can be summed by operation, and with the number of runs of a loop's body. Bytes are in the device's
memory: they include neither data that a TPU keeps on its chip (VMEM, CMEM) nor data that an
instruction only passes on.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from xla_spmd.hlo import accessed, data_dependence, forms, products
from xla_spmd.hlo.hlo_module import Array, Computation, Instruction, Module
from xla_spmd.hlo.products import Product

# Instructions that run other computations.
_CONTROL = frozenset(
    {
        "call",
        "conditional",
        "while",
    }
)
# The start of an asynchronous operation has its cost; its later steps cost nothing.
_START = "-start"
_LATER = ("-update", "-done")
# Instructions that name or pass on existing values, or whose results cost nothing.
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
# Functions of each element that take many operations.
_TRANSCENDENTAL = frozenset(
    {
        "atan2",
        "cbrt",
        "cosine",
        "erf",
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "logistic",
        "power",
        "rsqrt",
        "sine",
        "sqrt",
        "tan",
        "tanh",
    }
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one run, on one partition, of an instruction or a fusion."""

    name: str
    opcode: str
    # The operation from which it was made. A fusion with products has the name of the largest one.
    # Instructions without a name have an operand's name, or else a user's.
    op_name: str
    flops: int  # Of products only: two per multiply-add, without padding.
    accessed_bytes: int  # If an operand is sliced, only the slice counts.
    arrays: tuple[Array, ...]  # The types of its results.
    times: int  # The number of runs in a call; the most if it depends on data.
    arithmetic: str = "bf16"  # Its largest product's arithmetic; see Product.
    least_times: int | None = None  # The fewest runs; None if equal to `times`.
    transcendentals: int = 0  # The elements of exponentials, logarithms and the like.
    pair_flops: int = 0  # The flops of one pair of matrices of its largest product.
    form: str = ""  # Its largest product's form, or `transposing`; see forms.py.


def costs(module: Module, kernel_flops: Mapping[str, int] | None = None) -> tuple[Cost, ...]:
    """Returns the cost of each instruction that runs by itself and is not part of a fusion.

    `kernel_flops` is the flops of each kernel by its name; see kernels.flops_of.
    """
    runs = data_dependence.runs(module)
    found: list[Cost] = []
    for computation in _running(module):
        times = runs.most.times[computation]
        least_times = runs.least.times[computation]
        for instruction, op_name in _op_names(computation).items():
            opcode = opcode_of(instruction)
            if opcode.removesuffix(_START) in _FREE or opcode.endswith(_LATER):
                continue
            is_ragged = products.is_ragged(instruction)
            cost = _cost(instruction, opcode, op_name, kernel_flops or {})
            found.append(
                dataclasses.replace(cost, times=times, least_times=0 if is_ragged else least_times)
            )
    return tuple(found)


def _cost(
    instruction: Instruction, opcode: str, op_name: str, kernel_flops: Mapping[str, int]
) -> Cost:
    """Returns the cost of one run of an instruction."""
    # A fusion has the name of its largest product, which takes most of its time.
    found = list(products.of(instruction, kernel_flops))
    arithmetic = "bf16"
    pair_flops = 0
    form = forms.TRANSPOSING if forms.is_transposing(instruction) else ""
    if found:
        largest = max(found, key=_flops)
        op_name = largest.instruction.op_name or op_name
        arithmetic = largest.arithmetic
        pair_flops = largest.flops // largest.pairs
        form = forms.of_product(largest.instruction)

    return Cost(
        name=instruction.name,
        opcode=opcode,
        op_name=op_name,
        flops=sum(map(_flops, found)),
        accessed_bytes=accessed.accessed_bytes(instruction),
        arrays=instruction.arrays,
        times=1,
        arithmetic=arithmetic,
        transcendentals=_transcendentals(instruction),
        pair_flops=pair_flops,
        form=form,
    )


def _transcendentals(instruction: Instruction) -> int:
    """Returns the elements of transcendental functions in one run of an instruction."""
    if instruction.opcode in _TRANSCENDENTAL:
        return sum(math.prod(array.shape) for array in instruction.arrays)
    if instruction.opcode not in ("fusion", "async-start"):
        return 0
    return sum(map(_transcendentals, instruction.called[0].instructions))


def _flops(product: Product) -> int:
    return product.flops


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
            if opcode_of(instruction).removesuffix(_START) in _CONTROL:
                waiting += reversed(instruction.called)  # The first one is popped first.


def opcode_of(instruction: Instruction) -> str:
    """Returns the opcode; for an asynchronous call the one in XLA's text, `all-to-all-start`."""
    step = instruction.opcode.removeprefix("async")
    if step not in ("-start", "-update", "-done"):
        return instruction.opcode

    # The start calls the wrapped instruction. Each later step takes the step before it as operand.
    start = instruction
    while not start.called:
        start = start.operands[0]
    return start.called[0].root.opcode + step


def _op_names(computation: Computation) -> dict[Instruction, str]:
    """Returns each instruction's op_name, or if it is empty, an operand's or else a user's."""
    names: dict[Instruction, str] = {}

    # Names from operands, which come before their users.
    for instruction in computation.instructions:
        if instruction.opcode == "parameter":
            names[instruction] = ""  # Its op_name is the name of an argument, not an operation.
            continue
        inherited = [names[operand] for operand in instruction.operands if names[operand]]
        names[instruction] = instruction.op_name or (inherited[0] if inherited else "")

    # Names from users, which come after their operands.
    for instruction in reversed(computation.instructions):
        for operand in instruction.operands:
            names[operand] = names[operand] or names[instruction]
    return names
