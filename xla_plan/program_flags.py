"""Flags of the programs that plan somebody else's program."""

import pathlib

from absl import flags

from xla_plan.machines import topology_names
from xla_plan.program import patterns, program_path
from xla_spmd.files import storage
from xla_spmd.mesh import Mesh

TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Such as v3:32x32, which is 2048 cores, or h100:32x8, 32 hosts of 8 GPUs."
)
OUT = flags.DEFINE_string(
    "out", None, "The folder for the plan and its report, or the file for measured rates."
)
MESH = flags.DEFINE_string(
    "mesh", None, "The program's axes, such as data:16,model:4; its own by default."
)
ROLE = flags.DEFINE_multi_string(
    "role", [], "A role of the arguments by name, LABEL=REGEX, such as weights=params; repeatable."
)
CATEGORY = flags.DEFINE_multi_string(
    "category",
    [],
    "A category of the operations by scope, LABEL=REGEX, such as mlp=/mlp/; repeatable.",
)
_PROGRAM = flags.DEFINE_string(
    "program",
    None,
    "A file of jax.export, StableHLO (text or bytecode) or HLO (text or a serialized "
    "HloModuleProto).",
)


def program() -> pathlib.Path:
    """Returns the program's path.

    Raises ValueError if a required flag is missing or malformed, for an unknown topology or one
    whose compiler is not installed, if the program's file is missing, and if --out cannot be
    written.
    """
    for flag in (_PROGRAM, TOPOLOGY, OUT):
        if flag.value is None:
            raise ValueError(f"--{flag.name} is missing; see --help.")
    topology_names.check(TOPOLOGY.value or "")

    path: pathlib.Path = storage.path(_PROGRAM.value or "")
    program_path.check(f"--program={path}", path)
    storage.check_writable(OUT.value or "")

    patterns.parse("--role", ROLE.value)
    patterns.parse("--category", CATEGORY.value)
    if MESH.value is not None:
        Mesh.parse(MESH.value, num_devices())
    return path


def num_devices() -> int:
    """Returns the number of devices of --topology."""
    return topology_names.num_devices(TOPOLOGY.value or "")
