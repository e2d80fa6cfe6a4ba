"""The Translator's rules for text as operations of a TensorFlow graph.

`normalize` is input/normalization.py, and `split` is decoding/translator.py, both on tensors of
UTF-8 strings. TensorFlow's regular expressions (RE2) have no lookahead. So a mark is inserted where
a cut may be, and moved or removed by what follows it.

N lines, P parts of lines, C cuts of a part.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf, tf_text
from lingvo_gshard.decoding.translator import CLOSING_MARKS, DASHES, PAUSES, SENTENCE_ENDS
from lingvo_gshard.input.normalization import CONTROL, SPACE

# Stands where a text may be cut. `normalize` removes it from the text itself.
CUT = "\x01"
# A cut leaves at least 1 / 8 of the text on both sides, as in translator.py.
_MIN_SHARE_INVERSE = 8


def normalize(text: tf.Tensor) -> tf.Tensor:
    """Returns strings in NFKC, without control characters, with single spaces.

    Bytes that are not UTF-8 become replacement characters, as where lines are read.
    """
    text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8", errors="replace")
    text = tf.strings.regex_replace(text, _re2(CONTROL.pattern), "")
    text = tf.strings.regex_replace(text, SPACE, " ")
    return single_spaces(tf_text.normalize_utf8(text, "NFKC"))


def cut_tokens(text: tf.Tensor, tokens: Sequence[str]) -> tf.Tensor:
    """Returns normalized strings with CUT after the first character of each of the tokens in them.

    So the parts are those of example_codec.literal_parts.
    """
    for token in tokens:
        marked = f"{token[0]}{CUT}{token[1:]}"
        text = tf.strings.regex_replace(text, re.escape(token), marked)
    return text


def single_spaces(text: tf.Tensor) -> tf.Tensor:
    """Returns " ".join(text.split()) of each string."""
    text = tf.strings.regex_replace(text, f"[{_white_space()}]+", " ")
    return _stripped(text)


def split(
    text: tf.Tensor, lines: tf.Tensor, fits: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits normalized text into parts that fit, in order and without the space between them.

    Args:
      text: string [N].
      lines: int64 [N], the number of each text, ascending.
      fits: From string [P] and int64 [P], the parts and the numbers of their texts, to bool [P].

    Returns:
      The parts, string [P], and the numbers of their texts, int64 [P].
    """

    def is_whole(text: tf.Tensor, lines: tf.Tensor) -> tf.Tensor:
        # A single character cannot be cut, whatever its length in pieces.
        return (tf.strings.length(text, "UTF8_CHAR") <= 1) | fits(text, lines)

    def cut_once(text: tf.Tensor, lines: tf.Tensor, whole: tf.Tensor) -> Sequence[tf.Tensor]:
        # Each part that does not fit is replaced by its two sides; others keep an empty right side,
        # which is left out.
        cut = _middle(tf.where(whole, "", text))
        start = tf.zeros_like(cut)
        left = tf.strings.substr(text, start, cut, "UTF8_CHAR")
        right = tf.strings.substr(text, cut, _lengths(text), "UTF8_CHAR")
        sides = tf.stack([tf.where(whole, text, left), tf.where(whole, "", right)], 1)
        kept = tf.stack([tf.ones_like(whole), ~whole], 1)

        text = _stripped(tf.boolean_mask(sides, kept))
        lines = tf.boolean_mask(tf.stack([lines, lines], 1), kept)
        return text, lines, is_whole(text, lines)

    text, lines, _ = tf.while_loop(
        lambda text, lines, whole: ~tf.reduce_all(whole),
        cut_once,
        [text, lines, is_whole(text, lines)],
        shape_invariants=[tf.TensorShape([None])] * 3,
    )
    return text, lines


def _middle(text: tf.Tensor) -> tf.Tensor:
    """Returns the best place to cut near the middle of each text, in characters, int32 [P]."""
    length = _lengths(text)
    middle = length // 2

    # Between words is replaced by at a comma or dash, and that by after a sentence, where these
    # leave enough on both sides.
    place = middle
    for marked in (_between_words(text), _at_pauses(text), _after_sentences(text)):
        cuts = _cuts(marked, length)  # [P, C]
        rest = length[:, None] - cuts
        is_even = _MIN_SHARE_INVERSE * tf.minimum(cuts, rest) >= length[:, None]
        allowed = is_even & (rest > 0)

        distance = tf.where(allowed, tf.abs(cuts - middle[:, None]), tf.int32.max)
        nearest = tf.argmin(distance, 1)  # The first of equals.
        nearest_cut = tf.gather(cuts, nearest, axis=1, batch_dims=1)
        place = tf.where(tf.reduce_any(allowed, 1), nearest_cut, place)

    return place


def _cuts(marked: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """Returns the places of the marks in each text, int32 [P, C], of which some are its end."""
    pieces = tf.strings.split(marked, CUT)
    piece_lengths = tf.ragged.map_flat_values(_lengths, pieces).to_tensor()
    # With the end itself, there is at least one.
    return tf.concat([tf.cumsum(piece_lengths, axis=1), length[:, None]], 1)


def _after_sentences(text: tf.Tensor) -> tf.Tensor:
    return _marked_after(text, f"[{SENTENCE_ENDS}]+[{CLOSING_MARKS}]*")


def _at_pauses(text: tf.Tensor) -> tf.Tensor:
    # A space that a comma has before its mark begins no dash.
    marked = _marked_after(text, f"[{PAUSES}]")
    return tf.strings.regex_replace(marked, f" [{DASHES}] ", rf"\0{CUT}")


def _between_words(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.regex_replace(text, " +", rf"\0{CUT}")


def _marked_after(text: tf.Tensor, end: str) -> tf.Tensor:
    """Marks the places after what matches `end` and its spaces, unless [0-9A-Za-z] follows."""
    text = tf.strings.regex_replace(text, end, rf"\0{CUT}")
    text = tf.strings.regex_replace(text, f"{CUT}([0-9A-Za-z])", r"\1")
    return tf.strings.regex_replace(text, f"{CUT}( +)", rf"\1{CUT}")


def _stripped(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.regex_replace(text, "^ +| +$", "")


def _lengths(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.length(text, "UTF8_CHAR")


@functools.cache
def _white_space() -> str:
    """Returns the characters at which str.split() splits, for the brackets of a pattern."""
    characters = map(chr, range(sys.maxunicode + 1))
    return _re2("".join(filter(str.isspace, characters)))


def _re2(pattern: str) -> str:
    """Returns a pattern whose characters beyond printable ASCII are escaped."""
    escaped = []
    for character in pattern:
        is_plain = character.isascii() and character.isprintable()
        escaped.append(character if is_plain else rf"\x{{{ord(character):x}}}")
    return "".join(escaped)
