"""The English of a meaning."""

from data_prep.conlang import meaning, words
from data_prep.conlang.meaning import Number, Person, Tense

_OBJECT_PRONOUNS = {
    "I": "me",
    "you": "you",
    "he": "him",
    "she": "her",
    "we": "us",
    "they": "them",
}
_BE = {
    Tense.PRESENT: {Person.FIRST_SINGULAR: "am", Person.THIRD_SINGULAR: "is"},
    Tense.PAST: {Person.FIRST_SINGULAR: "was", Person.THIRD_SINGULAR: "was"},
}
_BE_OTHERWISE = {Tense.PRESENT: "are", Tense.PAST: "were"}
_PLURAL_DETERMINERS = {"this": "these", "that": "those"}


def sentence(what: meaning.Sentence) -> str:
    """Returns the sentence, capitalized and with its final mark."""
    if what.is_question:
        text, mark = _question(what.first), "?"
    else:
        text, mark = _statement(what.first), "."
    if what.link is not None and what.second is not None:
        text = f"{text} {what.link.value} {_statement(what.second)}"
    return text[0].upper() + text[1:] + mark


def _statement(clause: meaning.Clause) -> str:
    subject = _nominal(clause.subject, is_object=False)
    return _join(subject, *_verb_group(clause), _rest(clause))


def _question(clause: meaning.Clause) -> str:
    subject = _nominal(clause.subject, is_object=False)
    auxiliary, *others = _verb_group(clause, needs_auxiliary=True)
    return _join(auxiliary, subject, *others, _rest(clause))


def _verb_group(clause: meaning.Clause, needs_auxiliary: bool = False) -> list[str]:
    """The finite verb or auxiliary first, then "not", then the rest."""
    negation = ["not"] if clause.is_negated else []
    person = meaning.person_of(clause.subject)
    if clause.predicate_adjective:
        if clause.tense is Tense.FUTURE:
            return ["will", *negation, "be"]
        forms = _BE[clause.tense]
        return [forms.get(person, _BE_OTHERWISE[clause.tense]), *negation]
    verb = words.VERB_BY_NAME[clause.verb]
    if clause.tense is Tense.FUTURE:
        return ["will", *negation, verb.name]
    is_third = person is Person.THIRD_SINGULAR
    if negation or needs_auxiliary:
        present = "does" if is_third else "do"
        return ["did" if clause.tense is Tense.PAST else present, *negation, verb.name]
    if clause.tense is Tense.PAST:
        return [verb.past]
    return [verb.third_person if is_third else verb.name]


def _rest(clause: meaning.Clause) -> str:
    return _join(
        clause.predicate_adjective,
        _nominal(clause.object, is_object=True) if clause.object else "",
        clause.manner,
        _adposition(clause.place) if clause.place else "",
        clause.time,
    )


def _adposition(phrase: meaning.Adposition) -> str:
    return f"{phrase.preposition} {_nominal(phrase.nominal, is_object=True)}"


def _nominal(nominal: meaning.Nominal, is_object: bool) -> str:
    if isinstance(nominal, meaning.Pronoun):
        return _OBJECT_PRONOUNS[nominal.name] if is_object else nominal.name
    if isinstance(nominal, meaning.Name):
        return nominal.name
    noun = words.NOUN_BY_NAME[nominal.noun]
    is_plural = nominal.number is Number.PLURAL
    core = _join(*nominal.adjectives, noun.plural if is_plural else noun.name)
    attribute = _adposition(nominal.attribute) if nominal.attribute else ""
    if nominal.possessor is not None:
        return _join(_possessive(nominal.possessor), core, attribute)
    return _join(_determiner(nominal.determiner, is_plural, core), core, attribute)


def _possessive(possessor: meaning.NounPhrase | meaning.Name) -> str:
    text = _nominal(possessor, is_object=False)
    is_plural = isinstance(possessor, meaning.NounPhrase) and possessor.number is Number.PLURAL
    return text + ("'" if is_plural and text.endswith("s") else "'s")


def _determiner(determiner: str, is_plural: bool, core: str) -> str:
    if determiner == "a":
        return "" if is_plural else ("an" if core[0] in "aeiou" else "a")
    return _PLURAL_DETERMINERS.get(determiner, determiner) if is_plural else determiner


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
