"""Plans side by side: two partitionings of one model, two group sizes, loop against unrolled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lingvo_gshard.planning.plan import Plan

_MEMORY = ("replicated_weights", "expert_weights", "optimizer_slots", "temporaries", "peak")
_TIMES = ("compute", "memory", "network", "step")


def table(plans: Sequence[Plan]) -> str:
    """A row a figure, a column a plan, and the last plan's over the first's.

    A plan that does not fit has no times.
    """
    lines = ["".join(f"{cell:>24}" for cell in ("", *(_title(plan) for plan in plans), "ratio"))]
    for i, plan in enumerate(plans):
        lines.append(f"  {i + 1}: {plan.model} on {plan.topology}, {_how(plan)}")
    rows = [_figures(plan) for plan in plans]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        cells = ["-" if value is None else f"{value:.4g}" for value in values]
        first, last = values[0], values[-1]
        ratio = f"{last / first:.3f}" if first and last is not None else "-"
        lines.append(f"{name:>24}" + "".join(f"{cell:>24}" for cell in (*cells, ratio)))
    return "\n".join(lines)


def _title(plan: Plan) -> str:
    return plan.model[-22:]


def _how(plan: Plan) -> str:
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
    table = ", ".join(f"{letter}:{axis}" for letter, axis in plan.sharding.items())
    return "; ".join([f"mesh {mesh}", f"table {table}", *plan.settings])


def _figures(plan: Plan) -> dict[str, float]:
    return dict(_pairs(plan))


def _pairs(plan: Plan) -> Iterator[tuple[str, float]]:
    yield "fits", float(plan.fits)
    for part in _MEMORY:
        yield f"{part} GiB", getattr(plan.memory_gib, part)
    yield "lower s", plan.lower_secs
    yield "compile s", plan.compile_secs
    yield "compile CPU s", plan.compile_cpu_secs
    if plan.cost is None:
        return
    for part in _TIMES:
        yield f"roofline {part} ms", 1e3 * getattr(plan.cost.roofline_secs, part)
    for name, times in sorted(plan.cost.roofline_secs_by_category.items()):
        yield f"{name} ms", 1e3 * times.step
    yield "XLA optimal ms", 1e3 * plan.cost.xla_optimal_secs
    yield "Gflop a core", sum(plan.cost.flops_per_core.values()) / 1e9
    yield "instructions", float(plan.cost.instructions)
    for kind in sorted({each.kind for each in plan.cost.collectives}):
        of_kind = [each for each in plan.cost.collectives if each.kind == kind]
        yield f"{kind}", float(sum(each.count for each in of_kind))
        yield f"{kind} MiB", sum(each.bytes for each in of_kind) / 2**20
