"""The parts of a program whose layers are not known: by kind of operation, or by users' patterns.

Figure 8's categories (categories.py) are those of this project's layers.
"""

import enum
import json
from collections.abc import Mapping, Sequence

from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.hlo.hlo_module import Instruction, Module
from lingvo_gshard.planning import patterns
from lingvo_gshard.planning.compiled.categories import Parts, Pass, pass_of, scopes
from lingvo_gshard.planning.compiled.compiled_step import CompiledStep
from lingvo_gshard.planning.patterns import Pattern

_COPIES = frozenset(
    {
        "concatenate",
        "copy",
        "copy-start",
        "dynamic-slice",
        "dynamic-update-slice",
        "pad",
        "reshape",
        "slice",
        "transpose",
    }
)


class Kind(enum.StrEnum):
    """A kind of operation."""

    PRODUCTS = "products"  # With whatever is fused with them.
    BATCHED = "batched products"  # Of many pairs of matrices: attention, experts.
    COLLECTIVES = "collectives"
    COPIES = "copies"
    OTHERS = "others"


def by_kind(module: Module, categories: Sequence[Pattern], step: CompiledStep) -> Parts:
    """Returns the parts of a program: of the users' `categories`, and by kind what has none.

    A pattern is looked for in an instruction's scopes, such as `decoder/mlp/dot_general`. Raises
    ValueError as patterns.assign.
    """
    names = [cost.op_name for cost in step.costs]
    names += [collective.op_name for collective in step.report.collective_ops]
    paths = {name: "/".join(scopes(name)) for name in names}
    # What the compiler adds by itself has no name.
    named = [path for path in paths.values() if path]
    labels: Mapping[str, str] = patterns.assign("--category", categories, named)
    batched = _batched(module)

    def part_of(instruction: Cost | Collective) -> str:
        label = labels.get(paths[instruction.op_name])
        return label or _kind(instruction, instruction.op_name in batched)

    own = dict.fromkeys(pattern.label for pattern in categories)
    return Parts((*own, *Kind), part_of)


def _pass_of(instruction: Cost | Collective) -> str:
    return pass_of(instruction.op_name)


# The passes of a training step.
PASSES = Parts(tuple(Pass), _pass_of)


def _kind(instruction: Cost | Collective, is_batched: bool) -> Kind:
    if isinstance(instruction, Collective):
        return Kind.COLLECTIVES
    if instruction.flops:
        return Kind.BATCHED if is_batched else Kind.PRODUCTS
    return Kind.COPIES if instruction.opcode in _COPIES else Kind.OTHERS


def _batched(module: Module) -> frozenset[str]:
    """Returns the op_names of products of many pairs of matrices."""
    return frozenset(
        instruction.op_name for instruction in module.instructions() if _is_batched(instruction)
    )


def _is_batched(instruction: Instruction) -> bool:
    """Whether an instruction is a product with dims that both operands and the result have.

    The TPU's compiler writes such a product as a convolution along a dilated dim.
    """
    match instruction.opcode:
        case "dot":
            return bool(instruction.proto.dot_dimension_numbers.lhs_batch_dimensions)
        case "convolution":
            windows = instruction.proto.window.dimensions
            return any(window.size > 1 and window.base_dilation > 1 for window in windows)
        case "custom-call" if instruction.proto.custom_call_target.startswith("__cublas$"):
            config = json.loads(instruction.proto.backend_config)["gemm_backend_config"]
            return bool(config["dot_dimension_numbers"].get("lhs_batch_dimensions"))
    return False
