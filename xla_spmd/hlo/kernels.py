"""Custom calls, whose computation XLA does not know: kernels and libraries.

A kernel that a user writes (Pallas) is a custom call, to Mosaic on TPUs and to Triton on GPUs. XLA
sees its operands and results, and so its bytes, but not its products. The kernel's author can
declare its cost with `cost_estimate` of `jax.experimental.pallas.pallas_call`, which JAX keeps only
on TPUs. For a kernel without an estimate, the user of a plan can give its flops by name. A call of
a library is named by its target; products.py knows cuBLAS and cuDNN.
"""

import json
import re
from collections.abc import Iterable, Mapping

from xla_spmd.hlo.hlo_module import Instruction, Module

_MOSAIC = "tpu_custom_call"
_TRITON = "__gpu$xla.gpu.triton"
# The operation from which a kernel comes; the scope around it is the kernel's name.
_OPERATION = "pallas_call"
# Targets of custom calls that multiply nothing: compiler notes, moves, sorts and bit operations.
# Their cost is their bytes, which count as in any operation.
_WITHOUT_PRODUCTS = re.compile(
    r"AllocateBuffer|AsyncCollective\w*|AssumeGatherIndicesInBound|ConcatBitcast"
    r"|GatherScatterIndicesBitpacked|X64\w+|Sharding|SPMD\w+ToShardShape|SPMDShardToFullShape"
    r"|MoveTo(Host|Device)|PinToDevice\w*|annotate_device_placement|LayoutConstraint"
    r"|PartialReduce|(__gpu\$)?TopK|__cub\$\w+|cu_threefry2x32\w*|(cu_)?lu_pivots_to_permutation"
    r"|xla\.sdy\.\w+|CreateBuffer|SetBound|SliceToDynamic|PadToStatic"
    r"|TODO\(b/522284627\)"  # The TPU compiler's, around a gather on a SparseCore.
)


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction is a kernel of Mosaic or Triton."""
    return instruction.proto.custom_call_target in (_MOSAIC, _TRITON)


def has_dynamic_grid(instruction: Instruction) -> bool:
    """Returns whether a number given as data decides how many steps a Mosaic kernel runs.

    Pallas passes this number as the first operand: a scalar, before the array operands.
    """
    if instruction.proto.custom_call_target != _MOSAIC or not instruction.operands:
        return False
    first = instruction.operands[0]
    is_scalar = bool(first.arrays) and first.arrays[0].shape == ()
    return is_scalar and first.opcode != "constant"


def name_of(call: Instruction) -> str:
    """Returns the name of a custom call.

    A kernel is named by its function or by the `name` of its pallas_call, and other calls by their
    targets.
    """
    if not is_kernel(call):
        return str(call.proto.custom_call_target)
    scopes = call.op_name.split(";")[0].split("/")
    if len(scopes) > 1 and scopes[-1] == _OPERATION:
        return _untransformed(scopes[-2])
    return re.sub(r"\.\d+$", "", call.name)  # XLA numbers instructions of one name.


def _untransformed(scope: str) -> str:
    """Returns `step` of `jit(step)`, the function around an unnamed kernel."""
    transformed = re.fullmatch(r"\w+\((.*)\)", scope)
    while transformed is not None:
        scope = transformed[1]
        transformed = re.fullmatch(r"\w+\((.*)\)", scope)
    return scope


def flops_of(call: Instruction, flops_by_name: Mapping[str, int]) -> int | None:
    """Returns the flops of one run of a custom call, on one partition; None if unknown.

    An entry of `flops_by_name` takes precedence over the kernel's own cost_estimate.
    """
    name = name_of(call)
    if name in flops_by_name:
        return flops_by_name[name]

    if call.proto.custom_call_target != _MOSAIC:
        return None  # Other calls' configurations do not include an estimate.
    config = json.loads(call.proto.backend_config or "{}")
    estimate = config.get("custom_call_config", {}).get("cost_estimate")
    # A protobuf in JSON has 64-bit integers as text and leaves out zeros.
    return None if estimate is None else int(estimate.get("flops", 0))


def parse_flops(texts: Iterable[str]) -> dict[str, int]:
    """Returns the flops by custom call name, parsed from texts such as `flash_attention=8.6e9`.

    Raises ValueError for a malformed text, a negative number, or a repeated name.
    """
    flops_by_name: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            flops = float(number)
        except ValueError:
            flops = -1.0
        if not name or not 0 <= flops < float("inf"):
            raise ValueError(
                f"flops of a kernel {text!r}: expected NAME=FLOPS of one run on one device, "
                "such as flash_attention=8.6e9."
            )

        if name in flops_by_name:
            raise ValueError(f"flops of a kernel {text!r}: {name} was given before.")
        flops_by_name[name] = round(flops)
    return flops_by_name


def check_names(module: Module, flops_by_name: Mapping[str, int]) -> None:
    """Raises ValueError for a name that does not occur in the program's kernels or custom calls."""
    names = {name_of(call) for call in calls(module)}
    for name in flops_by_name:
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise ValueError(f"flops of a kernel {name!r}: the program's kernels are: {known}.")


def calls(module: Module) -> list[Instruction]:
    """Returns the custom calls of a program that may multiply something."""
    found = []
    for instruction in module.instructions():
        target = instruction.proto.custom_call_target
        if instruction.opcode == "custom-call" and not _WITHOUT_PRODUCTS.fullmatch(target):
            found.append(instruction)
    return found
