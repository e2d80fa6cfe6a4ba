"""What became of every example that was read: it is kept, or a rule has dropped it.

The numbers add up: of each direction, those read are those kept and those dropped.
"""

import collections
from collections.abc import Iterable

from data_prep import languages
from data_prep.deduplication import Selected
from data_prep.directions import Direction
from data_prep.encoding import Encoded
from data_prep.job import Corpus, SplitKey
from data_prep.rules import Dropped, Rule
from data_prep.source_cleaning import Cleaned
from lingvo_gshard.files import digests
from lingvo_gshard.input import manifest
from lingvo_gshard.input.manifest import Kind


def entry(
    direction: Direction,
    scripts: dict[str, frozenset[str]],
    corpus: Corpus,
    dropped: Dropped,
    records: dict[SplitKey, Encoded],
    texts: dict[SplitKey, digests.File],
) -> manifest.Language:
    """Returns a direction's entry in the manifest, which accounts for every example that was read.

    `dropped` are the examples that the steps before dropped; those that were too long for the
    direction's records come on top.
    """
    # A language may lack a split, and a direction may lack all: then it has only its drops.
    by_split: dict[str, Encoded] = {}
    for split in manifest.SPLITS:
        if (split, direction.code) in records:
            by_split[split] = records[split, direction.code]

    dropped_by_rule: dict[str, int] = {}
    for (language, rule), number in sorted((dropped + sum_of_dropped(by_split.values())).items()):
        if language == direction.language:
            dropped_by_rule[str(rule)] = number

    # With English, that of both directions is the other one.
    own_language = direction.language
    if languages.is_without_english(direction.language):
        own_language = direction.source
    described = manifest.Language(
        code=direction.code,
        records={split: encoded.records for split, encoded in by_split.items()},
        text={split: file for (split, code), file in texts.items() if code == direction.code},
        dropped=dropped_by_rule,
        repaired=corpus.repaired[direction.language],
        scripts=tuple(sorted(scripts.get(own_language, ()))),
        read=corpus.read[direction.language],
        kept=_num_kept(direction, corpus, by_split, texts),
        escaped=corpus.escaped[direction.language],
    )
    num_accounted = described.kept + sum(dropped_by_rule.values())
    assert described.read == num_accounted, (
        f"{direction.code}: {described.read} read, {described.kept} kept, {dropped_by_rule} dropped"
    )
    return described


def _num_kept(
    direction: Direction,
    corpus: Corpus,
    records: dict[str, Encoded],
    texts: dict[SplitKey, digests.File],
) -> int:
    """Returns the number of a direction's examples, given its records by split, and all texts."""
    num_kept = sum(encoded.records.num_examples for encoded in records.values())

    # Those of splits that are only decoded have no records.
    for (split, language), chunks in corpus.chunks.items():
        is_text_alone = split not in manifest.SPLITS and (split, direction.code) in texts
        if language == direction.language and is_text_alone:
            num_kept += sum(chunk.num_examples for chunk in chunks)
    return num_kept


def sum_of_dropped(results: Iterable[Cleaned | Selected | Encoded]) -> Dropped:
    """Returns how many examples the rules have dropped in all results together."""
    total: Dropped = collections.Counter()
    for result in results:
        total += result.dropped  # Unlike update(), this leaves out rules that dropped nothing.
    return total


def nothing_left(kind: Kind, dropped: Dropped) -> ValueError:
    """Returns an error that counts the dropped examples by rule."""
    by_rule: collections.Counter[str] = collections.Counter()
    unknown: list[str] = []
    for (language, rule), number in dropped.items():
        by_rule[rule] += number
        if rule is Rule.UNKNOWN_LANGUAGE:
            unknown.append(language)
    if not by_rule:
        return ValueError(f"the sources hold no training {kind.noun}")

    counts = ", ".join(f"{number} {rule}" for rule, number in by_rule.most_common())
    problem = f"no training {kind.noun} is left: dropped {counts}"
    if unknown:
        problem += f"; no languages: {', '.join(sorted(unknown))}"
    return ValueError(problem)
