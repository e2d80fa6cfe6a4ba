"""The parts of a program that its cost is split into: kinds of operations, or users' categories."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from xla_plan.cost.compiled_step import CompiledStep
from xla_plan.cost.scopes import scopes
from xla_plan.program import patterns
from xla_plan.program.patterns import Pattern
from xla_spmd.hlo import products
from xla_spmd.hlo.collectives import Collective
from xla_spmd.hlo.hlo_cost import Cost
from xla_spmd.hlo.hlo_module import Module

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

    PRODUCTS = "products"  # Matrix products and the operations that are fused with them.
    BATCHED = "batched products"  # Many pairs of matrices at once: attention, experts.
    COLLECTIVES = "collectives"
    COPIES = "copies"
    OTHERS = "others"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that the cost of a program is split into."""

    names: tuple[str, ...]  # All are listed, also if nothing belongs to them.
    of: Callable[[Cost | Collective], str]  # Returns the part of an instruction.


def by_kind(module: Module, categories: Sequence[Pattern], step: CompiledStep) -> Parts:
    """Groups operations by the users' `categories`, and the remaining ones by kind.

    A pattern is searched in an instruction's scopes, such as `decoder/mlp/dot_general`. Raises
    ValueError if a pattern matches no instruction, or if patterns of two labels match the same one.
    """
    names = [cost.op_name for cost in step.costs]
    names += [collective.op_name for collective in step.report.collective_ops]
    paths = {name: "/".join(scopes(name)) for name in names}
    # Instructions that the compiler adds by itself are unnamed.
    named = [path for path in paths.values() if path]
    labels: Mapping[str, str] = patterns.assign("--category", categories, named)
    batched = _batched(module)

    def part_of(instruction: Cost | Collective) -> str:
        label = labels.get(paths[instruction.op_name])
        return label or _kind(instruction, instruction.op_name in batched)

    own = dict.fromkeys(pattern.label for pattern in categories)
    return Parts((*own, *Kind), part_of)


def _kind(instruction: Cost | Collective, is_batched: bool) -> Kind:
    if isinstance(instruction, Collective):
        return Kind.COLLECTIVES
    if instruction.flops:
        return Kind.BATCHED if is_batched else Kind.PRODUCTS
    return Kind.COPIES if instruction.opcode in _COPIES else Kind.OTHERS


def _batched(module: Module) -> frozenset[str]:
    """Returns the op_names of products of many pairs of matrices: dims that all three have."""
    return frozenset(
        instruction.op_name
        for instruction in module.instructions()
        if products.num_pairs(instruction) > 1
    )
