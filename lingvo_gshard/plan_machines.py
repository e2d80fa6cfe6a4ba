"""Plans an experiment's training step on several machines, side by side.

gshard plan machines --model=m4.MoE128E12L --out=MACHINES
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from absl import flags

from lingvo_gshard import cli, plan_flags
from xla_plan.machines import topology_names
from xla_spmd.runtime import environment

if TYPE_CHECKING:
    from lingvo_gshard.plans.request import Request

_NUM_DEVICES = flags.DEFINE_integer(
    "num_devices", 128, "The devices of each machine, a power of two.", 8
)
flags.adopt_module_key_flags(plan_flags)


def main() -> None:
    """Prints whether the step fits on each machine once it is planned, then the table."""
    model = plan_flags.check()
    if _NUM_DEVICES.value.bit_count() != 1:
        raise ValueError(f"--num_devices={_NUM_DEVICES.value}: expected a power of two.")
    names = plan_flags.PROGRAMS.value
    if names and not {"train", "all"} & set(names):
        raise ValueError("machines are compared by training steps; expected train in --programs.")

    # Several compilers are optional packages.
    requests: dict[str, Request | None] = {}
    for topology in topology_names.compared(_NUM_DEVICES.value):
        requests[topology] = None
        if topology_names.is_installed(topology):
            request = plan_flags.request(model, topology, default="train")
            request.check_sizes()
            requests[topology] = request

    environment.prepare_compiling()
    from lingvo_gshard.plans import commands

    with plan_flags.working() as out:
        commands.compare_machines(requests, out, functools.partial(print, flush=True))


if __name__ == "__main__":
    cli.run("plan machines", main)
