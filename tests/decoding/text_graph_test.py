"""The rules for text in a TensorFlow graph, compared with the same rules in Python."""

import random
import unicodedata

import pytest
import tensorflow as tf

from lingvo_gshard.decoding import joints, text_graph, translator
from lingvo_gshard.input import example_codec
from lingvo_gshard.input.normalization import normalize, one_line

_ALPHABET = "ab3é語😀  ..!?。\"')»,،:--–;"


def _strings(tensor):
    return [text.decode() for text in tensor.numpy()]


def _texts(count, longest):
    rng = random.Random(0)
    return ["".join(rng.choices(_ALPHABET, k=rng.randint(0, longest))) for _ in range(count)]


def test_text_is_normalized_as_it_is_for_training():
    """For all characters of planes 0 and 1 that this Python's version of Unicode has assigned."""
    characters = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    known = [c for c in characters if unicodedata.category(c) != "Cn"]
    texts = [f" x{c}\u0301 {c} " for c in known] + _texts(200, 40)
    made = _strings(text_graph.normalize(tf.constant([text.encode() for text in texts])))
    assert made == [normalize(text) for text in texts]


def test_invalid_bytes_become_replacement_characters():
    assert _strings(text_graph.normalize(tf.constant([b"a\xff\xc3 b"]))) == ["a\ufffd\ufffd b"]


@pytest.mark.parametrize("longest", [1, 4, 11])
def test_text_is_split_where_the_translator_splits_it(longest):
    texts = [normalize(text) for text in _texts(300, 60)]
    texts += ["a, - b - - - c", "1.5 2.5. x.y 3", "a.\" b.') c", "no.spaces.at.all", "。。。語語。"]

    def fits(text, lines):
        # In every third text, parts may be longer.
        extra = tf.where(lines % 3 == 0, 5, 0)
        return tf.strings.length(text, "UTF8_CHAR") <= longest + extra

    numbers = tf.range(len(texts), dtype=tf.int64)
    parts, lines = text_graph.split(tf.constant(texts), numbers, fits)
    made = [[] for _ in texts]
    for part, line in zip(_strings(parts), lines.numpy(), strict=True):
        made[line].append(part)

    for number, text in enumerate(texts):
        size = longest + (5 if number % 3 == 0 else 0)
        expected = translator.split(text, lambda part, size=size: len(part) <= size)
        assert made[number] == expected, text


def test_tokens_in_a_text_are_cut_as_the_tokenizer_cuts_them():
    tokens = ["<2de>", "<2zh-Hant>"]
    texts = ["a house", "<2de> <2zh-Hant><2de> b", "<2<2de>2de>", "<2fr>"]
    cut = _strings(text_graph.cut_tokens(tf.constant(texts), tokens))
    for text, parts in zip(texts, cut, strict=True):
        expected = example_codec.literal_parts(f"<2de> {text}", tokens)
        assert f"<2de> {parts}".split(text_graph.CUT) == expected


def test_written_text_is_one_line_as_the_translator_writes_it():
    texts = [f" x{chr(code)} {chr(code)}y" for code in range(0x3000)]
    assert _strings(text_graph.one_line(tf.constant(texts))) == [one_line(text) for text in texts]


def test_parts_are_joined_as_the_translator_joins_them():
    rng = random.Random(1)
    alphabet = 'ab3\u0e01\u0e48語かﾃ、。９๕é😀 ."»'
    lines = []
    for _ in range(400):
        texts = ["".join(rng.choices(alphabet, k=rng.randint(0, 4))) for _ in range(4)]
        lines.append([one_line(text) for text in texts[: rng.randint(0, 4)]])

    numbers = [number for number, parts in enumerate(lines) for _ in parts]
    parts = tf.constant([part for parts in lines for part in parts])
    made = text_graph.joined(parts, tf.constant(numbers, tf.int64), tf.constant(len(lines)))
    assert _strings(made) == [joints.joined(parts) for parts in lines]
    assert any(" " in line and "語か" in line for line in _strings(made))
