"""Plans of foreign programs in folders: made once, and again only if something has changed.

FOLDER/program_plan.json    the plan
FOLDER/report.md            the plan as text
FOLDER/fingerprint          a digest of what the plan depends on, written last
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from lingvo_gshard.planning import any_program, fingerprints
from lingvo_gshard.planning.compiled import own_process
from lingvo_gshard.planning.program_plan import AnyPlan
from lingvo_gshard.spmd import foreign

_FINGERPRINT = "fingerprint"


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is planned: see any_program.of_file."""

    path: pathlib.Path
    topology_name: str
    mesh: str | None
    roles: Sequence[str]
    categories: Sequence[str]
    kernel_flops: Sequence[str]

    @property
    def label(self) -> str:
        return f"--program={self.path}"


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
    It is made in a process of its own: a file that is damaged can make parsers and compilers die.
    Raises ValueError as any_program.of_file, or if that process died.
    """
    # A program of another name has other text in its report.
    program = (path.name, foreign.digest(path))
    options = (mesh, list(roles), list(categories), list(kernel_flops))
    fingerprint = fingerprints.of(program, topology_name, options)

    kept = _load(folder, fingerprint)
    if kept is not None:
        return kept

    request = _Request(path, topology_name, mesh, roles, categories, kernel_flops)
    made = own_process.call(_plan, request)
    # The fingerprint goes first and comes last: a plan that is killed in between counts as none.
    file = folder / _FINGERPRINT
    file.unlink(missing_ok=True)
    any_program.save(made, folder)
    file.write_text(fingerprint)
    return made


def _plan(request: _Request) -> AnyPlan:
    return any_program.of_file(
        request.path,
        request.topology_name,
        request.mesh,
        request.roles,
        request.categories,
        request.kernel_flops,
    )


def _load(folder: pathlib.Path, fingerprint: str) -> AnyPlan | None:
    """Returns the plan in `folder` with this fingerprint; None if there is no readable one."""
    file = folder / _FINGERPRINT
    if not file.is_file() or file.read_bytes() != fingerprint.encode():
        return None
    # What is damaged is planned again.
    try:
        return any_program.load(folder)
    except ValueError:
        return None
