"""Searches for the partitioning with which an experiment trains fastest on a topology.

gshard plan search --model=m4.MoE128E12L --topology=v3:8x8 --out=SEARCH

Training steps are tried. The programs of --programs, all by default, are planned for the best one.
"""

import functools

from absl import flags

from lingvo_gshard import cli, plan_flags
from xla_spmd.runtime import environment

_TOPOLOGY = plan_flags.define_topology()
flags.adopt_module_key_flags(plan_flags)


def main() -> None:
    """Prints each candidate once it is compiled, their ranking, and the plan of the best."""
    model = plan_flags.check(_TOPOLOGY)
    request = plan_flags.request(model, _TOPOLOGY.value or "", default="all")
    environment.prepare_compiling()
    from lingvo_gshard.plans import commands

    with plan_flags.working() as out:
        commands.search_partitioning(request, out, functools.partial(print, flush=True))


if __name__ == "__main__":
    cli.run("plan search", main)
