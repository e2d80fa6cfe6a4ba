"""The manifest: what a prepared data folder holds.

`data_prep.build` writes `manifest.json` last and atomically, so a folder is complete if and only if
it has a manifest. The library finds everything in a data folder through the manifest.

    DIR/manifest.json
        vocab/{source,target}.model                      SentencePiece models
        records/{split}/{language}-I-of-N.array_record   token ids, see example_codec.py
        records/{split}/{language}-I-of-N.lengths.npy    [n, 2]: tokens of each source and target
        text/{split}/{language}-en.tsv.gz                the raw text of dev, test and others
        report/                                          for people: what the preparation did
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import atomic_file, json_records, storage

FILE_NAME = "manifest.json"
VERSION = 3
SPLITS = ("train", "dev", "test")
_COMMAND = "python -m data_prep.build --input=TEXT_DIR --out="
_THREADS = 32  # More than cores: a network's disk answers many at once.
_FILES_PER_TASK = 16


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file; `path` is relative to the data folder, `sha256` is in hex."""

    path: str
    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece model and its number of pieces."""

    file: DataFile
    size: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records and the file of their lengths."""

    file: DataFile
    lengths: DataFile
    num_examples: int


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of one split of one language: files, in order, and numbers of tokens with EOS.

    Byte tokens are tokens that stand for one byte of a character that has no piece.
    """

    shards: tuple[Shard, ...]
    num_source_tokens: int
    num_target_tokens: int
    num_source_byte_tokens: int
    num_target_byte_tokens: int

    @property
    def num_examples(self) -> int:
        return sum(shard.num_examples for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Language:
    """One source language, or a language translated from English.

    Attributes:
        code: a BCP-47 code, or the source's name for it; en-de for German from English.
        records, text: keyed by split. Splits other than SPLITS have text alone.
        dropped: how many training pairs each cleaning rule dropped.
        repaired: how many training pairs had a broken encoding that was repaired.
        scripts: the ISO 15924 codes of the scripts of its sources.
    """

    code: str
    records: dict[str, Records]
    text: dict[str, DataFile]
    dropped: dict[str, int]
    repaired: int = 0
    scripts: tuple[str, ...] = ()

    def num_examples(self, split: str) -> int:
        """The number of records in a split, 0 if the language has none there."""
        return self.records[split].num_examples if split in self.records else 0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared data folder, with the settings and library versions of its preparation."""

    languages: tuple[Language, ...]
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    config: dict[str, Any]
    library_versions: dict[str, str]
    version: int = VERSION

    def language(self, code: str) -> Language:
        """One language; ValueError if the folder does not hold it."""
        by_code = {language.code: language for language in self.languages}
        if code not in by_code:
            raise ValueError(f"language {code!r} is not in the data: it holds {', '.join(by_code)}")
        return by_code[code]

    @property
    def vocabulary_files(self) -> tuple[DataFile, DataFile]:
        """The SentencePiece models of source and target."""
        return self.source_vocabulary.file, self.target_vocabulary.file

    def files(self) -> tuple[DataFile, ...]:
        """Every file that the manifest names."""
        found = [*self.vocabulary_files]
        for language in self.languages:
            for records in language.records.values():
                for shard in records.shards:
                    found += [shard.file, shard.lengths]
            found.extend(language.text.values())
        return tuple(found)


def describe_file(data_dir: str | os.PathLike[str], path: str) -> DataFile:
    """The size and hash of `data_dir/path`."""
    full_path = pathlib.Path(data_dir, path)
    found = full_path.stat()
    return DataFile(path, found.st_size, _sha256(str(full_path), found.st_mtime_ns))


def save(manifest: Manifest, data_dir: str | os.PathLike[str]) -> None:
    """Writes `data_dir/manifest.json` atomically."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True, ensure_ascii=False)
    atomic_file.write(pathlib.Path(data_dir, FILE_NAME), text + "\n")


def load(data_dir: str | os.PathLike[str]) -> Manifest:
    """Reads a folder's manifest, but looks at no other file: see `verify`.

    Raises ValueError if the folder or its manifest is missing, or if the manifest is damaged or of
    another version.
    """
    folder = storage.path(data_dir)
    path = folder / FILE_NAME
    with storage.errors(path, "read"):
        text = path.read_bytes() if path.exists() else None
        problem = f"no {FILE_NAME} in {folder}" if folder.is_dir() else f"no data folder {folder}"
    if text is None:
        raise ValueError(f"{problem}: prepare it with {_COMMAND}{folder}")
    return _parsed(path, text)


@functools.lru_cache(maxsize=1)  # A manifest of 100,000 files takes seconds to parse.
def _parsed(path: pathlib.Path, text: bytes) -> Manifest:
    try:
        fields = json.loads(text)
        if fields["version"] == VERSION:
            return json_records.read(Manifest, fields)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a manifest: {error!r}") from error
    raise ValueError(
        f"{path} has version {fields['version']}, expected {VERSION}: "
        f"prepare the data again with {_COMMAND}{path.parent}"
    )


def verify(
    data_dir: str | os.PathLike[str], files: Sequence[DataFile], *, contents: bool = True
) -> None:
    """Checks the sizes and, if `contents`, the SHA-256 of files that a manifest names.

    Raises ValueError for one that is missing or differs. A file is hashed again only if modified.
    Files in a bucket are copied to this machine, see storage.cached.
    """

    def check_some(start: int) -> None:
        for file in files[start : start + _FILES_PER_TASK]:
            _check(str(storage.cached(data_dir, file.path, file.sha256)), file, contents)

    # Waiting for a disk and hashing release the interpreter's lock.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(check_some, range(0, len(files), _FILES_PER_TASK)):
            pass


def _check(path: str, file: DataFile, contents: bool) -> None:
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is missing: the manifest names it, prepare the data again in an empty folder"
        ) from error
    if (size := found.st_size) != file.size_bytes:
        raise ValueError(
            f"{path} has {size} bytes, the manifest says {file.size_bytes}: prepare the data again "
            "in an empty folder"
        )
    if contents and (sha256 := _sha256(path, found.st_mtime_ns)) != file.sha256:
        raise ValueError(
            f"{path} has SHA-256 {sha256}, the manifest says {file.sha256}: the file was "
            "damaged, or comes from another preparation than the manifest"
        )


@functools.cache
def _sha256(path: str, mtime_ns: int) -> str:
    del mtime_ns
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
