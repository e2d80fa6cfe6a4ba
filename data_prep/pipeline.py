"""Turns parallel text into a prepared data folder, step by step.

    survey   finds the scripts that each source's languages are written in
    clean    repairs, normalizes and cleans each span of a source, in chunks
    select   drops held-out pairs and duplicates from each language
    vocab    draws text from each language and trains the two vocabularies
    records  tokenizes each shard
    report   writes tables, a picture and, last, the manifest

Each step is a number of tasks that run in parallel. Their results are files in OUT/.unfinished: a
killed run continues where it stopped and ends with the same bytes (runs.py). In memory are one
chunk, or the digests of one group of chunks (selection.py), for each process, those of dev and
test, and the text that the vocabularies learn from.
"""

import collections
import dataclasses
import enum
import itertools
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial

from absl import logging

from data_prep import chunks, directions, encoding, report, runs, selection, shards, vocabulary
from data_prep.chunks import Chunk, Cleaned, Dropped
from data_prep.config import BuildConfig
from data_prep.directions import Direction
from data_prep.engines import Engine
from data_prep.sources import Source
from lingvo_gshard.files import digests, storage
from lingvo_gshard.input import manifest

# In order; see above.
Step = enum.StrEnum("Step", ["SURVEY", "CLEAN", "SELECT", "VOCAB", "RECORDS", "REPORT"])
_UNFINISHED = ".unfinished"
_MADE = ("records", "report", "text", "vocab", manifest.FILE_NAME, _UNFINISHED)
_Key = tuple[str, str]  # A split, and a language or direction.


def run_through(
    last: Step,
    found: Sequence[Source],
    out_dir: pathlib.Path,
    config: BuildConfig,
    engine: Engine,
) -> None:
    """Runs the steps up to `last` that are not done yet; the manifest is written last of all.

    ValueError for unreadable text, no pair left, another plan's folder, or files that are gone.
    """
    runs.claim(out_dir, runs.plan(found, config), _MADE)
    storage.publish(out_dir)  # Fails before the work is done, not after it.
    # Results name its files, and a run in another working directory may continue.
    work_dir = (out_dir / _UNFINISHED).absolute()
    if (out_dir / manifest.FILE_NAME).exists():
        digests.verify(out_dir, manifest.load(out_dir).files(), contents=False)
        logging.info("%s: is prepared already", out_dir)
        shutil.rmtree(work_dir, ignore_errors=True)
        return
    if work_dir.exists():
        logging.info("%s: continuing where an earlier run stopped", out_dir)
    run = partial(runs.run_tasks, work_dir / "results", engine)
    steps = _Steps(found, out_dir, work_dir, config, run)
    for step in Step:
        getattr(steps, step)  # Runs it, as each step is a cached property.
        if step is last:
            return


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The results of the steps, and what lies between. Each is computed when it is first needed."""

    sources: Sequence[Source]
    out_dir: pathlib.Path
    work_dir: pathlib.Path
    config: BuildConfig
    run: selection.Runner

    @cached_property
    def survey(self) -> dict[str, frozenset[str]]:
        """The scripts of each language."""
        calls = {source: partial(chunks.survey, source) for source in self.sources}
        return chunks.scripts(self.run("survey", calls).values(), self.config.scripts)

    @cached_property
    def clean(self) -> list[Cleaned]:
        """What each source became."""
        folder = self.work_dir / "text"
        calls = {
            (source, span): partial(chunks.clean, source, span, folder, self.survey, self.config)
            for source in self.sources
            for span in source.spans()
        }
        parts: dict[Source, list[Cleaned]] = collections.defaultdict(list)
        for (source, _), cleaned in self.run("clean", calls).items():
            parts[source].append(cleaned)
        max_share = self.config.max_malformed_share
        return [chunks.join(source, part, max_share) for source, part in parts.items()]

    @cached_property
    def chunks(self) -> dict[_Key, list[Chunk]]:
        """The chunks in the order of the sources."""
        found: dict[_Key, list[Chunk]] = collections.defaultdict(list)
        ends: collections.Counter[_Key] = collections.Counter()
        for one in self.clean:
            for key, end in ends.items():  # A source begins a block of its own.
                ends[key] = end + -end % self.config.pairs_per_chunk
            for chunk in one.chunks:
                key = chunk.split, chunk.language
                found[key].append(dataclasses.replace(chunk, start=ends[key]))
                ends[key] += chunk.num_pairs
        return dict(sorted(found.items()))

    @cached_property
    def train(self) -> dict[str, list[Chunk]]:
        """The chunks of each language's training text."""
        return {code: members for (split, code), members in self.chunks.items() if split == "train"}

    @cached_property
    def select(self) -> dict[str, selection.Selected]:
        every_chunk = itertools.chain.from_iterable(self.chunks.values())
        held_out = [chunk for chunk in every_chunk if chunk.split != "train"]
        folder, size = self.work_dir / "select", self.config.pairs_per_chunk
        found = selection.select(self.train, held_out, folder, size, self.run)
        if not any(one.block_sizes.total() for one in found.values()):
            raise _nothing_left([*self.clean, *found.values()])
        return found

    @cached_property
    def drawn(self) -> list[tuple[str, pathlib.Path]]:
        """The files of the text that the vocabularies learn from, each with its language."""
        config = self.config
        counts = [one.block_sizes.total() for one in self.select.values()]
        quotas = vocabulary.quotas(counts, config.max_vocab_sentences, config.vocab_temperature)
        folder = self.work_dir / "drawn"
        folder.mkdir(exist_ok=True)
        calls = {}
        for (code, members), count, quota in zip(self.train.items(), counts, quotas, strict=True):
            for i, group in enumerate(selection.groups(members)):
                path = folder / f"{code}-{i:05d}.tsv"
                calls[code, path] = partial(vocabulary.draw, group, count, quota, config.seed, path)
        self.run("draw", calls)
        return list(calls)

    @cached_property
    def vocab(self) -> dict[vocabulary.Side, manifest.Vocabulary]:
        train = partial(vocabulary.train_drawn, self.drawn, self.config, self.out_dir)
        return self.run("vocab", {side: partial(train, side) for side in vocabulary.Side})

    @cached_property
    def records(self) -> dict[_Key, encoding.Encoded]:
        """What was made of all shards together."""
        models = tuple(self.out_dir / vocab.file.path for vocab in self.vocab.values())
        calls = {}
        per_block, per_shard = self.config.pairs_per_chunk, self.config.pairs_per_shard
        for split, direction, members in self._turned():
            if split not in manifest.SPLITS:
                continue
            if split == "train":
                sizes = self.select[direction.language].block_sizes
            else:
                sizes = shards.block_sizes(members, per_block)
            divided = shards.divide(members, sizes, per_block, per_shard)
            for i, shard in enumerate(divided):
                name = f"records/{split}/{direction.code}-{i:05d}-of-{len(divided):05d}"
                files = self.out_dir, name, models
                call = partial(encoding.encode, shard, direction, *files, self.config.max_pieces)
                calls[split, direction.code, i] = call
        found: dict[_Key, encoding.Encoded] = collections.defaultdict(encoding.Encoded)
        for (split, code, _), encoded in self.run("records", calls).items():
            found[split, code] += encoded
        if not any(made.source.lengths for (split, _), made in found.items() if split == "train"):
            raise _nothing_left(found.values())
        return found

    @cached_property
    def texts(self) -> dict[_Key, digests.File]:
        """The raw text of every split but train."""
        write = partial(encoding.write_text, data_dir=self.out_dir)
        calls = {
            (split, direction.code): partial(write, members, split, direction)
            for split, direction, members in self._turned()
            if split != "train"
        }
        return self.run("text", calls)

    def _turned(self) -> Iterator[tuple[str, Direction, list[Chunk]]]:
        """Yields each split of each language in each of its directions, and the chunks."""
        for (split, code), members in self.chunks.items():
            for direction in self._directions(code):
                yield split, direction, members

    def _directions(self, code: str) -> list[Direction]:
        """A language's directions. Only languages with training text are targets."""
        found = directions.of(code, self.config.directions)
        return [one for one in found if code in self.train or not one.from_english]

    @cached_property
    def report(self) -> None:
        """Writes the report and, when everything else is complete, the manifest."""
        dropped = _dropped([*self.clean, *self.select.values()])
        codes = {*self.survey, *(code for _, code in self.chunks), *(code for code, _ in dropped)}
        described = tuple(
            self._language(direction, dropped)
            for code in sorted(codes)
            for direction in self._directions(code)
        )
        reports = [(one, self.records["train", one.code]) for one in described]
        report.write(reports, self.out_dir / "report")
        made = manifest.Manifest(
            languages=described,
            source_vocabulary=self.vocab[vocabulary.Side.SOURCE],
            target_vocabulary=self.vocab[vocabulary.Side.TARGET],
            config=dataclasses.asdict(self.config) | {"sources": list(map(str, self.sources))},
            library_versions=runs.library_versions(),
        )
        for path in self.out_dir.rglob("*.partial"):  # Left by processes that were killed.
            path.unlink(missing_ok=True)
        manifest.save(made, self.out_dir)
        shutil.rmtree(self.work_dir, ignore_errors=True)

    def _language(self, direction: Direction, dropped: Dropped) -> manifest.Language:
        code, language = direction.code, direction.language
        encoded = {split: self.records[split, code] for split in manifest.SPLITS}
        dropped = dropped + _dropped(encoded.values())
        return manifest.Language(
            code=code,
            records={split: made.records for split, made in encoded.items() if made.shards},
            text={split: file for (split, other), file in self.texts.items() if other == code},
            dropped={str(rule): n for (of, rule), n in sorted(dropped.items()) if of == language},
            repaired=sum(one.repaired[language] for one in self.clean),
            scripts=tuple(sorted(self.survey.get(language, ()))),
        )


def _dropped(results: Iterable[Cleaned | selection.Selected | encoding.Encoded]) -> Dropped:
    return sum((one.dropped for one in results), collections.Counter())


def _nothing_left(results: Iterable[Cleaned | selection.Selected | encoding.Encoded]) -> ValueError:
    by_rule: collections.Counter[str] = collections.Counter()
    for (_, rule), number in _dropped(results).items():
        by_rule[rule] += number
    if not by_rule:
        return ValueError("the sources hold no training pair")
    counts = ", ".join(f"{number} {rule}" for rule, number in by_rule.most_common())
    return ValueError(f"no training pair is left: dropped {counts}")
