"""Searches for the mesh and the table with which an experiment trains fastest on a topology.

The paper left the automatic choice of a partitioning to future work (section 3.2). Here candidates
are generated and ranked by a cost model; XLA's own compiler judges the best few.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from lingvo_gshard.planning.estimate.candidates import Candidate
from lingvo_gshard.planning.plan import Times
from lingvo_gshard.planning.request import Request
from lingvo_gshard.planning.tables import trials
from lingvo_gshard.planning.tables.trials import Trial

_COMPILED = 6  # How many candidates are compiled.


@dataclasses.dataclass(frozen=True)
class Gain:
    """Why a step is faster than another one."""

    times_as_fast: float
    resource: str  # Where most of the time is saved.
    saved_secs: float  # In that resource.


def compile_best(
    candidates: Sequence[Candidate],
    request: Request,
    folder: pathlib.Path,
    progress: Callable[[Trial], None],
) -> list[Trial]:
    """Compiles the first candidates; returns their trials, the fastest first.

    Of each mesh and table only one schedule that fits is compiled. Calls `progress` with each trial
    once it is compiled.
    """
    # The candidates come with the fastest by the cost model first.
    compiled: list[Trial] = []
    fitting_layouts: set[tuple[str, ...]] = set()
    for candidate in candidates:
        if len(compiled) == _COMPILED:
            break

        layout = candidate.settings[:2]  # Mesh and table.
        if layout in fitting_layouts:
            continue

        # Another remat or number of microbatches is tried only where the best one does not fit.
        trial = trials.compile_trial(request, candidate.settings, folder)
        trial = dataclasses.replace(trial, estimated_secs=candidate.secs)
        progress(trial)
        compiled.append(trial)
        if trial.fits:
            fitting_layouts.add(layout)
    return sorted(compiled, key=lambda trial: trial.secs.step)


def gain(best: Times, second: Times) -> Gain:
    """Returns what the best step gains over the second."""
    # A resource where the best step takes longer has a negative gain.
    saved_secs = {
        "memory": second.memory - best.memory,
        "network": second.network - best.network,
        "compute": second.compute - best.compute,
    }
    most = max(saved_secs, key=saved_secs.__getitem__)
    return Gain(second.step / best.step, most, saved_secs[most])
