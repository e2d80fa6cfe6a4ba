"""Text to text: order, blank and long lines, n-best lists, one output a line."""

import itertools

import numpy as np
import pytest

from lingvo_gshard.decode.decoder import DecoderSpec
from lingvo_gshard.decode.translator import Translation, Translator

_EOS = 2


class _Letters:
    """A letter is a piece: `a` is 4, `b` is 5, ..."""

    def encode(self, text):
        return [ord(letter) - ord("a") + 4 for letter in text.strip()] + [_EOS]

    def encode_lines(self, lines):
        return [self.encode(line) for line in lines]

    def decode(self, ids):
        ids = list(ids)
        return "".join(chr(i - 4 + ord("a")) for i in ids[: ids.index(_EOS)])


class _Reverser:
    """A decoder that says each source backwards, and `a` for each letter as its second best.

    Its third hypothesis was not found. It notes the batches' shapes.
    """

    def __init__(self, batch_size, source_lengths):
        self.spec = DecoderSpec("reverser", ("de",), batch_size, source_lengths, 3, 1)
        self.shapes = []

    def __call__(self, features):
        shape = features.source_ids.shape
        self.shapes.append(shape)
        ids, lengths = np.zeros((shape[0], 3, shape[1]), np.int32), np.zeros((shape[0], 3), int)
        for row, (source, real) in enumerate(
            zip(features.source_ids, features.source_segment_ids, strict=True)
        ):
            words = source[real > 0][:-1]
            ids[row, 0, : len(words) + 1] = [*words[::-1], _EOS]
            ids[row, 1, : len(words) + 1] = [4] * len(words) + [_EOS]
            lengths[row, :2] = len(words) + 1
        return {"ids": ids, "lengths": lengths, "scores": lengths * [-0.25, -2.0, -1e9]}


def _translator(batch_size=3, source_lengths=(16, 20)):
    decoder = _Reverser(batch_size, source_lengths)
    return Translator(decoder, _Letters(), _Letters()), decoder


def _texts(lines, *sizes):
    return [best.text for best, *_ in _translator(*sizes)[0].translate(lines)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_one_output_a_line_in_order(batch_size):
    lines = ["abc", "z", "abcdefghijklmnopqr", "hello", "b", "qq", "yes"] * 20
    assert _texts(lines, batch_size) == [line[::-1] for line in lines]


def test_the_best_hypotheses_with_their_scores_and_lengths():
    (found,) = _translator()[0].translate(["abc"])
    assert found == (Translation("cba", -1.0, 4), Translation("aaa", -8.0, 4))


def test_blank_lines_stay_blank():
    assert _texts(["", "ab", "  \t", "cd", "\u2028", ""]) == ["", "ba", "", "dc", "", ""]


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_nothing_to_say_asks_nothing_of_the_model(lines):
    translator, decoder = _translator()
    assert list(translator.translate(lines)) == [(Translation("", 0.0, 0),)] * len(lines)
    assert not decoder.shapes


def test_a_long_line_is_translated_in_parts():
    translator, decoder = _translator(3, (5,))
    found = list(translator.translate(["abcdefg", "ab"]))
    # 3 and 4 letters, each with its EOS.
    assert found[0] == (
        Translation("cba gfed", (4 * -1.0 + 5 * -1.25) / 9, 9),
        Translation("aaa aaaa", (4 * -8.0 + 5 * -10.0) / 9, 9),
    )
    assert found[1][0].text == "ba" and {shape[0] for shape in decoder.shapes} == {3}


def test_lines_of_similar_length_share_a_batch():
    translator, decoder = _translator(batch_size=2)
    list(translator.translate(["a" * 18, "b", "c" * 19, "d"]))
    assert decoder.shapes == [(2, 16), (2, 20)]


def test_lines_are_given_back_before_the_last_was_read():
    translator, _ = _translator(batch_size=1)
    endless = translator.translate(itertools.cycle(["ab", "cde"]))
    assert [next(endless)[0].text for _ in range(40)] == ["ba", "edc"] * 20


def test_a_translation_that_spells_a_lines_end_or_a_tab_stays_on_its_line():
    class Breaking(_Letters):
        def decode(self, ids):
            text = super().decode(ids).replace("x", "\n").replace("y", "\r\n")
            return text.replace("z", "\u2028").replace("w", "\t")

    translator = Translator(_translator()[1], _Letters(), Breaking())
    assert [best.text for best, *_ in translator.translate(["dxcybzawa"])] == ["a a b c d"]
