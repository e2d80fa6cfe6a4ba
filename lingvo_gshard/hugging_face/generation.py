"""generation_config.json: the options of transformers' generate, and our settings for them.

    num_beams                        decode.beam_size; 1 is greedy: decode.length_norm_alpha=0
    length_penalty                   decode.length_norm_alpha
    early_stopping                   decode.stopping
    max_length, or max_new_tokens    decode.max_target_len, which does not count the first input
    min_length, or min_new_tokens    decode.min_target_len
    num_return_sequences             decode.num_best
    do_sample with one beam          decode.temperature, decode.top_k, decode.top_p

An older folder has these fields in config.json. If a field is missing or null, the experiment's own
setting holds. Options that we lack, such as no_repeat_ngram_size, are not read.
"""

import pathlib
from collections.abc import Callable
from typing import Any

from lingvo_gshard.beam_search.beam import Stopping
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.hugging_face.config import Config
from lingvo_gshard.input.manifest import Kind

FILE = "generation_config.json"
EARLY_STOPPING: dict[Stopping, Any] = {
    Stopping.DECIDED: "never",
    Stopping.LIKELY: False,
    Stopping.FIRST: True,
}
_MAX_LENGTH = 2**16
_MAX_BEAMS = 1024
_DEFAULT_TOP_K = 50  # In transformers, for a folder that samples.


def fields(folder: pathlib.Path, config: Config) -> Fields:
    """Returns the options of generate in a folder, from config.json if it has no other file.

    Raises ValueError if the file is damaged.
    """
    if (folder / FILE).is_file():
        return json_fields.read(folder / FILE)
    return config.values


def settings(given: Fields, config: Config) -> list[str]:
    """Returns the options as `path=value` settings of an experiment.

    Raises ValueError for a value that generate does not accept, and for special tokens that differ
    from config.json's.
    """
    if given is not config.values:
        config.check_generated(given)
    reader = _Reader(given, config.KIND)
    values = reader.lengths() | reader.search(config["vocab_size"])
    return [f"decode.{name}={value}" for name, value in values.items()]


def written_lengths(decode: Params, kind: Kind) -> dict[str, Any]:
    """Returns the options of lengths for a model of a kind of data: see _Reader.lengths."""
    shortest = decode.min_target_len
    if kind is Kind.TEXT:
        fields = {"max_new_tokens": decode.max_target_len}
        return fields if shortest == 1 else fields | {"min_new_tokens": shortest - 1}
    fields = {"max_length": decode.max_target_len + 1}  # Theirs counts the first token.
    return fields if shortest == 1 else fields | {"min_length": shortest}


class _Reader:
    """Reads the options, and checks that generate accepts them."""

    def __init__(self, given: Fields, kind: Kind) -> None:
        self._given = given
        self._counts_input = kind is not Kind.TEXT

    def lengths(self) -> dict[str, Any]:
        """Returns the settings of lengths; generate also counts the decoder's first input.

        A language model's first input is the prompt, whose length is not known here.
        """
        values = {}
        longest = self._integer("max_new_tokens", 1, _MAX_LENGTH)
        if longest is None and self._counts_input:
            length = self._integer("max_length", 2, _MAX_LENGTH)
            longest = None if length is None else length - 1
        if longest is not None:
            values["max_target_len"] = longest

        shortest = self._integer("min_new_tokens", 0, _MAX_LENGTH)
        if shortest is not None:
            shortest += 1
        elif self._counts_input:
            shortest = self._integer("min_length", 0, _MAX_LENGTH)
        if shortest is not None:
            values["min_target_len"] = max(shortest, 1)
            if longest is not None and longest < shortest:
                raise ValueError(
                    f"{self._given.path}: hypotheses of at least {shortest} tokens and at most "
                    f"{longest}."
                )
        return values

    def search(self, vocab_size: int) -> dict[str, Any]:
        """Returns the settings of beam search or of sampling."""
        beams = self._integer("num_beams", 1, _MAX_BEAMS)
        if self._boolean("do_sample") and beams in (None, 1):
            return {"beam_size": 1} | self._sampling(vocab_size)

        values: dict[str, Any] = {}
        penalty = self._number("length_penalty", lambda x: x >= 0, "0 or more")
        if penalty is not None:
            values["length_norm_alpha"] = penalty
        if beams is not None:
            values["beam_size"] = beams
        if beams == 1:
            values["length_norm_alpha"] = 0.0  # Greedy search does not compare lengths.

        stopping = self._early_stopping()
        if stopping is not None:
            values["stopping"] = stopping.name
        num_best = self._integer("num_return_sequences", 1, beams or _MAX_BEAMS)
        if num_best is not None:
            values["num_best"] = num_best
        return values

    def _sampling(self, vocab_size: int) -> dict[str, Any]:
        temperature = self._number("temperature", lambda x: x > 0, "above 0")
        top_p = self._number("top_p", lambda x: 0 < x <= 1, "above 0, at most 1")
        top_k = self._integer("top_k", 0, _MAX_LENGTH)
        if top_k is None:
            top_k = _DEFAULT_TOP_K
        return {
            "temperature": 1.0 if temperature is None else temperature,
            "top_k": min(top_k, vocab_size) or None,  # In generate, 0 means all tokens.
            "top_p": None if top_p in (None, 1) else top_p,
        }

    def _early_stopping(self) -> Stopping | None:
        value = self._given.get("early_stopping")
        if value is None:
            return None
        for stopping, theirs in EARLY_STOPPING.items():
            if value == theirs and type(value) is type(theirs):
                return stopping
        raise json_fields.refused(self._given, "early_stopping", "true, false or 'never'")

    def _boolean(self, name: str) -> bool:
        value = self._given.get(name)
        if value not in (None, True, False):
            raise json_fields.refused(self._given, name, "true or false")
        return bool(value)

    def _integer(self, name: str, least: int, most: int) -> int | None:
        value = self._given.get(name)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            raise json_fields.refused(self._given, name, f"{least} to {most}")
        return value

    def _number(self, name: str, is_right: Callable[[float], bool], what: str) -> float | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not json_fields.is_number(value) or not is_right(value):
            raise json_fields.refused(self._given, name, what)
        return float(value)
