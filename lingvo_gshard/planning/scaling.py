"""Table 3 and Figures 7 to 9: plans of the paper's models on its own cores, beside its figures."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core import table
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.planning import hardware, paper, planner, report
from lingvo_gshard.planning.hardware import Torus
from lingvo_gshard.planning.paper import PaperRun
from lingvo_gshard.planning.plan import Plan, StepCost
from lingvo_gshard.spmd import topology

_FIGURE_9_PARTITIONS = (16, 32, 64, 128, 256, 512, 1024, 2048)

_DIFFERENCES = """Why they differ
  steps/s: ours are a bound, with every instruction at its peak rate and no waiting. Our backward
    pass computes blocks again; where memory allows it, all but their large products and their
    AllToAlls. The paper's compiler did so from 36 layers on, for 28 % of the cycles (section 5.1).
  batches: taken as target tokens, with as many source tokens beside them. Where the paper's
    steps/s exceed ours, its batches must have been smaller: at most both sides together. Its
    steps/s and batches of Table 3 do not give the growth of section 5.2 either.
  AllToAll: the compiler exchanges bfloat16, which the products that follow take, and so half the
    bytes of the paper's float32. Our share is of a bound of the whole step, the paper's of the
    measured forward pass.
  memory: the paper prints Figure 7 only as a picture. Slots are separate here, and temporaries
    hold the gradients of all layers of a stack at once.
  weights: the paper's are rounded; ours include gates, embeddings and the softmax."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the family as the paper ran it and as it is planned."""

    run: PaperRun
    plan: Plan


def lines(settings: Sequence[str], batch_tokens: int | None, folder: pathlib.Path) -> Iterator[str]:
    """Plans the family, each model in a folder of its own; yields progress, then all tables.

    Args:
      settings, batch_tokens: changes to every model, as for planner.request.
      folder: where the plans and the pictures go.
    """
    rows = []
    for run in paper.FAMILY:
        request = planner.request(run.model, topology.v3(run.cores), settings, batch_tokens)
        made = planner.planned(request, folder / run.model.partition(".")[2])
        yield f"{run.name}: {'fits' if made.fits else 'does not fit'}"
        rows.append(Row(run, made))
    yield text(rows)
    draw(rows, folder)


def text(rows: Sequence[Row]) -> str:
    """Returns all tables, and how they differ from the paper and why."""
    growth, compiling = "\n".join(_growth(rows)), "\n".join(_compiling(rows))
    figures = (_figure_7(rows), _figure_8(rows), growth, compiling, _figure_9())
    return "\n\n".join((_table_3(rows), *figures, _DIFFERENCES))


def draw(rows: Sequence[Row], folder: pathlib.Path) -> None:
    """Writes Figures 7 and 8 of the whole family into `folder`."""
    memories = {row.run.name: row.plan.memory_gib for row in rows}
    report.draw_memory(memories, folder / "figure_7.png")
    report.draw_times(_costs(rows), folder / "figure_8.png")


def _table_3(rows: Iterable[Row]) -> str:
    head = ("model", "cores", "weights B", "paper's", "step ms", "steps/s", "paper's", "share")
    cells = [(*head, "core-yrs", "paper's"), *map(_table_3_row, rows)]
    shares = ", ".join(f"{share:.0%} at {d}" for d, share in paper.ROOFLINE_SHARE.items())
    return (
        "Table 3: the paper's measured steps/s, and ours if every core were at its roofline\n"
        f"{table.text(cells)}\n"
        f"  share: the paper's steps/s over ours at the roofline; it reports {shares} experts, "
        "for a roofline without the optimizer and of only one pair of layers."
    )


def _table_3_row(row: Row) -> Sequence[object]:
    run, plan = row.run, row.plan
    cells = (run.name, run.cores, f"{plan.weights / 1e9:.2f}", f"{run.weights / 1e9:g}")
    if plan.cost is None:
        return *cells, "does not fit", *[""] * 5
    ours, theirs = plan.steps_per_sec(), run.steps_per_sec
    rates = (f"{1e3 * plan.cost.roofline_secs.step:.0f}", f"{ours:.2f}", table.number(theirs))
    share = table.number(theirs and theirs / ours, ".0%")
    return *cells, *rates, share, f"{plan.core_years():.1f}", table.number(run.core_years, ".1f")


def _figure_7(rows: Iterable[Row]) -> str:
    parts = (*report.MEMORY_PARTS, "peak", "capacity")
    cells = [["model", "replicated", "experts", "slots", "temporaries", "peak", "capacity"]]
    for row in rows:
        gib = (f"{getattr(row.plan.memory_gib, part):.2f}" for part in parts)
        cells.append([row.run.name, *gib])
    return "Figure 7: GiB of a core\n" + table.text(cells)


def _figure_8(rows: Sequence[Row]) -> str:
    costs = _costs(rows)
    names = sorted({name for cost in costs.values() for name in cost.roofline_secs_by_category})
    cells = [("model", *names, "AllToAll")]
    for model, cost in costs.items():
        ms = {name: 1e3 * each.step for name, each in cost.roofline_secs_by_category.items()}
        exchange = f"{1e3 * _all_to_all_secs(cost):.1f}"
        cells.append((model, *(table.number(ms.get(name), ".1f") for name in names), exchange))
    title = "Figure 8: ms of a step at the roofline, by category (the paper shows the forward pass)"
    return f"{title}\n{table.text(cells)}"


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the growth from 128 to 2048 cores for each number of layers."""
    yield "From 128 to 2048 cores, the same layers (tokens a core as the paper's batches give them)"
    found = {(row.run.layers, row.run.cores): row for row in rows}
    for layers in sorted({row.run.layers for row in rows}):
        small, large = found.get((layers, 128)), found.get((layers, 2048))
        if small is None or large is None:
            continue
        memories = [row.plan.memory_gib for row in (small, large)]
        before, after = (each.replicated_weights + each.expert_weights for each in memories)
        cpu_secs = large.plan.compile_cpu_secs / small.plan.compile_cpu_secs
        yield (
            f"  {layers} layers: weights' GiB x{after / before:.3f}, "
            f"CPU seconds to compile x{cpu_secs:.2f}"
        )
        if small.plan.cost and large.plan.cost:
            yield "    " + _cost_growth(small, small.plan.cost, large, large.plan.cost)


def _cost_growth(small: Row, at_128: StepCost, large: Row, at_2048: StepCost) -> str:
    fewer = small.plan.tokens_per_core / large.plan.tokens_per_core
    step = at_2048.roofline_secs.step / at_128.roofline_secs.step * fewer
    exchange = _all_to_all_secs(at_2048) / _all_to_all_secs(at_128) * fewer
    before, after = _measured_rate(small.run), _measured_rate(large.run)
    measured = f", by its Table 3 x{before / after:.2f}" if before and after else ""
    shares = [_all_to_all_secs(cost) / _layers_secs(cost) for cost in (at_128, at_2048)]
    return (
        f"a token's step x{step:.2f} (paper {paper.STEP_GROWTH}{measured}), its AllToAll "
        f"x{exchange:.2f} (paper {paper.ALL_TO_ALL_GROWTH}); AllToAll's share of the layers "
        f"{shares[0]:.0%} and {shares[1]:.0%} (paper {paper.ALL_TO_ALL_SHARE[128]:.0%} and "
        f"{paper.ALL_TO_ALL_SHARE[2048]:.0%}); instructions "
        f"x{at_2048.instructions / at_128.instructions:.2f}"
    )


def _compiling(rows: Sequence[Row]) -> Iterator[str]:
    yield "Compiling, in this machine's seconds, and XLA's own roofline of what it made"
    head = ("model", "lower s", "compile s", "CPU s", "instructions", "host GiB", "XLA's ms")
    cells: list[Sequence[str]] = [head]
    for row in rows:
        plan, cost = row.plan, row.plan.cost
        secs = (plan.lower_secs, plan.compile_secs, plan.compile_cpu_secs)
        instructions = str(cost.instructions) if cost else "-"
        xla_ms = f"{1e3 * cost.xla_optimal_secs:.0f}" if cost else "-"
        figures = (*(f"{each:.1f}" for each in secs), instructions, f"{plan.host_peak_gib:.1f}")
        cells.append((row.run.name, *figures, xla_ms))
    yield table.text(cells)
    fitting = {r.run.layers: r.plan for r in rows if r.run.cores == 2048 and r.plan.fits}
    least = min(fitting, default=0)
    for layers in sorted(fitting.keys() - {least}):
        ratio = fitting[layers].compile_cpu_secs / fitting[least].compile_cpu_secs
        yield (
            f"  {layers} layers against {least} on 2048 cores: CPU seconds to compile x{ratio:.2f}"
        )
    found = [f"  suspicious in {r.run.name}: {each}" for r in rows for each in r.plan.suspicious]
    yield from found or ["  none that fits gathers weights, experts or tokens."]


def _figure_9() -> str:
    cells: list[Sequence[object]] = [("partitions", *_FIGURE_9_PARTITIONS, "growth")]
    for kind in ("all-to-all", "all-reduce"):
        for size in paper.FIGURE_9_BYTES:
            secs = [_collective_secs(kind, size, d) for d in _FIGURE_9_PARTITIONS]
            ms = (f"{1e3 * each:.3f}" for each in secs)
            cells.append((f"{kind} {size >> 20} MiB", *ms, f"x{secs[-1] / secs[0]:.1f}"))
    return (
        "Figure 9: ms of the collectives' model on TPU v3 (section 5.3)\n"
        f"{table.text(cells)}\n"
        f"  paper: AllToAll x{paper.FIGURE_9_ALL_TO_ALL_GROWTH:g} from 16 to 2048 partitions, "
        "AllReduce about constant. Ours has no latency."
    )


def _collective_secs(kind: str, size: int, partitions: int) -> float:
    generation = hardware.GENERATIONS["v3"]
    sizes = tuple(map(int, topology.v3(partitions).partition(":")[2].split("x")))
    places = [chip for chip in np.ndindex(sizes) for _ in range(generation.cores_per_chip)]
    whole = Collective(kind, size, (tuple(range(partitions)),), times=1)
    return Torus(generation, sizes, tuple(places)).collective_secs(whole)


def _costs(rows: Iterable[Row]) -> dict[str, StepCost]:
    return {row.run.name: row.plan.cost for row in rows if row.plan.cost}


def _all_to_all_secs(cost: StepCost) -> float:
    return cost.network_secs_by_kind.get("all-to-all", 0.0)


def _layers_secs(cost: StepCost) -> float:
    """Returns the time of a step without the optimizer and the vocabulary."""
    times = (cost.roofline_secs_by_category.get(name) for name in ("optimizer", "softmax"))
    return cost.roofline_secs.step - sum(each.step for each in times if each)


def _measured_rate(run: PaperRun) -> float | None:
    """Returns the tokens per second of a core that the paper measured."""
    return run.steps_per_sec and run.steps_per_sec * run.batch_tokens / run.cores
