"""Turns parallel text into a prepared data folder, step by step.

    survey   finds the scripts that each source's languages are written in
    clean    repairs, normalizes and cleans each source, in chunks
    select   drops held-out pairs and duplicates from each language
    vocab    draws text from each language and trains the two vocabularies
    records  tokenizes each shard
    report   writes tables, a picture and, last, the manifest

Each step is a number of tasks that run in parallel (tasks.py). Their results are files in
OUT/.unfinished: a killed run continues where it stopped and ends with the same bytes, as long as
its plan is the same (plan.py). In memory are one chunk for each process, the digests of dev and
test, and the text that the vocabularies learn from.
"""

import collections
import dataclasses
import enum
import itertools
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

from absl import logging

from data_prep import (
    chunks,
    encoding,
    languages,
    plan,
    reading,
    report,
    selection,
    sources,
    tasks,
    tsv,
    vocabulary,
)
from data_prep.chunks import Chunk
from data_prep.cleaning import Rule
from data_prep.config import BuildConfig
from data_prep.sources import Source
from data_prep.vocabulary import Side
from lingvo_gshard.input import manifest


class Step(enum.StrEnum):
    """The steps, in order."""

    SURVEY = "survey"
    CLEAN = "clean"
    SELECT = "select"
    VOCAB = "vocab"
    RECORDS = "records"
    REPORT = "report"


_UNFINISHED = ".unfinished"
_MADE = ("records", "report", "text", "vocab", manifest.FILE_NAME, _UNFINISHED)
_HELD_OUT_SPLITS = ("dev", "test")


def build(
    input_dir: pathlib.Path, out_dir: pathlib.Path, config: BuildConfig, num_workers: int = 1
) -> manifest.Manifest:
    """Prepares a corpus folder (sources.py); see `prepare`."""
    return prepare(sources.in_folder(input_dir), out_dir, config, num_workers)


def prepare(
    found: Sequence[Source], out_dir: pathlib.Path, config: BuildConfig, num_workers: int = 1
) -> manifest.Manifest:
    """Prepares sources into `out_dir` and returns the manifest, which is written last.

    Raises:
        ValueError: text cannot be read, no pair is left to train on, or the folder has another
            plan.
    """
    run_through(Step.REPORT, found, out_dir, config, num_workers)
    shutil.rmtree(out_dir / _UNFINISHED, ignore_errors=True)
    return manifest.load(out_dir)


def run_through(
    last: Step,
    found: Sequence[Source],
    out_dir: pathlib.Path,
    config: BuildConfig,
    num_workers: int,
) -> None:
    """Runs the steps up to `last` that are not done yet. Raises ValueError as `prepare`."""
    plan.claim(out_dir, plan.text(found, config), _MADE)
    if (out_dir / manifest.FILE_NAME).exists():
        logging.info("%s: is prepared already", out_dir)
        return
    work_dir = out_dir / _UNFINISHED
    if work_dir.exists():
        logging.info("%s: continuing where an earlier run stopped", out_dir)
    runner = tasks.Runner(work_dir / "results", num_workers)
    steps = _Steps(found, out_dir, work_dir, config, runner)
    for step in Step:
        getattr(steps, step)  # Runs it, as each step is a cached property.
        if step is last:
            return


def _write_text(chunks: Sequence[Chunk], data_dir: pathlib.Path, path: str) -> manifest.DataFile:
    """Writes the raw text of chunks of dev or test to `path` in `data_dir`."""
    tsv.write(data_dir / path, itertools.chain.from_iterable(chunk.pairs() for chunk in chunks))
    return manifest.describe_file(data_dir, path)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The results of the steps, and what lies between. Each is computed when it is first needed."""

    sources: Sequence[Source]
    out_dir: pathlib.Path
    work_dir: pathlib.Path
    config: BuildConfig
    runner: tasks.Runner

    @cached_property
    def survey(self) -> dict[str, frozenset[str]]:
        """The scripts of each language."""
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        calls = [partial(reading.survey, source) for source in self.sources]
        for surveyed in self.runner.run("survey", calls):
            for code, found in surveyed.items():
                counts[code] += found
        return {
            code: languages.own_scripts(code, found, self.config.scripts)
            for code, found in counts.items()
        }

    @cached_property
    def clean(self) -> list[reading.Cleaned]:
        """The cleaned chunks of each source."""
        folder = self.work_dir / "text"
        calls = [
            partial(reading.clean, source, folder, f"{index:05d}", self.survey, self.config)
            for index, source in enumerate(self.sources)
        ]
        return self.runner.run("clean", calls)

    @cached_property
    def chunks(self) -> dict[str, dict[str, list[Chunk]]]:
        """The chunks by split and language, in the order of the sources."""
        found: dict[str, dict[str, list[Chunk]]] = {split: {} for split in manifest.SPLITS}
        for chunk in itertools.chain.from_iterable(one.chunks for one in self.clean):
            found[chunk.split].setdefault(chunk.language, []).append(chunk)
        return {split: dict(sorted(chunks.items())) for split, chunks in found.items()}

    @cached_property
    def select(self) -> dict[str, selection.Selected]:
        """What is selected of each language's training text."""
        folder = self.work_dir / "held_out"
        by_language = [one for split in _HELD_OUT_SPLITS for one in self.chunks[split].values()]
        everything = list(itertools.chain.from_iterable(by_language))
        english = selection.save_held_out(everything, chunks.ENGLISH, folder / "english.npy")
        calls = []
        for code, members in self.chunks["train"].items():
            own = [chunk for chunk in everything if chunk.language == code]
            own_sources = selection.save_held_out(own, chunks.SOURCE, folder / f"{code}.npy")
            calls.append(partial(selection.select, members, english, own_sources))
        found = self.runner.run("select", calls)
        if not sum(sum(one.num_kept) for one in found):
            by_cleaning = itertools.chain(*(one.dropped.values() for one in self.clean))
            dropped = [*by_cleaning, *(one.dropped for one in found)]
            raise _nothing_left(sum(dropped, collections.Counter[Rule]()))
        return dict(zip(self.chunks["train"], found, strict=True))

    @cached_property
    def drawn(self) -> list[pathlib.Path]:
        """The text of each language that the vocabularies learn from."""
        counts = {code: sum(one.num_kept) for code, one in self.select.items()}
        quotas = vocabulary.quotas(
            list(counts.values()), self.config.max_vocab_sentences, self.config.vocab_temperature
        )
        folder = self.work_dir / "drawn"
        folder.mkdir(exist_ok=True)
        calls = []
        for (code, count), quota in zip(counts.items(), quotas, strict=True):
            members, path = self.chunks["train"][code], folder / f"{code}.tsv"
            calls.append(partial(vocabulary.draw, members, count, quota, self.config.seed, path))
        return self.runner.run("draw", calls)

    @cached_property
    def vocab(self) -> dict[Side, manifest.Vocabulary]:
        """The two vocabularies."""
        calls = [
            partial(vocabulary.train_drawn, side, self.drawn, self.config, self._model(side))
            for side in Side
        ]
        return {
            side: manifest.Vocabulary(manifest.describe_file(self.out_dir, _model_path(side)), size)
            for side, size in zip(Side, self.runner.run("vocab", calls), strict=True)
        }

    @cached_property
    def records(self) -> dict[tuple[str, str], list[encoding.Encoded]]:
        """The shards of each (split, language)."""
        assert self.vocab
        calls = [
            (key, call)
            for split, by_language in self.chunks.items()
            for key in ((split, code) for code in by_language)
            for call in self._encode_calls(*key)
        ]
        results = self.runner.run("records", [call for _, call in calls])
        found: dict[tuple[str, str], list[encoding.Encoded]] = collections.defaultdict(list)
        for (key, _), result in zip(calls, results, strict=True):
            found[key].append(result)
        of_train = [one for (split, _), made in found.items() if split == "train" for one in made]
        if not any(one.shard.num_examples for one in of_train):
            num_too_long = sum(one.num_too_long for one in of_train)
            raise _nothing_left(collections.Counter({Rule.TOO_MANY_PIECES: num_too_long}))
        return dict(found)

    @cached_property
    def texts(self) -> dict[tuple[str, str], manifest.DataFile]:
        """The raw text of each (split, language) of dev and test."""
        calls = {
            (split, code): partial(_write_text, one, self.out_dir, f"text/{split}/{code}-en.tsv.gz")
            for split in _HELD_OUT_SPLITS
            for code, one in self.chunks[split].items()
        }
        return dict(zip(calls, self.runner.run("text", list(calls.values())), strict=True))

    @cached_property
    def report(self) -> None:
        """Writes the report and, when everything else is complete, the manifest."""
        dropped = (one.dropped for one in self.clean)
        codes = set(self.survey).union(*dropped, *self.chunks.values())
        described = tuple(map(self._language, sorted(codes)))
        reports = [
            report.LanguageReport(one, *(self._statistics(one.code, side) for side in Side))
            for one in described
        ]
        report.write(reports, self.out_dir / "report")
        made = manifest.Manifest(
            languages=described,
            source_vocabulary=self.vocab[Side.SOURCE],
            target_vocabulary=self.vocab[Side.TARGET],
            config=dataclasses.asdict(self.config) | {"sources": list(map(str, self.sources))},
            library_versions=plan.library_versions(),
        )
        manifest.save(made, self.out_dir)

    def _encode_calls(self, split: str, code: str) -> list[Callable[[], encoding.Encoded]]:
        members = self.chunks[split][code]
        num_kept, max_pieces = [chunk.num_pairs for chunk in members], math.inf
        if split == "train":
            num_kept, max_pieces = self.select[code].num_kept, self.config.max_pieces
        models = (self._model(Side.SOURCE), self._model(Side.TARGET))
        shards = list(_shards(members, num_kept, self.config.pairs_per_shard))
        calls: list[Callable[[], encoding.Encoded]] = []
        for index, shard in enumerate(shards):
            name = f"records/{split}/{code}-{index:05d}-of-{len(shards):05d}"
            calls.append(partial(encoding.encode, shard, self.out_dir, name, models, max_pieces))
        return calls

    def _language(self, code: str) -> manifest.Language:
        dropped: collections.Counter[Rule] = collections.Counter()
        for cleaned in self.clean:
            dropped += cleaned.dropped.get(code, collections.Counter())
        if code in self.select:
            dropped += self.select[code].dropped
        shards = {split: self.records.get((split, code), []) for split in manifest.SPLITS}
        dropped[Rule.TOO_MANY_PIECES] = sum(one.num_too_long for one in shards["train"])
        return manifest.Language(
            code=code,
            records={split: _records(made) for split, made in shards.items() if made},
            text={split: file for (split, other), file in self.texts.items() if other == code},
            dropped={str(rule): number for rule, number in sorted(dropped.items()) if number},
            repaired=sum(cleaned.repaired[code] for cleaned in self.clean),
            scripts=tuple(sorted(self.survey.get(code, ()))),
        )

    def _statistics(self, code: str, side: Side) -> encoding.SideStatistics:
        shards = self.records.get(("train", code), [])
        return sum((getattr(shard, side) for shard in shards), encoding.NOTHING)

    def _model(self, side: Side) -> pathlib.Path:
        return self.out_dir / _model_path(side)


def _nothing_left(dropped: collections.Counter[Rule]) -> ValueError:
    counts = ", ".join(f"{number} {rule}" for rule, number in dropped.most_common())
    if not counts:
        return ValueError("the sources hold no training pair")
    return ValueError(f"no training pair is left: dropped {counts}")


def _model_path(side: Side) -> str:
    return f"vocab/{side}.model"


def _shards(
    members: Sequence[Chunk], num_kept: Sequence[int], pairs_per_shard: int
) -> Iterator[list[Chunk]]:
    """Groups chunks into shards of at most `pairs_per_shard` pairs, or of one chunk."""
    shard: list[Chunk] = []
    num_pairs = 0
    for chunk, number in zip(members, num_kept, strict=True):
        if shard and num_pairs + number > pairs_per_shard:
            yield shard
            shard, num_pairs = [], 0
        shard.append(chunk)
        num_pairs += number
    if shard:
        yield shard


def _records(made: Sequence[encoding.Encoded]) -> manifest.Records:
    return manifest.Records(
        shards=tuple(one.shard for one in made),
        num_source_tokens=sum(one.source.num_pieces for one in made),
        num_target_tokens=sum(one.target.num_pieces for one in made),
        num_source_byte_tokens=sum(one.source.num_byte_pieces for one in made),
        num_target_byte_tokens=sum(one.target.num_byte_pieces for one in made),
    )
