"""Text to text: order, blank lines, one output a line."""

import numpy as np
import pytest

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.decode.translator import Translation, Translator
from lingvo_gshard.sharding.partitioning import TensorSpec

_EOS = 2


class _Letters:
    """A letter is a piece: `a` is 4, `b` is 5, ..."""

    def encode_lines(self, lines):
        return [[ord(letter) - ord("a") + 4 for letter in line.strip()] + [_EOS] for line in lines]

    def decode(self, ids):
        ids = list(ids)
        return "".join(chr(i - 4 + ord("a")) for i in ids[: ids.index(_EOS)])


class _Reverser:
    """An estimator whose predictions are the sources, reversed; notes the batches' specs."""

    def __init__(self):
        self.shapes = []

    def predict(self, input_fn):
        source = input_fn(None)
        assert source.specs.features.source_ids == TensorSpec(
            source.specs.features.source_ids.shape, "int32", "BL"
        )
        for batch in source:
            features = batch.features
            self.shapes.append(features.source_ids.shape)
            for ids, segments in zip(features.source_ids, features.source_segment_ids, strict=True):
                words = ids[segments > 0][:-1]
                best = np.array([*words[::-1], _EOS])
                worst = np.array([4] * len(words) + [_EOS])
                yield {
                    "ids": np.stack([best, worst]),
                    "lengths": np.array([len(best), len(worst)]),
                    "scores": np.array([-0.25 * len(best), -9.0]),
                }


def _translator(batch_size=3, max_source_len=20):
    p = Params()
    p.Define("batch_size", batch_size, "")
    p.Define("max_source_len", max_source_len, "")
    estimator = _Reverser()
    return Translator(estimator, _Letters(), _Letters(), p), estimator


def _texts(lines, **sizes):
    return [translation.text for translation in _translator(**sizes)[0].translate(lines)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_one_output_a_line_in_order(batch_size):
    lines = ["abc", "z", "abcdefghijklmnopqr", "hello", "b", "qq", "yes"]
    assert _texts(lines, batch_size=batch_size) == [line[::-1] for line in lines]


def test_the_best_hypothesis_with_its_score_and_length():
    assert _translator()[0].translate(["abc"]) == [Translation("cba", -1.0, 4)]


def test_blank_lines_stay_blank():
    assert _texts(["", "ab", "  \t", "cd", ""]) == ["", "ba", "", "dc", ""]


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_nothing_to_say_asks_nothing_of_the_model(lines):
    translator, estimator = _translator()
    assert translator.translate(lines) == [Translation("", 0.0, 0)] * len(lines)
    assert not estimator.shapes


def test_long_lines_are_cut_and_batches_keep_their_size():
    translator, estimator = _translator(max_source_len=5)
    assert [t.text for t in translator.translate(["abcdefgh", "ab"])] == ["dcba", "ba"]
    assert {shape[0] for shape in estimator.shapes} == {3}


def test_lines_of_similar_length_share_a_batch():
    translator, estimator = _translator(batch_size=2)
    translator.translate(["a" * 18, "b", "c" * 19, "d"])
    assert estimator.shapes == [(2, 16), (2, 20)]


def test_a_translation_that_spells_a_lines_end_stays_on_its_line():
    class Breaking(_Letters):
        def decode(self, ids):
            return (
                super().decode(ids).replace("x", "\n").replace("y", "\r\n").replace("z", "\u2028")
            )

    translator, _ = _translator()
    translator._target = Breaking()
    assert [t.text for t in translator.translate(["dxcybza"])] == ["a b c d"]
