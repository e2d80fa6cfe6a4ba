"""Translates lines of standard input, one line for each, in order.

    python -m lingvo_gshard.translate --logdir=RUN --source_lang=de < in.txt > out.txt
    python -m lingvo_gshard.translate --logdir=RUN --export=DIR
    python -m lingvo_gshard.translate --bundle=DIR < in.txt > out.txt
    python -m lingvo_gshard.translate --bundle=DIR --input=in.txt --output=out.txt
    python -m lingvo_gshard.translate --bundle=DIR --serve=8080

The target is English. If the data was prepared with other directions, --target_lang chooses it.

--export writes a bundle, which runs without TensorFlow. --serve answers over HTTP and serves a page
to type in, for any number of people; SIGHUP loads its bundle again.

--input is for long files. OUTPUT.parts holds what is done, and the same command goes on from there
when it was stopped. In the end OUTPUT is written, over any earlier one. Several processes, with
flags as for the trainer, share the work.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import itertools
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.core import atomic_file, storage

if TYPE_CHECKING:
    from lingvo_gshard.decode.translator import NBest, Translator

_LOGDIR = flags.DEFINE_string("logdir", None, "The folder of a trained run.")
_BUNDLE = flags.DEFINE_string("bundle", None, "A folder that --export wrote.")
_EXPORT = flags.DEFINE_string("export", None, "Write a bundle of --logdir to this folder, and end.")
_SOURCE_LANG = flags.DEFINE_string("source_lang", None, "The lines' language; checked, not used.")
_TARGET_LANG = flags.DEFINE_string("target_lang", None, "The target, if a model has several.")
_NBEST = flags.DEFINE_integer("nbest", 1, "Translations of each line.", lower_bound=1)
_BEAM_SIZE = flags.DEFINE_integer("beam_size", None, "Active hypotheses of each line.", 1)
_AVERAGE = flags.DEFINE_integer("average_checkpoints", None, "Average the last N checkpoints.", 1)
_INPUT = flags.DEFINE_string("input", None, "Translate the lines of this file.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the translations of --input to this file.")
_SCORES = flags.DEFINE_bool("scores", False, "Print each translation's score before it.")
_SERVE = flags.DEFINE_integer("serve", None, "Serve over HTTP on this port.", 0, 65535)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "The address that --serve listens on.")
_CLIENT_HEADER = flags.DEFINE_string("client_header", None, "Set by a proxy: names the client.")
_ATTENTION = flags.DEFINE_bool("attention", False, "Return attention weights, too (--serve).")
cli.define_devices()
flags.adopt_module_key_flags(cli)

# At most; a pipe returns what it holds.
_READ_BYTES = 1 << 20


def main(argv: list[str]) -> None:
    """Translates, serves, or exports a bundle; raises ValueError for a user's mistake."""
    del argv
    if _EXPORT.value:
        with _trained_run() as (run, _):
            run.export_bundle(_EXPORT.value)
        command = "python -m lingvo_gshard.translate --bundle=. < in.txt > out.txt"
        print(f"Wrote {_EXPORT.value}: cd {_EXPORT.value} && {command}")
        return
    with cli.joined():
        translator = _translator()
        if _INPUT.value and _OUTPUT.value:
            _translate_file(translator, pathlib.Path(_INPUT.value), pathlib.Path(_OUTPUT.value))
        elif _SERVE.value is not None:
            bundle, make = cli.load("lingvo_gshard.decode.bundle"), type(translator)
            load = (lambda: make(*bundle.load(_BUNDLE.value))) if _BUNDLE.value else None
            given = {"load": load, "client_header": _CLIENT_HEADER.value}
            _server().serve(translator, _HOST.value, _SERVE.value, **given)
        else:
            beginning = translator.decoder.spec.beginning(_TARGET_LANG.value)
            for lines in read_lines(cast(io.BufferedReader, sys.stdin.buffer)):
                for found in translator.translate(beginning + line for line in lines):
                    sys.stdout.buffer.write(f"{_line(found)}\n".encode())  # Whatever the locale is.
                    sys.stdout.buffer.flush()


def _translate_file(translator: Translator, source: pathlib.Path, target: pathlib.Path) -> None:
    chunks, folder = cli.load("lingvo_gshard.decode.chunks"), pathlib.Path(f"{target}.parts")
    beginning = translator.decoder.spec.beginning(_TARGET_LANG.value)
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        text = {"text": digest, "nbest": _NBEST.value, "scores": _SCORES.value}
        text |= {"beginning": beginning} if beginning else {}
        parts = chunks.Parts(folder, translator, _line, text)
        lines = itertools.chain.from_iterable(read_lines(file))
        num_parts = parts.write(beginning + line for line in lines)
    if cli.load("lingvo_gshard.spmd.processes").is_first():
        with atomic_file.replacing(target) as path, path.open("w", encoding="utf-8") as file:
            file.writelines(parts.lines(num_parts))
        shutil.rmtree(parts.folder)


def read_lines(stream: io.BufferedIOBase) -> Iterator[list[str]]:
    """Yields the lines of a stream of bytes, without their ends, as soon as they arrive.

    Only a newline ends a line, not U+2028. Bytes not UTF-8 become replacement characters.
    """
    unfinished: list[bytes] = []  # The parts of a line whose end has not arrived.
    while data := stream.read1(_READ_BYTES):
        first, *others = data.split(b"\n")
        unfinished.append(first)
        if others:
            lines = [b"".join(unfinished), *others]
            unfinished = [lines.pop()]
            yield [line.decode("utf-8", errors="replace") for line in lines]
    if any(unfinished):
        yield [b"".join(unfinished).decode("utf-8", errors="replace")]


def _translator() -> Translator:
    if _BUNDLE.value:
        bundle = cli.load("lingvo_gshard.decode.bundle")
        spec = bundle.load_spec(_BUNDLE.value)
        _, devices = cli.start_devices(spec.model, spec.num_partitions)
        if _BEAM_SIZE.value is not None or _NBEST.value > spec.num_best:
            raise ValueError(
                f"{_BUNDLE.value}: its beam is fixed and gives {spec.num_best} translations of a "
                "line; export it again with another --beam_size or --nbest."
            )
        decoder, source, target = bundle.load(_BUNDLE.value)
    else:
        with _trained_run() as (run, devices):
            decoder, source, target = run.decoder()
    _check_language(_SOURCE_LANG.value, decoder.spec.source_languages)
    print(devices, file=sys.stderr)
    return cli.load("lingvo_gshard.decode.translator").Translator(decoder, source, target)


@contextlib.contextmanager
def _trained_run() -> Iterator[tuple[Any, str]]:
    """Yields the run of --logdir, and a description of its devices."""
    decode = {"num_best": _NBEST.value, "tell_attention": _ATTENTION.value}
    given = {"beam_size": _BEAM_SIZE.value, "average_checkpoints": _AVERAGE.value}
    decode |= {name: value for name, value in given.items() if value is not None}
    runs = cli.load("lingvo_gshard.train.run")
    with storage.working(str(_LOGDIR.value)) as logdir:
        launch = runs.recorded(str(logdir))
        num_partitions, devices = cli.start_devices(launch.model)
        yield runs.open_run(launch, str(logdir), num_partitions, **decode), devices


def _server() -> Any:
    try:
        return cli.load("lingvo_gshard.serving.app")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--serve needs {error.name}: pip install 'lingvo_gshard[serve]', or -r "
            "requirements-serve.txt."
        ) from error


def _check_language(code: str | None, languages: Sequence[str]) -> None:
    if code is not None and code not in languages:
        near = difflib.get_close_matches(code, languages, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--source_lang={code}: the model was trained on {', '.join(languages)}.{hint}"
        )


def _line(found: NBest) -> str:
    """Joins a line's --nbest translations by tabs; --scores puts each one's score before it."""
    asked = found[: _NBEST.value]
    return "\t".join(f"{t.score:.4f}\t{t.text}" if _SCORES.value else t.text for t in asked)


def _num_devices() -> int:
    """Returns how many devices this process needs, after checking the flags."""
    if (_LOGDIR.value is None) == (_BUNDLE.value is None):
        raise ValueError("give either --logdir or --bundle; see --help.")
    for flag in (_EXPORT, _AVERAGE):
        if _BUNDLE.value and flag.value is not None:
            raise ValueError(f"--{flag.name} needs --logdir.")
    _check_files(_INPUT.value, _OUTPUT.value)
    if _BUNDLE.value is None:
        return cli.devices_each()
    spec = cli.load("lingvo_gshard.decode.bundle").load_spec(_BUNDLE.value)
    return cli.devices_each(spec.num_partitions)


def _check_files(source: str | None, target: str | None) -> None:
    if source is None or target is None:
        if source or target or cli.processes():
            raise ValueError("give both --input and --output, which several processes need.")
        if sys.stdin is None and not _EXPORT.value and _SERVE.value is None:
            raise ValueError("standard input is closed; give --input and --output.")
    elif _EXPORT.value or _SERVE.value is not None:
        raise ValueError("--input goes with neither --serve nor --export.")
    elif not pathlib.Path(source).is_file():
        raise ValueError(f"--input={source}: there is no such file.")
    elif pathlib.Path(target).is_dir() or not pathlib.Path(target).parent.is_dir():
        raise ValueError(f"--output={target}: expected a file in a folder that exists.")


def run() -> None:
    """The console entry."""
    cli.run("translate", main, _num_devices)


if __name__ == "__main__":
    run()
