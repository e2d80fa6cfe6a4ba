import itertools

import pytest

from data_prep import keys
from data_prep.tsv import Document, Pair
from lingvo_gshard.input.normalization import normalize

# Texts in the same line are copies of one text; texts in different lines are not.
_COPIES = [
    [
        "The Dog's!",
        "the dogs",
        "\u201cThe dog\u2019s\u201d ...",
        "the dog\u00b4s \u2014",
        "-The dogs",
    ],
    ["It is -5 degrees.", "it is -5 degrees", "It is \u20135 degrees", "It is (-5) degrees!"],
    ["It is 5 degrees.", "It is 5 degrees", "- it is 5 degrees", "It is: 5 degrees ..."],
    ["It is +5 degrees"],
    ["It costs 3.5", "It costs: 3.5!"],
    ["It costs 35"],
    ["It costs 3 5"],
    ["It costs .5", "it costs (.5)"],
    ["It costs -$5"],
    ["It costs $5", "It costs \u2014 $5"],
    ["It costs 5 %"],
    ["COVID-19", "covid 19", "Covid19."],
    ["a < b"],
    ["a >= b", "a>=b"],
    ["a <= b"],
    ["a = b", "A = B."],
    ["a == b"],
    ["a != b", "a!=b"],
    ["a -> b"],
    ["a + b"],
    ["a * b"],
    ["C", "c."],
    ["C++"],
    ["C#"],
    ["maxlen", "max-len"],
    ["max_len"],
    ["a\u0304 tone", "A\u0304 tone."],
    ["a tone"],
    ["\u0915\u093f"],
    ["\u0915\u0940"],
    ["?!"],
]


def test_only_copies_have_the_same_english_key():
    found = [{keys.english(normalize(text)) for text in texts} for texts in _COPIES]
    assert [len(of_line) for of_line in found] == [1] * len(_COPIES)
    assert len(set().union(*found)) == len(_COPIES)


@pytest.mark.parametrize(
    "texts",
    [
        ["if (a[1] < 2) x = -y;", "if (a[1] >= 2) x = -y;", "if (a[1] < 2) x = y;"],
        ["!x", "x", "x()", "x[]", "'x'"],
        ["\u0915\u093f\u0924\u093e\u092c", "\u0915\u0924\u092c", "\u0915\u0941\u0924\u092c"],
        ["\u0e21\u0e32", "\u0e21\u0e49\u0e32", "\u0e21\u0e48\u0e32"],
        ["\u05e9\u05c1", "\u05e9\u05c2", "\u05e9"],
        ["\u0f54\u0f0b\u0f62", "\u0f54\u0f62"],
    ],
)
def test_other_texts_are_compared_whole(texts):
    for one, other in itertools.combinations(map(normalize, texts), 2):
        assert keys.of(Document(one), "code") != keys.of(Document(other), "code")
        assert keys.of(Pair("x", one), "de+fr") != keys.of(Pair("x", other), "de+fr")
        assert keys.of_source(Pair(one, "x")) != keys.of_source(Pair(other, "x"))


def test_case_and_final_punctuation_do_not_distinguish_documents():
    for text, copy in (("A b.", "a B!"), ("\u0928\u0926\u0940\u0964", "\u0928\u0926\u0940")):
        assert keys.of(Document(text), "notes") == keys.of(Document(copy), "notes")
    for text, other in (
        ("cd ..", "cd ."),
        ("f . g", "f g"),
        ("a ? b : c", "a b c"),
        ("i++", "i--"),
    ):
        assert keys.of(Document(text), "notes") != keys.of(Document(other), "notes")
    assert keys.of_source(Pair("Stra\u00dfe", "x")) == keys.of_source(Pair("STRASSE", "x"))
