"""The languages of `m4bible`, from m4bible.tsv."""

import csv
import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Language:
    """A language's file, and its number of pairs in the folder of repro/quality/results.md."""

    code: str
    repository: str
    file: str
    num_pairs: tuple[int, ...]  # In train, dev and test.
    family: str  # Such as "Indo-European, Slavic".


def load() -> list[Language]:
    """Returns the languages."""
    with pathlib.Path(__file__).with_name("m4bible.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))

    languages: list[Language] = []
    for row in rows:
        num_pairs = (int(row["train"]), int(row["dev"]), int(row["test"]))
        languages.append(
            Language(row["code"], row["repository"], row["file"], num_pairs, row["family"])
        )
    return languages
