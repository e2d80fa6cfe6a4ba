"""Turns pairs, or documents, into a prepared data folder, step by step.

    survey   finds the scripts of each source's languages
    clean    repairs, normalizes and cleans each span of a source, in chunks
    select   drops held-out examples and duplicates from each language
    vocab    draws text from each language and trains the vocabularies
    records  tokenizes each shard
    report   writes tables, a picture and, last, the manifest

Each step is a function of the results of earlier steps, and divides its work into tasks that run in
parallel. Their results are files in OUT/.unfinished: a killed run continues where it stopped and
produces the same bytes in the end (runs.py). Each process has one chunk in memory, or the digests
of one group of chunks (deduplication.py) and of dev and test. The text for learning the
vocabularies is in memory, too.
"""

import collections
import dataclasses
import enum
import math
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from absl import logging

from data_prep import (
    accounts,
    deduplication,
    directions,
    encoding,
    given_vocabulary,
    report,
    runs,
    shards,
    source_cleaning,
    vocabulary,
)
from data_prep.config import BuildConfig
from data_prep.deduplication import Selected
from data_prep.directions import Direction
from data_prep.encoding import Encoded
from data_prep.engines import Engine
from data_prep.job import Corpus, Job, SplitKey
from data_prep.rules import Rule
from data_prep.source_cleaning import Cleaned
from data_prep.sources import Source
from data_prep.text_chunks import Chunk
from data_prep.vocabulary import Side
from lingvo_gshard.input import manifest
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import digests, lock, storage


class Step(enum.StrEnum):
    """The steps, in order; see above."""

    SURVEY = enum.auto()
    CLEAN = enum.auto()
    SELECT = enum.auto()
    VOCAB = enum.auto()
    RECORDS = enum.auto()
    REPORT = enum.auto()


_LOCK = "build.lock"
_UNFINISHED = ".unfinished"
# Renamed whenever the format of results changes: results of older versions are not continued.
_RESULTS = "results-4"
# The outputs of a build in its folder, besides the plan.
_OUTPUTS = ("records", "report", "text", "vocab", manifest.FILE_NAME, _UNFINISHED)


def run_through(
    last: Step,
    sources: Sequence[Source],
    out_dir: pathlib.Path,
    config: BuildConfig,
    engine: Engine,
) -> None:
    """Runs the steps up to `last` that are not done yet; the manifest is written last.

    Raises ValueError if text cannot be read, if no examples are left, if the folder was begun with
    another plan, if files of a finished folder are missing, or if another process builds in it.
    """
    for source in sources:
        directions.check(source, config.directions)
    with lock.held(out_dir, "builds in this folder", out_dir / _LOCK):
        runs.claim(out_dir, sources, config, _OUTPUTS)
        storage.publish(out_dir)  # So that this fails before the work, not after it.
        # Absolute, since results name files in it, and a later run may have another working folder.
        work_dir = (out_dir / _UNFINISHED).absolute()
        if (out_dir / manifest.FILE_NAME).exists():
            digests.verify(out_dir, manifest.load(out_dir).files(), contents=False)
            logging.info("%s: already prepared", out_dir)
            shutil.rmtree(work_dir, ignore_errors=True)
            return

        # Tasks whose results exist are not run again.
        if work_dir.exists():
            logging.info("%s: continuing where an earlier run stopped", out_dir)
        run = partial(runs.run_tasks, work_dir / _RESULTS, engine)
        given = None
        if config.vocabulary:
            given = given_vocabulary.read(
                config.vocabulary,
                out_dir,
                config.new_languages,
                config.language_tokens,
                Kind(config.kind),
            )
        _build(Job(sources, out_dir, work_dir, config, run, given), last)


def _build(job: Job, last: Step) -> None:
    """Runs the steps up to `last`. Tasks that an earlier run finished are not repeated."""
    scripts = survey(job)
    if job.given_languages is not None:
        job.given_languages.check(scripts)
    if last is Step.SURVEY:
        return

    corpus = clean(job, scripts)
    if last is Step.CLEAN:
        return

    selected = select(job, corpus)
    if last is Step.SELECT:
        return

    vocabularies = train_vocabularies(job, corpus, selected)
    if last is Step.VOCAB:
        return

    records = write_records(job, corpus, selected, vocabularies)
    if last is Step.RECORDS:
        return

    write_report(job, scripts, corpus, selected, vocabularies, records)


def survey(job: Job) -> dict[str, frozenset[str]]:
    """Finds the scripts of each language."""
    calls = {source: partial(source_cleaning.survey, source) for source in job.sources}
    surveys = job.run("survey", calls)
    return source_cleaning.scripts_by_language(surveys.values(), job.config.scripts)


def clean(job: Job, scripts: dict[str, frozenset[str]]) -> Corpus:
    """Cleans all sources. Raises ValueError if too many lines of one source are malformed."""
    folder = job.work_dir / "text"
    calls: dict[tuple[Source, range], Callable[[], Cleaned]] = {}
    for source in job.sources:
        for span in source.spans():
            calls[source, span] = partial(
                source_cleaning.clean, source, span, folder, scripts, job.config, job.normalization
            )

    # The limit of malformed lines applies to a whole source.
    spans_of: dict[Source, list[Cleaned]] = collections.defaultdict(list)
    for (source, _), cleaned in job.run("clean", calls).items():
        spans_of[source].append(cleaned)

    max_share = job.config.max_malformed_share
    sources = [source_cleaning.join(source, spans, max_share) for source, spans in spans_of.items()]
    chunks = _numbered([cleaned.chunks for cleaned in sources], job.config.pairs_per_chunk)
    corpus = Corpus(chunks=chunks)
    for cleaned in sources:
        corpus.add(cleaned)
    return corpus


def _numbered(
    chunks_by_source: Iterable[Iterable[Chunk]], pairs_per_block: int
) -> dict[SplitKey, list[Chunk]]:
    """Sorts the chunks of all sources by split and language, and numbers their pairs.

    Each source begins its own block (shards.py), so some positions are unused.
    """
    by_split: dict[SplitKey, list[Chunk]] = collections.defaultdict(list)
    ends: collections.Counter[SplitKey] = collections.Counter()
    for chunks in chunks_by_source:
        # Skip the rest of the last block of each split and language.
        for key, end in ends.items():
            num_blocks = math.ceil(end / pairs_per_block)
            ends[key] = num_blocks * pairs_per_block

        for chunk in chunks:
            key = (chunk.split, chunk.language)
            by_split[key].append(dataclasses.replace(chunk, start=ends[key]))
            ends[key] += chunk.num_examples
    return dict(sorted(by_split.items()))


def select(job: Job, corpus: Corpus) -> dict[str, Selected]:
    """Decides which training examples of each language are kept.

    Raises ValueError if none are kept.
    """
    selected = deduplication.select(
        corpus.train,
        corpus.held_out,
        job.work_dir / "select",
        job.config.pairs_per_chunk,
        job.run,
    )
    if not any(of_language.block_sizes.total() for of_language in selected.values()):
        raise accounts.nothing_left(
            job.kind, corpus.dropped + accounts.sum_of_dropped(selected.values())
        )
    return selected


def train_vocabularies(
    job: Job, corpus: Corpus, selected: dict[str, Selected]
) -> dict[Side, manifest.Vocabulary]:
    """Draws text from all languages, and trains the vocabularies of all sides on it.

    A given vocabulary is used for all sides.
    """
    if job.given is not None:
        return {side: job.given.vocabulary for side in vocabulary.SIDES[job.kind]}

    config = job.config
    counts = [of_language.block_sizes.total() for of_language in selected.values()]
    quotas = vocabulary.quotas(counts, config.max_vocab_sentences, config.vocab_temperature)
    if job.kind is Kind.TEXT:
        # A few documents may be most of the text, so no document is drawn twice.
        quotas = list(map(min, quotas, counts))

    # A task draws from each group of chunks; all groups together reach the language's quota.
    folder = job.work_dir / "drawn"
    folder.mkdir(exist_ok=True)
    draw_calls: dict[tuple[str, pathlib.Path], Callable[[], None]] = {}
    for (language, chunks), count, quota in zip(corpus.train.items(), counts, quotas, strict=True):
        for i, group in enumerate(deduplication.groups(chunks)):
            path = folder / f"{language}-{i:05d}.tsv"
            draw_calls[language, path] = partial(
                vocabulary.draw, group, count, quota, config.seed, path
            )
    job.run("draw", draw_calls)

    # The two sides are trained at the same time, on the same pairs.
    drawn = list(draw_calls)
    train_calls = {
        side: partial(vocabulary.train_drawn, drawn, config, job.out_dir, side)
        for side in vocabulary.SIDES[job.kind]
    }
    return job.run("vocab", train_calls)


def write_records(
    job: Job,
    corpus: Corpus,
    selected: dict[str, Selected],
    vocabularies: dict[Side, manifest.Vocabulary],
) -> dict[SplitKey, Encoded]:
    """Writes the records of all splits; returns them by split and direction's code.

    Raises ValueError if no training example is short enough.
    """
    config = job.config
    models = [job.out_dir / of_side.file.path for of_side in vocabularies.values()]

    calls: dict[tuple[str, str, int], Callable[[], Encoded]] = {}
    for split, direction, chunks in _splits_by_direction(job, corpus):
        if split not in manifest.SPLITS:  # Other splits are only decoded, as text.
            continue
        if split == "train":
            sizes = selected[direction.language].block_sizes
        else:
            sizes = shards.block_sizes(chunks, config.pairs_per_chunk)

        # File names contain the number of files, so divide before any file is written.
        divided = shards.divide(chunks, sizes, config.pairs_per_chunk, config.pairs_per_shard)
        for i, shard in enumerate(divided):
            name = f"records/{split}/{direction.code}-{i:05d}-of-{len(divided):05d}"
            calls[split, direction.code, i] = partial(
                encoding.encode,
                shard,
                direction,
                job.out_dir,
                name,
                models,
                job.max_pieces,
            )

    # Add up statistics and drops by split and direction, instead of by file.
    records: dict[SplitKey, Encoded] = collections.defaultdict(Encoded)
    for (split, code, _), encoded in job.run("records", calls).items():
        records[split, code] += encoded

    of_train = [encoded for (split, _), encoded in records.items() if split == "train"]
    if not any(encoded.target.lengths for encoded in of_train):
        raise accounts.nothing_left(job.kind, accounts.sum_of_dropped(records.values()))
    return dict(records)


def write_report(
    job: Job,
    scripts: dict[str, frozenset[str]],
    corpus: Corpus,
    selected: dict[str, Selected],
    vocabularies: dict[Side, manifest.Vocabulary],
    records: dict[SplitKey, Encoded],
) -> None:
    """Writes the raw text, the report and, when everything else is complete, the manifest."""
    texts = _write_texts(job, corpus)
    dropped = corpus.dropped + accounts.sum_of_dropped(selected.values())

    described: list[manifest.Language] = []
    for code in sorted(corpus.read):
        of_language = job.directions_of(code, corpus)
        if not of_language:
            # The language lost all of its examples, or lacks training text in this target.
            of_language = [Direction(code)]
            dropped[code, Rule.NO_TARGET] = corpus.num_examples(code)
        for direction in of_language:
            described.append(accounts.entry(direction, scripts, corpus, dropped, records, texts))

    of_train = [records.get(("train", language.code), Encoded()) for language in described]
    report.write(zip(described, of_train, strict=True), job.out_dir / "report", job.kind)

    # The manifest marks the folder as complete, so everything else must be done before.
    for path in job.out_dir.rglob("*.partial"):  # Left behind by killed processes.
        path.unlink(missing_ok=True)
    config: dict[str, Any] = job.config.settings()
    config["sources"] = [str(source) for source in job.sources]
    of_sides = list(vocabularies.values())  # Documents have one vocabulary, for both sides.
    data = manifest.Manifest(
        languages=tuple(described),
        source_vocabulary=of_sides[0],
        target_vocabulary=of_sides[-1],
        config=config,
        library_versions=runs.library_versions(),
        kind=job.kind,
    )
    manifest.save(data, job.out_dir)
    shutil.rmtree(job.work_dir, ignore_errors=True)


def _write_texts(job: Job, corpus: Corpus) -> dict[SplitKey, digests.File]:
    """Writes the raw text of every split but train."""
    calls: dict[SplitKey, Callable[[], digests.File]] = {}
    for split, direction, chunks in _splits_by_direction(job, corpus):
        if split != "train":
            calls[split, direction.code] = partial(
                encoding.write_text, chunks, split, direction, job.out_dir, job.kind
            )
    return job.run("text", calls)


def _splits_by_direction(job: Job, corpus: Corpus) -> Iterator[tuple[str, Direction, list[Chunk]]]:
    """Yields each split of each language in each of its directions, with its chunks."""
    for (split, language), chunks in corpus.chunks.items():
        for direction in job.directions_of(language, corpus):
            yield split, direction, chunks
