"""What a killed run continues from: the plan of its folder and the results of its tasks.

The plan names everything that the outcome depends on. A run continues only a folder of its plan.
"""

import dataclasses
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
# Plans list all of these, so a folder made with another list could not be continued. TensorFlow's
# two are listed for that reason alone.
_LIBRARIES = ["array_record", "ftfy", "langcodes", "sentencepiece", "tensorflow", "tensorflow-text"]
_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that the outcome depends on."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def plan(sources: Sequence[Source], config: BuildConfig) -> str:
    """Returns everything that the outcome depends on, one item a line."""
    # What TFDS has prepared in a folder, under a name and version, does not change.
    files = [path for source in sources for path in source.files if path.is_file()]
    lines = [
        f"manifest version = {manifest.VERSION}",
        *(f"{name} = {version}" for name, version in library_versions().items()),
        *(f"{name} = {value!r}" for name, value in dataclasses.asdict(config).items()),
        *map(repr, sources),
        *(f"{path}: {path.stat().st_size} bytes, {path.stat().st_mtime_ns}" for path in files),
    ]
    return "\n".join(lines) + "\n"


def claim(out_dir: pathlib.Path, given: str, made: Sequence[str]) -> None:
    """Writes the plan `given` into a folder without one, or checks that the folder has this plan.

    Raises ValueError for another plan or, without one, for files or folders of those `made`.
    """
    path = out_dir / PLAN_NAME
    if path.exists():
        there = path.read_text(encoding="utf-8").splitlines()
        for old, new in itertools.zip_longest(there, given.splitlines(), fillvalue="nothing"):
            if old != new:
                raise ValueError(
                    f"{out_dir} was begun with other text, settings or libraries: {old} there, "
                    f"{new} given; give another folder, or delete it"
                )
        return
    taken = [name for name in made if (out_dir / name).exists()]
    if taken:
        raise ValueError(
            f"{out_dir} holds {', '.join(taken)}, but no {PLAN_NAME} of the run that made it: "
            "give another folder, or delete it"
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, given)


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
    both = zip(calls.values(), paths, strict=True)
    left = [functools.partial(_run, call, path) for call, path in both if not path.exists()]
    num_done = len(paths) - len(left)
    for _ in tqdm.tqdm(engine(left), name, len(paths), initial=num_done, disable=None):
        pass
    return {key: pickle.loads(path.read_bytes()) for key, path in zip(calls, paths, strict=True)}


def _run(call: Callable[[], Any], path: pathlib.Path) -> None:
    result = call()
    # A task that was given up as lost may still run while another process repeats it.
    with atomic_file.replacing(path, is_shared=True) as partial:
        partial.write_bytes(pickle.dumps(result))
