"""Translates a text of any length with any number of processes, and goes on where it was stopped.

The lines are dealt out in chunks, few of which are in memory at once. A folder holds what is done:

    belongs_to.txt    the lines in a chunk, and below them what the parts are made from
    part_<I>.txt      the output lines of chunk I, whole or absent
"""

import dataclasses
import itertools
import json
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lingvo_gshard.files import atomic_file
from lingvo_gshard.spmd import processes
from lingvo_gshard.translation.translator import NBest, Translator


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a text's translation."""

    folder: pathlib.Path  # The folder above it must exist.
    translator: Translator
    line_of: Callable[[NBest], str]  # Makes a line of output, without its end.
    # JSON-able, identifies text and `line_of`; parts of others are deleted.
    text: Mapping[str, Any]

    def write(self, lines: Iterable[str]) -> int:
        """Translates the chunks that have no part yet; returns the number of all parts.

        All processes must call it with the same lines. In each round, every share of the decoder's
        rows gets one chunk.
        """
        processes.check_shared(self.folder)
        size = processes.of_first(self._claim() if processes.is_first() else 0)
        share, remaining = self.translator.decoder.share, iter(lines)
        chunks = enumerate(iter(lambda: list(itertools.islice(remaining, size)), []))
        num_parts = 0
        while some := list(itertools.islice(chunks, share.count)):
            num_parts += len(some)
            some += [(0, [])] * (share.count - len(some))
            self._write_part(*some[share.index])
        processes.wait_for_all()  # Process 0 joins the last round's parts.
        return num_parts

    def lines(self, num_parts: int) -> Iterator[str]:
        """Yields every line of the parts, with its end. Raises OSError if a part is missing."""
        for path in map(self._path, range(num_parts)):
            with path.open(encoding="utf-8", newline="\n") as file:
                yield from file

    def _claim(self) -> int:
        """Prepares the folder; returns the lines in a chunk, which its parts were begun with."""
        note, window = self.folder / "belongs_to.txt", self.translator.window
        wanted = json.dumps({**self.translator.decoder.origin, **self.text}, indent=2)
        chunk_lines, _, held = note.read_text().partition("\n") if note.exists() else [""] * 3
        if held == wanted:
            return int(chunk_lines)
        self.folder.mkdir(exist_ok=True)
        others = list(self.folder.glob("part_*"))
        if others:
            reason = "they belong to another checkpoint, text or setting"
            logging.warning("%s: deleting %d parts; %s.", self.folder, len(others), reason)
        for part in others:
            part.unlink()
        atomic_file.write(note, f"{window}\n{wanted}")
        return window

    def _write_part(self, number: int, lines: list[str]) -> None:
        """Writes a part unless it exists. All processes must call it, some without lines."""
        share, path = self.translator.decoder.share, self._path(number)
        own_number, writers = processes.index() + 1, [0] * share.count
        writers[share.index] = own_number if lines and not path.exists() else 0
        writer = processes.largest(writers)[share.index]  # One of those with the same share.
        found = self.translator.translate_together(lines if writer else [])
        if writer == own_number:
            atomic_file.write(path, "".join(f"{self.line_of(each)}\n" for each in found))

    def _path(self, number: int) -> pathlib.Path:
        return self.folder / f"part_{number:08}.txt"
