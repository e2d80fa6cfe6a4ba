"""The work of a call in sums by kind and size, from which rates by size give its time."""

import collections
import dataclasses
import enum
import math
from collections.abc import Iterable

from xla_plan.cost.scopes import is_attention_kernel
from xla_spmd.hlo.hlo_cost import Cost
from xla_spmd.hlo.hlo_module import COLLECTIVES

_TRANSCENDENTAL = "transcendental"
_Class = tuple[str, str, str, int]  # Kind, arithmetic, form and size.


class Work(enum.StrEnum):
    """A kind of work that one core does by itself."""

    ATTENTION = "attention"  # Attention's kernels.
    PRODUCTS = "products"  # All other products, with the operations that are fused with them.
    OTHERS = "others"


@dataclasses.dataclass(frozen=True)
class WorkSum:
    """All instructions of a call that are of one kind and of about one size."""

    kind: str  # A value of Work.
    # The products' arithmetic; see xla_spmd/hlo/products.py. OTHERS are `transcendental` or empty.
    arithmetic: str
    # The logarithm to base 2 of the flops of one pair of matrices, or of the bytes of one run of
    # OTHERS, rounded.
    size: int
    runs: int
    flops: float  # The sum over all runs, as in the following fields.
    accessed_bytes: float
    transcendentals: float
    form: str = ""  # A product's form, or `transposing`; see xla_spmd/hlo/forms.py.


def sums(costs: Iterable[Cost]) -> tuple[WorkSum, ...]:
    """Returns the sums of all instructions except collectives, by their class."""
    runs = collections.Counter[_Class]()
    flops = collections.Counter[_Class]()
    transcendentals = collections.Counter[_Class]()
    num_bytes = collections.Counter[_Class]()
    for cost in costs:
        if cost.opcode.removesuffix("-start") in COLLECTIVES or not cost.times:
            continue
        key = _class(cost)
        runs[key] += cost.times
        flops[key] += cost.times * cost.flops
        num_bytes[key] += cost.times * cost.accessed_bytes
        transcendentals[key] += cost.times * cost.transcendentals

    found = []
    for key, count in sorted(runs.items()):
        amounts = (flops[key], num_bytes[key], transcendentals[key])
        kind, arithmetic, form, size = key
        found.append(WorkSum(kind, arithmetic, size, count, *amounts, form=form))
    return tuple(found)


def _class(cost: Cost) -> _Class:
    """Returns the kind, arithmetic, form and size of an instruction."""
    if not cost.flops:
        arithmetic = _TRANSCENDENTAL if cost.transcendentals else ""
        return Work.OTHERS, arithmetic, cost.form, size_of(cost.accessed_bytes)
    kind = Work.ATTENTION if is_attention_kernel(cost) else Work.PRODUCTS
    return kind, cost.arithmetic, cost.form, size_of(cost.pair_flops)


def size_of(amount: float) -> int:
    """Returns the rounded logarithm to base 2 of flops or bytes; 0 for none."""
    return round(math.log2(amount)) if amount > 1 else 0
