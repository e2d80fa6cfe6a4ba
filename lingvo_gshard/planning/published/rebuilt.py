"""Plans of published steps, rebuilt as a dense decoder in plain JAX: made once, and kept.

FOLDER/ID/program_plan.json, report.md    the plan; see any_program.py
FOLDER/ID/fingerprint                     a digest of what it depends on, written last
"""

import contextlib
import pathlib

from lingvo_gshard.planning import any_program, fingerprints
from lingvo_gshard.planning.compiled import own_process
from lingvo_gshard.planning.program_plan import AnyPlan
from lingvo_gshard.planning.published.dense_decoder import attention, splits, step
from lingvo_gshard.planning.published.records import Record
from lingvo_gshard.spmd import topology

# Tensor parallelism on TPUs gathers what it multiplies. By default the compiler writes products as
# loops that send one part while they compute on another, and a plan adds up both.
_GATHERS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

# What a plan of a program that is not this project's depends on.
_CODE = (
    "hlo",
    "planning/any_program.py",
    "planning/compiled",
    "planning/estimate",
    "planning/program_plan.py",
    "planning/published/dense_decoder",
    "planning/published/rebuilt.py",
    "spmd",
)


def load_or_make(record: Record, folder: pathlib.Path) -> AnyPlan:
    """Returns the plan of a record that is kept in `folder`, or else makes and keeps it.

    It is made in a process of its own, so that a compiler that dies takes nothing with it. Raises
    ValueError as any_program.of, or if the process died.
    """
    own_folder = folder / record.id
    fingerprint_file = own_folder / "fingerprint"
    fingerprint = _fingerprint(record)
    if fingerprint_file.is_file() and fingerprint_file.read_bytes() == fingerprint.encode():
        # What is damaged is planned again.
        with contextlib.suppress(ValueError):
            return any_program.load(own_folder)

    made = own_process.call(make, record)
    # While the fingerprint is missing, a plan that is killed in between counts as none.
    fingerprint_file.unlink(missing_ok=True)
    any_program.save(made, own_folder)
    fingerprint_file.write_text(fingerprint)
    return made


def load(record: Record, folder: pathlib.Path) -> AnyPlan | None:
    """Returns the plan of a record that is kept in `folder`, whichever code made it, if any."""
    own_folder = folder / record.id
    if not (own_folder / any_program.PLAN_JSON).is_file():
        return None
    return any_program.load(own_folder)


def make(record: Record) -> AnyPlan:
    """Returns the plan of a record's step. Raises ValueError as any_program.of."""
    gpu = record.machine if topology.is_gpu(record.topology) else None
    mesh = splits.abstract_mesh(record.run, gpu)
    jitted = step.train_step(record.model, record.run, mesh)
    args = step.arguments(record.model, record.run, mesh)
    with splits.tracing(mesh):
        return any_program.of(
            jitted,
            args,
            record.topology,
            roles=["weights=params", "optimizer=slots", "tokens=tokens"],
            kernel_flops=attention.kernel_flops(record.model, record.run),
            device_order=device_order(record.topology),
            compiler_options=_GATHERS if gpu is None and record.run.tensor > 1 else {},
        )


def device_order(name: str) -> list[int]:
    """Returns a topology's devices by slice and coordinates, so that mesh axes are lines of chips.

    JAX counts TPUs host by host, each a square of chips, and trainers put them in order. GPUs are
    in order. Raises ValueError as topology.places.
    """
    places = topology.places(name)
    per_slice = len(places) // topology.num_slices(name)
    return sorted(range(len(places)), key=lambda device: (device // per_slice, places[device]))


def _fingerprint(record: Record) -> str:
    """Returns a digest of what a plan depends on: the step, the code, and the compilers."""
    planned = repr((record.model, record.run, record.topology))
    return fingerprints.of(planned, code=_CODE)
