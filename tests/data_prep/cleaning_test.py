import pytest

from data_prep import cleaning
from data_prep.config import BuildConfig
from data_prep.rules import Rule
from data_prep.tsv import Pair

_LATIN = frozenset({"Latn"})


def _rule(pair, language="de", own_scripts=_LATIN, **limits):
    scripts = (own_scripts, cleaning.ENGLISH_SCRIPTS)
    return cleaning.broken_rule(pair, language, scripts, BuildConfig(**limits))


def test_repair_undoes_a_wrong_encoding_and_touches_nothing_else():
    assert cleaning.repair("schÃ¶n, sagte er â€“ wirklich", _LATIN) == "schön, sagte er – wirklich"
    for text in ("schön – wirklich", "水 and ﬁne", "plain", "ÃO É NÃO"):
        assert cleaning.repair(text, _LATIN) == text
    damaged = "где".encode().decode("latin-1")
    assert cleaning.repair(damaged, frozenset({"Cyrl"})) == "где"
    # Chinantec, whose tone marks happen to spell the bytes of an Ethiopic letter.
    text = "jo̱ i̱ Yáˆ\u00a0do, íbˋ i̱ lɨ́ɨngˊ"
    assert cleaning.repair(text, _LATIN) == text


@pytest.mark.parametrize(
    ("source", "english", "rule"),
    [
        ("gut", "good", None),
        ("da\ufffdmaged", "damaged", Rule.UNDECODABLE),
        ("", "nothing is left", Rule.EMPTY),
        ("x y" * 11, "y z" * 11, Rule.TOO_LONG),
        ("kurz", "a very long one it is", Rule.RATIO),
        ("Amen", "Amen", Rule.IDENTICAL),
        ("aaaaaaaaaaaaa", "ah, a long one", Rule.REPEATED),
        ("Es steht da", "..........", Rule.REPEATED),
        ("da . . . . . . . . . . .", "something else here", Rule.REPEATED),
        ("это русский", "this is Russian", Rule.WRONG_SCRIPT),
        ("das ist so", "это русский", Rule.WRONG_SCRIPT),
        # Less than half is in another script; and text without any letters.
        ("Moskau heißt на русском", "Moscow, in Russian", None),
        ("1, 2, 3", "1, 2, 3.", None),
    ],
)
def test_each_rule(source, english, rule):
    assert _rule(Pair(source, english), max_chars=30, max_length_ratio=2.2) is rule


def test_length_ratio_by_hand():
    # (10 + 40) / (10 + 0 + 15) = 2
    pair = Pair("x y z w " * 5, "yz zw wy zz wyz")
    assert _rule(pair, max_length_ratio=2.0) is None
    assert _rule(pair, max_length_ratio=1.99) is Rule.RATIO
    # Five Han characters count as fifteen.
    han, english = frozenset({"Hani"}), "x y z w " * 5
    assert _rule(Pair("水火木金土", english), "zh", han, max_length_ratio=2.0) is None
    assert _rule(Pair("水火木金", english), "zh", han, max_length_ratio=2.0) is Rule.RATIO


def test_another_language_is_dropped_only_on_request_and_if_certain():
    pair = Pair("The weather is very nice here today", "Das Wetter ist heute hier sehr schön")
    assert _rule(pair) is None
    assert _rule(pair, check_language=True) is Rule.WRONG_LANGUAGE
    right = Pair("Das Wetter ist heute hier sehr schön", "The weather is very nice here today")
    assert _rule(right, check_language=True) is None
    assert _rule(Pair("No sé", "I know not"), check_language=True) is None
    # The model does not know Achuar.
    odd = Pair("Das Wetter ist heute hier sehr schön", "The weather is very nice here today")
    assert _rule(odd, "acu", check_language=True) is None


def test_a_digest_is_64_bits_of_the_text():
    digests = {cleaning.digest(f"text {i}") for i in range(1000)}
    assert len(digests) == 1000
    assert 0 <= min(digests) < max(digests) < 2**64
    assert sum(digest >> 63 for digest in digests) in range(420, 580)


def test_entities_and_marks_of_a_tokenizer_become_text():
    texts = {
        "it &apos;s &quot; a &amp; b &#91; c &#x5D;": "it 's \" a & b [ c ]",
        "well @-@ known 3 @.@ 5": "well-known 3.5",
        "&amp;quot;": '"',
        "a&#10;b&#9;c": "a b c",
    }
    for text, expected in texts.items():
        pair = Pair(text, "x")
        assert cleaning.is_escaped(pair)
        assert cleaning.unescape_sides(pair) == Pair(expected, "x")
    for text in ("AT&T; R&D", "&c.", "a @-@", "mail@-@", "&notanentity;", "a - b"):
        assert not cleaning.is_escaped(Pair("x", text))
        assert cleaning.unescape_sides(Pair(text, "x")) == Pair(text, "x")
