"""Decodes a text of any length with any number of processes, and resumes an interrupted run.

The lines are dealt out in chunks, and only a few chunks are in memory at once. A folder has the
finished parts:

    belongs_to.txt    the number of lines in a chunk, and below it the identity of the inputs
    part_<I>.txt      the output lines of chunk I, whole or absent; each after its Finish and a tab
"""

import dataclasses
import itertools
import json
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lingvo_gshard.decoding.outcomes import Finish, Line
from lingvo_gshard.decoding.text_decoder import NBest, OnLines, TextDecoder
from lingvo_gshard.spmd import processes, shared_folder
from xla_spmd.files import atomic_file
from xla_spmd.runtime import progress

# The format of a part's lines; parts of another format are decoded again.
_FORMAT = "finish, tab, line"
_ENTRY = re.compile(r"(part_\d+|belongs_to)\.txt(\.partial)?")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a text's results."""

    folder: pathlib.Path  # The folder above it must exist.
    text_decoder: TextDecoder
    line_of: Callable[[NBest], Line]  # Makes a line of output.
    # JSON-able; identifies the text and `line_of`. Parts with another identity are deleted.
    text: Mapping[str, Any]
    seed: int = 0  # The seed of samples.

    def write(self, lines: Iterable[str], num_lines: int) -> int:
        """Decodes the chunks that do not have a part yet; returns the number of all parts.

        All processes must call it with the same lines, of which there are `num_lines`. In each
        round, every share of the decoder's rows gets one chunk. Raises NoResultError if a line has
        no result.
        """
        shared_folder.check(self.folder)
        chunk_lines = processes.of_first(self._claim() if processes.is_first() else 0)
        share = self.text_decoder.decoder.share

        num_parts = 0
        chunks = _chunks(lines, chunk_lines)
        # Each process counts the lines of its own share.
        num_own = math.ceil(num_lines / share.count)
        with progress.shown("decoding", total=num_own, unit="lines") as done:
            while chunks_of_round := list(itertools.islice(chunks, share.count)):
                first_of_round = num_parts
                num_parts += len(chunks_of_round)

                # In the last round some shares may lack a chunk, but their processes still take
                # part.
                own_chunk: list[str] = []
                if share.index < len(chunks_of_round):
                    own_chunk = chunks_of_round[share.index]
                own_part = first_of_round + share.index
                self._write_part(own_part, own_chunk, own_part * chunk_lines + 1, done.update)

        processes.wait_for_all()  # Process 0 joins the last round's parts.
        return num_parts

    def lines(self, num_parts: int) -> Iterator[Line]:
        """Yields every line of the parts. Raises OSError if a part is missing."""
        for number in range(num_parts):
            with self._path(number).open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    finish, _, text = line.rstrip("\n").partition("\t")
                    yield Line(text, Finish(finish))

    def _identity(self) -> dict[str, Any]:
        identity = {**self.text_decoder.decoder.origin, **self.text, "format": _FORMAT}
        # Only samples depend on the seed.
        if self.text_decoder.spec.is_sampled:
            identity["seed"] = self.seed
        return identity

    def _claim(self) -> int:
        """Prepares the folder; returns the number of lines in a chunk.

        Parts from an interrupted run keep the chunk size with which they were begun.
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

        # The note is written last, so that the parts beside a note always match it.
        window = self.text_decoder.window
        atomic_file.write(note, f"{window}\n{wanted}")
        return window

    def _check_own(self) -> None:
        """Raises ValueError if the folder, which is deleted in the end, has other files."""
        for entry in self.folder.iterdir():
            if not _ENTRY.fullmatch(entry.name):
                raise ValueError(
                    f"{self.folder} is for parts of the result, and holds {entry.name}; move it, "
                    "or write the result elsewhere."
                )

    def _write_part(
        self, number: int, lines: list[str], first_number: int, on_lines: OnLines
    ) -> None:
        """Writes a part unless it exists. All processes must call it, some without lines.

        `first_number` is the number of its first line; `on_lines` counts lines.
        """
        share = self.text_decoder.decoder.share
        path = self._path(number)

        # Processes with the same share decode together, and the one with the largest number writes.
        # Numbers count from 1, as 0 means that nobody has to write the part.
        own_number = processes.index() + 1
        writers = [0] * share.count
        if lines and not path.exists():
            writers[share.index] = own_number
        writer = processes.largest(writers)[share.index]

        needs_writer = writer > 0
        own_lines = lines if needs_writer else []
        if not needs_writer:
            on_lines(len(lines))
        results = self.text_decoder.decode_together(own_lines, first_number, self.seed, on_lines)
        if writer == own_number:
            lines_of_part = [self.line_of(nbest) for nbest in results]
            text = "".join(f"{line.finish}\t{line.text}\n" for line in lines_of_part)
            atomic_file.write(path, text)

    def _path(self, number: int) -> pathlib.Path:
        return self.folder / f"part_{number:08}.txt"


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields the lines in chunks of `size`; the last one may have fewer."""
    remaining = iter(lines)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk
