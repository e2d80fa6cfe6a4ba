"""One model on several machines side by side: whether it fits, its speed and its cost."""

import dataclasses
import pathlib
from collections.abc import Callable

from lingvo_gshard.plans import kept_plans, least_remat
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Ask
from xla_plan.machines import topology

# The most devices of a pod.
_TPUS = {"v3": 2048, "v4": 8192, "v5e": 256, "v5p": 8192, "v6e": 256, "tpu7x": 16384}
_GPUS_PER_HOST = {"a100": 8, "h100": 8, "h200": 8, "b200": 8, "gb200": 64}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A topology and the plan for it; None if its compiler is not installed."""

    topology: str
    plan: Plan | None


def plan_machines(
    ask: Ask,
    model: str,
    num_devices: int,
    folder: pathlib.Path,
    progress: Callable[[Machine], None],
) -> list[Machine]:
    """Plans the model for machines of `num_devices` devices; calls `progress` with each plan.

    Each plan has its own folder in `folder`.
    """
    machines = []
    for name in topologies(num_devices):
        # Several compilers are optional packages.
        plan = None
        if topology.is_installed(name):
            machine_folder = folder / name.replace(":", "_")
            request = least_remat.resolved(ask(model, name), machine_folder)
            plan = kept_plans.load_or_make(request, machine_folder)

        machine = Machine(name, plan)
        progress(machine)
        machines.append(machine)
    return machines


def topologies(num_devices: int) -> list[str]:
    """Returns the machines with `num_devices` devices, a power of two of at least 8.

    TPUs are as near to cubes as possible.
    """
    names = []
    for kind, most_devices in _TPUS.items():
        if num_devices <= most_devices:
            names.append(topology.tpu(kind, num_devices))

    # A host is filled before the next one is used.
    for kind, gpus_per_host in _GPUS_PER_HOST.items():
        gpus = min(gpus_per_host, num_devices)
        names.append(f"{kind}:{num_devices // gpus}x{gpus}")
    return names
