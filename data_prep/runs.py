"""The state from which a killed run continues: its folder's plan and its tasks' results.

The plan lists everything that determines the outcome. A run continues a folder only if its own plan
is the same.
"""

import functools
import importlib.metadata
import itertools
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from data_prep.config import BuildConfig
from data_prep.engines import Engine
from data_prep.sources import Source
from lingvo_gshard.input import manifest
from xla_spmd.files import atomic_file, digests
from xla_spmd.runtime import progress

PLAN_NAME = "plan.txt"
# Plans list all of these, so a folder that was made with another list could not be continued.
_LIBRARIES = ["array_record", "ftfy", "langcodes", "sentencepiece"]
# A plan's line about a file of text.
_FILE = re.compile(
    r"^(?P<file>(?P<text>.+: \d+ bytes), modified \d+), SHA-256 (?P<digest>[0-9a-f]{64})$",
    re.MULTILINE,
)
_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that influence the outcome."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def plan(sources: Sequence[Source], config: BuildConfig, earlier: str = "") -> str:
    """Returns everything that determines the outcome, one item per line.

    Files are read for their digests, except for files in an `earlier` plan that were not modified
    since.
    """
    # The settings of the build.
    lines = [f"manifest version = {manifest.VERSION}"]
    for name, version in library_versions().items():
        lines.append(f"{name} = {version}")
    for name, value in config.settings().items():
        lines.append(f"{name} = {value!r}")
    lines += [repr(source) for source in sources]

    # Its inputs. Folders are left out: TFDS never changes prepared data of one name and version.
    files = list(config.vocabulary_files)
    for source in sources:
        files += source.files
    known = {match["file"]: match["digest"] for match in _FILE.finditer(earlier)}
    with ThreadPoolExecutor() as threads:  # Hashing releases the interpreter's lock.
        existing = [path for path in files if path.is_file()]
        lines += threads.map(functools.partial(_file_line, known), existing)
    return "\n".join(lines) + "\n"


def _file_line(known: Mapping[str, str], path: pathlib.Path) -> str:
    """Returns the plan's line about a file; `known` has the digests of earlier plans."""
    stat = path.stat()
    # The name may not be valid UTF-8, and may contain newlines.
    name = str(path).encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")
    file = f"{name}: {stat.st_size} bytes, modified {stat.st_mtime_ns}"
    digest = known.get(file) or digests.describe(path.parent, path.name).sha256
    return f"{file}, SHA-256 {digest}"


def claim(
    out_dir: pathlib.Path, sources: Sequence[Source], config: BuildConfig, outputs: Sequence[str]
) -> None:
    """Writes the plan into a folder without one, or checks that the folder has the same plan.

    Raises ValueError if the folder has another plan, or if it has some of a run's `outputs`, but no
    plan.
    """
    path = out_dir / PLAN_NAME
    if path.exists():
        earlier = path.read_text(encoding="utf-8")
        new_plan = plan(sources, config, earlier)
        _check_same_plan(out_dir, earlier, new_plan)
        if new_plan != earlier:  # Record new times, so that unchanged text is hashed only once.
            atomic_file.write(path, new_plan)
        return

    # The folder is used for something else: a build would mix its files with those.
    taken = [name for name in outputs if (out_dir / name).exists()]
    if taken:
        raise ValueError(
            f"{out_dir} has {', '.join(taken)}, but no {PLAN_NAME} of the run that made them: "
            "give another folder, or delete it"
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, plan(sources, config))


def _check_same_plan(out_dir: pathlib.Path, old_plan: str, new_plan: str) -> None:
    # Another time of modification does not make it another text.
    old_lines = _FILE.sub(r"\g<text>, SHA-256 \g<digest>", old_plan).splitlines()
    new_lines = _FILE.sub(r"\g<text>, SHA-256 \g<digest>", new_plan).splitlines()
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

    The results are stored in `folder`, and existing results are not computed again. All runs that
    share a folder must pass the same names and calls. A call is a partial application of a module's
    function, and writes the same files whenever it runs. Its exceptions are raised here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{i:06d}.result" for i in range(len(calls))]

    remaining: list[Callable[[], None]] = []
    for call, path in zip(calls.values(), paths, strict=True):
        if not path.exists():
            remaining.append(functools.partial(_run, call, path))

    # The calls that the engine has finished are counted.
    num_done = len(paths) - len(remaining)
    with progress.shown(name, total=len(paths), unit="tasks", first=num_done) as done:
        for _ in engine(remaining):
            done.update()
    return {key: pickle.loads(path.read_bytes()) for key, path in zip(calls, paths, strict=True)}


def _run(call: Callable[[], Any], path: pathlib.Path) -> None:
    """Writes the result of a call to a file."""
    result = call()
    # A task that was given up as lost may still be running while another process repeats it.
    with atomic_file.replacing(path, is_shared=True) as partial:
        partial.write_bytes(pickle.dumps(result))
