"""Kernels that users write themselves (Pallas), which XLA runs without knowing what they compute.

They are custom calls, on TPUs of Mosaic and on GPUs of Triton. XLA sees their operands and results,
and so their bytes, but no products. The author of a kernel can tell what it computes, with
`cost_estimate` of `jax.experimental.pallas.pallas_call`, which JAX keeps for TPUs alone; for a
kernel without it, the user of a plan can, by its name.
"""

import json
import re
from collections.abc import Iterable, Mapping

from lingvo_gshard.hlo.hlo_module import Instruction, Module

_MOSAIC = "tpu_custom_call"
_TRITON = "__gpu$xla.gpu.triton"
# The operation that a kernel comes from; the scope around it is the kernel's name.
_OPERATION = "pallas_call"


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction is a kernel of Mosaic or Triton."""
    return instruction.proto.custom_call_target in (_MOSAIC, _TRITON)


def name_of(kernel: Instruction) -> str:
    """Returns the name of a kernel: that of its function, or the `name` of its pallas_call."""
    scopes = kernel.op_name.split(";")[0].split("/")
    if len(scopes) > 1 and scopes[-1] == _OPERATION:
        return _untransformed(scopes[-2])
    return re.sub(r"\.\d+$", "", kernel.name)  # XLA numbers instructions of one name.


def _untransformed(scope: str) -> str:
    """Returns `step` of `jit(step)`, the function around a kernel that has no name of its own."""
    transformed = re.fullmatch(r"\w+\((.*)\)", scope)
    while transformed is not None:
        scope = transformed[1]
        transformed = re.fullmatch(r"\w+\((.*)\)", scope)
    return scope


def flops_of(kernel: Instruction, flops_by_name: Mapping[str, int]) -> int | None:
    """Returns the flops of one run of a kernel, on one partition; None if nobody gives them.

    What `flops_by_name` has for its name comes before its own cost_estimate.
    """
    name = name_of(kernel)
    if name in flops_by_name:
        return flops_by_name[name]

    if kernel.proto.custom_call_target == _TRITON:
        return None  # Its configuration has no estimate.
    config = json.loads(kernel.proto.backend_config or "{}")
    estimate = config.get("custom_call_config", {}).get("cost_estimate")
    # A protobuf in JSON has 64-bit integers as text and leaves out zeros.
    return None if estimate is None else int(estimate.get("flops", 0))


def parse_flops(texts: Iterable[str]) -> dict[str, int]:
    """Returns the flops by the kernels' names of texts such as `flash_attention=8.6e9`.

    Raises ValueError for a text of another form, a number below zero, or a name given twice.
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
    """Raises ValueError for a name that no kernel of the program has."""
    names = {name_of(instruction) for instruction in _kernels(module)}
    for name in flops_by_name:
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise ValueError(f"flops of a kernel {name!r}: the program's kernels are: {known}.")


def uncounted(module: Module, flops_by_name: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the names of the kernels whose flops nobody gives, each once."""
    names = [
        name_of(instruction)
        for instruction in _kernels(module)
        if flops_of(instruction, flops_by_name) is None
    ]
    return tuple(dict.fromkeys(names))


def _kernels(module: Module) -> list[Instruction]:
    return [instruction for instruction in module.instructions() if is_kernel(instruction)]
