"""The routes that LibreTranslate's clients use."""

import dataclasses
import re
import urllib.parse

import pytest

from lingvo_gshard.serving import libretranslate
from tests.serving.shouter import SPEC, Shouter, post, with_client

_PATH = "/libretranslate/translate"
_CODES = ("deu_Latn", "fra_Latn")
_NAMED = dataclasses.replace(SPEC, sources=_CODES, targets=_CODES)


def _answer(body, status=200, spec=SPEC):
    async def act(client):
        return await post(client, body, status, _PATH)

    return with_client(act, Shouter(spec=spec))


def test_a_text_gets_a_text_and_a_list_a_list():
    asked = {"q": "tag", "source": "auto", "target": "en", "format": "text", "api_key": ""}
    assert _answer(asked) == {"translatedText": "TAG"}
    assert _answer({"q": ["a", "b\nc", ""], "source": "de", "target": "en"}) == {
        "translatedText": ["A", "B\nC", ""]
    }
    assert _answer({"q": [], "target": "en"}) == {"translatedText": []}


def test_alternatives_are_the_available_next_best_translations():
    answer = _answer({"q": "a\nb", "target": "en", "alternatives": 3})
    assert answer == {"translatedText": "A\nB", "alternatives": ["?\n?"]}
    answer = _answer({"q": ["a"], "target": "en", "alternatives": 1})
    assert answer == {"translatedText": ["A"], "alternatives": [["?"]]}


def test_a_form_is_taken_as_json_is():
    form = urllib.parse.urlencode({"q": "ü b", "source": "de", "target": "en", "alternatives": "1"})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}

    async def act(client):
        async with client.post(_PATH, data=form, headers=headers) as answer:
            return await answer.json()

    assert with_client(act) == {"translatedText": "Ü B", "alternatives": ["?"]}


def test_languages_that_are_named_begin_the_lines():
    body = {"q": "tag\nx", "source": "deu_Latn", "target": "fra_Latn"}
    translated = "DEU_LATN FRA_LATN TAG\nDEU_LATN FRA_LATN X"
    assert _answer(body, spec=_NAMED) == {"translatedText": translated}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], 'Expected {"q": '),
        ({"target": "en"}, 'Expected {"q": '),
        ({"q": ["a", 1], "target": "en"}, 'Expected {"q": '),
        ({"q": "\ud83d", "target": "en"}, "q: a surrogate"),
        ({"q": "a"}, "target is missing"),
        ({"q": "a", "target": "de"}, "translates into English alone"),
        ({"q": "a", "source": "xx", "target": "en"}, "expected one of de, fr, got 'xx'"),
        ({"q": "a", "target": "en", "format": "html"}, "format: expected text, got 'html'"),
        ({"q": "a", "target": "en", "alternatives": -1}, "alternatives: expected a number, got -1"),
    ],
)
def test_wrong_requests_are_refused_in_the_form_of_libretranslate(body, message):
    assert re.search(re.escape(message), _answer(body, 400)["error"])


def test_a_model_with_named_sources_cannot_detect_them():
    answer = _answer({"q": "a", "source": "auto", "target": "fra_Latn"}, 400, _NAMED)
    assert answer == {"error": "source_lang is missing: expected one of deu_Latn, fra_Latn"}


def test_a_language_model_does_not_translate():
    spec = dataclasses.replace(SPEC, kind="text")
    answer = _answer({"q": "a", "target": "en"}, 404, spec)
    assert answer["error"].startswith(f"{_PATH}: toy continues prompts; POST to /generate")


def test_languages_list_their_targets():
    async def act(client):
        async with client.get("/libretranslate/languages") as answer:
            return await answer.json()

    expected = [{"code": code, "name": code, "targets": ["en"]} for code in ("de", "fr")]
    assert with_client(act) == expected
    assert libretranslate.languages(_NAMED) == [{"code": code, "name": code} for code in _CODES]
    assert libretranslate.languages(dataclasses.replace(SPEC, kind="text")) == []
