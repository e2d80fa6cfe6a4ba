"""Plans of foreign programs in folders: made once, and again only if something has changed.

FOLDER/program_plan.json    the plan
FOLDER/report.md            the plan as text
FOLDER/fingerprint          a digest of what the plan depends on, written last
"""

import pathlib
from collections.abc import Sequence

from lingvo_gshard.planning import any_program, fingerprints
from lingvo_gshard.planning.any_program import AnyPlan
from lingvo_gshard.spmd import foreign

_FINGERPRINT = "fingerprint"


def load_or_make(
    path: pathlib.Path,
    topology_name: str,
    folder: pathlib.Path,
    *,
    mesh: str | None = None,
    roles: Sequence[str] = (),
    categories: Sequence[str] = (),
    kernel_flops: Sequence[str] = (),
) -> AnyPlan:
    """Returns the plan of the program in a file that is kept in `folder`, once it is made.

    It is made again if the file, the options, the code, the compilers or their options are others.
    Raises ValueError as any_program.of_file.
    """
    # A program of another name has other text in its report.
    program = (path.name, foreign.digest(path))
    options = (mesh, list(roles), list(categories), list(kernel_flops))
    fingerprint = fingerprints.of(program, topology_name, options)

    kept = _load(folder, fingerprint)
    if kept is not None:
        return kept

    made = any_program.of_file(path, topology_name, mesh, roles, categories, kernel_flops)
    # The fingerprint goes first and comes last: a plan that is killed in between counts as none.
    file = folder / _FINGERPRINT
    file.unlink(missing_ok=True)
    any_program.save(made, folder)
    file.write_text(fingerprint)
    return made


def _load(folder: pathlib.Path, fingerprint: str) -> AnyPlan | None:
    """Returns the plan in `folder` with this fingerprint; None if there is no readable one."""
    file = folder / _FINGERPRINT
    if not file.is_file() or file.read_text() != fingerprint:
        return None
    # What is damaged is planned again.
    try:
        return any_program.load(folder)
    except ValueError:
        return None
