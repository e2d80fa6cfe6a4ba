"""The least recomputation whose training step fits a topology, in place of remat=AUTO."""

import pathlib
from collections.abc import Callable

from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import remats
from lingvo_gshard.plans import kept_plans, trials
from lingvo_gshard.plans.plan import TRAIN
from lingvo_gshard.plans.request import Request
from lingvo_gshard.plans.trials import Trial
from lingvo_gshard.runs import loss_products
from xla_plan.machines import hardware, topology
from xla_plan.machines.hardware import GIB


def resolved(
    request: Request, folder: pathlib.Path, progress: Callable[[Trial], None] = lambda trial: None
) -> Request:
    """Returns the request with a Remat in place of AUTO: BLOCK if no training step fits.

    Steps are planned in folders below `folder`, which gets the plan of the step that fits. Calls
    `progress` with each trial after its compilation. A request without a training step gets BLOCK,
    since its programs have no gradients.
    """
    if not remats.automatic(request.params):
        return request
    if TRAIN not in request.programs:
        return request.changed(remats.settings(request.params, Remat.BLOCK))

    compiled: dict[Remat, Trial] = {}

    def fits(remat: Remat) -> bool:
        settings = remats.settings(request.params, remat)
        trial = trials.compile_trial(request, settings, folder, f"remat={remat.name}")
        progress(trial)
        compiled[remat] = trial
        return trial.fits

    # A mistake would look as if no trial fitted. The compiler knows the possible sizes.
    request.check_sizes()
    topology.devices(request.topology)
    capacity_bytes = hardware.generation(request.topology).capacity_gib * GIB
    remat = remats.least(
        request.params, loss_products.of_experiment, request.partitioning, capacity_bytes, fits
    )
    trial = compiled[remat or Remat.BLOCK]
    if trial.plan is not None:
        kept_plans.adopt(trial.request, trial.folder, folder)
    return trial.request
