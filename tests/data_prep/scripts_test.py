from data_prep import scripts


def test_counts_letters_by_script():
    assert scripts.count("Ab 12, где! 水") == {"Latn": 2, "Cyrl": 3, "Hani": 1}


def test_a_languages_scripts_are_those_of_its_text_unless_it_is_said():
    counts = {"Cyrl": 80, "Latn": 15, "Grek": 5}
    assert scripts.own_scripts("sr", counts, {}) == {"Cyrl", "Latn"}
    assert scripts.own_scripts("sr-Latn", counts, {}) == {"Latn"}
    assert scripts.own_scripts("sr", counts, {"sr": ["Cyrl"]}) == {"Cyrl"}
    assert scripts.own_scripts("zh-Hant", {}, {}) == {"Hani"}
    assert scripts.own_scripts("ja", {}, {"ja": ["Jpan"]}) == {"Hani", "Hira", "Kana"}
    assert scripts.own_scripts("ja", {"Hira": 68, "Hani": 25, "Kana": 5}, {}) == {
        *("Hani", "Hira", "Kana")
    }
    assert scripts.own_scripts("zh", {"Hani": 9}, {}) == {"Hani"}
    assert scripts.own_scripts("de", {}, {}) == frozenset()


def test_foreign_is_what_has_more_letters_of_other_scripts():
    latin = frozenset({"Latn"})
    assert not scripts.is_mostly_foreign("abc где", latin)
    assert scripts.is_mostly_foreign("ab где", latin)
    assert not scripts.is_mostly_foreign("123 ...", latin)
    assert not scripts.is_mostly_foreign("где", frozenset())
