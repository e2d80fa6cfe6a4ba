"""The parts of a corpus of several languages that Figure 6's models learn from."""

import pathlib
import random
from collections.abc import Mapping

from data_prep import tsv

_SUFFIX = "-en.tsv.gz"


def whole_languages(source: pathlib.Path) -> dict[str, None]:
    """Returns the languages of a corpus, each with None in place of a number of training pairs.

    Raises ValueError if `source` has no training file.
    """
    paths = sorted((source / "train").glob(f"*{_SUFFIX}"))
    if not paths:
        raise ValueError(f"--input={source}: expected files train/LANGUAGE{_SUFFIX}, found none.")
    return {path.name.removesuffix(_SUFFIX): None for path in paths}


def write(
    source: pathlib.Path,
    folder: pathlib.Path,
    sizes: Mapping[str, int | None],
    dev_pairs: int | None = None,
) -> None:
    """Writes folder/LANGUAGE/{train,dev,test} of each language, and all of them as folder/all.

    A language gets the number of training pairs in `sizes`, and at most `dev_pairs` of dev, drawn
    with a fixed seed. None stands for all pairs. Returns at once if the folder exists.
    """
    if folder.exists():
        return
    aside = folder.with_name(f"{folder.name}.partial")
    for code, size in sizes.items():
        limits = {"train": size, "dev": dev_pairs, "test": None}
        for split, limit in limits.items():
            lines = tsv.read(source / split / f"{code}{_SUFFIX}")
            pairs = [line for line in lines if isinstance(line, tsv.Pair)]
            if limit is not None and limit < len(pairs):
                pairs = random.Random(code).sample(pairs, limit)
            for group in (code, "all"):
                tsv.write(aside / group / split / f"{code}{_SUFFIX}", pairs)
    aside.rename(folder)
