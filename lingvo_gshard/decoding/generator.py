"""Continues prompts and answers chats with a language model, by beam search or by samples."""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.text_decoder import NBest, Part, TextDecoder
from lingvo_gshard.input.normalization import one_line, without_control
from lingvo_gshard.input.tokenizer import Tokenizer


class Generator(TextDecoder):
    """Continues the beginnings of documents. A blank line continues from BOS alone.

    A decoder that samples draws spec.num_best continuations of each prompt, each in its own row.
    A sample depends only on the weights, the prompt, its number in its text, and the seed: not on
    the other lines, nor on the number of processes.
    """

    def __init__(
        self,
        decoder: Decoder,
        source: Tokenizer,
        target: Tokenizer,
        first_tokens: int | None = None,
    ) -> None:
        """With `first_tokens`, a prompt is a line cut to that many tokens, including BOS."""
        super().__init__(decoder, source, target)
        self._first_tokens = first_tokens

    def parts(self, line: str, number: int = 1, seed: int = 0) -> list[Part]:
        """Returns a part with the prompt, or one part for each of its samples.

        Raises ValueError if the prompt is too long, or has no tokens.
        """
        ids = self._source.prompt(line)[: self._first_tokens]
        if not ids:
            raise ValueError(f"prompt {number} has no tokens, and the vocabulary has no BOS.")
        longest = self.spec.input_lengths[-1]
        if len(ids) > longest:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens with BOS, and the limit is {longest}: "
                "shorten it, or raise decode.max_prompt_len, by --max_prompt_len with --logdir."
            )

        prompt = np.array(ids, np.int32)
        num_samples = self.spec.num_best if self.spec.is_sampled else 1
        first_sample = (number - 1) * num_samples
        row_length = self._row_length(len(ids))
        return [Part(prompt, row_length, (seed, first_sample + i)) for i in range(num_samples)]

    def num_tokens(self, lines: Sequence[str]) -> list[int]:
        """Returns the number of tokens of each prompt, including BOS if the tokenizer adds it."""
        return [len(self._source.prompt(line)) for line in lines]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the prompt of a chat, for `of_chats`.

        A message has a `role`, such as user, and its `content`. Raises ValueError if the tokenizer
        has no chat template, or the template refuses the messages.
        """
        try:
            return self._source.chat(messages)
        except ValueError as error:
            raise ValueError(f"{self.spec.model}: {error}") from error

    @functools.cached_property
    def of_chats(self) -> "Generator":
        """The same decoder for the prompts of chats."""
        return _ChatGenerator(self.decoder, self._source.of_chats, self._target)

    def divided(self, line: str) -> tuple[str, str]:
        """Returns the text of a line's first tokens, and the rest of its normalized text."""
        prompt = self._source.decode(self._source.prompt(line)[: self._first_tokens])
        return prompt, _after(prompt, self._source.normalize(line))

    def text_of(self, line: str, ids: Sequence[int]) -> str:
        """Returns the text of a prompt's continuation by these tokens."""
        prompt = np.array(self._source.prompt(line), np.int32)
        return self._text(prompt, np.array(ids, np.int32))

    def _text(self, source: np.ndarray, ids: np.ndarray) -> str:
        """Returns the continuation; it begins with a space, unless it continues a word."""
        whole = self._target.decode([*source, *ids])
        return _after(self._target.decode(source), whole)

    def _more_features(self, parts: Sequence[Part]) -> NestedMap:
        seeds = np.zeros((self.num_rows, 2), np.int32)
        for row, part in enumerate(parts):
            # The program adds the step, which must not lead to another sample's seed.
            mixed = np.random.SeedSequence(part.seed).generate_state(2, np.uint32)
            seeds[row] = mixed.view(np.int32)
        return NestedMap(seeds=seeds)

    def _joined_line(self, results: Sequence[NBest]) -> NBest:
        """Returns a prompt's continuations: the beam's, or its samples, most probable first."""
        hypotheses = itertools.chain.from_iterable(results)
        return tuple(sorted(hypotheses, key=lambda hypothesis: -hypothesis.score))


class _ChatGenerator(Generator):
    """Answers chats, whose prompts end where the answer begins, and may have EOS after a turn."""

    def _text(self, source: np.ndarray, ids: np.ndarray) -> str:
        return one_line(self._target.decode(ids))


def _after(beginning: str, text: str) -> str:
    """Returns the text after its beginning, on one line and without a space at the end.

    Control characters are removed and runs of spaces merged: see normalization.one_line.
    """
    # The texts differ at the end of `beginning` if a character's bytes are split between the two.
    num_shared = 0
    for one, other in zip(beginning, text, strict=False):
        if one != other:
            break
        num_shared += 1

    return re.sub(r"\s+", " ", without_control(text[num_shared:])).rstrip()
