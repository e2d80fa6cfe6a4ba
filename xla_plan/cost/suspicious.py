"""Signs of a bad partitioning: gathered tensors and whole batches on a core.

If only the arguments are known, the signs are arguments that every device holds whole, or gathers.
"""

import re
from collections.abc import Sequence

from xla_plan.cost.compiled_step import CompiledStep, sum_by_source
from xla_plan.cost.scopes import source
from xla_plan.plans.program_plan import Batch
from xla_plan.program.stablehlo_program import Argument
from xla_spmd.hlo import hlo_module

# Smaller tensors, such as metrics and the gate's losses, are not suspicious.
_LARGE_BYTES = 2**20
# These kinds are expected: tokens go to experts and back, and sums are taken.
_EXPECTED = ("all-to-all", "all-reduce", "reduce-scatter")


def describe(
    step: CompiledStep, batch: Batch, num_partitions: int, call: str = "step"
) -> tuple[str, ...]:
    """Describes gathers of large tensors, and tensors of the whole batch on a core.

    `call` is the word for a call of the program. On one partition everything is whole.
    """
    if num_partitions == 1:
        return ()
    descriptions = _large_gathers(step, call) + _whole_batches(step, batch)
    return tuple(dict.fromkeys(descriptions))


def describe_arguments(step: CompiledStep, arguments: Sequence[Argument]) -> tuple[str, ...]:
    """Describes the large arguments that are whole on every device, or are gathered there."""
    gathered = _gathered_shapes(step)
    whole: dict[str, list[Argument]] = {}
    for argument in arguments:
        if hlo_module.num_bytes([argument.array]) < _LARGE_BYTES:
            continue
        if argument.local == argument.array:
            whole.setdefault(f"{argument.array} is whole on every device", []).append(argument)
        elif argument.array.shape in gathered:
            text = f"{argument.array} is gathered whole on every device"
            whole.setdefault(text, []).append(argument)

    # The largest first. Models have many arguments of one type.
    descriptions = []
    for text, alike in sorted(whole.items(), key=lambda item: -_argument_bytes(item[1][0])):
        of_them = f", the first of {len(alike)}" if len(alike) > 1 else ""
        mib = _argument_bytes(alike[0]) / 2**20
        descriptions.append(f"argument {text}, {mib:.1f} MiB: {alike[0].name}{of_them}")
    return tuple(descriptions)


def _argument_bytes(argument: Argument) -> int:
    return hlo_module.num_bytes([argument.array])


def _gathered_shapes(step: CompiledStep) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of the results of all-gathers, and of sums that stand in for them."""
    shapes = set()
    for instruction in step.costs:
        if instruction.opcode.startswith("all-gather") or instruction.name in step.gathered_bytes:
            shapes |= {array.shape for array in instruction.arrays}
    return frozenset(shapes)


def _large_gathers(step: CompiledStep, call: str) -> list[str]:
    """Describes, per kind and layer, the collectives that move many bytes."""
    # XLA's own collectives.
    num_bytes = {
        (collective_sum.kind, collective_sum.source): collective_sum.bytes
        for collective_sum in sum_by_source(step.report.collective_ops)
        if collective_sum.kind not in _EXPECTED
    }

    # From 64 partitions on, the TPU's compiler writes all-gathers as sums of parts in zeros.
    for instruction in step.costs:
        if instruction.name in step.gathered_bytes:
            key = "all-reduce in place of an all-gather", source(instruction.op_name)
            gathered = instruction.times * step.gathered_bytes[instruction.name]
            num_bytes[key] = num_bytes.get(key, 0) + gathered

    return [
        f"{kind} of {size / 2**20:.1f} MiB a {call} from {layer}"
        for (kind, layer), size in num_bytes.items()
        if size >= _LARGE_BYTES
    ]


def _whole_batches(step: CompiledStep, batch: Batch) -> list[str]:
    """Describes large tensors of vectors for all tokens of the batch."""
    # Tokens are vectors, and a dim follows: a last dim may be a number of tokens by chance.
    whole = re.compile(rf"\[(\d+,)*{batch.rows},({batch.source_len}|{batch.target_len}),")

    descriptions = []
    for instruction in step.costs:
        for array in instruction.arrays:
            if whole.search(str(array)) and hlo_module.num_bytes([array]) >= _LARGE_BYTES:
                layer = source(instruction.op_name)
                descriptions.append(f"{array}, the whole batch on every core, from {layer}")
    return descriptions
