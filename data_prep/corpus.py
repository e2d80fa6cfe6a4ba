"""Finding the files of a corpus, in either of two layouts.

DIR/{train,dev,test}/<lang>-en.tsv[.gz]    already split
DIR/<lang>-en.tsv[.gz]                     dev and test are held out here
"""

import dataclasses
import hashlib
import pathlib
import re

from data_prep import cleaning, tsv
from lingvo_gshard.input.manifest import SPLITS

_NAME = re.compile(r"([A-Za-z0-9_]+)-en\.tsv(\.gz)?")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """`files[split][language]` is a file; in a flat corpus every file is under "train"."""

    folder: pathlib.Path
    files: dict[str, dict[str, pathlib.Path]]
    is_flat: bool

    @property
    def languages(self) -> tuple[str, ...]:
        """All language codes, sorted."""
        return tuple(sorted(set().union(*self.files.values())))


def find(folder: pathlib.Path) -> Corpus:
    """Lists a corpus. Raises ValueError if the folder holds no training text."""
    if not folder.is_dir():
        raise ValueError(f"no input folder {folder}")
    is_flat = not any((folder / split).is_dir() for split in SPLITS)
    if is_flat:
        files = {"train": _language_files(folder)}
    else:
        files = {split: _language_files(folder / split) for split in SPLITS}
    if not files["train"]:
        where = folder if is_flat else folder / "train"
        raise ValueError(f"no <lang>-en.tsv or <lang>-en.tsv.gz files in {where}")
    return Corpus(folder, files, is_flat)


def held_out_split(english: str, held_out_share: float) -> str:
    """The split of a sentence of a flat corpus, by a hash of its English.

    The hash sees what the cleaning compares, so that sentences that differ in case or punctuation
    alone, in whatever language's file, fall in the same split.
    """
    digest = hashlib.sha256(cleaning.english_key(english).encode("utf-8")).digest()
    position = int.from_bytes(digest[:8]) / 2**64
    if position < held_out_share:
        return "dev"
    return "test" if position < 2 * held_out_share else "train"


def deal_out(
    flat: Corpus, folder: pathlib.Path, held_out_share: float, max_malformed_share: float
) -> tuple[Corpus, dict[str, int]]:
    """Writes a flat corpus to `folder` as a split one.

    Returns the split corpus, and the number of malformed lines of each language.
    """
    num_malformed = {}
    for language, path in flat.files["train"].items():
        text = tsv.read(path, max_malformed_share)
        num_malformed[language] = text.num_malformed
        dealt: dict[str, list[tsv.Pair]] = {split: [] for split in SPLITS}
        for pair in text.pairs:
            dealt[held_out_split(pair.english, held_out_share)].append(pair)
        for split, pairs in dealt.items():
            tsv.write(folder / split / f"{language}-en.tsv.gz", pairs)
    return find(folder), num_malformed


def _language_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    if not folder.is_dir():
        return {}
    files: dict[str, pathlib.Path] = {}
    for path in sorted(folder.iterdir()):
        if not path.name.endswith((".tsv", ".tsv.gz")):
            continue
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected a name like de-en.tsv or de-en.tsv.gz")
        code = match[1]
        if code in files:
            raise ValueError(f"{path}: language {code} is also in {files[code].name}")
        files[code] = path
    return files
