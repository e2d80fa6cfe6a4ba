"""Continues prompts with a language model, by beam search or by samples."""

import itertools
import re
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.text_decoder import NBest, Part, TextDecoder
from lingvo_gshard.input.example_codec import BOS_ID
from lingvo_gshard.input.tokenizer import Tokenizer


class Generator(TextDecoder):
    """Continues the beginnings of documents. A blank line continues from BOS alone.

    A decoder that samples draws spec.num_best continuations of each prompt, in rows of their own.
    A sample is a function of the weights, the prompt, its number in its text, and the seed: not of
    the other lines, or of the number of processes.
    """

    def __init__(
        self,
        decoder: Decoder,
        source: Tokenizer,
        target: Tokenizer,
        first_tokens: int | None = None,
    ) -> None:
        """With `first_tokens`, prompts are lines cut to so many tokens with BOS."""
        super().__init__(decoder, source, target)
        self._first_tokens = first_tokens

    def parts(self, line: str, number: int = 1, seed: int = 0) -> list[Part]:
        """Returns a part with the prompt, or one for each of its samples.

        Raises ValueError for a prompt that is too long.
        """
        ids = self._prompt(line)[: self._first_tokens]
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

    def divided(self, line: str) -> tuple[str, str]:
        """Returns the text of a line's first tokens, and the rest of its normalized text."""
        prompt = self._source.decode(self._prompt(line)[: self._first_tokens])
        return prompt, _after(prompt, self._source.normalize(line))

    def _prompt(self, line: str) -> list[int]:
        """Returns BOS and the tokens of a line, as a document begins in training."""
        return [BOS_ID, *self._source.encode(self._source.normalize(line))[:-1]]

    def _text(self, source: np.ndarray, ids: np.ndarray) -> str:
        """Returns what the prompt goes on with: a space first, unless a word goes on."""
        whole = self._target.decode([*source, *ids])
        return _after(self._target.decode(source), whole)

    def _more_features(self, parts: Sequence[Part]) -> NestedMap:
        seeds = np.zeros((self.num_rows, 2), np.int32)
        for row, part in enumerate(parts):
            # The program adds the step, which must not lead to the seed of another sample.
            mixed = np.random.SeedSequence(part.seed).generate_state(2, np.uint32)
            seeds[row] = mixed.view(np.int32)
        return NestedMap(seeds=seeds)

    def _joined_line(self, results: Sequence[NBest]) -> NBest:
        """Returns a prompt's continuations: of the beam, or its samples, the likeliest first."""
        hypotheses = itertools.chain.from_iterable(results)
        return tuple(sorted(hypotheses, key=lambda hypothesis: -hypothesis.score))


def _after(beginning: str, text: str) -> str:
    """Returns the text after its beginning, with single spaces, and none at the end."""
    # They differ at the beginning's end if a character's bytes are pieces on both sides of it.
    num_shared = 0
    for one, other in zip(beginning, text, strict=False):
        if one != other:
            break
        num_shared += 1

    # Byte pieces can spell line breaks and tabs.
    return re.sub(r"\s+", " ", text[num_shared:]).rstrip()
