"""Translates lines of standard input, one line for each, in order.

    python -m lingvo_gshard.translate --logdir=RUN --source_lang=de < in.txt > out.txt
    python -m lingvo_gshard.translate --bundle=DIR < in.txt > out.txt
    python -m lingvo_gshard.translate --bundle=DIR --input=in.txt --output=out.txt

The target is English. If the data was prepared with other directions, --target_lang chooses it.

--input is for long files. OUTPUT.parts holds what is done, and the same command goes on from there
when it was stopped. In the end OUTPUT is written, over any earlier one. Several processes, with
flags as for the trainer, share the work.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from absl import flags

from lingvo_gshard import cli, decoder_flags
from lingvo_gshard.files import atomic_file

if TYPE_CHECKING:
    from lingvo_gshard.translation.translator import NBest, Translator

_TARGET_LANG = flags.DEFINE_string("target_lang", None, "The target, if a model has several.")
_INPUT = flags.DEFINE_string("input", None, "Translate the lines of this file.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the translations of --input to this file.")
_SCORES = flags.DEFINE_bool("scores", False, "Print each translation's score before it.")
cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(decoder_flags)

# How much is read at a time at most; a pipe returns what it holds.
_READ_BYTES = 1 << 20


def main() -> None:
    """Translates; raises ValueError for a user's mistake."""
    decoder_flags.check()
    _check_files()

    with decoder_flags.translator() as translator:
        if _INPUT.value and _OUTPUT.value:
            _translate_file(translator, pathlib.Path(_INPUT.value), pathlib.Path(_OUTPUT.value))
        else:
            _translate_stdin(translator)


def _translate_stdin(translator: Translator) -> None:
    """Writes each line's translations as soon as it has come."""
    beginning = translator.decoder.spec.beginning(_TARGET_LANG.value)
    for lines in read_lines(cast(io.BufferedReader, sys.stdin.buffer)):
        for translations in translator.translate(beginning + line for line in lines):
            # In UTF-8, whatever the locale is, and at once, for whoever reads a pipe.
            sys.stdout.buffer.write(f"{_line(translations)}\n".encode())
            sys.stdout.buffer.flush()


def _translate_file(translator: Translator, source: pathlib.Path, target: pathlib.Path) -> None:
    """Translates `source` in parts, of which each process does some, and joins them to `target`."""
    from lingvo_gshard.spmd import processes
    from lingvo_gshard.translation import chunks

    beginning = translator.decoder.spec.beginning(_TARGET_LANG.value)
    with source.open("rb") as file:
        # Parts of other text, or made with other flags, are not taken for these.
        identity = {
            "text": hashlib.file_digest(file, "sha256").hexdigest(),
            "nbest": decoder_flags.NBEST.value,
            "scores": _SCORES.value,
        }
        if beginning:
            identity["beginning"] = beginning
        parts = chunks.Parts(pathlib.Path(f"{target}.parts"), translator, _line, identity)

        # The hash has read the file to its end.
        file.seek(0)
        lines = itertools.chain.from_iterable(read_lines(file))
        num_parts = parts.write(beginning + line for line in lines)

    # Every part is on the disk by now, whichever process wrote it.
    if processes.is_first():
        with atomic_file.replacing(target) as path, path.open("w", encoding="utf-8") as file:
            file.writelines(parts.lines(num_parts))
        shutil.rmtree(parts.folder)


def read_lines(stream: io.BufferedIOBase) -> Iterator[list[str]]:
    """Yields the lines of a stream of bytes, without their ends, as soon as they arrive.

    Only a newline ends a line, not U+2028. Bytes not UTF-8 become replacement characters.
    """
    unfinished = b""  # A line whose end has not arrived.
    while data := stream.read1(_READ_BYTES):
        *lines, unfinished = (unfinished + data).split(b"\n")
        if lines:
            yield [line.decode("utf-8", errors="replace") for line in lines]

    if unfinished:
        yield [unfinished.decode("utf-8", errors="replace")]


def _line(translations: NBest) -> str:
    """Joins a line's --nbest translations by tabs; --scores puts each one's score before it."""
    fields = []
    for translation in translations[: decoder_flags.NBEST.value]:
        if _SCORES.value:
            fields.append(f"{translation.score:.4f}")
        fields.append(translation.text)
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
    if output.exists() and not output.is_file():
        raise ValueError(f"--output={output}: expected a file, and this is something else.")
    if not output.parent.is_dir():
        raise ValueError(f"--output={output}: expected a file in a folder that exists.")


def run() -> None:
    """Runs `main` with the flags of the command line."""
    cli.run("translate", main)


if __name__ == "__main__":
    run()
