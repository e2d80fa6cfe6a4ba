"""One model on several machines side by side: whether it fits, its speed and its cost."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

from lingvo_gshard.plans import kept_plans, least_remat
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Request


@dataclasses.dataclass(frozen=True)
class Machine:
    """A topology and the plan for it; None if its compiler is not installed."""

    topology: str
    plan: Plan | None


def plan_machines(
    requests: Mapping[str, Request | None],
    folder: pathlib.Path,
    progress: Callable[[Machine], None],
) -> list[Machine]:
    """Plans one model for several machines; calls `progress` with each plan.

    `requests` has the request for each topology, or None if its compiler is not installed. Each
    plan has its own folder in `folder`.
    """
    machines = []
    for name, request in requests.items():
        plan = None
        if request is not None:
            machine_folder = folder / name.replace(":", "_")
            resolved = least_remat.resolved(request, machine_folder)
            plan = kept_plans.load_or_make(resolved, machine_folder)

        machine = Machine(name, plan)
        progress(machine)
        machines.append(machine)
    return machines
