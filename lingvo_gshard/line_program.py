"""What the programs that decode lines share: they read standard input, or a file in parts."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import logging
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from absl import flags

from lingvo_gshard import cli, decoder_flags
from lingvo_gshard.files import atomic_file, text_file

if TYPE_CHECKING:
    from lingvo_gshard.decoding.bundle import DecoderSpec
    from lingvo_gshard.decoding.text_decoder import NBest, TextDecoder

_INPUT = flags.DEFINE_string("input", None, "Decode the lines of this file.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the results of --input to this file.")
_SCORES = flags.DEFINE_bool("scores", False, "Print each result's score before it.")
cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(decoder_flags)

# How much is read at a time at most; a pipe returns what it holds.
_READ_BYTES = 1 << 20


class Stream(Protocol):
    """What lines are read from: a pipe, or a file that is plain or gzip."""

    def read1(self, size: int = -1, /) -> bytes:
        """Returns some bytes as soon as there are any, and none at the end."""
        ...


def run(
    command: str, beginning_of: Callable[[DecoderSpec], str] = lambda spec: "", seed: int = 0
) -> None:
    """Decodes the lines of standard input or of --input; raises ValueError for a user's mistake.

    Args:
      command: The program's name; a model of another kind is refused.
      beginning_of: Returns what all lines have to begin with.
      seed: Of samples.
    """
    decoder_flags.check()
    _check_files()

    with decoder_flags.text_decoder(command) as text_decoder:
        beginning = beginning_of(text_decoder.spec)
        if _INPUT.value and _OUTPUT.value:
            source = pathlib.Path(_INPUT.value)
            target = pathlib.Path(_OUTPUT.value)
            _decode_file(text_decoder, source, target, beginning, seed)
        else:
            _decode_stdin(text_decoder, beginning, seed)


def _decode_stdin(text_decoder: TextDecoder, beginning: str, seed: int) -> None:
    """Writes each line's results as soon as it has come."""
    first_number = 1
    for lines in read_lines(cast(io.BufferedReader, sys.stdin.buffer), "standard input"):
        decode = functools.partial(text_decoder.decode, first_number=first_number, seed=seed)
        for results in decode(beginning + line for line in lines):
            # In UTF-8, whatever the locale is, and at once, for whoever reads a pipe.
            sys.stdout.buffer.write(f"{_line(results)}\n".encode())
            sys.stdout.buffer.flush()
        first_number += len(lines)


def _decode_file(
    text_decoder: TextDecoder,
    source: pathlib.Path,
    target: pathlib.Path,
    beginning: str,
    seed: int,
) -> None:
    """Decodes `source` in parts, of which each process does some, and joins them to `target`."""
    from lingvo_gshard.decoding import chunks
    from lingvo_gshard.spmd import processes

    with processes.locked(target, "writes this file"):
        identity = _identity(source, beginning)
        with text_file.opened_text(source) as stream:
            folder = pathlib.Path(f"{target}.parts")
            parts = chunks.Parts(folder, text_decoder, _line, identity, seed)
            lines: Iterable[str] = itertools.chain.from_iterable(read_lines(stream, str(source)))
            num_parts = parts.write(beginning + line for line in lines)

        # Every part is on the disk by now, whichever process wrote it.
        if processes.is_first():
            with atomic_file.replacing(target) as path, path.open("w", encoding="utf-8") as file:
                file.writelines(parts.lines(num_parts))
            shutil.rmtree(parts.folder)


def _identity(source: pathlib.Path, beginning: str) -> dict[str, object]:
    """Returns what identifies this text and these flags; no parts of others are reused."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    identity: dict[str, object] = {
        "text": digest,
        "nbest": decoder_flags.NBEST.value,
        "scores": _SCORES.value,
    }
    if beginning:
        identity["beginning"] = beginning
    return identity


def read_lines(stream: Stream, name: str = "the text") -> Iterator[list[str]]:
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
                f"{name}: line {number} is not UTF-8 ({error.reason} at byte {error.start}); what "
                "cannot be read there, and in later lines, becomes a replacement character."
            )
            return True
    return False


def _line(results: NBest) -> str:
    """Joins a line's --nbest results by tabs; --scores puts each one's score before it."""
    fields = []
    for hypothesis in results[: decoder_flags.NBEST.value]:
        if _SCORES.value:
            fields.append(f"{hypothesis.score:.4f}")
        fields.append(hypothesis.text)
    return "\t".join(fields)


def _check_files() -> None:
    """Refuses flags that do not go together, and files that are not there."""
    if decoder_flags.ATTENTION.value:
        raise ValueError("--attention is for lingvo_gshard.serve and export_bundle.")

    if _INPUT.value is None or _OUTPUT.value is None:
        if _INPUT.value or _OUTPUT.value or cli.processes():
            raise ValueError("give both --input and --output; several processes need them.")
        if sys.stdin is None:
            raise ValueError("standard input is closed; give --input and --output.")
        return

    # Before the model is loaded, which may take a minute.
    if not pathlib.Path(_INPUT.value).is_file():
        raise ValueError(f"--input={_INPUT.value}: there is no such file.")
    output = pathlib.Path(_OUTPUT.value)
    if output.exists() and output.samefile(_INPUT.value):
        raise ValueError(f"--output={output} is the file of --input; choose another.")
    if output.exists() and not output.is_file():
        raise ValueError(f"--output={output}: expected a file, and this is something else.")
    if not output.parent.is_dir():
        raise ValueError(f"--output={output}: expected a file in a folder that exists.")
