"""Plans of experiments in folders: each of its programs is planned once.

xla_plan/plans/plan_folder.py describes the files; beside them are memory.png and time.png, Figures
7 and 8 of the training step.
"""

import dataclasses
import functools
import pathlib
import shutil

from lingvo_gshard.plans import plan, plan_pictures, plan_text, run_programs
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Request
from lingvo_gshard.spmd import own_sources
from xla_plan.plans import fingerprints, own_process, plan_folder
from xla_spmd.runtime import versions

# Each plan is made in a separate process.
_make_plan = functools.partial(run_programs.make_plan, is_last=True)


def load_or_make(request: Request, folder: pathlib.Path) -> Plan:
    """Returns the plan kept in `folder`, after planning the programs that it lacks.

    Each program is planned in a separate process, so that its memory is measured alone and a
    compiler that dies does not affect other plans. The folder is written after each program. Raises
    ValueError for sizes that no partitioning divides, and if a process died.
    """
    request.check_sizes()
    fingerprint = _fingerprint(request)
    kept = plan_folder.load_current(Plan, folder, fingerprint)
    if kept is not None:
        # Expected times depend on the published records, which may have changed since.
        plan_folder.save(kept, folder, plan_text.markdown(kept))

    for name in request.programs:
        if kept is not None and name in kept.programs:
            continue

        # This takes minutes.
        program_request = dataclasses.replace(request, programs=(name,))
        made = own_process.call(_make_plan, program_request)
        kept = made if kept is None else _joined(kept, made)
        with plan_folder.replacing(folder, fingerprint):
            plan_folder.save(kept, folder, plan_text.markdown(kept))
            if name == plan.TRAIN:
                # Pictures show only the training step.
                plan_pictures.draw_step(kept, folder)

    assert kept is not None  # A request has a program.
    return kept


def adopt(request: Request, kept: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the plan of a request from the folder `kept`, unless `folder` has one already."""
    fingerprint = _fingerprint(request)
    if plan_folder.load_current(Plan, folder, fingerprint) is None:
        others = shutil.ignore_patterns(plan_folder.FINGERPRINT)
        with plan_folder.replacing(folder, fingerprint):
            shutil.copytree(kept, folder, dirs_exist_ok=True, ignore=others)


def _joined(first: Plan, second: Plan) -> Plan:
    """Returns one plan with the programs of two, made one after the other."""
    # The step comes first, even if it was planned later.
    programs = first.programs | second.programs
    return dataclasses.replace(
        first,
        programs={name: programs[name] for name in plan.PROGRAMS if name in programs},
        host_peak_gib=max(first.host_peak_gib, second.host_peak_gib),
    )


def _fingerprint(request: Request) -> str:
    """Returns a digest of everything that a plan depends on: request, code and compilers."""
    # The requested programs are left out, since each is looked up in the plan.
    experiment = (
        request.model,
        request.params.ToText(),
        own_sources.digests_of(value for _, value in request.params.Leaves()),
        request.topology,
        request.partitioning,
    )
    # TensorFlow lowers an experiment's programs.
    return fingerprints.of(repr(experiment), versions.installed(["tensorflow"]))
