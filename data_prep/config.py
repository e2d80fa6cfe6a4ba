"""The configuration of a build: a small TOML file of sources and settings.

    source_vocab_size = 64000
    target_vocab_size = 32000

    [scripts]                         # only if a language's text should not decide
    sr = ["Cyrl", "Latn"]

    [[sources]]
    format = "folder"                 # {train,dev,test}/<lang>-en.tsv[.gz], or <lang>-en.tsv[.gz]
    path = "m4bible"

    [[sources]]
    format = "moses"                  # also tsv, tmx, jsonl, po: see sources.py
    source = "europarl.de-en.de.gz"
    english = "europarl.de-en.en.gz"
    language = "de"
    split = "train"                   # if missing: distributed over train, dev and test

    [[sources]]
    format = "jsonl"
    path = "web/*.jsonl.gz"           # all files that match
    language = "pt-BR"
    source_field = "translation.pt"
    english_field = "translation.en"
    split = "train"

    [[sources]]
    format = "tfds"
    name = "ted_multi_translate"
    tfds_split = "train"
    languages = ["de", "zh"]          # if missing: all

Paths are relative to the file, or absolute.
"""

import dataclasses
import glob
import math
import pathlib
import tomllib
from collections.abc import Collection, Mapping, Set
from typing import Any

from data_prep import languages, sources
from data_prep.sources import JsonlFile, MosesFiles, PoFile, Source, TfdsSplit, TmxFile, TsvFile
from lingvo_gshard.input.manifest import SPLITS

MODEL_TYPES = ("bpe", "unigram")
# The formats whose `path` is a pattern, and those with other paths or none.
_FILE_FORMATS = {"tsv": TsvFile, "tmx": TmxFile, "jsonl": JsonlFile, "po": PoFile}
_OTHER_FORMATS = {"moses": MosesFiles, "tfds": TfdsSplit}
_FORMATS = ("folder", *_FILE_FORMATS, *_OTHER_FORMATS)
# The four special ids, a piece for each byte, and one character.
_MIN_VOCAB_SIZE = 4 + 256 + 1
# The least and the greatest value that is allowed.
_RANGES = {
    "source_vocab_size": (_MIN_VOCAB_SIZE, math.inf),
    "target_vocab_size": (_MIN_VOCAB_SIZE, math.inf),
    "character_coverage": (0.98, 1),  # The range that SentencePiece accepts.
    "max_vocab_sentences": (1, math.inf),
    "vocab_temperature": (1, math.inf),
    "max_pieces": (1, math.inf),
    "max_malformed_share": (0, 1),
    "held_out_share": (0, 0.5),
    "max_chars": (1, math.inf),
    "max_length_ratio": (1, math.inf),
    "pairs_per_chunk": (1, math.inf),
    "pairs_per_shard": (1, math.inf),
}


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """The settings of a build. Lengths in pieces include EOS.

    Attributes:
        source_vocab_size: pieces of the source vocabulary.
        target_vocab_size: pieces of the English vocabulary.
        model_type: SentencePiece's algorithm, bpe or unigram.
        character_coverage: share of the characters that get pieces; others are written as bytes.
            For three languages in Han among 71, 0.9995 makes 8 to 17 % of the pieces bytes, and
            0.9999 only 1 to 5 %; the other languages' sentences become 0.2 % longer with 64000
            pieces, and 4 % with 8000.
        max_vocab_sentences: number of sentences that the vocabularies learn from.
        vocab_temperature: T, where a language's share of these is proportional to n**(1/T).
        max_pieces: longer training pairs are dropped.
        max_malformed_share: share of a file's lines that may be malformed.
        held_out_share: share of a source without a split that goes to each of dev and test.
        max_chars: longest side of a training pair.
        max_length_ratio: largest ratio between the sides' lengths in characters.
        check_language: whether sentences that are surely in another language are dropped.
        scripts: ISO 15924 codes by language, if its text should not decide.
        pairs_per_chunk: number of pairs that a process holds in memory.
        pairs_per_shard: most pairs in a file of records, if a chunk does not have more. The writer
            of a file takes about 200 bytes of memory for each.
        seed: decides which sentences the vocabularies learn from.
    """

    source_vocab_size: int = 8000
    target_vocab_size: int = 4000
    model_type: str = "bpe"
    character_coverage: float = 0.9999
    max_vocab_sentences: int = 300_000
    vocab_temperature: float = 5.0
    max_pieces: int = 128
    max_malformed_share: float = 0.01
    held_out_share: float = 0.01
    max_chars: int = 1000
    max_length_ratio: float = 5.0
    check_language: bool = False
    scripts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    pairs_per_chunk: int = 32_768
    pairs_per_shard: int = 32_768
    seed: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.type
            fits = type(value) is kind or (kind is float and type(value) is int)
            if isinstance(kind, type) and not fits:  # `load` checks the scripts.
                raise ValueError(
                    f"{field.name} {value!r}: expected a value of type {kind.__name__}"
                )
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
                raise ValueError(f"{name} {value}: expected {expected}")
        if self.model_type not in MODEL_TYPES:
            raise ValueError(
                f"model_type {self.model_type!r}: expected one of {', '.join(MODEL_TYPES)}"
            )


def load(path: pathlib.Path, settings: Mapping[str, Any]) -> tuple[tuple[Source, ...], BuildConfig]:
    """Reads a configuration file; `settings` override it.

    Raises:
        ValueError: it is not TOML, has an unknown key or a bad value, or a file is missing.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
        tables = fields.pop("sources", [])
        if not isinstance(tables, list):
            raise ValueError("sources: expected tables, each under [[sources]]")
        config = _build_config(fields | dict(settings))
        found = tuple(source for table in tables for source in _sources(table, path.parent))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not found:
        raise ValueError(f"{path}: no [[sources]]")
    return found, config


def _build_config(fields: Mapping[str, Any]) -> BuildConfig:
    _check_keys("the file", fields, {field.name for field in dataclasses.fields(BuildConfig)})
    scripts_of = {
        languages.code(tag): languages.checked_scripts(codes)
        for tag, codes in fields.get("scripts", {}).items()
    }
    return BuildConfig(**{**fields, "scripts": scripts_of})


def _sources(table: Mapping[str, Any], folder: pathlib.Path) -> list[Source]:
    fields = dict(table)
    name = fields.pop("format", None)
    if name not in _FORMATS:
        raise ValueError(f"sources: format {name!r}: expected one of {', '.join(_FORMATS)}")
    if name == "folder":
        _check_keys("a folder", fields, {"path"}, ["path"])
        return list(sources.in_folder(folder / fields["path"]))
    split = fields.get("split", "train")
    if split not in SPLITS:
        raise ValueError(f"sources: split {split!r}: expected one of {', '.join(SPLITS)}")
    if "language" in fields:
        fields["language"] = languages.code(fields["language"])
    if "languages" in fields:
        fields["languages"] = tuple(map(languages.code, fields["languages"]))
    if name in _OTHER_FORMATS:
        paths = {"source", "english", "data_dir"} & fields.keys()
        return [_make(_OTHER_FORMATS[name], fields | {key: folder / fields[key] for key in paths})]
    found = sorted(glob.glob(str(folder / str(fields.get("path", ""))), recursive=True))
    files = [file for file in map(pathlib.Path, found) if file.is_file()]
    if not files:
        raise ValueError(f"sources: no file matches path {fields.get('path')!r}")
    return [_make(_FILE_FORMATS[name], fields | {"path": file}) for file in files]


def _make(cls: type[Source], fields: Mapping[str, Any]) -> Source:
    known = dataclasses.fields(cls)  # type: ignore[arg-type]  # All sources are data classes.
    required = [field.name for field in known if field.default is dataclasses.MISSING]
    _check_keys(cls.__name__, fields, {field.name for field in known}, required)
    return cls(**fields)


def _check_keys(
    owner: str, fields: Mapping[str, Any], known: Set[str], required: Collection[str] = ()
) -> None:
    unknown, missing = sorted(fields.keys() - known), sorted(set(required) - fields.keys())
    if unknown:
        raise ValueError(
            f"{owner} has no {', '.join(unknown)}: there is {', '.join(sorted(known))}"
        )
    if missing:
        raise ValueError(f"{owner} needs {', '.join(missing)}")
