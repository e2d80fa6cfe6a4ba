"""The Translator's rules for text as operations of a TensorFlow graph.

`normalize` and `one_line` are input/normalization.py, `split` is decoding/translator.py, and
`joined` is decoding/joints.py, all on tensors of UTF-8 strings. TensorFlow's regular expressions
(RE2) lack lookahead. So a mark is inserted at each possible cut, and then moved or removed
depending on the text after it.

N lines, P parts of lines, C cuts of a part.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf, tf_text
from lingvo_gshard.decoding.joints import WITHOUT_SPACES
from lingvo_gshard.decoding.translator import CLOSING_MARKS, DASHES, PAUSES, SENTENCE_ENDS
from lingvo_gshard.input.normalization import CONTROL, SPACE

# Marks the places where a text may be cut. `normalize` removes the character from the text itself.
CUT = "\x01"
# A cut leaves at least 1 / 8 of the text on both sides, as in translator.py.
_MIN_SHARE_INVERSE = 8


def normalize(text: tf.Tensor) -> tf.Tensor:
    """Returns strings in NFKC, without control characters, with single spaces.

    Bytes that are not UTF-8 become replacement characters, as everywhere that lines are read.
    """
    text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8", errors="replace")
    text = tf.strings.regex_replace(_without_control(text), SPACE, " ")
    return _single_spaces(tf_text.normalize_utf8(text, "NFKC"))


def one_line(text: tf.Tensor) -> tf.Tensor:
    """Returns strings written by a model without control characters, with single spaces."""
    return _single_spaces(_without_control(text))


def cut_tokens(text: tf.Tensor, tokens: Sequence[str]) -> tf.Tensor:
    """Returns normalized strings with CUT after the first character of each token in them.

    The resulting parts are the same as example_codec.literal_parts'.
    """
    for token in tokens:
        marked = f"{token[0]}{CUT}{token[1:]}"
        text = tf.strings.regex_replace(text, re.escape(token), marked)
    return text


def split(
    text: tf.Tensor, lines: tf.Tensor, fits: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits normalized text into parts that fit, in order and without the space between them.

    Args:
      text: string [N].
      lines: int64 [N], the number of each text, ascending.
      fits: Maps string [P] and int64 [P], the parts and the numbers of their texts, to bool [P].

    Returns:
      The parts, string [P], and the numbers of their texts, int64 [P].
    """

    def is_whole(text: tf.Tensor, lines: tf.Tensor) -> tf.Tensor:
        # A single character cannot be cut, however many pieces it has.
        return (tf.strings.length(text, "UTF8_CHAR") <= 1) | fits(text, lines)

    def cut_once(text: tf.Tensor, lines: tf.Tensor, whole: tf.Tensor) -> Sequence[tf.Tensor]:
        # A part that does not fit is replaced by its two sides. The others keep an empty right
        # side, which is then dropped.
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


def joined(parts: tf.Tensor, lines: tf.Tensor, num_lines: tf.Tensor) -> tf.Tensor:
    """Returns the texts of N lines, string [N], given their parts in order.

    Args:
      parts: string [P], each on one line; empty parts leave no trace.
      lines: int64 [P], the number of each part's line, ascending.
      num_lines: N.
    """
    is_text = parts != ""
    parts = tf.boolean_mask(parts, is_text)
    lines = tf.boolean_mask(lines, is_text)

    # The joint before each part depends on the part before it. A line's first part lacks a joint.
    before = tf.roll(parts, 1, 0)
    is_first = lines != tf.roll(lines, 1, 0)
    is_first = tf.concat([tf.ones_like(is_first[:1]), is_first[1:]], 0)
    joints = tf.where(is_first | _is_joined_closely(before, parts), "", " ")
    return tf.strings.unsorted_segment_join(joints + parts, lines, num_lines)


def _is_joined_closely(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Returns bool [P]: whether the parts are joined without a space."""
    letter = f"[{_re2(WITHOUT_SPACES)}]"
    others = f"[^\\pL{_re2(WITHOUT_SPACES)}]*"

    def matches(text: tf.Tensor, pattern: str) -> tf.Tensor:
        return tf.strings.regex_full_match(text, pattern)

    left_has_none = matches(left, others)
    right_has_none = matches(right, others)
    left_fits = left_has_none | matches(left, f".*{letter}{others}")
    right_fits = right_has_none | matches(right, f"{others}{letter}.*")
    are_numbers = matches(left, r".*\p{Nd}") & matches(right, r"\p{Nd}.*")
    return left_fits & right_fits & ~(left_has_none & right_has_none) & ~are_numbers


def _middle(text: tf.Tensor) -> tf.Tensor:
    """Returns the best place to cut near the middle of each text, in characters, int32 [P]."""
    length = _lengths(text)
    middle = length // 2

    # Cuts between words are the fallback; commas and dashes replace them, and ends of sentences
    # replace those, wherever enough text is left on both sides.
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
    """Returns the places of the marks in each text, int32 [P, C], padded with the text's end."""
    pieces = tf.strings.split(marked, CUT)
    piece_lengths = tf.ragged.map_flat_values(_lengths, pieces).to_tensor()
    # The end itself is added, so that there is at least one place.
    return tf.concat([tf.cumsum(piece_lengths, axis=1), length[:, None]], 1)


def _after_sentences(text: tf.Tensor) -> tf.Tensor:
    return _marked_after(text, f"[{SENTENCE_ENDS}]+[{CLOSING_MARKS}]*")


def _at_pauses(text: tf.Tensor) -> tf.Tensor:
    # The space between a comma and its mark does not begin a dash.
    marked = _marked_after(text, f"[{PAUSES}]")
    return tf.strings.regex_replace(marked, f" [{DASHES}] ", rf"\0{CUT}")


def _between_words(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.regex_replace(text, " +", rf"\0{CUT}")


def _marked_after(text: tf.Tensor, end: str) -> tf.Tensor:
    """Marks the places after matches of `end` and their spaces, unless [0-9A-Za-z] follows."""
    text = tf.strings.regex_replace(text, end, rf"\0{CUT}")
    text = tf.strings.regex_replace(text, f"{CUT}([0-9A-Za-z])", r"\1")
    return tf.strings.regex_replace(text, f"{CUT}( +)", rf"\1{CUT}")


def _without_control(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.regex_replace(text, _re2(CONTROL.pattern), "")


def _single_spaces(text: tf.Tensor) -> tf.Tensor:
    """Returns " ".join(text.split()) of each string."""
    text = tf.strings.regex_replace(text, f"[{_white_space()}]+", " ")
    return _stripped(text)


def _stripped(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.regex_replace(text, "^ +| +$", "")


def _lengths(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.length(text, "UTF8_CHAR")


@functools.cache
def _white_space() -> str:
    """Returns the characters at which str.split() splits, for a pattern's brackets."""
    characters = map(chr, range(sys.maxunicode + 1))
    return _re2("".join(filter(str.isspace, characters)))


def _re2(pattern: str) -> str:
    """Returns a pattern with escapes for all characters other than printable ASCII."""
    escaped = []
    for character in pattern:
        is_plain = character.isascii() and character.isprintable()
        escaped.append(character if is_plain else rf"\x{{{ord(character):x}}}")
    return "".join(escaped)
