"""Text that was decoded with another text's encoding.

`cleaning.repair` undoes the damage that is certain: UTF-8 that was decoded as a western encoding.
The damage recognized here is only counted, since its repair would be a guess.

- UTF-8 decoded as another encoding: "РџСЂРёРІРµС‚" for "Привет", "浣犲ソ" for "你好".
- Text in another encoding decoded as a western one: "Ïðèâåò".
- Cyrillic text decoded as another Cyrillic encoding, which mixes up its case: "рТЙЧЕФ".
"""

import codecs
import collections
import itertools
import re
from collections.abc import Iterable

from data_prep import languages

# Encodings with one byte for each character, by their Python names, and Asian ones with two.
_SINGLE_BYTE = (
    "cp1252 latin-1 cp850 cp437 mac-roman cp1250 iso8859-2 cp852 mac-latin2 cp1251 koi8-r "
    "iso8859-5 cp866 mac-cyrillic cp1253 iso8859-7 cp1254 cp1255 cp1256 cp1257 cp1258"
).split()
_DOUBLE_BYTE = ("gbk", "cp932", "big5", "cp949")
# The first byte of a non-ASCII character in UTF-8, and its other bytes.
_LEADS = range(0xC2, 0xF5)
_CONTINUATIONS = range(0x80, 0xC0)

_AS_LATIN = "data_prep.mojibake"  # The name of an error handler for codecs.

_NON_ASCII = re.compile("[^\x00-\x7f]+")
_EXAMINED_RUNS = 4  # The first runs of a text, which decide the encodings to try.
_MIN_SHARE_OF_RUNS = 0.6
_FIRST_DOUBLE_BYTE = "\u1100"  # Apart from a few symbols, Asian characters begin here.
# This many characters of UTF-8, mostly in one script, cannot be an accident.
_FEWEST = 3
_FEWEST_OF_ASIA = 4
_MIN_SCRIPT_SHARE = 0.8
_SCRIPTS_OF_ASIA = ("Hani", "Hira", "Kana", "Hang", "Bopo")

# No language has this many accented letters in a row. Kana in Shift-JIS begin with `‚` or `ƒ`.
_WESTERN = re.compile("[\xa1-\xff\u201a\u0192]{4,}")
_FEWEST_DISTINCT = 3
_MIN_SHARE_OF_WESTERN = 1 / 3

_CYRILLIC_WORD = re.compile("[\u0400-\u045f]+")
_RISING = re.compile("[\u0430-\u045f][\u0400-\u042f]")  # A capital letter after a small one.
_SYMBOL_IN_CYRILLIC = re.compile("[¤¦§©«¬®](?<=[\u0400-\u04ff].)(?=[\u0400-\u04ff])")
_FEWEST_LETTERS = 12


def is_likely(text: str) -> bool:
    """Returns whether a text was probably decoded with another text's encoding."""
    if text.isascii():
        return False
    return _is_utf_8(text) or _is_read_as_western(text) or _is_mixed_cyrillic(text)


def _masks(bytes_of_encoding: Iterable[int]) -> dict[str, int]:
    """Returns a bit mask for each character: the _SINGLE_BYTE encodings with one of these bytes."""
    masks: collections.Counter[str] = collections.Counter()
    for number, encoding in enumerate(_SINGLE_BYTE):
        for byte in bytes_of_encoding:
            # A byte that is missing in an encoding is often decoded as Latin-1.
            character = bytes([byte]).decode(encoding, "ignore") or chr(byte)
            masks[character] |= 1 << number
    return dict(masks)


def _as_latin(error: UnicodeError) -> tuple[bytes, int]:
    """Encodes a character that is missing in an encoding as Latin-1, or `?`: see `_masks`."""
    assert isinstance(error, UnicodeEncodeError)
    code = ord(error.object[error.start])
    return (bytes([code]) if code < 0x100 else b"?"), error.start + 1


codecs.register_error(_AS_LATIN, _as_latin)


_MASKS_OF_LEADS = _masks(_LEADS)
_MASKS_OF_CONTINUATIONS = _masks(_CONTINUATIONS)


def _is_utf_8(text: str) -> bool:
    """Returns whether a text is UTF-8 that was decoded as another encoding."""
    masks: list[int] = []
    num_runs = 0
    for match in itertools.islice(_NON_ASCII.finditer(text), _EXAMINED_RUNS):
        run = match[0]
        if len(run) == 1:
            continue
        num_runs += 1

        # ASCII, such as a space, is the same in both encodings, so a run begins with a lead byte.
        mask = _MASKS_OF_LEADS.get(run[0], 0) & _MASKS_OF_CONTINUATIONS.get(run[1], 0)
        if mask:
            masks.append(mask)
        elif num_runs == 1 and run[0] >= _FIRST_DOUBLE_BYTE and _is_utf_8_of_asia(text, run):
            return True

    fewest = max(1, _MIN_SHARE_OF_RUNS * num_runs)
    if len(masks) < fewest:  # True of almost all text.
        return False
    for number, encoding in enumerate(_SINGLE_BYTE):
        num_beginning = sum(mask >> number & 1 for mask in masks)
        if num_beginning >= fewest and _is_utf_8_in(text, encoding):
            return True
    return False


def _is_utf_8_of_asia(text: str, run: str) -> bool:
    """Returns whether a text, which has this first run, is UTF-8 decoded as two-byte characters."""
    for encoding in _DOUBLE_BYTE:
        beginning = run[:2].encode(encoding, "ignore")
        decoded = beginning.decode("utf-8", "ignore")
        is_possible = beginning[:1] and beginning[0] in _LEADS and not decoded.isascii()
        if is_possible and _is_utf_8_in(text, encoding, _FEWEST_OF_ASIA):
            return True
    return False


def _is_utf_8_in(text: str, encoding: str, fewest: int = _FEWEST) -> bool:
    """Returns whether a text's bytes in an encoding are UTF-8, except for a few of them."""
    data = text.encode(encoding, _AS_LATIN)
    decoded = data.decode("utf-8", "replace")
    num_damaged = decoded.count("\ufffd")
    num_characters = len(decoded) - len(decoded.encode("ascii", "ignore")) - num_damaged
    num_damaged += data.count(b"?") - text.count("?")  # Characters that are not in the encoding.

    if num_damaged > 0:
        fewest = max(fewest, 2 * num_damaged)
    if num_characters < fewest:
        return False

    # If this were an accident, the decoded text would be in many scripts.
    scripts = languages.count_scripts("".join(_NON_ASCII.findall(decoded)))
    of_asia = sum(scripts.pop(script, 0) for script in _SCRIPTS_OF_ASIA)
    largest = max([of_asia, *scripts.values()])
    return largest >= _MIN_SCRIPT_SHARE * (of_asia + scripts.total())


def _is_read_as_western(text: str) -> bool:
    """Returns whether a text has long runs of accented letters."""
    runs = [run for run in _WESTERN.findall(text) if len(set(run)) >= _FEWEST_DISTINCT]
    if not runs:
        return False
    num_characters = len("".join(text.split()))
    return sum(map(len, runs)) >= _MIN_SHARE_OF_WESTERN * num_characters


def _is_mixed_cyrillic(text: str) -> bool:
    """Returns whether Cyrillic words have capitals, or symbols, in the middle."""
    if len(_SYMBOL_IN_CYRILLIC.findall(text)) >= _FEWEST:
        return True
    if not _RISING.search(text):
        return False

    # Single cases may be units, such as kW, or prefixed abbreviations.
    words = _CYRILLIC_WORD.findall(text)
    rising = {word for word in words if len(word) > 3 and _RISING.search(word)}
    if len(rising) > 1 and 4 * len(rising) >= len(words):
        return True
    letters = "".join(words)
    num_small = sum(map(str.islower, letters))
    return bool(rising) and len(letters) >= _FEWEST_LETTERS and num_small < 0.2 * len(letters)
