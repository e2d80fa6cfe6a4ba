"""Requests and answers of LibreTranslate's API, for the programs that are written for it.

    POST /libretranslate/translate    {"q": "Guten Tag", "source": "de", "target": "en"} ->
                                      {"translatedText": "Good day"}; q may be a list
    GET  /libretranslate/languages    [{"code": "de", "name": "de", "targets": ["en"]}, ...]

A text may have several lines, each of which is translated alone. Bodies are JSON or a form.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.text_decoder import NBest
from lingvo_gshard.serving import messages
from lingvo_gshard.serving.messages import refused

PREFIX = "/libretranslate"
_ENGLISH = "en"  # The target of a model that names none.


@dataclasses.dataclass(frozen=True)
class Asked:
    """The contents of a request."""

    texts: list[list[str]]  # The lines of each text.
    is_list: bool  # Whether q is a list.
    beginning: str  # What every line has to begin with.
    alternatives: int  # The number of further translations of each text.

    @property
    def lines(self) -> list[str]:
        """All lines, as the model reads them."""
        return [self.beginning + line for line in itertools.chain.from_iterable(self.texts)]


def asked(body: Any, spec: DecoderSpec) -> Asked:
    """Returns the contents of a request. Raises HTTPBadRequest if they are invalid."""
    given = body.get("q") if isinstance(body, dict) else None
    is_list = isinstance(given, list)
    texts: list[Any] = given if isinstance(given, list) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise refused('Expected {"q": ...}, a string or a list of strings.')
    messages.check_is_text("q", texts)

    if body.get("format") not in (None, "text"):
        raise refused(f"format: expected text, got {body['format']!r}.")
    return Asked(
        [text.split("\n") for text in texts],
        is_list,
        _beginning(body.get("source"), body.get("target"), spec),
        _alternatives(body.get("alternatives"), spec),
    )


def _beginning(source: Any, target: Any, spec: DecoderSpec) -> str:
    """Returns what lines begin with, for the model to read their languages."""
    if target is None:
        raise refused("target is missing: the code of the language to translate into.")
    if target == _ENGLISH and not spec.targets:
        target = None

    if source == "auto":  # Most models read any of their languages.
        source = None
    return messages.beginning({}, {"source_lang": source, "target_lang": target}, spec)


def _alternatives(count: Any, spec: DecoderSpec) -> int:
    if isinstance(count, str) and count.isdecimal():  # A form has strings alone.
        count = int(count)
    if count is None:
        return 0
    if type(count) is not int or count < 0:
        raise refused(f"alternatives: expected a number, got {count!r}.")
    return min(count, spec.num_best - 1)


def answer(asked: Asked, results: Sequence[NBest]) -> dict[str, Any]:
    """Returns the answer to a request, given the results of its lines."""
    remaining = iter(results)
    translated: list[str] = []
    alternatives: list[list[str]] = []
    for lines in asked.texts:
        of_lines = list(itertools.islice(remaining, len(lines)))
        # The i-th best of a text has the i-th best of each line, or its last.
        num_best = max(len(nbest) for nbest in of_lines)
        ranked = []
        for i in range(min(num_best, 1 + asked.alternatives)):
            ranked.append("\n".join(nbest[min(i, len(nbest) - 1)].text for nbest in of_lines))
        translated.append(ranked[0])
        alternatives.append(ranked[1:])

    fields: dict[str, Any] = {"translatedText": translated if asked.is_list else translated[0]}
    if asked.alternatives:
        fields["alternatives"] = alternatives if asked.is_list else alternatives[0]
    return fields


def languages(spec: DecoderSpec) -> list[dict[str, Any]]:
    """Returns the languages to translate from, each with its targets unless they are all of them.

    Their names are their codes. The list is empty for a language model.
    """
    codes = spec.source_languages
    targets = list(spec.targets) or [_ENGLISH]
    found: list[dict[str, Any]] = []
    for code in codes:
        language: dict[str, Any] = {"code": code, "name": code}
        if set(targets) != set(codes):
            language["targets"] = targets
        found.append(language)
    return found
