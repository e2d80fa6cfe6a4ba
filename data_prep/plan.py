"""The plan of a prepared folder: a text file in it of everything that the outcome depends on.

A run continues only a folder that has the same plan, so a mistaken flag destroys nothing.
"""

import dataclasses
import importlib.metadata
import itertools
import pathlib
from collections.abc import Sequence

from data_prep.config import BuildConfig
from data_prep.sources import Source
from lingvo_gshard.core import atomic_file
from lingvo_gshard.input import manifest

FILE_NAME = "plan.txt"
_LIBRARIES = (
    "array_record",
    "ftfy",
    "langcodes",
    "sentencepiece",
    "tensorflow",
    "tensorflow-text",
)


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that the outcome depends on."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def text(sources: Sequence[Source], config: BuildConfig) -> str:
    """Returns everything that the outcome depends on, one item a line."""
    files = [path for source in sources for path in source.files]
    stats = [(path, path.stat()) for path in files if path.exists()]
    lines = [
        f"manifest version = {manifest.VERSION}",
        *(f"{name} = {version}" for name, version in library_versions().items()),
        *(f"{name} = {value!r}" for name, value in dataclasses.asdict(config).items()),
        *map(repr, sources),
        *(f"{path}: {stat.st_size} bytes, {stat.st_mtime_ns}" for path, stat in stats),
    ]
    return "\n".join(lines) + "\n"


def claim(out_dir: pathlib.Path, plan: str, made: Sequence[str]) -> None:
    """Writes the plan into a folder without one, or checks that the folder has this plan.

    `made` are the names of everything that a build makes in the folder.

    Raises:
        ValueError: the folder has another plan, or contains one of `made` without a plan.
    """
    path = out_dir / FILE_NAME
    if path.exists():
        _check_same(out_dir, path.read_text(encoding="utf-8"), plan)
        return
    taken = [name for name in made if (out_dir / name).exists()]
    if taken:
        raise ValueError(
            f"{out_dir} holds {', '.join(taken)}, but no {FILE_NAME} of the run that made it: "
            "give another folder, or delete it"
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_file.write(path, plan)


def _check_same(out_dir: pathlib.Path, there: str, given: str) -> None:
    lines = itertools.zip_longest(there.splitlines(), given.splitlines(), fillvalue="nothing")
    for old, new in lines:
        if old != new:
            raise ValueError(
                f"{out_dir} was begun with other text, settings or libraries: {old} there, "
                f"{new} given; give another folder, or delete it"
            )
