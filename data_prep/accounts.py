"""The account of every example that was read: either it is kept, or a rule dropped it.

The numbers add up: for each direction, the examples read are the kept plus the dropped ones.
"""

import collections
from collections.abc import Iterable

from data_prep import languages
from data_prep.deduplication import Selected
from data_prep.directions import Direction
from data_prep.encoding import Encoded
from data_prep.job import Corpus, SplitKey
from data_prep.rules import Dropped, Rule
from lingvo_gshard.input import manifest
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import digests


def entry(
    direction: Direction,
    scripts: dict[str, frozenset[str]],
    corpus: Corpus,
    dropped: Dropped,
    records: dict[SplitKey, Encoded],
    texts: dict[SplitKey, digests.File],
) -> manifest.Language:
    """Returns a direction's entry in the manifest, which accounts for every example that was read.

    `dropped` counts the examples that earlier steps dropped; examples that are too long for the
    direction's records are added here.
    """
    # A language may lack a split. A direction may even lack all splits: then it only has drops.
    by_split: dict[str, Encoded] = {}
    for split in manifest.SPLITS:
        if (split, direction.code) in records:
            by_split[split] = records[split, direction.code]

    dropped_by_rule: dict[str, int] = {}
    for (language, rule), number in sorted((dropped + sum_of_dropped(by_split.values())).items()):
        if language == direction.language:
            dropped_by_rule[str(rule)] = number

    # Without English, the direction's own language is its source.
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
        mojibake=corpus.mojibake[direction.language],
        beginning=direction.beginning,
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
    """Returns how many of a direction's examples are kept, from its records and all texts."""
    num_kept = sum(encoded.records.num_examples for encoded in records.values())

    # Splits that are only decoded are counted from their text, since they lack records.
    for (split, language), chunks in corpus.chunks.items():
        is_text_alone = split not in manifest.SPLITS and (split, direction.code) in texts
        if language == direction.language and is_text_alone:
            num_kept += sum(chunk.num_examples for chunk in chunks)
    return num_kept


def sum_of_dropped(results: Iterable[Selected | Encoded]) -> Dropped:
    """Returns how many examples the rules dropped in all results together."""
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
        return ValueError(f"the sources contain no training {kind.noun}s")

    counts = ", ".join(f"{number} {rule}" for rule, number in by_rule.most_common())
    problem = f"no training {kind.noun}s are left: dropped {counts}"
    if unknown:
        problem += f"; unknown languages: {', '.join(sorted(unknown))}"
    return ValueError(problem)
