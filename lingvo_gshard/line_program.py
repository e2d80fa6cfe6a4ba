"""What the programs that decode lines share: they read standard input, or a file in parts."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import io
import itertools
import logging
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from absl import flags

from lingvo_gshard import cli, decoder_flags
from lingvo_gshard.decoding import outcomes
from lingvo_gshard.files import text_file
from lingvo_gshard.files.text_file import BinaryFile
from xla_spmd.files import atomic_file, storage
from xla_spmd.runtime import progress

if TYPE_CHECKING:
    from lingvo_gshard.decoding.text_decoder import NBest, TextDecoder
    from lingvo_gshard.runs.opening import Check

_INPUT = flags.DEFINE_string("input", None, "Decode the lines of this file.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the results of --input to this file.")


class _Scores(enum.StrEnum):
    """Which scores are printed before a result: its own, or also each token's."""

    NONE = "none"
    LINES = "lines"
    TOKENS = "tokens"


class _ScoresParser(flags.ArgumentParser):
    """Reads --scores, which alone stands for LINES, and --noscores."""

    syntactic_help = ""
    _values: ClassVar = {"true": _Scores.LINES, "false": _Scores.NONE}

    def parse(self, argument: str | _Scores) -> _Scores:
        text = argument.lower()
        if text in self._values:
            return self._values[text]
        try:
            return _Scores(text)
        except ValueError as error:
            expected = ", ".join(score.name for score in _Scores)
            raise ValueError(f"expected one of {expected}") from error


class _ScoresFlag(flags.Flag):
    """A flag that needs no value."""

    def __init__(self, name: str) -> None:
        text = "Print each result's score before it; =TOKENS: and the scores of its tokens."
        super().__init__(_ScoresParser(), None, name, _Scores.NONE, text)
        self.boolean = True


_SCORES = flags.DEFINE_flag(_ScoresFlag("scores"))
_FINISH = flags.DEFINE_bool("finish", False, "Print how each result ended, stop or length.")
cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(decoder_flags)

# At most this much is read at a time; a pipe returns the bytes that it has.
_READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Reader:
    """A model, and the function that makes its input of a line."""

    text_decoder: TextDecoder
    text_of: Callable[[str], str]

    def texts(self, lines: Iterable[str]) -> Iterator[str]:
        """Yields the model's inputs of lines."""
        return map(self.text_of, lines)


def run(
    command: str,
    reader_of: Callable[[TextDecoder], Reader],
    check_languages: Check | None = None,
    seed: int = 0,
) -> None:
    """Decodes the lines of standard input or of --input; raises ValueError for a user's mistake.

    Args:
      command: The program's name; a model of another kind is refused.
      reader_of: Returns what reads the lines, given the model of the flags.
      check_languages: Raises ValueError, before the model is loaded, if it lacks a language.
      seed: The seed of samples.
    """
    decoder_flags.check()
    _check_files()

    with decoder_flags.text_decoder(command, check_languages) as text_decoder:
        reader = reader_of(text_decoder)
        if _INPUT.value and _OUTPUT.value:
            source = pathlib.Path(_INPUT.value)
            target = pathlib.Path(_OUTPUT.value)
            _decode_file(reader, source, target, seed)
        else:
            _decode_stdin(reader, seed)


def _decode_stdin(reader: Reader, seed: int) -> None:
    """Writes each line's results as soon as it has come; warns of the cut ones at the end."""
    source = cast(io.BufferedReader, sys.stdin.buffer)
    if source.isatty():
        hint = "Type a line and Enter; Ctrl-D ends. A file is read by `< in.txt`."
        print(hint, file=sys.stderr)

    # On a terminal, the results themselves are the progress.
    reading = progress.shown(
        "decoding",
        total=_num_lines(source) if source.seekable() else None,
        unit="lines",
        enabled=not sys.stdout.buffer.isatty(),
    )

    cut_lines = outcomes.CutLines()
    first_number = 1
    with reading as done:
        for lines in read_lines(source, "standard input"):
            results_of_lines = reader.text_decoder.decode(
                reader.texts(lines), first_number, seed, done.update
            )
            for number, results in enumerate(results_of_lines, first_number):
                # In UTF-8, whatever the locale is, and at once, for whoever reads a pipe.
                line = _line(results)
                sys.stdout.buffer.write(f"{line.text}\n".encode())
                sys.stdout.buffer.flush()
                cut_lines.count(f"line {number}", line.finish)
            first_number += len(lines)
    cut_lines.warn()


def _decode_file(reader: Reader, source: pathlib.Path, target: pathlib.Path, seed: int) -> None:
    """Decodes `source` in parts, of which each process does some, and joins them to `target`."""
    from lingvo_gshard.decoding import chunks
    from lingvo_gshard.spmd import processes

    with processes.locked(target, "writes this file"):
        identity = _identity(source, reader)
        with text_file.opened_text(source) as stream:
            folder = pathlib.Path(f"{target}.parts")
            parts = chunks.Parts(folder, reader.text_decoder, _line, identity, seed)
            lines: Iterable[str] = itertools.chain.from_iterable(read_lines(stream, str(source)))
            num_lines = _num_lines(stream)
            num_parts = parts.write(reader.texts(lines), num_lines)

        # Every part is on the disk by now, whichever process wrote it.
        if processes.is_first():
            cut_lines = outcomes.CutLines()
            with atomic_file.replacing(target) as path, path.open("w", encoding="utf-8") as file:
                for number, line in enumerate(parts.lines(num_parts), start=1):
                    file.write(f"{line.text}\n")
                    cut_lines.count(f"line {number}", line.finish)
            cut_lines.warn()
            shutil.rmtree(parts.folder)


def _num_lines(stream: BinaryFile) -> int:
    """Returns the number of lines ahead in a file, whose position stays."""
    position = stream.tell()
    num_lines = 0
    last = b"\n"
    while data := stream.read1(_READ_BYTES):
        num_lines += data.count(b"\n")
        last = data[-1:]
    stream.seek(position)
    return num_lines + (last != b"\n")  # The last line may lack its end.


def _identity(source: pathlib.Path, reader: Reader) -> dict[str, object]:
    """Returns what identifies this text and these flags; no parts of others are reused."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "text": digest,
        "read": reader.text_of("a line"),
        "nbest": decoder_flags.NBEST.value,
        "scores": _SCORES.value,
        "finish": _FINISH.value,
    }


def read_lines(stream: BinaryFile, name: str = "the text") -> Iterator[list[str]]:
    """Yields the lines of a stream of bytes, without their ends, as soon as they arrive.

    Only a newline ends a line, not U+2028. Bytes that are not UTF-8 become replacement characters,
    with a warning for the first line that has some. Raises ValueError, with the stream's `name`, if
    it is no text: see text_file.py.
    """
    num_lines = 0
    is_told = False
    unfinished = b""  # A line whose end has not arrived.
    while data := stream.read1(_READ_BYTES):
        if num_lines == 0 and not unfinished:
            text_file.check_head(data[: text_file.HEAD_BYTES], name)
        *lines, unfinished = (unfinished + data).split(b"\n")
        text_file.check_line(len(unfinished), f"{name}: line {num_lines + len(lines) + 1}")
        if not lines:
            continue

        decoded = [line.decode("utf-8", errors="replace") for line in lines]
        if not is_told:
            is_told = _tell_of_damage(lines, num_lines, name)
        num_lines += len(lines)
        yield decoded

    if unfinished:
        if not is_told:
            _tell_of_damage([unfinished], num_lines, name)
        yield [unfinished.decode("utf-8", errors="replace")]


def _tell_of_damage(lines: Sequence[bytes], num_before: int, name: str) -> bool:
    """Warns of the first of these lines that is not UTF-8; returns whether there is one."""
    for number, line in enumerate(lines, start=num_before + 1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            logging.warning(
                f"{name}: line {number} is not UTF-8 ({error.reason} at byte {error.start}); "
                "unreadable bytes there and in later lines become replacement characters."
            )
            return True
    return False


def _line(results: NBest) -> outcomes.Line:
    """Joins a line's --nbest results by tabs, each after its score and its Finish if asked for."""
    fields: list[str] = []
    written = results[: decoder_flags.NBEST.value]
    for hypothesis in written:
        if _SCORES.value is not _Scores.NONE:
            fields.append(f"{hypothesis.score:.4f}")
        if _SCORES.value is _Scores.TOKENS:
            tokens = [f"{token.piece} {token.log_prob:.4f}" for token in hypothesis.tokens]
            fields.append(" ".join(tokens))
        if _FINISH.value:
            fields.append(hypothesis.finish)
        fields.append(hypothesis.text)
    finish = outcomes.finish_of(hypothesis.finish for hypothesis in written)
    return outcomes.Line("\t".join(fields), finish)


def _check_files() -> None:
    """Refuses flags that do not go together, and files that are not there."""
    if decoder_flags.ATTENTION.value:
        raise ValueError("--attention is for gshard serve and gshard export.")

    if _INPUT.value is None or _OUTPUT.value is None:
        if _INPUT.value or _OUTPUT.value or cli.processes():
            raise ValueError("give both --input and --output; several processes need them.")
        if sys.stdin is None:
            raise ValueError("standard input is closed; give --input and --output.")
        return

    # Before the model is loaded, which may take a minute.
    if pathlib.Path(_INPUT.value).is_dir():
        raise ValueError(f"--input={_INPUT.value}: this is a folder; expected a file.")
    if not pathlib.Path(_INPUT.value).is_file():
        raise ValueError(f"--input={_INPUT.value}: there is no such file.")
    output = pathlib.Path(_OUTPUT.value)
    if output.exists() and output.samefile(_INPUT.value):
        raise ValueError(f"--output={output} is the file of --input; choose another.")
    storage.check_file_writable("--output", output)
