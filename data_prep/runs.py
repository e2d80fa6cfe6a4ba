"""What a killed run continues from: the plan of its folder and the results of its tasks.

The plan names everything that the outcome depends on. A run continues a folder only if its own plan
is the same.
"""

import functools
import importlib.metadata
import itertools
import pathlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tqdm

from data_prep.config import BuildConfig
from data_prep.engines import Engine
from data_prep.sources import Source
from lingvo_gshard.files import atomic_file
from lingvo_gshard.input import manifest

PLAN_NAME = "plan.txt"
# Plans list all of these, so a folder made with another list could not be continued. This is the
# only reason why TensorFlow's two are listed.
_LIBRARIES = ["array_record", "ftfy", "langcodes", "sentencepiece"]
_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that the outcome depends on."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def plan(sources: Sequence[Source], config: BuildConfig) -> str:
    """Returns everything that the outcome depends on, one item a line."""
    # How the folder is made.
    lines = [f"manifest version = {manifest.VERSION}"]
    for name, version in library_versions().items():
        lines.append(f"{name} = {version}")
    for name, value in config.settings().items():
        lines.append(f"{name} = {value!r}")
    lines += [repr(source) for source in sources]

    # What it is made from. Folders are left out: what TFDS has prepared there, under a name and
    # version, does not change.
    files = list(config.vocabulary_files)
    for source in sources:
        files += source.files
    for path in files:
        if path.is_file():
            stat = path.stat()
            lines.append(f"{path}: {stat.st_size} bytes, {stat.st_mtime_ns}")
    return "\n".join(lines) + "\n"


def claim(out_dir: pathlib.Path, new_plan: str, outputs: Sequence[str]) -> None:
    """Writes a plan into a folder without one, or checks that the folder has this plan.

    Raises ValueError if the folder has another plan, or has none but some of the `outputs` of a
    run.
    """
    path = out_dir / PLAN_NAME
    if path.exists():
        _check_same_plan(out_dir, path.read_text(encoding="utf-8"), new_plan)
        return

    # A folder of other things: a build would mix its files with them.
    taken = [name for name in outputs if (out_dir / name).exists()]
    if taken:
        raise ValueError(
            f"{out_dir} holds {', '.join(taken)}, but no {PLAN_NAME} of the run that made it: "
            "give another folder, or delete it"
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, new_plan)


def _check_same_plan(out_dir: pathlib.Path, old_plan: str, new_plan: str) -> None:
    old_lines = old_plan.splitlines()
    new_lines = new_plan.splitlines()
    for old, new in itertools.zip_longest(old_lines, new_lines, fillvalue="nothing"):
        if old != new:
            raise ValueError(
                f"{out_dir} was begun with other text, settings or libraries: {old} there, "
                f"{new} given; give another folder, or delete it"
            )


def run_tasks(
    folder: pathlib.Path, engine: Engine, name: str, calls: Mapping[_Key, Callable[[], _Result]]
) -> dict[_Key, _Result]:
    """Returns the results of calls without arguments, which an engine runs.

    The results are kept in `folder`, and those that are there are not computed again; all runs that
    share a folder must give the same names and calls. A call is a partial application of a module's
    function, and writes the same files whenever it runs. Its exceptions are raised here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{i:06d}.result" for i in range(len(calls))]

    remaining: list[Callable[[], None]] = []
    for call, path in zip(calls.values(), paths, strict=True):
        if not path.exists():
            remaining.append(functools.partial(_run, call, path))

    # The progress bar counts what the engine reports done, and shows only on a terminal.
    num_done = len(paths) - len(remaining)
    for _ in tqdm.tqdm(engine(remaining), name, len(paths), initial=num_done, disable=None):
        pass
    return {key: pickle.loads(path.read_bytes()) for key, path in zip(calls, paths, strict=True)}


def _run(call: Callable[[], Any], path: pathlib.Path) -> None:
    """Writes the result of a call to a file."""
    result = call()
    # A task that was given up as lost may still run while another process repeats it.
    with atomic_file.replacing(path, is_shared=True) as partial:
        partial.write_bytes(pickle.dumps(result))
