"""Searches for the mesh and the table with which an experiment trains fastest on a topology.

The paper left the automatic choice of a partitioning to future work (section 3.2). Here candidates
are generated and ranked by a cost model; XLA's own compiler judges the best few.
"""

import pathlib
from collections.abc import Iterator, Sequence

from lingvo_gshard.plans import trials
from lingvo_gshard.plans.candidates import Candidate
from lingvo_gshard.plans.request import Request
from lingvo_gshard.plans.trials import Trial

_COMPILED = 6  # How many candidates are compiled.


def compiled(
    candidates: Sequence[Candidate], request: Request, folder: pathlib.Path
) -> Iterator[Trial]:
    """Compiles the first candidates; yields each trial after its compilation.

    For each mesh and table, compilation stops at the first schedule that fits.
    """
    # The candidates are sorted by the cost model, the fastest first.
    num_compiled = 0
    fitting_layouts: set[tuple[str, ...]] = set()
    for candidate in candidates:
        if num_compiled == _COMPILED:
            return

        layout = candidate.settings[:2]  # Mesh and table.
        if layout in fitting_layouts:
            continue

        # Another remat or number of microbatches is tried only if the best one does not fit.
        trial = trials.compile_trial(
            request, candidate.settings, folder, estimated_secs=candidate.secs
        )
        num_compiled += 1
        if trial.fits:
            fitting_layouts.add(layout)
        yield trial
