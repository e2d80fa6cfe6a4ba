"""Table 3 and Figures 7 to 9: plans of the paper's models beside its figures; see docs/paper.md.

The plans have Table 3's rates and costs, Figure 7's memory and Figure 8's times by category; here
are also the growth of these times per token (section 5.2), and Figure 9's model of collectives.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator

from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.planning import kept_plans
from lingvo_gshard.planning.compiled.categories import Category
from lingvo_gshard.planning.estimate import hardware
from lingvo_gshard.planning.estimate.networks import Torus
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.request import Ask
from lingvo_gshard.planning.tables import table3_as_printed
from lingvo_gshard.planning.tables.table3_as_printed import PaperRun
from lingvo_gshard.spmd import topology

_GENERATION = "v3"
_FIGURE_9_CORES = tuple(2**exponent for exponent in range(4, 12))
_FIGURE_9_MIB = (8, 32)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A row of Table 3, and our plan of it."""

    run: PaperRun
    plan: Plan


@dataclasses.dataclass(frozen=True)
class TokenTimes:
    """The roofline of a training step per target token of a core, as section 5.2 measures it."""

    step_secs: float
    all_to_all_secs: float
    all_to_all_share: float  # Of the time of the layers, without optimizer and vocabulary.


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """A point of Figure 9: a collective over all cores, by the torus's model."""

    cores: int
    kind: str
    mib: int
    secs: float


def plan_family(
    ask: Ask,
    folder: pathlib.Path,
    progress: Callable[[PlannedRun], None],
) -> list[PlannedRun]:
    """Plans the family in folders of their own; calls `progress` with each model once planned."""
    family = []
    for run in table3_as_printed.FAMILY:
        request = ask(run.model, topology.tpu(_GENERATION, run.cores))
        model_folder = folder / run.model.partition(".")[2]
        planned = PlannedRun(run, kept_plans.load_or_make(request, model_folder))
        progress(planned)
        family.append(planned)
    return family


def token_times(plan: Plan) -> TokenTimes | None:
    """Returns the growth that section 5.2 measures; None if a step does not fit."""
    cost = plan.step.cost
    if cost is None:
        return None

    # The paper measured a pass through the layers without optimizer and vocabulary.
    outside_secs = 0.0
    for category in (Category.OPTIMIZER, Category.SOFTMAX):
        if category in cost.roofline_secs_by_category:
            outside_secs += cost.roofline_secs_by_category[category].step
    layers_secs = cost.roofline_secs.step - outside_secs

    # A dense model has no AllToAll.
    exchange_secs = cost.network_secs_by_kind.get("all-to-all", 0.0)
    return TokenTimes(
        step_secs=cost.roofline_secs.step / plan.tokens_per_core,
        all_to_all_secs=exchange_secs / plan.tokens_per_core,
        all_to_all_share=exchange_secs / layers_secs,
    )


def figure_9() -> Iterator[CollectiveTime]:
    """Yields Figure 9's points, by cores, then by kind."""
    for cores in _FIGURE_9_CORES:
        # Pods of so many cores are squares, or twice as long as wide.
        torus = _square_torus(cores)
        for kind, mib in itertools.product(("all-to-all", "all-reduce"), _FIGURE_9_MIB):
            collective = Collective(kind, mib * 2**20, (tuple(range(cores)),), times=1)
            yield CollectiveTime(cores, kind, mib, torus.collective_secs(collective))


def _square_torus(cores: int) -> Torus:
    """Returns the network of so many cores of TPU v3, without its library."""
    generation = hardware.GENERATIONS[_GENERATION]
    sides = topology.tpu(_GENERATION, cores).partition(":")[2].split("x")
    chips = itertools.product(*(range(int(side)) for side in sides))

    # The cores of a chip have neighbouring numbers.
    places: list[tuple[int, ...]] = []
    for chip in chips:
        places += [chip] * generation.cores_per_chip
    return Torus(generation, tuple(places))
