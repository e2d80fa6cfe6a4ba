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
def test_what_is_not_registered_is_refused(tag):
    assert not languages.is_valid(tag)
    with pytest.raises(ValueError, match=f"'{tag}' is no language: expected a BCP-47 code"):
        languages.code(tag)


def test_parts():
    assert languages.primary("pt-BR") == "pt"
    assert (languages.script("zh-Hant"), languages.script("zh")) == ("Hant", None)
