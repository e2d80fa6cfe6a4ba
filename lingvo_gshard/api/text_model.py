"""A trained model that translates or continues lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, overload

from lingvo_gshard.decoding import reading

if TYPE_CHECKING:
    from lingvo_gshard.decoding.bundle_spec import DecoderSpec
    from lingvo_gshard.decoding.languages import Languages
    from lingvo_gshard.decoding.text_decoder import NBest, TextDecoder
    from lingvo_gshard.runs.opening import Check


class DecodesLines:
    """`translate` and `generate`, for a loaded model and for an experiment."""

    def _model_for(self, command: str, check: Check | None = None) -> TextModel:
        """Returns the model; `check` raises ValueError for languages that it does not know.

        Raises ValueError if `command` is not the program for it.
        """
        raise NotImplementedError

    @overload
    def translate(  # type: ignore[overload-overlap]
        self, lines: str, *, source_lang: str | None = ..., target_lang: str | None = ...
    ) -> str: ...

    @overload
    def translate(
        self, lines: Iterable[str], *, source_lang: str | None = ..., target_lang: str | None = ...
    ) -> list[str]: ...

    def translate(
        self,
        lines: str | Iterable[str],
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> str | list[str]:
        """Returns the translation of a line, or a list of the translations of a list of lines.

        Raises ValueError if the model does not translate, if it does not know a language, if a
        language must be named and is not, or if a line is not a str.
        """
        listed = texts(lines)
        model = self._model_for(
            "translate", lambda known: beginning_of(known, source_lang, target_lang)
        )
        found = model.nbest(listed, source_lang=source_lang, target_lang=target_lang)
        return _best(lines, found)

    @overload
    def generate(self, prompts: str, *, seed: int = ...) -> str: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompts: Iterable[str], *, seed: int = ...) -> list[str]: ...

    def generate(self, prompts: str | Iterable[str], *, seed: int = 0) -> str | list[str]:
        """Returns the continuation of a prompt, or a list of continuations of a list of prompts.

        Samples depend on `seed`. Raises ValueError if the model is not a language model, if a
        prompt is too long, or if one is not a str.
        """
        listed = texts(prompts)
        return _best(prompts, self._model_for("generate").nbest(listed, seed=seed))


class TextModel(DecodesLines):
    """A model that decodes lines, loaded from a run or a bundle."""

    def __init__(self, text_decoder: TextDecoder, name: str) -> None:
        """`name` is the folder of the model."""
        self._decoder = text_decoder
        self._name = name

    @property
    def spec(self) -> DecoderSpec:
        """The model's name, languages, lengths and other facts."""
        return self._decoder.spec

    def nbest(
        self,
        lines: Iterable[str],
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        seed: int = 0,
    ) -> list[NBest]:
        """Returns the decode.num_best best results of each line, with their scores.

        Raises ValueError if the model does not know a language, if a language must be named and is
        not, if a prompt is too long, or if a line is not a str.
        """
        beginning = beginning_of(self.spec.spoken, source_lang, target_lang)
        return list(self._decoder.decode((beginning + line for line in texts(lines)), seed=seed))

    def __repr__(self) -> str:
        return f"<{self.spec.model} of {self._name}, which {self.spec.reading.does}>"

    def _model_for(self, command: str, check: Check | None = None) -> TextModel:
        reading.check_command(self.spec.model, self.spec.kind, command)
        return self


def beginning_of(known: Languages, source_lang: str | None, target_lang: str | None) -> str:
    """Returns the text that begins each line of a source.

    Raises ValueError if the model does not know a language, or if a language must be named and is
    not.
    """
    if not known.sources:  # Otherwise `beginning` checks the source.
        reading.check_language(source_lang, known.source_languages, known.kind)
    return known.beginning(target_lang, source_lang)


def _best(lines: str | Iterable[str], found: list[NBest]) -> str | list[str]:
    """Returns the best result of a line, or a list of the best results of many."""
    best = [hypotheses[0].text for hypotheses in found]
    return best[0] if isinstance(lines, str) else best


def texts(lines: Iterable[str]) -> list[str]:
    """Returns lines as a list; a str is one line. Raises ValueError if a line is not a str."""
    if isinstance(lines, str):
        return [lines]
    if isinstance(lines, bytes) or not isinstance(lines, Iterable):
        raise ValueError(f"lines: expected a str or a list of them, got {lines!r}.")

    listed = list(lines)
    for number, text in enumerate(listed, start=1):
        if not isinstance(text, str):
            raise ValueError(f"line {number}: expected a str, got {type(text).__name__} {text!r}.")
    return listed
