"""Plans in folders: made once, and again only if the program, code or compilers have changed.

FOLDER/plan.json      the plan
FOLDER/report.md      the plan as text
FOLDER/fingerprint    a digest of everything that the plan depends on, written last
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from xla_spmd.files import atomic_file, digests, json_records, lock, storage

PLAN_JSON = "plan.json"
_REPORT = "report.md"
FINGERPRINT = "fingerprint"


class Plan(Protocol):
    """A plan of one program, or of several: a dataclass."""

    def derived(self) -> dict[str, Any]:
        """Returns figures that follow from the fields, for other readers of the file."""
        ...


_Plan = TypeVar("_Plan", bound=Plan)


@contextlib.contextmanager
def working(folder: str) -> Iterator[pathlib.Path]:
    """Yields the local folder of a path or address, locked against other planning processes.

    Raises ValueError if another process plans in it.
    """
    with (
        storage.working(folder) as local,
        lock.held(local, "plans in this folder", local / "plan.lock"),
    ):
        yield local


def load_or_make(
    kind: type[_Plan],
    folder: pathlib.Path,
    fingerprint: str,
    make: Callable[[], _Plan],
    report: Callable[[_Plan], str],
) -> _Plan:
    """Returns the plan in `folder` with this fingerprint, or else makes and saves it."""
    kept = load_current(kind, folder, fingerprint)
    if kept is None:
        kept = make()
        with replacing(folder, fingerprint):
            save(kept, folder, report(kept))
    return kept


def load_current(kind: type[_Plan], folder: pathlib.Path, fingerprint: str) -> _Plan | None:
    """Returns the plan in `folder`; None without a readable one, or if its fingerprint differs."""
    file = folder / FINGERPRINT
    if not file.is_file() or file.read_bytes() != fingerprint.encode():
        return None
    # A damaged plan is made again.
    try:
        return load(kind, folder)
    except ValueError:
        return None


@contextlib.contextmanager
def replacing(folder: pathlib.Path, fingerprint: str) -> Iterator[None]:
    """Removes a folder's fingerprint, and writes the new one at the end.

    Without it, an interrupted plan counts as missing.
    """
    file = folder / FINGERPRINT
    file.unlink(missing_ok=True)
    yield
    file.write_text(fingerprint, encoding="utf-8")


def save(plan: Plan, folder: pathlib.Path, report: str) -> None:
    """Writes plan.json, the plan's fields and the figures that follow from them, and report.md.

    Raises ValueError if the file of the published steps is damaged.
    """
    values = dataclasses.asdict(plan) | plan.derived()  # type: ignore[call-overload]
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(digests.with_digest(values), indent=2)
    atomic_file.write(folder / PLAN_JSON, f"{content}\n")
    atomic_file.write(folder / _REPORT, report)


def find(kind: type[_Plan], folder: pathlib.Path) -> _Plan | None:
    """Returns the plan in `folder`, whichever code made it; None for a folder without a plan.

    Raises ValueError if it is damaged or outdated.
    """
    return load(kind, folder) if (folder / PLAN_JSON).is_file() else None


def load(kind: type[_Plan], folder: pathlib.Path) -> _Plan:
    """Returns a saved plan. Raises ValueError if it is missing, damaged or outdated."""
    path = folder / PLAN_JSON
    if not path.is_file():
        raise ValueError(f"{folder}: no {PLAN_JSON} there; `plan ... --out={folder}` makes one.")

    try:
        values = json_records.parse(path.read_bytes())
        plan: _Plan = json_records.read(kind, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or outdated ({error!r}); plan again.") from error
    if not digests.pop_digest(values):
        raise ValueError(f"{path} is damaged or outdated: its digest is not that of its contents.")
    return plan
