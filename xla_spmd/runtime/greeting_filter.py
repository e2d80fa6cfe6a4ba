"""Copies standard input to standard output, except lines that begin with a pattern.

    python -I -S greeting_filter.py PATTERN

It needs only the standard library, so that it starts quickly: another process waits for it. Text
that is not a log line, for example a progress bar, passes at once, even before its line ends.
"""

import os
import re
import sys

_CHUNK_BYTES = 2**16


def main(pattern: str) -> None:
    """Copies until standard input ends."""
    greeting = re.compile(pattern.encode())
    unfinished = b""  # The last line so far, not written yet.
    is_begun = False  # Whether the beginning of the last line has been written.

    while chunk := os.read(0, _CHUNK_BYTES):
        kept = b""
        *lines, last = (unfinished + chunk).split(b"\n")
        for line in lines:
            if is_begun or greeting.match(line) is None:
                kept += line + b"\n"
            is_begun = False

        # A log line begins with a capital and contains no carriage return.
        may_be_greeting = not is_begun and b"\r" not in last and (not last or last[:1].isupper())
        if may_be_greeting:
            unfinished = last
        else:
            kept += last
            is_begun = True
            unfinished = b""
        _write(kept)
    _write(unfinished)


def _write(text: bytes) -> None:
    """Writes all bytes, in as many calls as needed."""
    while text:
        text = text[os.write(1, text) :]


if __name__ == "__main__":
    main(sys.argv[1])
