"""Table 3 and Figures 7 to 9: plans of the paper's models beside its figures; see docs/paper.md."""

import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping

from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.planning import hardware, paper, planner, report
from lingvo_gshard.planning.hardware import Torus
from lingvo_gshard.planning.paper import PaperRun
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.spmd import topology


def lines(ask: Callable[[str, str], Request], folder: pathlib.Path) -> Iterator[str]:
    """Plans the family, as `ask` requests a model and a topology; yields progress, then tables."""
    plans = {}
    for run in paper.FAMILY:
        request = ask(run.model, topology.tpu("v3", run.cores))
        plans[run] = planner.planned(request, folder / run.model.partition(".")[2])
        yield f"{run.name}: {plans[run].verdict}"
    yield text(plans)
    by_name = {run.name: plan for run, plan in plans.items()}
    report.draw(by_name, folder, ("figure_7.png", "figure_8.png"))


def text(plans: Mapping[PaperRun, Plan]) -> str:
    """Tables of the models of each depth by cores, of Figure 9, and the paper's own growth."""
    parts = [
        "Table 3, Figures 7 and 8: plans if every core were at its roofline, and the paper's own\n"
        "figures. From 128 to 2048 cores, the paper measured for a forward pass of the layers\n"
        "(section 5.2): step x1.7, AllToAll x3.75, its share 16% to 36%, share of the roofline "
        "70% to 48%."
    ]
    for layers, runs in itertools.groupby(plans, key=lambda run: run.layers):
        columns = {run.name: _figures(run, plans[run]) for run in runs}
        parts.append(f"{layers} layers\n{report.side_by_side(columns)}")
    found = [
        f"suspicious in {name} of {run.name}: {each}"
        for run, plan in plans.items()
        for name, program in plan.programs.items()
        for each in program.suspicious
    ]
    found = found or ["None that fits gathers weights, experts or tokens."]
    found += [f"{run.name}: {each}" for run, plan in plans.items() for each in report.caveats(plan)]
    return "\n\n".join([*parts, "\n".join(found), _figure_9()])


def _figures(run: PaperRun, plan: Plan) -> dict[str, float | None]:
    """The plan's figures, also for a token of a core, and the paper's."""
    found: dict[str, float | None] = {**report.figures(plan)}
    if cost := plan.step.cost:
        exchange_secs = cost.network_secs_by_kind.get("all-to-all", 0.0)
        times = (cost.roofline_secs_by_category.get(name) for name in ("optimizer", "softmax"))
        layers_secs = cost.roofline_secs.step - sum(each.step for each in times if each)
        found |= {
            "us a token of a core": 1e6 * cost.roofline_secs.step / plan.tokens_per_core,
            "AllToAll us a token of a core": 1e6 * exchange_secs / plan.tokens_per_core,
            "AllToAll % of the layers": 100 * exchange_secs / layers_secs,
        }
        if run.steps_per_sec:
            found["paper's % of our steps/s"] = 100 * run.steps_per_sec / plan.steps_per_sec()
    if run.steps_per_sec:
        secs = run.cores / run.steps_per_sec / run.batch_tokens
        found["paper's us a token of a core"] = 1e6 * secs
    return found | {
        "paper's weights B": run.weights / 1e9,
        "paper's steps/s": run.steps_per_sec,
        "paper's core-years": run.core_years,
    }


def _figure_9() -> str:
    columns, generation = dict[str, dict[str, float]](), hardware.GENERATIONS["v3"]
    for cores in (2**exponent for exponent in range(4, 12)):
        sides = map(int, topology.tpu("v3", cores).partition(":")[2].split("x"))
        chips = itertools.product(*map(range, sides))
        torus = Torus(generation, tuple(c for c in chips for _ in range(generation.cores_per_chip)))
        column = columns[str(cores)] = {}
        for kind, mib in itertools.product(("all-to-all", "all-reduce"), (8, 32)):
            collective = Collective(kind, mib * 2**20, (tuple(range(cores)),), times=1)
            column[f"{kind} {mib} MiB"] = 1e3 * torus.collective_secs(collective)
    return (
        "Figure 9: ms of the collectives' model on TPU v3 by partitions (section 5.3). The paper "
        "has\nAllToAll x9 and AllReduce about constant; ours has no latency.\n"
        f"{report.side_by_side(columns)}"
    )
