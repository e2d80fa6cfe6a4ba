"""The four families and their fourteen languages.

    Talvic   fusional, prepositions, verb in the middle     qta qtb qtc qtd
    Oruk     agglutinative, many cases, vowel harmony, verb last     qoa qob qoc qod
    Shenari  prefixes, verb first, nouns before adjectives     qsa qsb qsc
    Lopai    no affixes, particles     qla qlb qlc

Sounds are those of phonology.py. What a family leaves open, its daughters decide.
"""

import dataclasses

from data_prep.conlang import scripts
from data_prep.conlang.grammar import Attach, Morphology, Order, Side, Syntax
from data_prep.conlang.lexicon import Family, Language
from data_prep.conlang.meaning import Person
from data_prep.conlang.phonology import Phonotactics, SoundChanges

_NONE, _PREFIX, _SUFFIX = Attach.NONE, Attach.PREFIX, Attach.SUFFIX
_WORD_BEFORE, _WORD_AFTER = Attach.BEFORE, Attach.AFTER
_BEFORE, _AFTER = Side.BEFORE, Side.AFTER


def _sounds(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _agreement(forms: str) -> dict[Person, str]:
    return dict(zip(Person, forms.split(), strict=True))


_TALVIC_SYNTAX = Syntax(
    order=Order.SVO,
    adjective=_BEFORE,
    genitive=_AFTER,
    determiner=_BEFORE,
    manner=_AFTER,
    time=_AFTER,
    subordinate=_AFTER,
    adjective_agrees=True,
)
_TALVIC_MORPHOLOGY = Morphology(
    plural=_SUFFIX,
    accusative=_NONE,
    genitive=_SUFFIX,
    adposition=_WORD_BEFORE,
    attributive=_WORD_BEFORE,
    definite=_WORD_BEFORE,
    indefinite=_NONE,
    present=_NONE,
    past=_SUFFIX,
    future=_WORD_BEFORE,
    agreement=_SUFFIX,
    negation=_WORD_BEFORE,
    question=_WORD_BEFORE,
)
TALVIC = Family(
    name="Talvic",
    content=Phonotactics(
        onsets=_sounds("p t k b d g m n s l r v st tr kl br"),
        vowels="aeiou",
        codas=("", "", "", "n", "r", "l", "s"),
        num_syllables=(2, 2, 3),
    ),
    function=Phonotactics(tuple("ptkdnslvm"), "aeiou", ("", "n", "r", "l"), (1, 2)),
    markers={
        "plural": "eke",
        "accusative": "uno",
        "genitive": "isti",
        "attributive": "kwe",
        "definite": "sol",
        "indefinite": "oin",
        "present": "eu",
        "past": "ada",
        "future": "vol",
        "negation": "nen",
        "question": "kar",
    },
    agreement=_agreement("omo esi eti omus onti"),
    languages=(
        Language(
            "qta",
            scripts.LATIN_DIACRITICS,
            SoundChanges((("k(?=[ei])", "C"), ("s(?=i)", "S"), ("[aeiou]$", ""), ("kw", "v"))),
            _TALVIC_SYNTAX,
            _TALVIC_MORPHOLOGY,
        ),
        Language(
            "qtb",
            scripts.LATIN_PLAIN,
            SoundChanges((("p(?=[aeiou])", "f"), ("t(?=[aeiou])", "d"), ("o", "u"), ("w", "v"))),
            dataclasses.replace(_TALVIC_SYNTAX, adjective=_AFTER, manner=_BEFORE),
            dataclasses.replace(_TALVIC_MORPHOLOGY, definite=_SUFFIX, negation=_WORD_AFTER),
        ),
        Language(
            "qtc",
            scripts.CYRILLIC,
            SoundChanges((("(?<=[aeiou])k(?=[aeiou])", "g"), ("e(?=[nr])", "ya"), ("l$", "v"))),
            dataclasses.replace(_TALVIC_SYNTAX, order=Order.SOV, genitive=_BEFORE, time=_BEFORE),
            dataclasses.replace(
                _TALVIC_MORPHOLOGY, accusative=_SUFFIX, definite=_NONE, indefinite=_WORD_BEFORE
            ),
        ),
        Language(
            "qtd",
            scripts.GREEK,
            SoundChanges((("st", "s"), ("b", "v"), ("([aeiou])s(?=[aeiou])", r"\1h"))),
            dataclasses.replace(_TALVIC_SYNTAX, order=Order.OVS, adjective_agrees=False),
            dataclasses.replace(_TALVIC_MORPHOLOGY, genitive=_WORD_BEFORE, future=_SUFFIX),
        ),
    ),
)

_ORUK_SYNTAX = Syntax(
    order=Order.SOV,
    adjective=_BEFORE,
    genitive=_BEFORE,
    determiner=_BEFORE,
    manner=_BEFORE,
    time=_BEFORE,
    subordinate=_BEFORE,
    prefers_singular=True,
)
_ORUK_MORPHOLOGY = Morphology(
    plural=_SUFFIX,
    accusative=_SUFFIX,
    genitive=_SUFFIX,
    adposition=_SUFFIX,
    attributive=_SUFFIX,
    definite=_NONE,
    indefinite=_WORD_BEFORE,
    present=_SUFFIX,
    past=_SUFFIX,
    future=_SUFFIX,
    agreement=_SUFFIX,
    negation=_SUFFIX,
    question=_WORD_AFTER,
)
ORUK = Family(
    name="Oruk",
    content=Phonotactics(
        onsets=_sounds("k g t d b m n s y r l C S"),
        vowels="aaeioou",
        codas=("", "", "k", "n", "r", "z"),
        num_syllables=(2, 2, 3),
    ),
    function=Phonotactics(tuple("tdknsgbly"), "A", ("", "n", "r", "l", "m", "s", "k"), (1, 2)),
    markers={
        "plural": "lAr",
        "accusative": "mun",
        "genitive": "niN",
        "attributive": "kiX",
        "definite": "Sud",
        "indefinite": "bir",
        "present": "iyor",
        "past": "dug",
        "future": "ACAk",
        "negation": "mAz",
        "question": "mik",
    },
    agreement=_agreement("um sin o muz oXar"),
    languages=(
        Language("qoa", scripts.GEORGIAN, SoundChanges(()), _ORUK_SYNTAX, _ORUK_MORPHOLOGY),
        Language(
            "qob",
            scripts.LATIN_DIGRAPHS,
            SoundChanges((("^k", "X"), ("g", "w"), ("z(?=[aeiouA]|$)", "s"))),
            dataclasses.replace(_ORUK_SYNTAX, prefers_singular=False),
            dataclasses.replace(_ORUK_MORPHOLOGY, definite=_SUFFIX, indefinite=_NONE),
        ),
        Language(
            "qoc",
            scripts.CYRILLIC_SOUTHERN,
            SoundChanges((("C", "Z"), ("u", "o"), ("(?<=[aeiouA])b", "v"), ("Z$", "S"))),
            dataclasses.replace(_ORUK_SYNTAX, time=_AFTER),
            dataclasses.replace(
                _ORUK_MORPHOLOGY, adposition=_WORD_AFTER, attributive=_WORD_AFTER, present=_NONE
            ),
        ),
        Language(
            "qod",
            scripts.LATIN_ACCENTED,
            SoundChanges((("S", "s"), ("y", ""), ("k$", "h"), ("d(?=[ei])", "Z"))),
            dataclasses.replace(_ORUK_SYNTAX, order=Order.SVO, subordinate=_AFTER),
            dataclasses.replace(_ORUK_MORPHOLOGY, negation=_WORD_BEFORE, agreement=_NONE),
        ),
    ),
)

_SHENARI_SYNTAX = Syntax(
    order=Order.VSO,
    adjective=_AFTER,
    genitive=_AFTER,
    determiner=_BEFORE,
    manner=_AFTER,
    time=_AFTER,
    subordinate=_AFTER,
)
_SHENARI_MORPHOLOGY = Morphology(
    plural=_PREFIX,
    accusative=_PREFIX,
    genitive=_WORD_BEFORE,
    adposition=_WORD_BEFORE,
    attributive=_WORD_BEFORE,
    definite=_PREFIX,
    indefinite=_NONE,
    present=_NONE,
    past=_PREFIX,
    future=_PREFIX,
    agreement=_PREFIX,
    negation=_WORD_BEFORE,
    question=_WORD_BEFORE,
)
SHENARI = Family(
    name="Shenari",
    content=Phonotactics(
        onsets=_sounds("S h n m r l t d k b f X w"),
        vowels="aiuaeo",
        codas=("", "", "", "m", "l", "S", "t"),
        num_syllables=(2, 3),
    ),
    function=Phonotactics(tuple("ShnmltdkbfX"), "aiue", ("", "n", "l", "S"), (1, 2)),
    markers={
        "plural": "wi",
        "accusative": "et",
        "genitive": "Sel",
        "attributive": "aSer",
        "definite": "hab",
        "indefinite": "eXad",
        "present": "yo",
        "past": "kan",
        "future": "sof",
        "negation": "lof",
        "question": "haim",
    },
    agreement=_agreement("e te ya ne yi"),
    languages=(
        Language("qsa", scripts.TIFINAGH, SoundChanges(()), _SHENARI_SYNTAX, _SHENARI_MORPHOLOGY),
        Language(
            "qsb",
            scripts.ARMENIAN,
            SoundChanges((("X", "k"), ("f", "p"), ("a(?=[mn])", "o"))),
            dataclasses.replace(_SHENARI_SYNTAX, time=_BEFORE, determiner=_AFTER),
            dataclasses.replace(
                _SHENARI_MORPHOLOGY, definite=_WORD_AFTER, plural=_SUFFIX, question=_WORD_AFTER
            ),
        ),
        Language(
            "qsc",
            scripts.LATIN_DIGRAPHS,
            SoundChanges((("S", "s"), ("t(?=[iu])", "C"), ("(?<=[aeiou])d", "z"))),
            dataclasses.replace(_SHENARI_SYNTAX, order=Order.SVO),
            dataclasses.replace(
                _SHENARI_MORPHOLOGY, accusative=_WORD_BEFORE, negation=_PREFIX, genitive=_SUFFIX
            ),
        ),
    ),
)

_LOPAI_SYNTAX = Syntax(
    order=Order.SVO,
    adjective=_AFTER,
    genitive=_BEFORE,
    determiner=_AFTER,
    manner=_AFTER,
    time=_BEFORE,
    subordinate=_AFTER,
    prefers_singular=True,
)
_LOPAI_MORPHOLOGY = Morphology(
    plural=_WORD_AFTER,
    accusative=_NONE,
    genitive=_WORD_AFTER,
    adposition=_WORD_BEFORE,
    attributive=_WORD_BEFORE,
    definite=_NONE,
    indefinite=_WORD_AFTER,
    present=_NONE,
    past=_WORD_BEFORE,
    future=_WORD_BEFORE,
    agreement=_NONE,
    negation=_WORD_BEFORE,
    question=_WORD_AFTER,
)
LOPAI = Family(
    name="Lopai",
    content=Phonotactics(
        onsets=_sounds("p t k m n l h w y s C N"),
        vowels="aeiou",
        codas=("", "", "", "n", "N"),
        num_syllables=(2, 2, 3),
    ),
    function=Phonotactics(tuple("ptkmnlhwys"), "aeiou", ("", "", "n", "N"), (1, 2)),
    markers={
        "plural": "mena",
        "accusative": "ko",
        "genitive": "noN",
        "attributive": "yaN",
        "definite": "ite",
        "indefinite": "sae",
        "present": "nau",
        "past": "tele",
        "future": "kamai",
        "negation": "pohu",
        "question": "kaye",
    },
    agreement=_agreement("a e i o u"),
    languages=(
        Language("qla", scripts.DEVANAGARI, SoundChanges(()), _LOPAI_SYNTAX, _LOPAI_MORPHOLOGY),
        Language(
            "qlb",
            scripts.LATIN_PLAIN,
            SoundChanges((("p", "b"), ("k(?=[ou])", "g"), ("w", "v"))),
            dataclasses.replace(_LOPAI_SYNTAX, adjective=_BEFORE, determiner=_BEFORE),
            dataclasses.replace(_LOPAI_MORPHOLOGY, definite=_WORD_BEFORE, indefinite=_NONE),
        ),
        Language(
            "qlc",
            scripts.TELUGU,
            SoundChanges((("h", ""), ("s", "S"), ("(?<=[aeiou])t", "d"))),
            dataclasses.replace(_LOPAI_SYNTAX, order=Order.SOV, subordinate=_BEFORE),
            dataclasses.replace(
                _LOPAI_MORPHOLOGY,
                accusative=_WORD_AFTER,
                adposition=_WORD_AFTER,
                attributive=_WORD_AFTER,
                past=_WORD_AFTER,
            ),
        ),
    ),
)

FAMILIES = (TALVIC, ORUK, SHENARI, LOPAI)
