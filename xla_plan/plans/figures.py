"""The figures of plans by name, with units, and plans side by side."""

import collections
from collections.abc import Mapping

from xla_plan.cost.step_cost import StepCost
from xla_plan.plans.program_plan import ProgramPlan
from xla_spmd.files import table


def of_program(plan: ProgramPlan) -> dict[str, float]:
    """Returns the figures of a program's plan; if it does not fit, the times are left out."""
    size = {"cores": plan.cores, "fits": plan.fits}
    return {**size, **memory(plan), **times(plan), **work(plan)}


def memory(plan: ProgramPlan) -> dict[str, float]:
    """Returns the memory of a call by role, and the time that the plan itself took."""
    held = plan.memory_gib
    named = {"capacity GiB": held.capacity}
    for role, part in held.roles.items():
        named[f"{role} GiB"] = part.gib
    named["temporaries GiB"] = held.temporaries
    named["peak GiB"] = held.peak
    named["lower s"] = plan.lower_secs
    named["compile s"] = plan.compile_secs
    named["compile CPU s"] = plan.compile_cpu_secs
    return named


def times(plan: ProgramPlan) -> dict[str, float]:
    """Returns the time of a call, by resource and by category, and the expected time."""
    cost = plan.cost
    if cost is None:
        return {}

    named: dict[str, float] = {}
    for resource in ("compute", "memory", "network", "step"):
        named[f"roofline {resource} ms"] = 1e3 * getattr(cost.roofline_secs, resource)
    for category, secs in sorted(cost.roofline_secs_by_category.items()):
        named[f"{category} ms"] = 1e3 * secs.step
    if cost.overlapped_secs:
        named["overlapped ms"] = 1e3 * cost.overlapped_secs

    factor = plan.factor
    if factor is not None:
        expected = factor.expected(cost.step_secs)
        named["expected ms"] = 1e3 * expected.secs
        named["expected, at least ms"] = 1e3 * expected.least_secs
        named["expected, at most ms"] = 1e3 * expected.most_secs
    return named


def work(plan: ProgramPlan) -> dict[str, float]:
    """Returns the flops and the collectives of a call, and the size of the program."""
    cost = plan.cost
    if cost is None:
        return {}

    named: dict[str, float] = {}
    if cost.xla_optimal_secs:
        named["XLA optimal ms"] = 1e3 * cost.xla_optimal_secs
    named["Gflop a core"] = sum(cost.flops_per_core.values()) / 1e9
    named["recomputed % of flops"] = 100 * cost.recomputed_flops_share
    named["recomputed % of ms"] = 100 * cost.recomputed_time_share
    named["instructions"] = cost.instructions

    # Alphabetically, so that tables of several programs have them in one order.
    num_bytes = collections.Counter[str]()
    for collective in cost.collectives:
        num_bytes[collective.kind] += collective.bytes
    for kind, count in sorted(counts_by_kind(cost).items()):
        named[kind] = count
        named[f"{kind} MiB"] = num_bytes[kind] / 2**20
        named[f"{kind} ms"] = 1e3 * cost.network_secs_by_kind[kind]
    return named


def counts_by_kind(cost: StepCost) -> collections.Counter[str]:
    """Returns the number of collectives of each kind in a call."""
    counts = collections.Counter[str]()
    for collective in cost.collectives:
        counts[collective.kind] += collective.count
    return counts


def side_by_side(columns: Mapping[str, Mapping[str, float | None]]) -> str:
    """Returns a table of named figures, with the ratio of the last column to the first."""
    # A figure that some columns lack is placed where the first column with it has it.
    names: dict[str, None] = {}
    for column in columns.values():
        names |= dict.fromkeys(column)

    rows = [("", *columns, "ratio")]
    for name in names:
        values = [column.get(name) for column in columns.values()]
        first = values[0]
        last = values[-1]
        ratio = last / first if first and last is not None else None
        cells = [_cell(value) for value in values]
        rows.append((name, *cells, table.number(ratio, ".3f")))
    return table.text(rows)


def _cell(value: float | None) -> str:
    """Returns a figure with four digits, or all digits of a larger number."""
    spec = ".0f" if value is not None and value >= 1e4 else ".4g"
    return table.number(value, spec)
