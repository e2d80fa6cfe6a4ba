"""A toy decoder, which reverses words, and the tokenizer of its letters."""

import numpy as np

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.input.normalization import normalize
from lingvo_gshard.spmd.specs import WHOLE

_EOS = 2
_NO_RESULT = 4 + ord("!") - ord("a")  # The id of `!`.


class Letters:
    """Each letter is a piece: `a` is 4, `b` is 5, ... It records the texts that it encodes."""

    def __init__(self):
        self.encoded = set()

    def encode(self, text):
        """The letters' ids, then EOS."""
        self.encoded.add(text)
        return [ord(letter) - ord("a") + 4 for letter in text.strip()] + [_EOS]

    def normalize(self, text):
        """The normalization of the project's own vocabularies."""
        return normalize(text)

    def pieces(self, ids):
        """The letters, and `$` for EOS."""
        return ["$" if i == _EOS else chr(i - 4 + ord("a")) for i in ids]

    def decode(self, ids):
        """The letters before EOS."""
        ids = list(ids)
        return "".join(chr(i - 4 + ord("a")) for i in ids[: ids.index(_EOS)])


class Reverser:
    """A decoder that reverses each source; its second-best result is `a` for each letter.

    The third hypothesis is missing. It records the shapes of its batches. A source with `!` gets
    zero hypotheses. The log-probabilities of all tokens are 0.
    """

    def __init__(self, batch_size, input_lengths, share=WHOLE):
        self.spec = DecoderSpec("reverser", ("de",), batch_size, input_lengths, 3, 1)
        self.share, self.origin, self.shapes = share, {"weights": "reversed"}, []

    def __call__(self, features):
        shape = features.source_ids.shape
        self.shapes.append(shape)
        ids, lengths = np.zeros((shape[0], 3, shape[1]), np.int32), np.zeros((shape[0], 3), int)
        for row, (source, segments) in enumerate(
            zip(features.source_ids, features.source_segment_ids, strict=True)
        ):
            words = source[segments > 0][:-1]
            ids[row, 0, : len(words) + 1] = [*words[::-1], _EOS]
            ids[row, 1, : len(words) + 1] = [4] * len(words) + [_EOS]
            lengths[row, :2] = 0 if _NO_RESULT in words else len(words) + 1
        return {
            "ids": ids,
            "lengths": lengths,
            "scores": lengths * [-0.25, -2.0, -1e9],
            "token_log_probs": np.zeros(ids.shape),
        }
