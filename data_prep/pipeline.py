"""From a folder of parallel text to a prepared data folder, step by step.

    find -> hold out -> clean (spilled, a language at a time) -> vocabularies -> records -> manifest

Memory holds one language's pairs, the keys of dev and test, and the text that the vocabularies
learn from.
"""

import collections
import dataclasses
import importlib.metadata
import pathlib
import random
import shutil
from collections.abc import Iterator, Sequence

import tqdm
from absl import logging

from data_prep import cleaning, corpus, encoding, records, tsv, vocabulary
from lingvo_gshard.input import manifest

_UNFINISHED = ".unfinished"
_HELD_OUT_SPLITS = ("dev", "test")
_LIBRARIES = ("sentencepiece", "array_record")


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """What a prepared folder is made with. Lengths in pieces include EOS."""

    source_vocab_size: int = 8000
    target_vocab_size: int = 4000
    model_type: str = "bpe"
    character_coverage: float = 0.9995
    max_vocab_sentences: int = 300_000
    vocab_temperature: float = 5.0
    max_pieces: int = 128
    max_malformed_share: float = 0.01
    held_out_share: float = 0.01
    max_chars: int = 1000
    max_length_ratio: float = 5.0
    seed: int = 1


def build(input_dir: pathlib.Path, out_dir: pathlib.Path, config: BuildConfig) -> manifest.Manifest:
    """Prepares `input_dir` into `out_dir`; the manifest is written last.

    Raises:
        ValueError: no text, text that cannot be read, or nothing left to train on.
    """
    text = corpus.find(input_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / manifest.FILE_NAME).unlink(missing_ok=True)
    work_dir = out_dir / _UNFINISHED
    shutil.rmtree(work_dir, ignore_errors=True)
    dropped: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    if text.is_flat:
        text, num_malformed = corpus.deal_out(
            text, work_dir / "split", config.held_out_share, config.max_malformed_share
        )
        for language, count in num_malformed.items():
            dropped[language]["malformed"] += count
    made = _Build(text, out_dir, work_dir / "clean", config, dropped).run()
    manifest.save(made, out_dir)
    shutil.rmtree(work_dir, ignore_errors=True)
    return made


@dataclasses.dataclass(frozen=True)
class _Build:
    """One run of the steps after the corpus is split. `dropped` is keyed by language and rule."""

    text: corpus.Corpus
    out_dir: pathlib.Path
    clean_dir: pathlib.Path
    config: BuildConfig
    dropped: dict[str, collections.Counter[str]]

    def run(self) -> manifest.Manifest:
        texts = self._hold_out()
        counts = self._clean_train()
        logging.info("cleaned: %d training pairs of %d languages", sum(counts), len(counts))
        vocabularies = self._train_vocabularies(counts)
        written = self._write_records()
        return manifest.Manifest(
            languages=tuple(
                manifest.Language(
                    code=code,
                    records=written[code],
                    text=texts[code],
                    dropped={k: n for k, n in sorted(self.dropped[code].items()) if n},
                )
                for code in self.text.languages
            ),
            source_vocabulary=vocabularies["source"],
            target_vocabulary=vocabularies["target"],
            config=dataclasses.asdict(self.config),
            library_versions={name: importlib.metadata.version(name) for name in _LIBRARIES},
        )

    def _hold_out(self) -> dict[str, dict[str, manifest.DataFile]]:
        """Copies dev and test as raw text, and spills them normalized."""
        texts: dict[str, dict[str, manifest.DataFile]] = {c: {} for c in self.text.languages}
        for split in _HELD_OUT_SPLITS:
            for code, path in self.text.files.get(split, {}).items():
                pairs = self._read(code, path)
                relative = f"text/{split}/{code}-en.tsv.gz"
                tsv.write(self.out_dir / relative, pairs)
                texts[code][split] = manifest.describe_file(self.out_dir, relative)
                self._spill(split, code, [cleaning.normalize_pair(pair) for pair in pairs])
        return texts

    def _clean_train(self) -> list[int]:
        """Cleans and spills each language; returns the pairs left of each language of train."""
        english = frozenset(
            cleaning.english_key(pair.english)
            for split in _HELD_OUT_SPLITS
            for code in self.text.files.get(split, {})
            for pair in self._spilled(split, code)
        )
        limits = cleaning.Limits(self.config.max_chars, self.config.max_length_ratio)
        counts = []
        for code, path in tqdm.tqdm(self.text.files["train"].items(), "cleaning", disable=None):
            held_out = cleaning.HeldOut(english, self._held_out_sources(code))
            cleaned = cleaning.clean(self._read(code, path), held_out, limits)
            self.dropped[code].update(cleaned.dropped)
            self._spill("train", code, cleaned.pairs)
            counts.append(len(cleaned.pairs))
        if not sum(counts):
            raise ValueError(f"no training pair of {self.text.folder} is left after cleaning")
        return counts

    def _held_out_sources(self, code: str) -> frozenset[str]:
        return frozenset(
            cleaning.source_key(pair.source)
            for split in _HELD_OUT_SPLITS
            if code in self.text.files.get(split, {})
            for pair in self._spilled(split, code)
        )

    def _train_vocabularies(self, counts: Sequence[int]) -> dict[str, manifest.Vocabulary]:
        sizes = {"source": self.config.source_vocab_size, "target": self.config.target_vocab_size}
        drawn = self._draw(counts)
        # Many languages share their English; once is enough.
        sentences = {
            "source": [pair.source for pair in drawn],
            "target": list(dict.fromkeys(pair.english for pair in drawn)),
        }
        made = {}
        for name, size in sizes.items():
            logging.info("training the %s vocabulary: %d sentences", name, len(sentences[name]))
            path = f"vocab/{name}.model"
            trained_size = vocabulary.train(
                name, sentences[name], self._vocabulary_config(size), self.out_dir / path
            )
            file = manifest.describe_file(self.out_dir, path)
            made[name] = manifest.Vocabulary(file, trained_size)
        return made

    def _draw(self, counts: Sequence[int]) -> list[tsv.Pair]:
        quotas = vocabulary.quotas(counts, self._vocabulary_config(0))
        rng = random.Random(self.config.seed)
        drawn: list[tsv.Pair] = []
        for code, quota in zip(self.text.files["train"], quotas, strict=True):
            drawn.extend(vocabulary.draw(list(self._spilled("train", code)), quota, rng))
        return drawn

    def _vocabulary_config(self, size: int) -> vocabulary.VocabularyConfig:
        return vocabulary.VocabularyConfig(
            size=size,
            model_type=self.config.model_type,
            character_coverage=self.config.character_coverage,
            max_sentences=self.config.max_vocab_sentences,
            temperature=self.config.vocab_temperature,
        )

    def _write_records(self) -> dict[str, dict[str, manifest.Records]]:
        encoder = encoding.PairEncoder(
            self.out_dir / "vocab/source.model", self.out_dir / "vocab/target.model"
        )
        written: dict[str, dict[str, manifest.Records]] = {c: {} for c in self.text.languages}
        for split, files in self.text.files.items():
            for code in tqdm.tqdm(files, f"records of {split}", disable=None):
                encoded = encoder.encode(list(self._spilled(split, code)))
                if split == "train":
                    encoded = self._drop_long(code, encoded)
                written[code][split] = self._write(split, code, encoded)
        return written

    def _drop_long(
        self, code: str, encoded: list[encoding.EncodedPair]
    ) -> list[encoding.EncodedPair]:
        short = [pair for pair in encoded if pair.max_pieces <= self.config.max_pieces]
        self.dropped[code]["too_many_pieces"] += len(encoded) - len(short)
        return short

    def _write(
        self, split: str, code: str, encoded: Sequence[encoding.EncodedPair]
    ) -> manifest.Records:
        relative = f"records/{split}/{code}.array_record"
        examples = ((pair.source_ids, pair.target_ids) for pair in encoded)
        counts = records.write(self.out_dir / relative, examples)
        file = manifest.describe_file(self.out_dir, relative)
        return manifest.Records(file, **dataclasses.asdict(counts))

    def _read(self, code: str, path: pathlib.Path) -> list[tsv.Pair]:
        text = tsv.read(path, self.config.max_malformed_share)
        self.dropped[code]["malformed"] += text.num_malformed
        return text.pairs

    def _spill(self, split: str, code: str, pairs: Sequence[tsv.Pair]) -> None:
        path = self.clean_dir / split / code
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{pair.source}\t{pair.english}\n" for pair in pairs)

    def _spilled(self, split: str, code: str) -> Iterator[tsv.Pair]:
        with (self.clean_dir / split / code).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                source, english = line.rstrip("\n").split("\t")
                yield tsv.Pair(source, english)
