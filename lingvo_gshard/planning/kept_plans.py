"""Plans in folders: made once, and again only if the experiment, code or compilers have changed.

FOLDER/plan.json                the plan
FOLDER/report.md                the plan as text, with its pictures
FOLDER/memory.png, time.png     Figures 7 and 8 of its training step
FOLDER/fingerprint              a digest of what the plan depends on, written last
"""

import dataclasses
import functools
import pathlib

from lingvo_gshard.planning import fingerprints, plan, plan_pictures, plan_text
from lingvo_gshard.planning.compiled import own_process, run_programs
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.request import Request
from lingvo_gshard.spmd import versions

# Each plan has a process of its own.
_make_plan = functools.partial(run_programs.make_plan, is_last=True)


def load_or_make(request: Request, folder: pathlib.Path) -> Plan:
    """Returns the plan kept in `folder`, once the programs that it lacks are planned, too.

    Each program is planned in a process of its own, so that its memory is measured alone and a
    compiler that dies takes no other plan with it; the folder is written after each. Raises
    ValueError as own_process.call, or as the request's `check_sizes`.
    """
    request.check_sizes()
    # A plan of another experiment, or by other code or compilers, counts as none.
    fingerprint = _fingerprint(request)
    kept = _load(folder, fingerprint)
    if kept is not None:
        # Expected times follow the published records, of which there may be more by now.
        _write(kept, folder)

    for name in request.programs:
        if kept is not None and name in kept.programs:
            continue

        # This is what takes minutes.
        program_request = dataclasses.replace(request, programs=(name,))
        made = own_process.call(_make_plan, program_request)
        kept = made if kept is None else _joined(kept, made)

        # The fingerprint goes first and comes last: while it is missing, a plan that is killed in
        # between counts as none.
        fingerprint_file = folder / "fingerprint"
        fingerprint_file.unlink(missing_ok=True)
        _write(kept, folder)
        if name == plan.TRAIN:
            # Pictures are those of the training step alone.
            plan_pictures.draw_step(kept, folder)
        fingerprint_file.write_text(fingerprint, encoding="utf-8")

    assert kept is not None  # A request has a program.
    return kept


def _write(made: Plan, folder: pathlib.Path) -> None:
    """Writes a plan and its text."""
    plan.save(made, folder)
    (folder / "report.md").write_text(plan_text.markdown(made), encoding="utf-8")


def _load(folder: pathlib.Path, fingerprint: str) -> Plan | None:
    """Returns the plan in `folder` with this fingerprint; None if there is no readable one."""
    fingerprint_file = folder / "fingerprint"
    if not fingerprint_file.is_file() or fingerprint_file.read_bytes() != fingerprint.encode():
        return None
    # What is damaged is planned again.
    try:
        return plan.load(folder)
    except ValueError:
        return None


def _joined(first: Plan, second: Plan) -> Plan:
    """Returns one plan with the programs of two, made one after the other."""
    # The step comes first, whenever it was planned.
    programs = first.programs | second.programs
    return dataclasses.replace(
        first,
        programs={name: programs[name] for name in plan.PROGRAMS if name in programs},
        host_peak_gib=max(first.host_peak_gib, second.host_peak_gib),
    )


def _fingerprint(request: Request) -> str:
    """Returns a digest of all that a plan depends on: the request, our code, the compilers."""
    # The requested programs are left out, since each is looked up in the plan.
    experiment = (
        request.model,
        request.params.ToText(),
        request.topology,
        request.partitioning,
    )
    # TensorFlow lowers an experiment's programs.
    return fingerprints.of(repr(experiment), versions.installed(["tensorflow"]))
