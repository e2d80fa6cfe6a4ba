"""The words of a family's languages: one proto-word a concept, changed regularly in each daughter.

A proto-word is taken only if no inflected form of it, in any daughter and as it is written, is
already a form of something else. So in every language a written word has one reading, which is half
of why a sentence has one English; the other half is the grammar (see realize.py).
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping

from data_prep.conlang import grammar, meaning, words
from data_prep.conlang.grammar import UNMARKED, Attach, Marker
from data_prep.conlang.phonology import Phonotactics, SoundChanges, harmonize
from data_prep.conlang.scripts import Script

_MAX_TRIES = 2000
_MIN_SOUNDS = 2
_PREPOSITIONS = words.PREPOSITIONS_OF_PLACE + words.PREPOSITIONS_OF_THINGS


@dataclasses.dataclass(frozen=True)
class Language:
    """One daughter of a family. `code` is of the range that ISO 639-3 leaves for private use."""

    code: str
    script: Script
    changes: SoundChanges
    syntax: grammar.Syntax
    morphology: grammar.Morphology

    def __post_init__(self) -> None:
        needs_case = self.syntax.order in (grammar.Order.SOV, grammar.Order.VSO)
        if needs_case and self.morphology.accusative is Attach.NONE:
            raise ValueError(f"{self.code}: {self.syntax.order.value} needs a marked accusative")


@dataclasses.dataclass(frozen=True)
class Family:
    """Languages of one origin. `markers` and `agreement` are proto-forms in sounds."""

    name: str
    content: Phonotactics
    function: Phonotactics
    markers: dict[str, str]
    agreement: dict[meaning.Person, str]
    languages: tuple[Language, ...]


@dataclasses.dataclass(frozen=True)
class Lexicon:
    """One language's words, in sounds.

    Attributes:
        roots: by concept: "noun dog", "verb see", "adjective big", "adverb often", "name Anna",
            "pronoun he", "determiner this", "link and".
        markers: by category (a field of Morphology).
        agreement: by person.
        adpositions: by English preposition.
    """

    language: Language
    roots: dict[str, str]
    markers: dict[str, Marker]
    agreement: dict[meaning.Person, Marker]
    adpositions: dict[str, Marker]

    def word(self, concept: str, markers: tuple[Marker, ...] = ()) -> str:
        """Returns the word with its affixes, as written; other markers are not of the word."""
        return self.language.script.write(self._sounds(self.roots[concept], markers))

    def particle(self, marker: Marker) -> str:
        """Returns a marker that is a word of its own, as written."""
        return self.language.script.write(harmonize(marker.form))

    def noun_markers(self) -> Iterator[tuple[Marker, ...]]:
        """Every combination that a noun, a name or a pronoun can carry, innermost first."""
        cases = [UNMARKED, self.markers["accusative"], self.markers["genitive"]]
        case_chains: set[tuple[Marker, ...]] = {(case,) for case in cases}
        for adposition in self.adpositions.values():
            case_chains |= {(adposition,), (adposition, self.markers["attributive"])}
        numbers = (UNMARKED, self.markers["plural"])
        definites = (UNMARKED, self.markers["definite"])
        for number, definite, chain in itertools.product(
            numbers, definites, sorted(case_chains, key=str)
        ):
            yield (number, definite, *chain)

    def verb_markers(self) -> Iterator[tuple[tuple[Marker, ...], Marker]]:
        """Every (negation, tense) that a verb can carry, with every agreement."""
        tenses = (self.markers["present"], self.markers["past"], self.markers["future"])
        negations = (UNMARKED, self.markers["negation"])
        for negation, tense in itertools.product(negations, tenses):
            for agreement in self.agreement.values():
                yield (negation, tense), agreement

    def readings(self, concept: str) -> dict[str, tuple[str, ...]] | None:
        """Every written form of a concept with what it says; None if a form says two things.

        Agreement says nothing that the subject does not.
        """
        kind = concept.split()[0]
        found: dict[str, tuple[str, ...]] = {}
        for markers, silent in self._all_markers(kind):
            said = tuple(sorted(str(marker) for marker in markers if marker.is_affix))
            form = self.word(concept, (*markers, silent))
            if found.setdefault(form, (concept, *said)) != (concept, *said):
                return None
        return found

    def _all_markers(self, kind: str) -> Iterator[tuple[tuple[Marker, ...], Marker]]:
        if kind == "verb":
            yield from self.verb_markers()
        elif kind in ("noun", "name", "pronoun"):
            yield from ((markers, UNMARKED) for markers in self.noun_markers())
        elif kind == "adjective" and self.language.syntax.adjective_agrees:
            yield from (((), marker) for marker in (UNMARKED, self.markers["plural"]))
        else:
            yield (), UNMARKED

    def _sounds(self, root: str, markers: tuple[Marker, ...]) -> str:
        for marker in markers:
            if marker.attach is Attach.PREFIX:
                root = marker.form + root
            elif marker.attach is Attach.SUFFIX:
                root += marker.form
        return harmonize(root)


def concepts() -> Iterator[str]:
    """Every concept that has a root of its own; the closed classes first."""
    yield from (f"name {name}" for name in words.NAMES)
    yield from (f"pronoun {name}" for name in meaning.PRONOUNS)
    yield from (f"determiner {name}" for name in ("this", "that", "every", "many"))
    yield from (f"determiner {name}" for name in words.POSSESSIVES + words.NUMERALS)
    yield from (f"link {link.value}" for link in meaning.Link)
    adverbs = [*words.MANNER_ADVERBS, *words.TIME_ADVERBS_ANY]
    adverbs += [name for names in words.TIME_ADVERBS_BY_TENSE.values() for name in names]
    yield from (f"adverb {name}" for name in dict.fromkeys(adverbs))
    yield "verb be"
    yield from (f"verb {verb.name}" for verb in words.VERBS)
    yield from (f"noun {noun.name}" for noun in words.NOUNS)
    yield from (f"adjective {name}" for name in words.ADJECTIVES)


def build(family: Family, seed: int) -> tuple[Lexicon, ...]:
    """Makes the lexicons of a family's languages, in their order."""
    rng = random.Random(f"{seed} {family.name}")
    readings: dict[str, dict[str, tuple[str, ...]]] = {
        language.code: {} for language in family.languages
    }
    lexicons = [_empty_lexicon(family, language) for language in family.languages]
    _add_particles(lexicons, readings)
    for preposition in _PREPOSITIONS:
        _add_adposition(preposition, family, lexicons, readings, rng)
    for concept in concepts():
        _add_concept(concept, family, lexicons, readings, rng)
    return tuple(lexicons)


_Readings = Mapping[str, dict[str, tuple[str, ...]]]


def _empty_lexicon(family: Family, language: Language) -> Lexicon:
    markers = {}
    for category in grammar.MARKED_CATEGORIES:
        attach = getattr(language.morphology, category)
        form = language.changes.apply(family.markers[category])
        markers[category] = UNMARKED if attach is Attach.NONE else Marker(attach, form)
    attach = language.morphology.agreement
    agreement = {
        person: UNMARKED if attach is Attach.NONE else Marker(attach, language.changes.apply(form))
        for person, form in family.agreement.items()
    }
    return Lexicon(language, {}, markers, agreement, {})


def _add_particles(lexicons: list[Lexicon], readings: _Readings) -> None:
    for lexicon in lexicons:
        taken = readings[lexicon.language.code]
        for category, marker in lexicon.markers.items():
            if marker.attach is Attach.NONE:
                continue
            # An affix is no word; the hyphen keeps it from colliding with one.
            form = "-" + marker.form if marker.is_affix else lexicon.particle(marker)
            assert form not in taken, (lexicon.language.code, category, form, taken[form])
            taken[form] = (category,)


def _add_adposition(
    preposition: str,
    family: Family,
    lexicons: list[Lexicon],
    readings: _Readings,
    rng: random.Random,
) -> None:
    for _ in range(_MAX_TRIES):
        proto = family.function.word(rng)
        made = [_adposition(lexicon, proto) for lexicon in lexicons]
        if all(
            len(marker.form) >= _MIN_SOUNDS and form not in readings[lexicon.language.code]
            for lexicon, (marker, form) in zip(lexicons, made, strict=True)
        ):
            break
    else:
        raise ValueError(f"family {family.name}: no form is left for {preposition!r}")
    for lexicon, (marker, form) in zip(lexicons, made, strict=True):
        lexicon.adpositions[preposition] = marker
        readings[lexicon.language.code][form] = ("adposition", preposition)


def _adposition(lexicon: Lexicon, proto: str) -> tuple[Marker, str]:
    language = lexicon.language
    marker = Marker(language.morphology.adposition, language.changes.apply(proto))
    return marker, "-" + marker.form if marker.is_affix else lexicon.particle(marker)


def _add_concept(
    concept: str,
    family: Family,
    lexicons: list[Lexicon],
    readings: _Readings,
    rng: random.Random,
) -> None:
    for _ in range(_MAX_TRIES):
        proto = _proto_word(concept, family, rng)
        for lexicon in lexicons:
            lexicon.roots[concept] = lexicon.language.changes.apply(proto)
        found = [_new_readings(lexicon, concept, readings) for lexicon in lexicons]
        if all(found):
            break
    else:
        raise ValueError(f"family {family.name}: no form is left for {concept!r}")
    for lexicon, forms in zip(lexicons, found, strict=True):
        readings[lexicon.language.code].update(forms)


def _proto_word(concept: str, family: Family, rng: random.Random) -> str:
    kind, name = concept.split()
    if kind == "name":
        # Names are borrowed, by their sounds, and change like old words.
        return name.lower()
    is_function = kind in ("pronoun", "determiner", "link")
    return (family.function if is_function else family.content).word(rng)


def _new_readings(
    lexicon: Lexicon, concept: str, readings: _Readings
) -> dict[str, tuple[str, ...]]:
    """The readings of a concept's forms; empty if one of them is taken or means two things."""
    if len(lexicon.roots[concept]) < _MIN_SOUNDS:
        return {}
    forms = lexicon.readings(concept) or {}
    taken = readings[lexicon.language.code]
    return {} if any(form in taken for form in forms) else forms
