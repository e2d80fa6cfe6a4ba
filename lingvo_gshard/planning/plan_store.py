"""Plans kept in folders: one that was made by the same code for the same experiment is not remade.

Each is made in a process of its own, so that its memory is its own, and a compiler that dies or is
killed takes no other plan with it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import multiprocessing
import os
import pathlib
import threading
from concurrent.futures.process import BrokenProcessPool

from lingvo_gshard.planning import plan, plan_report, planner
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.planner import Request

# What a plan depends on: the code that makes the program and reads it, and the compilers.
_FOLDERS = ("analysis", "core", "input", "layers", "model", "optim", "sharding", "spmd", "train")
_PACKAGES = ("jax", "libtpu", "tensorflow")
_FINGERPRINT = "fingerprint"


def planned(request: Request, folder: pathlib.Path) -> Plan:
    """The plan in `folder`, made and written there with its report unless it is there already.

    Raises:
      ValueError: as planner.make; or the process that made it ended.
    """
    fingerprint, kept = _fingerprint(request), folder / _FINGERPRINT
    if kept.is_file() and kept.read_text() == fingerprint:
        return plan.load(folder)
    made = _in_own_process(request)
    folder.mkdir(parents=True, exist_ok=True)
    kept.unlink(missing_ok=True)
    plan.save(made, folder)
    plan_report.write(made, folder)
    kept.write_text(fingerprint)  # Last: until then the folder holds no finished plan.
    return made


def _in_own_process(request: Request) -> Plan:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, _end_with_parent) as pool:
        try:
            return pool.submit(planner.make, request).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{request.model} on {request.topology}: the process that planned it ended; this "
                "machine's memory may be too small."
            ) from error


def _end_with_parent() -> None:
    """Ends this process as soon as the one that started it has, were it killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _fingerprint(request: Request) -> str:
    root = pathlib.Path(__file__).parent.parent
    paths = [path for name in _FOLDERS for path in sorted((root / name).glob("*.py"))]
    versions = [f"{name}=={_version(name)}" for name in _PACKAGES]
    asked = [request.model, request.params.ToText(), request.topology]
    asked += [repr(request.mesh), repr(request.table)]
    digest = hashlib.sha256()
    for part in [*map(pathlib.Path.read_bytes, paths), *map(str.encode, versions + asked)]:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"  # Whoever needs it tells so.
