import pytest

from data_prep import languages


def test_codes_are_canonical():
    assert [languages.code(tag) for tag in ("de", "iw", "pt_BR", "ZH-hant", "acu", "qta")] == [
        "de",
        "he",
        "pt-BR",
        "zh-Hant",
        "acu",
        "qta",
    ]


@pytest.mark.parametrize("tag", ["xx", "", "german", "de-", "calv", "x-klingon"])
def test_unregistered_codes_are_refused(tag):
    assert not languages.is_valid(tag)
    with pytest.raises(ValueError, match=f"'{tag}' is not a language: expected a BCP-47 code"):
        languages.code(tag)


def test_the_primary_language_has_no_region():
    assert languages.primary("pt-BR") == "pt"


def test_names_have_standard_codes_or_stay():
    standard = [languages.named(tag, "standard") for tag in ("eng_Latn", "ger", "zho_Hans", "nob")]
    assert standard == ["en", "de", "zh-Hans", "nb"]
    assert languages.named("cat_Latn_vale1252", "standard") == "ca-x-vale1252"
    assert languages.primary("cat_Latn_vale1252") == "ca"
    assert languages.named("eng_Latn", "source") == "eng_Latn"
    assert languages.named("calv", "source") == "calv"
    with pytest.raises(ValueError, match=r"'../x' is not a language: expected letters"):
        languages.named("../x", "source")


def test_an_unknown_name_has_the_scripts_of_its_text():
    assert languages.own_scripts("calv", {"Latn": 9}, {}) == {"Latn"}
    assert not languages.is_surely_another("Das ist ganz sicher ein deutscher Satz.", "calv")
    assert languages.is_surely_another("Das ist ganz sicher ein deutscher Satz.", "fra_Latn")


def test_counts_letters_by_script():
    assert languages.count_scripts("Ab 12, где! 水") == {"Latn": 2, "Cyrl": 3, "Hani": 1}


def test_a_languages_scripts_follow_its_text_by_default():
    counts = {"Cyrl": 80, "Latn": 15, "Grek": 5}
    assert languages.own_scripts("sr", counts, {}) == {"Cyrl", "Latn"}
    assert languages.own_scripts("sr-Latn", counts, {}) == {"Latn"}
    assert languages.own_scripts("sr", counts, {"sr": ["Cyrl"]}) == {"Cyrl"}
    assert languages.own_scripts("zh-Hant", {}, {}) == {"Hani"}
    assert languages.own_scripts("ja", {}, {"ja": ["Jpan"]}) == {"Hani", "Hira", "Kana"}
    assert languages.own_scripts("ja", {"Hira": 68, "Hani": 25, "Kana": 5}, {}) == {
        *("Hani", "Hira", "Kana")
    }
    assert languages.own_scripts("zh", {"Hani": 9}, {}) == {"Hani"}
    assert languages.own_scripts("de", {}, {}) == frozenset()


def test_a_line_is_foreign_if_most_letters_are_of_other_scripts():
    latin = frozenset({"Latn"})
    assert not languages.is_mostly_foreign("abc где", latin)
    assert languages.is_mostly_foreign("ab где", latin)
    assert not languages.is_mostly_foreign("123 ...", latin)
    assert not languages.is_mostly_foreign("где", frozenset())


def test_codes_that_do_not_name_one_language_are_refused():
    for tag in ("und", "mul", "zxx", "mis", "und-Latn", "cz", "x-klingon"):
        assert not languages.is_valid(tag), tag
        with pytest.raises(ValueError, match=r"is not a language"):
            languages.code(tag)
    assert languages.printable("a/b|\n") == "a?b??" and languages.printable("") == "und"
