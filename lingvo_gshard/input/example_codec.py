"""The bytes of one record: a pair of token sequences.

    offset  size           contents
    0       1              w, the number of bytes per id: 2 or 4
    1       4              n, the number of source ids
    5       w * n          source ids, EOS last
    5+w*n   the rest       target ids, EOS last

All numbers are unsigned and little endian; w is 2 if every id fits.
"""

import dataclasses
import re
import struct
from collections.abc import Collection, Sequence

import numpy as np

# The special ids of both vocabularies.
PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
UNK_ID = 3

# The region in a BCP-47 code, as in en-GB; codes of languages have small letters.
_REGION = re.compile(r"([A-Z]{2}|\d{3})(-.+)?")
_TOKEN_BEGINNING = "<2"
_HEADER = struct.Struct("<BI")  # w and n.
_MAX_LISTED = 20  # The most languages that a message lists.
_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def sides(code: str, codes: Collection[str]) -> tuple[str, str]:
    """Returns the source and the target language of `code`, one of a model's `codes`.

    de means German into English, and en-de English into German. en-GB means British English as a
    source, unless GB is a language of the model. de-fr means German into French if the model has
    fr-de, too: pairs without English are trained in both directions.
    """
    # Languages may have hyphens of their own, such as zh-Hant, or pt-br in some sources.
    for hyphen in re.finditer("-", code):
        source = code[: hyphen.start()]
        target = code[hyphen.end() :]
        if f"{target}-{source}" in codes:
            return source, target

    target = code.removeprefix("en-")
    is_variety = _REGION.fullmatch(target) is not None and target not in codes
    if target == code or is_variety:
        return code, "en"
    return "en", target


def source_languages(codes: Sequence[str]) -> tuple[str, ...]:
    """Returns the codes of the source languages, each once, in order."""
    sources = [sides(code, codes)[0] for code in codes]
    return tuple(dict.fromkeys(sources))


def listed(codes: Sequence[str]) -> str:
    """Returns languages as a message lists them: only the first ones, if there are many."""
    if len(codes) <= _MAX_LISTED:
        return ", ".join(codes)
    return f"{', '.join(codes[:_MAX_LISTED])} and {len(codes) - _MAX_LISTED} more"


def target_token(code: str) -> str:
    """Returns the piece that begins a source if a model has several target languages."""
    return f"{_TOKEN_BEGINNING}{code}>"


def literal_parts(text: str, tokens: Collection[str]) -> list[str]:
    """Returns a text in parts such that tokens occur only at the beginning of the first part.

    `tokens` are the tokens that `target_token` returns. A vocabulary takes any text that looks like
    a token for one, but only a source's first piece is meant as a token. Anywhere else it is text,
    and is cut after its first character.
    """
    parts = [text]
    if text.find(_TOKEN_BEGINNING, 1) == -1:  # True of almost all text.
        return parts

    for token in tokens:
        if text.find(token, 1) == -1:
            continue
        rejoined: list[str] = []
        for number, part in enumerate(parts):
            # A token at the beginning of the whole text stays whole.
            beginning = token if number == 0 and part.startswith(token) else ""
            first, *others = part.removeprefix(beginning).split(token)
            rejoined.append(beginning + first)
            for other in others:
                rejoined[-1] += token[0]
                rejoined.append(token[1:] + other)
        parts = rejoined
    return parts


@dataclasses.dataclass(frozen=True)
class Example:
    """A sentence pair: two one-dimensional int32 arrays, EOS last."""

    source_ids: np.ndarray
    target_ids: np.ndarray


def encode(source_ids: Sequence[int] | np.ndarray, target_ids: Sequence[int] | np.ndarray) -> bytes:
    """Returns the bytes of a record. Raises ValueError if an id is outside [0, 2**31)."""
    ids = np.asarray([*source_ids, *target_ids], np.int64)
    largest = int(ids.max(initial=0))
    if ids.min(initial=0) < 0 or largest >= 2**31:
        raise ValueError(f"token ids must be in [0, 2**31), given {ids.min()} to {largest}")

    # Two bytes are enough for an id if the vocabulary has at most 65,536 pieces.
    width = 2 if largest < 2**16 else 4
    return _HEADER.pack(width, len(source_ids)) + ids.astype(_DTYPES[width]).tobytes()


def decode(record: bytes) -> Example:
    """Parses a record. Raises ValueError if the bytes are not a record."""
    # A record may be too short for its header, or the ids may not fill the rest of it.
    payload_bytes = len(record) - _HEADER.size
    width = 0
    num_source = 0
    if payload_bytes >= 0:
        width, num_source = _HEADER.unpack_from(record)
    if width not in _DTYPES or payload_bytes % width or payload_bytes < width * num_source:
        raise ValueError(
            f"not a record: id width {width}, {num_source} source ids, {payload_bytes} bytes of ids"
        )

    # The model's dtype for ids, whatever the record's width.
    ids = np.frombuffer(record, _DTYPES[width], offset=_HEADER.size).astype(np.int32)
    return Example(ids[:num_source], ids[num_source:])
