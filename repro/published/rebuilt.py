"""Plans of published steps, rebuilt as a dense decoder in plain JAX and stored for reuse.

FOLDER/ID    a plan as xla_plan/plans/plan_folder.py keeps it
"""

import functools
import pathlib

from repro.published.dense_decoder import attention, splits, step
from repro.published.records import Record
from xla_plan.machines import topology
from xla_plan.plans import fingerprints, own_process, plan_folder, program_text, programs
from xla_plan.plans.program_plan import ProgramPlan

# Tensor parallelism on TPUs gathers a product's operands. By default the compiler writes products
# as loops that send one part while they compute on another, but a plan adds both times.
_GATHERS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

# The parts of this project on which a plan of a foreign program depends.
_CODE = (
    "repro/published/dense_decoder",
    "repro/published/rebuilt.py",
    "xla_plan",
    "xla_spmd",
)


def load_or_make(record: Record, folder: pathlib.Path) -> ProgramPlan:
    """Returns the stored plan of a record, or makes and stores it.

    A separate process makes it, so that a dying compiler does not end this process. Raises
    ValueError if the process died, or if XLA refuses the program.
    """
    return plan_folder.load_or_make(
        ProgramPlan,
        folder / record.id,
        _fingerprint(record),
        functools.partial(own_process.call, make, record),
        program_text.markdown,
    )


def load(record: Record, folder: pathlib.Path) -> ProgramPlan | None:
    """Returns the stored plan of a record, even from older code; None if `folder` lacks it."""
    return plan_folder.find(ProgramPlan, folder / record.id)


def make(record: Record) -> ProgramPlan:
    """Returns the plan of a record's step. Raises ValueError if XLA refuses the program."""
    gpu = record.machine if topology.is_gpu(record.topology) else None
    mesh = splits.abstract_mesh(record.run, gpu)
    jitted = step.train_step(record.model, record.run, mesh)
    args = step.arguments(record.model, record.run, mesh)
    with splits.tracing(mesh):
        return programs.of(
            jitted,
            args,
            record.topology,
            roles=["weights=params", "optimizer=slots", "tokens=tokens"],
            kernel_flops=attention.kernel_flops(record.model, record.run),
            device_order=device_order(record.topology),
            compiler_options=_GATHERS if gpu is None and record.run.tensor > 1 else {},
        )


def device_order(name: str) -> list[int]:
    """Sorts a topology's devices by slice and coordinates, so that mesh axes are lines of chips.

    JAX numbers TPUs host by host, each a square of chips, and trainers reorder them. GPUs are in
    order already. Raises ValueError for an unknown topology.
    """
    places = topology.places(name)
    per_slice = len(places) // topology.num_slices(name)
    return sorted(range(len(places)), key=lambda device: (device // per_slice, places[device]))


def _fingerprint(record: Record) -> str:
    """Returns a digest of a plan's inputs: the step, the code, and the compilers."""
    planned = repr((record.model, record.run, record.topology))
    return fingerprints.of(planned, code=_CODE)
