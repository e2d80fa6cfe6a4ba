"""Compiles a Program for a named topology without such devices: to read it, not to run it.

xla_plan/machines/topology.py has the names of topologies.
"""

from typing import Any

import jax

from lingvo_gshard.spmd import executable, specs
from lingvo_gshard.spmd.program import Program
from xla_plan.machines import topology


class TopologyExecutable(executable.Executable):
    """A program compiled for a topology, to be read: a call or `place` raises ValueError."""

    def _placed(self, *_: Any) -> list[jax.Array]:
        raise ValueError(
            f"{self.program.name}: compiled for a topology, it can be read but not run; "
            "executable.compile_program is for devices at hand."
        )


def compile_program(
    program: Program, name: str, options: dict[str, str | bool] | None = None
) -> TopologyExecutable:
    """Compiles `program` for the first devices of the topology called `name`.

    `options` are the compiler's. Raises topology.OutOfMemoryError if the program needs more memory
    than a device has. Raises ValueError if the topology is unknown, if its compiler is not
    installed, if it has fewer devices than the program has partitions, and if its devices cannot
    run the program.
    """
    what = f"topology {name}: program {program.name}"
    mesh = specs.device_mesh(program.partitioning, topology.devices(name), what)
    with topology.one_line_errors(what):
        compiled = executable.lower(program, mesh).compile(compiler_options=options)
        return TopologyExecutable(program, mesh, compiled)
