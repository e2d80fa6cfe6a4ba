"""Decodes a text of any length with any number of processes, and resumes where it was stopped.

The lines are dealt out in chunks, few of which are in memory at once. A folder holds what is done:

    belongs_to.txt    the number of lines in a chunk, and below it what the parts are made from
    part_<I>.txt      the output lines of chunk I, whole or absent
"""

import dataclasses
import itertools
import json
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lingvo_gshard.decoding.text_decoder import NBest, TextDecoder
from lingvo_gshard.files import atomic_file
from lingvo_gshard.spmd import processes

_ENTRY = re.compile(r"(part_\d+|belongs_to)\.txt(\.partial)?")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a text's results."""

    folder: pathlib.Path  # The folder above it must exist.
    text_decoder: TextDecoder
    line_of: Callable[[NBest], str]  # Makes a line of output, without its end.
    # JSON-able; identifies the text and `line_of`. Parts of anything else are deleted.
    text: Mapping[str, Any]
    seed: int = 0  # Of samples.

    def write(self, lines: Iterable[str]) -> int:
        """Decodes the chunks that have no part yet; returns the number of all parts.

        All processes must call it with the same lines. In each round, every share of the decoder's
        rows gets one chunk.
        """
        processes.check_shared(self.folder)
        chunk_lines = processes.of_first(self._claim() if processes.is_first() else 0)
        share = self.text_decoder.decoder.share

        num_parts = 0
        chunks = _chunks(lines, chunk_lines)
        while chunks_of_round := list(itertools.islice(chunks, share.count)):
            first_of_round = num_parts
            num_parts += len(chunks_of_round)

            # In the last round some shares may have no chunk, but their processes take part.
            own_chunk: list[str] = []
            if share.index < len(chunks_of_round):
                own_chunk = chunks_of_round[share.index]
            own_part = first_of_round + share.index
            self._write_part(own_part, own_chunk, own_part * chunk_lines + 1)

        processes.wait_for_all()  # Process 0 joins the last round's parts.
        return num_parts

    def lines(self, num_parts: int) -> Iterator[str]:
        """Yields every line of the parts, with its end. Raises OSError if a part is missing."""
        for number in range(num_parts):
            with self._path(number).open(encoding="utf-8", newline="\n") as file:
                yield from file

    def _identity(self) -> dict[str, Any]:
        identity = {**self.text_decoder.decoder.origin, **self.text}
        # Nothing else depends on the seed.
        if self.text_decoder.spec.is_sampled:
            identity["seed"] = self.seed
        return identity

    def _claim(self) -> int:
        """Prepares the folder; returns the number of lines in a chunk.

        Parts that another run began keep the size of chunk that they were begun with.
        """
        if self.folder.exists():
            self._check_own()
        note = self.folder / "belongs_to.txt"
        wanted = json.dumps(self._identity(), indent=2)
        if note.exists():
            chunk_lines, _, held = note.read_text(encoding="utf-8").partition("\n")
            if held == wanted:
                return int(chunk_lines)

        self.folder.mkdir(exist_ok=True)
        others = list(self.folder.glob("part_*"))
        if others:
            reason = "they belong to another checkpoint, text or setting"
            logging.warning("%s: deleting %d parts; %s.", self.folder, len(others), reason)
        for part in others:
            part.unlink()

        # The note comes last: parts beside it are never those of anything else.
        window = self.text_decoder.window
        atomic_file.write(note, f"{window}\n{wanted}")
        return window

    def _check_own(self) -> None:
        """Raises ValueError if the folder, which is deleted in the end, holds anything else."""
        for entry in self.folder.iterdir():
            if not _ENTRY.fullmatch(entry.name):
                raise ValueError(
                    f"{self.folder} is for parts of the result, and holds {entry.name}; move it, "
                    "or write the result elsewhere."
                )

    def _write_part(self, number: int, lines: list[str], first_number: int) -> None:
        """Writes a part unless it exists. All processes must call it, some without lines.

        `first_number` is that of its first line.
        """
        share = self.text_decoder.decoder.share
        path = self._path(number)

        # Processes with the same share decode together, and one of them writes: the one with the
        # largest number, counted from 1, as 0 means that the part needs no writer.
        own_number = processes.index() + 1
        writers = [0] * share.count
        if lines and not path.exists():
            writers[share.index] = own_number
        writer = processes.largest(writers)[share.index]

        needs_writer = writer > 0
        own_lines = lines if needs_writer else []
        results = self.text_decoder.decode_together(own_lines, first_number, self.seed)
        if writer == own_number:
            text = "".join(f"{self.line_of(nbest)}\n" for nbest in results)
            atomic_file.write(path, text)

    def _path(self, number: int) -> pathlib.Path:
        return self.folder / f"part_{number:08}.txt"


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields the lines in chunks of `size`; the last one may have fewer."""
    remaining = iter(lines)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk
