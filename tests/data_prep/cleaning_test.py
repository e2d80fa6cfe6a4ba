from data_prep import cleaning
from data_prep.tsv import Pair

_NOTHING_HELD_OUT = cleaning.HeldOut(frozenset(), frozenset())


def _dropped(pairs, held_out=_NOTHING_HELD_OUT, **limits):
    return cleaning.clean(pairs, held_out, cleaning.Limits(**limits)).dropped


def test_normalize():
    assert cleaning.normalize("\u00a0ﬁne \t１２\u200bx\u202e\u2028y\x07 ") == "fine 12x y"
    assert cleaning.normalize("e\u0301") == "é"
    # The zero width non-joiner is spelling in Persian.
    assert cleaning.normalize("می\u200cخواهم") == "می\u200cخواهم"


def test_each_rule_drops_its_pair_and_counts_it():
    pairs = [
        Pair("gut", "good"),
        Pair("gut ", "good"),
        Pair("da\ufffdmaged", "damaged"),
        Pair("\u200b", "nothing is left"),
        Pair("x" * 31, "y" * 31),
        Pair("kurz", "a very long one it is"),
        Pair("ein anderer", "Held OUT!"),
        Pair("AUCH gehalten", "something else"),
    ]
    held_out = cleaning.HeldOut(
        frozenset({cleaning.english_key("held out.")}),
        frozenset({cleaning.source_key("auch gehalten")}),
    )
    result = cleaning.clean(pairs, held_out, cleaning.Limits(max_chars=30, max_length_ratio=2.2))
    assert result.pairs == [Pair("gut", "good")]
    assert result.dropped == {
        "duplicate": 1,
        "empty": 1,
        "held_out": 2,
        "ratio": 1,
        "too_long": 1,
        "undecodable": 1,
    }


def test_length_ratio_by_hand():
    # (10 + 40) / (10 + 0 + 15) = 2
    pair = Pair("x" * 40, "y" * 15)
    assert _dropped([pair], max_length_ratio=2.0) == {}
    assert _dropped([pair], max_length_ratio=1.99) == {"ratio": 1}
    # Five Han characters count as fifteen.
    assert _dropped([Pair("水" * 5, "x" * 40)], max_length_ratio=2.0) == {}
    assert _dropped([Pair("水" * 4, "x" * 40)], max_length_ratio=2.0) == {"ratio": 1}


def test_english_key_ignores_case_and_marks_but_never_vanishes():
    assert cleaning.english_key("The Dog's!") == cleaning.english_key("the dogs")
    assert cleaning.english_key("?!") == "?!"


def test_a_duplicate_is_of_both_sides():
    pairs = [Pair("a", "x"), Pair("a", "y"), Pair("b", "x"), Pair("a", "x")]
    assert _dropped(pairs) == {"duplicate": 1}
