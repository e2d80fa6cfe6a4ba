"""The manifest: what a prepared data folder holds.

`data_prep.build` writes `manifest.json` last, by an atomic rename, so a folder with a manifest is
complete and a folder without one is not. The library reads a data folder through its manifest
alone.

    DIR/manifest.json
        vocab/{source,target}.model                      SentencePiece models
        records/{split}/{language}-I-of-N.array_record   token ids, see example_codec.py
        records/{split}/{language}-I-of-N.lengths.npy    how many: [n, 2], of source and target
        text/{split}/{language}-en.tsv.gz                the raw text of dev and test
        report/                                          what was made of what, for people
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

FILE_NAME = "manifest.json"
VERSION = 3
SPLITS = ("train", "dev", "test")


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file of the folder: `path` is relative to it, `sha256` is in hex."""

    path: str
    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece model and the number of its pieces."""

    file: DataFile
    size: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of records, and that of their lengths."""

    file: DataFile
    lengths: DataFile
    num_examples: int


@dataclasses.dataclass(frozen=True)
class Records:
    """One split of one language: its files, in order, and their tokens, EOS included.

    Byte tokens are those of the tokens that stand for a byte of a character without a piece.
    """

    shards: tuple[Shard, ...]
    num_source_tokens: int
    num_target_tokens: int
    num_source_byte_tokens: int
    num_target_byte_tokens: int

    @property
    def num_examples(self) -> int:
        """The records of all files."""
        return sum(shard.num_examples for shard in self.shards)


@dataclasses.dataclass(frozen=True)
class Language:
    """One source language.

    `records` and `text` are keyed by split, `dropped` by cleaning rule; `repaired` counts the
    training pairs whose encoding was, `scripts` (ISO 15924) are what its sources are written in.
    """

    code: str
    records: dict[str, Records]
    text: dict[str, DataFile]
    dropped: dict[str, int]
    repaired: int = 0
    scripts: tuple[str, ...] = ()

    def num_examples(self, split: str) -> int:
        """The number of records of a split, 0 where the language has none."""
        return self.records[split].num_examples if split in self.records else 0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared data folder. `config` is the preparation's own, `library_versions` its tools'."""

    languages: tuple[Language, ...]
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    config: dict[str, Any]
    library_versions: dict[str, str]
    version: int = VERSION

    def language(self, code: str) -> Language:
        """Returns one language. Raises ValueError for a code that the folder does not hold."""
        for language in self.languages:
            if language.code == code:
                return language
        known = ", ".join(language.code for language in self.languages)
        raise ValueError(f"language {code!r} is not in the data: it holds {known}")

    def files(self) -> tuple[DataFile, ...]:
        """Every file that the manifest names."""
        found = [self.source_vocabulary.file, self.target_vocabulary.file]
        for language in self.languages:
            for records in language.records.values():
                for shard in records.shards:
                    found += [shard.file, shard.lengths]
            found.extend(language.text.values())
        return tuple(found)


def describe_file(data_dir: str | os.PathLike[str], path: str) -> DataFile:
    """Measures `data_dir/path` as it lies on disk."""
    full_path = pathlib.Path(data_dir, path)
    return DataFile(path, full_path.stat().st_size, _sha256(full_path))


def save(manifest: Manifest, data_dir: str | os.PathLike[str]) -> None:
    """Writes `data_dir/manifest.json`: the whole file or nothing."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True, ensure_ascii=False)
    unfinished = pathlib.Path(data_dir, FILE_NAME + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, pathlib.Path(data_dir, FILE_NAME))


def load(data_dir: str | os.PathLike[str]) -> Manifest:
    """Reads a folder's manifest and checks that its files are there and have their sizes.

    Raises:
        ValueError: no such folder, no manifest, not a manifest, another version, a file that is
            missing or of another size.
    """
    folder = pathlib.Path(data_dir)
    if not folder.is_dir():
        raise ValueError(f"no data folder {folder}: prepare it with {_command(folder)}")
    path = folder / FILE_NAME
    if not path.is_file():
        raise ValueError(f"no {FILE_NAME} in {folder}: prepare it with {_command(folder)}")
    manifest = _parse(path)
    for file in manifest.files():
        _check_present(folder, file)
    return manifest


def verify(data_dir: str | os.PathLike[str], files: Iterable[DataFile]) -> None:
    """Checks the SHA-256 of files of a manifest that was loaded from `data_dir`.

    A file that this process has verified before, and that has not been written to since, is not
    read again.

    Raises:
        ValueError: the first file that differs.
    """

    def check(file: DataFile) -> None:
        path = pathlib.Path(data_dir, file.path)
        found = _sha256_of_version(path, path.stat().st_mtime_ns)
        if found != file.sha256:
            raise ValueError(
                f"{path} has SHA-256 {found}, the manifest says {file.sha256}: "
                "it was damaged, or is of another preparation than the records"
            )

    # Hashing lets go of the interpreter's lock.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for _ in threads.map(check, files):
            pass


def _command(folder: pathlib.Path) -> str:
    return f"python -m data_prep.build --input=TEXT_DIR --out={folder}"


def _parse(path: pathlib.Path) -> Manifest:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields["version"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a manifest: {error!r}") from error
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version}, expected {VERSION}: "
            f"prepare the data again with {_command(path.parent)}"
        )
    try:
        return _manifest(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a manifest: {error!r}") from error


def _manifest(fields: dict[str, Any]) -> Manifest:
    fields = dict(fields)
    fields["languages"] = tuple(_language(entry) for entry in fields["languages"])
    for name in ("source_vocabulary", "target_vocabulary"):
        entry = fields[name]
        fields[name] = Vocabulary(DataFile(**entry["file"]), entry["size"])
    return Manifest(**fields)


def _language(entry: dict[str, Any]) -> Language:
    fields = dict(entry)
    fields["records"] = {split: _records(one) for split, one in entry["records"].items()}
    fields["text"] = {split: DataFile(**file) for split, file in entry["text"].items()}
    fields["scripts"] = tuple(entry["scripts"])
    return Language(**fields)


def _records(entry: dict[str, Any]) -> Records:
    shards = tuple(
        Shard(DataFile(**shard["file"]), DataFile(**shard["lengths"]), shard["num_examples"])
        for shard in entry["shards"]
    )
    return Records(**{**entry, "shards": shards})


def _check_present(folder: pathlib.Path, file: DataFile) -> None:
    path = folder / file.path
    if not path.is_file():
        raise ValueError(f"{path} is missing: the manifest names it, prepare the data again")
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise ValueError(
            f"{path} has {size_bytes} bytes, the manifest says {file.size_bytes}: "
            "prepare the data again"
        )


@functools.cache
def _sha256_of_version(path: pathlib.Path, mtime_ns: int) -> str:
    del mtime_ns  # Tells a file's versions apart.
    return _sha256(path)


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
