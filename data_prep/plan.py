"""What a folder is prepared from and with, as text that lies in it: a folder has one plan.

A run goes on only in a folder of its own plan. So a mistaken flag, or a folder that holds other
things, costs nothing that is there.
"""

import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Sequence

from data_prep.config import BuildConfig
from data_prep.sources.source import Source
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
    """Of the libraries that the outcome depends on."""
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}


def text(sources: Sequence[Source], config: BuildConfig) -> str:
    """All that the outcome depends on, a line each."""
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
    """Begins in a folder without a plan, goes on in one of this plan.

    Args:
        out_dir: is made where it is not there.
        plan: as `text`.
        made: names of all that will be made in it.

    Raises:
        ValueError: the folder has another plan, or holds what is to be made, and no plan.
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
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(plan, encoding="utf-8")
    os.replace(unfinished, path)


def _check_same(out_dir: pathlib.Path, there: str, given: str) -> None:
    lines = itertools.zip_longest(there.splitlines(), given.splitlines(), fillvalue="nothing")
    for old, new in lines:
        if old != new:
            raise ValueError(
                f"{out_dir} was begun with other text, settings or libraries: {old} there, "
                f"{new} given; give another folder, or delete it"
            )
