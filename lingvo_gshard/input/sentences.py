"""The dev and test text of a prepared folder, and the row lengths for lines to decode."""

import gzip
import os
from collections.abc import Iterator

# Each length has its own program; beyond the first bucket, at most half of a row is padding.
_BUCKETS = (16, 32, 64, 128)


def eval_text(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Yields the raw (source, English) pairs of a file of dev or test text, in order."""
    for line in eval_documents(path):
        source, english = line.split("\t")
        yield source, english


def eval_documents(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the raw documents of a file of dev or test text, in order."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.rstrip("\n")


def lengths(max_len: int, setting: str) -> tuple[int, ...]:
    """Returns the row lengths for lines of at most `max_len` tokens, shortest first.

    Raises ValueError, which names the setting, if `max_len` is below 1.
    """
    if max_len < 1:
        raise ValueError(f"{setting} must be 1 or more, got {max_len}.")
    shorter = [bucket for bucket in _BUCKETS if bucket < max_len]
    return (*shorter, max_len)
