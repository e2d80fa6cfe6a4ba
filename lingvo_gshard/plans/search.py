"""Searches for the mesh and the table with which an experiment trains fastest on a topology.

The paper left the automatic choice of a partitioning to future work (section 3.2). Here candidates
are generated and ranked by a cost model; XLA's own compiler judges the best few.
"""

import pathlib
from collections.abc import Callable, Sequence

from lingvo_gshard.plans import trials
from lingvo_gshard.plans.candidates import Candidate
from lingvo_gshard.plans.request import Request
from lingvo_gshard.plans.trials import Trial

_COMPILED = 6  # How many candidates are compiled.


def compile_best(
    candidates: Sequence[Candidate],
    request: Request,
    folder: pathlib.Path,
    progress: Callable[[Trial], None],
) -> list[Trial]:
    """Compiles the first candidates; returns their trials, the fastest first.

    For each mesh and table, compilation stops at the first schedule that fits. Calls `progress`
    with each trial after its compilation.
    """
    # The candidates are sorted by the cost model, the fastest first.
    compiled: list[Trial] = []
    fitting_layouts: set[tuple[str, ...]] = set()
    for candidate in candidates:
        if len(compiled) == _COMPILED:
            break

        layout = candidate.settings[:2]  # Mesh and table.
        if layout in fitting_layouts:
            continue

        # Another remat or number of microbatches is tried only if the best one does not fit.
        trial = trials.compile_trial(
            request, candidate.settings, folder, estimated_secs=candidate.secs
        )
        progress(trial)
        compiled.append(trial)
        if trial.fits:
            fitting_layouts.add(layout)
    return sorted(compiled, key=lambda trial: trial.secs.step)
