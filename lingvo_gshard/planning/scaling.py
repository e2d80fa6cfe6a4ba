"""Table 3 and Figures 7 to 9: the paper's family planned on its own cores, beside its values."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.planning import hardware, paper, plan_report
from lingvo_gshard.planning.hardware import Torus
from lingvo_gshard.planning.paper import PaperRun
from lingvo_gshard.planning.plan import Cost, Plan
from lingvo_gshard.spmd import topology

_FIGURE_9_PARTITIONS = (16, 32, 64, 128, 256, 512, 1024, 2048)

_DIFFERENCES = (
    "steps/s: ours are a bound: every instruction at its peak rate, nothing waits. Blocks are "
    "computed again in the backward pass; where memory allows it all but their large products and "
    "their AllToAlls. The paper's compiler computed again from 36 layers on, for 28 % of the "
    "cycles (section 5.1).",
    "batches: taken for target tokens, and as many source tokens beside them. Where the paper's "
    "steps/s exceed ours, it must have computed on fewer: those of both sides together, or less. "
    "Its steps/s and batches of Table 3 are not those of the growth in section 5.2 either.",
    "AllToAll: the compiler exchanges bfloat16, which the products that follow take, and half the "
    "bytes of the paper's float32; its share is of a bound of the whole step, the paper's of the "
    "measured forward pass.",
    "memory: the paper prints Figure 7 as a picture alone. Slots stand apart here, and temporaries "
    "hold the gradients of all layers of a stack at once.",
    "weights: the paper's are rounded; gates, embeddings and the softmax count here.",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the family as the paper ran it and as it is planned."""

    run: PaperRun
    plan: Plan


def text(rows: Sequence[Row]) -> str:
    """All tables, and what differs from the paper and why."""
    tables = [_table_3(rows), _figure_7(rows), _figure_8(rows), _growth(rows), _compiling(rows)]
    sections = [*tables, _figure_9(), ["Why they differ", *(f"  {why}" for why in _DIFFERENCES)]]
    return "\n\n".join("\n".join(section) for section in sections)


def draw(rows: Sequence[Row], folder: pathlib.Path) -> None:
    """Writes Figures 7 and 8 of the whole family into `folder`."""
    memories = {row.run.name: row.plan.memory_gib for row in rows}
    plan_report.draw_memory(memories, folder / "figure_7.png")
    costs = {row.run.name: row.plan.cost for row in rows if row.plan.cost}
    plan_report.draw_times(costs, folder / "figure_8.png")


def _table_3(rows: Iterable[Row]) -> Iterator[str]:
    line = "{:<16} {:>6} {:>9} {:>9} {:>9} {:>9} {:>11} {:>10} {:>9} {:>9}".format
    yield "Table 3: the paper's measured steps/s, and ours were every core always at its roofline"
    yield line(
        *("model", "cores", "weights B", "paper's", "step ms", "steps/s", "paper's", "share"),
        *("core-yrs", "paper's"),
    )
    for row in rows:
        run, plan = row.run, row.plan
        weights = (f"{plan.weights / 1e9:.2f}", f"{run.weights / 1e9:g}")
        if plan.cost is None:
            yield line(run.name, run.cores, *weights, *["does not fit"], *[""] * 5)
            continue
        steps, step_ms = plan.steps_per_sec(), 1e3 * plan.cost.roofline_secs.step
        measured = (
            [f"{run.steps_per_sec:.2f}", f"{run.steps_per_sec / steps:.0%}"]
            if run.steps_per_sec
            else ["-", "-"]
        )
        years = f"{plan.core_years():.1f}", f"{run.core_years:.1f}" if run.core_years else "-"
        yield line(
            run.name, run.cores, *weights, f"{step_ms:.0f}", f"{steps:.2f}", *measured, *years
        )
    yield (
        "  share: the paper's steps/s over ours at the roofline; it reports "
        + ", ".join(f"{share:.0%} at {d}" for d, share in paper.ROOFLINE_SHARE.items())
        + " experts, of a roofline that has no optimizer and only one layer pair."
    )


def _figure_7(rows: Iterable[Row]) -> Iterator[str]:
    line = "{:<16} {:>10} {:>10} {:>10} {:>12} {:>8} {:>9}".format
    yield "Figure 7: GiB of a core"
    yield line("model", "replicated", "experts", "slots", "temporaries", "peak", "capacity")
    for row in rows:
        values = dataclasses.asdict(row.plan.memory_gib)
        order = ("replicated_weights", "expert_weights", "optimizer_slots", "temporaries")
        cells = (values[name] for name in (*order, "peak", "capacity"))
        yield line(row.run.name, *(f"{cell:.2f}" for cell in cells))


def _figure_8(rows: Sequence[Row]) -> Iterator[str]:
    yield "Figure 8: ms of a step at the roofline, by category (the paper shows the forward pass)"
    costs = {row.run.name: row.plan.cost for row in rows if row.plan.cost}
    names = sorted({name for cost in costs.values() for name in cost.roofline_secs_by_category})
    line = ("{:<16}" + " {:>9}" * (len(names) + 1)).format
    yield line("model", *(name[:9] for name in names), "AllToAll")
    for model, cost in costs.items():
        times = [cost.roofline_secs_by_category.get(name) for name in names]
        cells = [f"{1e3 * each.step:.1f}" if each else "-" for each in times]
        yield line(model, *cells, f"{1e3 * _all_to_all_secs(cost):.1f}")


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    """From 128 to 2048 cores, for each number of layers."""
    yield "From 128 to 2048 cores, the same layers (tokens a core as the paper's batches give them)"
    by_layers: dict[int, dict[int, Row]] = {}
    for row in rows:
        by_layers.setdefault(row.run.layers, {})[row.run.cores] = row
    for layers, by_cores in sorted(by_layers.items()):
        if not {128, 2048} <= by_cores.keys():
            continue
        small, large = by_cores[128].plan, by_cores[2048].plan
        weights = [
            each.memory_gib.replicated_weights + each.memory_gib.expert_weights
            for each in (small, large)
        ]
        yield f"  {layers} layers: weights' GiB x{weights[1] / weights[0]:.3f}, " + (
            f"CPU seconds to compile x{large.compile_cpu_secs / small.compile_cpu_secs:.2f}"
        )
        if small.cost and large.cost:
            runs = by_cores[128].run, by_cores[2048].run
            yield from _cost_growth(small, small.cost, large, large.cost, _measured_growth(*runs))


def _measured_growth(small: PaperRun, large: PaperRun) -> str:
    """How much longer a token's step takes on more cores by Table 3, in words."""
    before, after = _core_rate(small), _core_rate(large)
    return f", by its Table 3 x{before / after:.2f}" if before and after else ""


def _core_rate(run: PaperRun) -> float | None:
    """Tokens a second of a core, measured."""
    return run.steps_per_sec and run.steps_per_sec * run.batch_tokens / run.cores


def _cost_growth(
    small: Plan, at_128: Cost, large: Plan, at_2048: Cost, measured: str
) -> Iterator[str]:
    fewer = small.tokens_per_core / large.tokens_per_core
    step = at_2048.roofline_secs.step / at_128.roofline_secs.step * fewer
    exchange = _all_to_all_secs(at_2048) / _all_to_all_secs(at_128) * fewer
    shares = [
        _all_to_all_secs(cost) / (cost.roofline_secs.step - _of_no_layer(cost))
        for cost in (at_128, at_2048)
    ]
    yield (
        f"    a token's step x{step:.2f} (paper {paper.STEP_GROWTH}{measured}), its AllToAll "
        f"x{exchange:.2f} (paper {paper.ALL_TO_ALL_GROWTH}); AllToAll's share of the layers "
        f"{shares[0]:.0%} and {shares[1]:.0%} (paper {paper.ALL_TO_ALL_SHARE[128]:.0%} and "
        f"{paper.ALL_TO_ALL_SHARE[2048]:.0%}); instructions "
        f"x{at_2048.instructions / at_128.instructions:.2f}"
    )


def _compiling(rows: Sequence[Row]) -> Iterator[str]:
    line = "{:<16} {:>9} {:>10} {:>7} {:>13} {:>9} {:>9}".format
    yield "Compiling, in this machine's seconds, and XLA's own roofline of what it made"
    yield line("model", "lower s", "compile s", "CPU s", "instructions", "host GiB", "XLA's ms")
    for row in rows:
        plan, cost = row.plan, row.plan.cost
        made = [str(cost.instructions), f"{1e3 * cost.xla_optimal_secs:.0f}"] if cost else ["-"] * 2
        secs = (plan.lower_secs, plan.compile_secs, plan.compile_cpu_secs)
        cells = (*(f"{each:.1f}" for each in secs), made[0], f"{plan.host_peak_gib:.1f}", made[1])
        yield line(row.run.name, *cells)
    yield from _more_layers({r.run.layers: r.plan for r in rows if r.run.cores == 2048})
    found = [f"  suspicious in {r.run.name}: {each}" for r in rows for each in r.plan.suspicious]
    yield from found or ["  none that fits gathers weights, experts or tokens."]


def _more_layers(by_layers: dict[int, Plan]) -> Iterator[str]:
    """What more layers take to compile, by plans of 2048 cores."""
    fitting = {layers: plan for layers, plan in sorted(by_layers.items()) if plan.fits}
    for layers, plan in list(fitting.items())[1:]:
        least = min(fitting)
        ratio = plan.compile_cpu_secs / fitting[least].compile_cpu_secs
        yield (
            f"  {layers} layers against {least} on 2048 cores: CPU seconds to compile x{ratio:.2f}"
        )


def _figure_9() -> Iterator[str]:
    yield "Figure 9: ms of the collectives' model on TPU v3 (section 5.3)"
    line = "{:<22}".format
    yield line("partitions") + "".join(f"{d:>9}" for d in _FIGURE_9_PARTITIONS)
    for kind in ("all-to-all", "all-reduce"):
        for size in paper.FIGURE_9_BYTES:
            times = [_collective_secs(kind, size, d) for d in _FIGURE_9_PARTITIONS]
            name = f"{kind} {size >> 20} MiB"
            cells = "".join(f"{1e3 * secs:>9.3f}" for secs in times)
            yield f"{line(name)}{cells}  x{times[-1] / times[0]:.1f}"
    yield (
        f"  paper: AllToAll x{paper.FIGURE_9_ALL_TO_ALL_GROWTH:g} from 16 to 2048 partitions, "
        "AllReduce about constant. Ours has no latency."
    )


def _collective_secs(kind: str, size: int, partitions: int) -> float:
    generation = hardware.GENERATIONS["v3"]
    sizes = tuple(map(int, topology.v3(partitions).partition(":")[2].split("x")))
    chips = [(x, y) for y in range(sizes[1]) for x in range(sizes[0])]
    places = tuple(chip for chip in chips for _ in range(generation.cores_per_chip))
    whole = Collective(kind, size, (tuple(range(partitions)),), times=1)
    return Torus(generation, sizes, places).collective_secs(whole)


def _all_to_all_secs(cost: Cost) -> float:
    return cost.network_secs_by_kind.get("all-to-all", 0.0)


def _of_no_layer(cost: Cost) -> float:
    """The optimizer's and the vocabulary's time."""
    names = ("optimizer", "softmax")
    times = (cost.roofline_secs_by_category.get(name) for name in names)
    return sum(each.step for each in times if each)
