"""The manifest: what a prepared data folder holds.

`data_prep.build` writes `manifest.json` last and atomically, so a folder is complete if and only if
it has a manifest. The library finds everything in a data folder through the manifest.

    DIR/manifest.json
        vocab/{source,target}.model                      SentencePiece models
        records/{split}/{language}-I-of-N.array_record   token ids, see example_codec.py
        records/{split}/{language}-I-of-N.lengths.npy    [n, 2]: tokens of each source and target
        text/{split}/{pair}.tsv.gz                       the raw text of dev, test and others
        report/                                          for people: what the preparation did

A folder holds one kind of data. In parallel data an example is a pair, as above. In text it is a
document, the target of an empty source; what the manifest calls a language is a corpus by its name:

        vocab/text.model                                 the one vocabulary, of both sides
        text/{split}/{corpus}.txt.gz                     a document a line
"""

import dataclasses
import enum
import functools
import os
import pathlib
import shlex
from typing import Any

from lingvo_gshard.files import digests, json_records, storage
from lingvo_gshard.files.digests import File

FILE_NAME = "manifest.json"
VERSION = 4
SPLITS = ("train", "dev", "test")


class Kind(enum.StrEnum):
    """What the examples of a folder are."""

    PARALLEL = enum.auto()  # Pairs of a sentence and its translation.
    TEXT = enum.auto()  # Documents in one language.

    @property
    def noun(self) -> str:
        """What an example is called."""
        return "pair" if self is Kind.PARALLEL else "document"

    @property
    def group(self) -> str:
        """What the manifest's languages are called."""
        return "language" if self is Kind.PARALLEL else "corpus"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece model, and its number of pieces with rows in a model's tables."""

    file: File
    size: int
    languages: tuple[str, ...] = ()  # The codes of those that it has tokens of.


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records and the file of their lengths."""

    file: File
    lengths: File
    num_examples: int
    num_target_tokens: int = 0  # With EOS. Older folders do not tell.


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of one split of one language: files, in order, and numbers of tokens with EOS."""

    shards: tuple[Shard, ...]
    num_source_tokens: int
    num_target_tokens: int
    num_source_byte_tokens: int  # Each is a byte of a character without a piece.
    num_target_byte_tokens: int = 0  # Older folders do not tell this and the next.
    num_target_bytes: int = 0  # Of the normalized text, in UTF-8.

    @property
    def num_examples(self) -> int:
        return sum(shard.num_examples for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Language:
    """One direction of translation; of text, a corpus."""

    # A BCP-47 code, or the source's name for it; en-de for German from English; de-fr for French
    # from German; a corpus's name.
    code: str
    records: dict[str, Records]  # By split.
    text: dict[str, File]  # By split, also those not in SPLITS.
    dropped: dict[str, int]  # How many examples each cleaning rule dropped.
    repaired: int = 0  # How many training examples had a broken encoding that was repaired.
    scripts: tuple[str, ...] = ()  # The ISO 15924 codes of the scripts of its sources.
    # How many rows its sources have: those kept in all splits, and those dropped. Older folders do
    # not tell.
    read: int = 0
    kept: int = 0
    # How many training examples have HTML entities, or marks of a tokenizer, before deduplication.
    escaped: int = 0

    def num_examples(self, split: str) -> int:
        """Returns the number of records in a split, 0 if the language has none there."""
        if split not in self.records:
            return 0
        return self.records[split].num_examples


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared data folder, with the settings and library versions of its preparation."""

    languages: tuple[Language, ...]
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    config: dict[str, Any]
    library_versions: dict[str, str]
    kind: str = Kind.PARALLEL
    version: int = VERSION

    def language(self, code: str) -> Language:
        """Returns one language. Raises ValueError if the folder does not hold it."""
        by_code = {language.code: language for language in self.languages}
        if code not in by_code:
            held = ", ".join(by_code)
            raise ValueError(f"{self.group} {code!r} is not in the data: it holds {held}")
        return by_code[code]

    @property
    def group(self) -> str:
        """What each of `languages` is called: examples come in languages, or in corpora."""
        return Kind(self.kind).group

    @property
    def vocabulary_files(self) -> tuple[File, File]:
        """The SentencePiece models of source and target."""
        return self.source_vocabulary.file, self.target_vocabulary.file

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the names and digests of all files, which no other data has."""
        return digests.of_json(sorted((file.path, file.sha256) for file in self.files()))

    def files(self) -> tuple[File, ...]:
        """Returns every file that the manifest names, each once."""
        files = list(dict.fromkeys(self.vocabulary_files))  # Text has one vocabulary.
        for language in self.languages:
            for records in language.records.values():
                for shard in records.shards:
                    files += [shard.file, shard.lengths]
            files += language.text.values()
        return tuple(files)


def load_kind(data_dir: str | os.PathLike[str], kind: Kind, reader: str) -> Manifest:
    """Returns a folder's manifest. Raises as `load`, or ValueError if its data is of another kind.

    The error names `reader`, which needs data of this kind.
    """
    data = load(data_dir)
    if data.kind != kind:
        raise ValueError(
            f"{data_dir} holds data of kind {data.kind}, but {reader} reads kind {kind}: "
            f"prepare it with python -m data_prep.build --kind={kind}"
        )
    return data


def save(manifest: Manifest, data_dir: str | os.PathLike[str]) -> None:
    """Writes `data_dir/manifest.json` atomically."""
    # The version comes first in the file, and the digest last.
    fields = dataclasses.asdict(manifest)
    digests.write_json(pathlib.Path(data_dir, FILE_NAME), fields.pop("version"), fields)


def load(data_dir: str | os.PathLike[str]) -> Manifest:
    """Reads a folder's manifest, but looks at no other file: see `digests.verify`.

    Raises ValueError if the folder or its manifest is missing, or if the manifest is damaged or of
    another version.
    """
    folder = storage.path(data_dir)
    path = folder / FILE_NAME
    with storage.errors(path, "read"):
        if path.is_file():
            return _read_version(path, storage.modified(path))

        # Say what is missing, and how to make it.
        problem = f"no data folder {folder}"
        if folder.is_dir():
            problem = f"no {FILE_NAME} in {folder}"
    command = f"python -m data_prep.build --input=TEXT_DIR --out={shlex.quote(str(folder))}"
    raise ValueError(f"{problem}: prepare it with {command}")


@functools.lru_cache(maxsize=1)  # A manifest of 100,000 files takes seconds to read.
def _read_version(path: pathlib.Path, modified: float) -> Manifest:
    """Reads a manifest, or returns the last one if it is the same file, not modified since."""
    del modified  # It is part of the cache's key.
    build = functools.partial(json_records.read, Manifest)
    return digests.read_json(path, VERSION, build)
