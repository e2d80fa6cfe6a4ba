"""The manifest lists the contents of a prepared data folder.

`gshard prepare` writes `manifest.json` last and atomically, so a folder is complete if and only if
it has a manifest. The library finds everything in a data folder through the manifest.

    DIR/manifest.json
        vocab/{source,target}.model                      SentencePiece models
        records/{split}/{language}-I-of-N.array_record   token ids, see example_codec.py
        records/{split}/{language}-I-of-N.lengths.npy    [n, 2]: tokens of each source and target
        text/{split}/{pair}.tsv.gz                       the raw text of dev, test and others,
                                                         without tokens of languages
        report/                                          for people: a report of the preparation

A folder holds one kind of data. In parallel data an example is a pair, as above. In text data it is
a document, the target of an empty source, and the manifest's "languages" are corpora, by name:

        vocab/text.model                                 the one vocabulary, of both sides
                                                         (if it was given: vocab/shared.model)
        text/{split}/{corpus}.txt.gz                     one document per line
"""

import dataclasses
import enum
import functools
import os
import pathlib
import shlex
from typing import Any

from xla_spmd.files import digests, json_records, storage
from xla_spmd.files.digests import File

FILE_NAME = "manifest.json"
VERSION = 4
SPLITS = ("train", "dev", "test")


class Kind(enum.StrEnum):
    """The kind of a folder's examples."""

    PARALLEL = enum.auto()  # Pairs of a sentence and its translation.
    TEXT = enum.auto()  # Documents in one language.

    @property
    def noun(self) -> str:
        """The word for an example."""
        return "pair" if self is Kind.PARALLEL else "document"

    @property
    def group(self) -> str:
        """The word for each of the manifest's languages."""
        return "language" if self is Kind.PARALLEL else "corpus"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary's file, and its number of pieces with rows in a model's tables."""

    file: File
    size: int
    languages: tuple[str, ...] = ()  # The codes of the languages that have tokens in it.


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records and the file of their lengths."""

    file: File
    lengths: File
    num_examples: int
    num_target_tokens: int = 0  # Including EOS. Older folders do not record it.


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of one split of one language: files, in order, and token counts including EOS."""

    shards: tuple[Shard, ...]
    num_source_tokens: int
    num_target_tokens: int
    num_source_byte_tokens: int  # Tokens for single bytes of characters without a piece.
    num_target_byte_tokens: int = 0  # Older folders do not record this and the next count.
    num_target_bytes: int = 0  # The size of the normalized text, in UTF-8.

    @property
    def num_examples(self) -> int:
        return sum(shard.num_examples for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Language:
    """One direction of translation or, in text data, a corpus."""

    # A BCP-47 code, or the source's name for it; en-de for German from English; de-fr for French
    # from German; or a corpus's name.
    code: str
    records: dict[str, Records]  # By split.
    text: dict[str, File]  # By split, including splits that are not in SPLITS.
    dropped: dict[str, int]  # The number of examples that each cleaning rule dropped.
    repaired: int = 0  # The number of training examples whose broken encoding was repaired.
    scripts: tuple[str, ...] = ()  # The scripts of its sources, as ISO 15924 codes.
    # The number of rows in its sources, and the number kept in all splits. Older folders do not
    # record them.
    read: int = 0
    kept: int = 0
    # The number of training examples with HTML entities or a tokenizer's marks, before
    # deduplication.
    escaped: int = 0
    # The number of training examples, including dropped ones, that seem to have been decoded with
    # a wrong encoding and could not be repaired with certainty.
    mojibake: int = 0
    # The languages at the beginning of a line of its text for the decoder. Empty in older folders,
    # whose text already contains them, and for models that need no such beginning.
    beginning: str = ""

    def line(self, source: str) -> str:
        """Returns a source of its text as the line for the decoder."""
        return f"{self.beginning} {source}" if self.beginning else source

    def num_examples(self, split: str) -> int:
        """Returns the number of records in a split; 0 if the language is not in it."""
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
        """Returns one language. Raises ValueError if the folder does not contain it."""
        by_code = {language.code: language for language in self.languages}
        if code not in by_code:
            held = ", ".join(by_code)
            raise ValueError(f"{self.group} {code!r} is not in the data, which has {held}")
        return by_code[code]

    @property
    def group(self) -> str:
        """The word for each of `languages`: language, or corpus."""
        return Kind(self.kind).group

    @property
    def vocabulary_files(self) -> tuple[File, File]:
        """The files of the vocabularies of source and target."""
        return self.source_vocabulary.file, self.target_vocabulary.file

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the names and digests of all files, unique to this data."""
        return digests.of_json(sorted((file.path, file.sha256) for file in self.files()))

    def files(self) -> tuple[File, ...]:
        """Returns every file that the manifest names, each once."""
        files = list(dict.fromkeys(self.vocabulary_files))  # Text data has just one vocabulary.
        for language in self.languages:
            for records in language.records.values():
                for shard in records.shards:
                    files += [shard.file, shard.lengths]
            files += language.text.values()
        return tuple(files)


def save(manifest: Manifest, data_dir: str | os.PathLike[str]) -> None:
    """Writes `data_dir/manifest.json` atomically."""
    # The version comes first in the file, and the digest last.
    fields = dataclasses.asdict(manifest)
    digests.write_json(pathlib.Path(data_dir, FILE_NAME), fields.pop("version"), fields)


def load(data_dir: str | os.PathLike[str]) -> Manifest:
    """Reads a folder's manifest, and no other file: see `digests.verify`.

    Raises ValueError if the folder or its manifest is missing, or if the manifest is damaged or of
    another version.
    """
    folder = storage.path(data_dir)
    path = folder / FILE_NAME
    with storage.errors(path, "read"):
        if path.is_file():
            return _read_version(path, storage.modified(path))

        # The message names the missing part, and the command that makes it.
        problem = f"no data folder {folder}"
        if folder.is_dir():
            problem = f"no {FILE_NAME} in {folder}"
    command = f"gshard prepare --input=TEXT_DIR --out={shlex.quote(str(folder))}"
    raise ValueError(f"{problem}: prepare it with {command}")


@functools.lru_cache(maxsize=1)  # A manifest of 100,000 files takes seconds to read.
def _read_version(path: pathlib.Path, modified: float) -> Manifest:
    """Reads a manifest; returns the last one if the file was not modified since."""
    del modified  # It is part of the cache's key.
    build = functools.partial(json_records.read, Manifest)
    return digests.read_json(path, VERSION, build)
