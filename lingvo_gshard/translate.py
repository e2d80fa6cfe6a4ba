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
from lingvo_gshard.files import atomic_file, storage
from lingvo_gshard.input import example_codec

if TYPE_CHECKING:
    from lingvo_gshard.input.tokenizer import Tokenizer
    from lingvo_gshard.runs.launch import Launch
    from lingvo_gshard.runs.run import Run
    from lingvo_gshard.translation.bundle import Decoder, DecoderSpec
    from lingvo_gshard.translation.translator import NBest, Translator

_LOGDIR = flags.DEFINE_string("logdir", None, "The folder of a trained run.")
_BUNDLE = flags.DEFINE_string("bundle", None, "A folder that --export wrote.")
_EXPORT = flags.DEFINE_string("export", None, "Write a bundle of --logdir to this folder, and end.")
_SOURCE_LANG = flags.DEFINE_string("source_lang", None, "The lines' language; checked, not used.")
_TARGET_LANG = flags.DEFINE_string("target_lang", None, "The target, if a model has several.")
_NBEST = flags.DEFINE_integer("nbest", 1, "Translations of each line.", lower_bound=1)
_BEAM_SIZE = flags.DEFINE_integer("beam_size", None, "Active hypotheses of each line.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Lines to translate together.", 1)
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


def main() -> None:
    """Translates, serves, or exports a bundle; raises ValueError for a user's mistake."""
    _check_flags()
    if _EXPORT.value:
        with _launched() as launched:
            _open_run(*launched).export_bundle(_EXPORT.value)
        command = f"python -m lingvo_gshard.translate --bundle={_EXPORT.value} < in.txt > out.txt"
        print(f"Wrote {_EXPORT.value}: {command}")
        return
    spec = _bundle().load_spec(_BUNDLE.value) if _BUNDLE.value else None
    with cli.joined(spec and spec.num_partitions):
        decoder, source, target = _of_bundle(spec) if spec else _of_run()
        translator = cli.load("lingvo_gshard.translation.translator").Translator(
            decoder, source, target
        )
        if _INPUT.value and _OUTPUT.value:
            _translate_file(translator, pathlib.Path(_INPUT.value), pathlib.Path(_OUTPUT.value))
        elif _SERVE.value is not None:
            make = type(translator)
            load = (lambda: make(*_bundle().load(_BUNDLE.value))) if _BUNDLE.value else None
            given = {"load": load, "client_header": _CLIENT_HEADER.value}
            _server().serve(translator, _HOST.value, _SERVE.value, **given)
        else:
            beginning = translator.decoder.spec.beginning(_TARGET_LANG.value)
            for lines in read_lines(cast(io.BufferedReader, sys.stdin.buffer)):
                for found in translator.translate(beginning + line for line in lines):
                    sys.stdout.buffer.write(f"{_line(found)}\n".encode())  # Whatever the locale is.
                    sys.stdout.buffer.flush()


def _translate_file(translator: Translator, source: pathlib.Path, target: pathlib.Path) -> None:
    chunks, folder = cli.load("lingvo_gshard.translation.chunks"), pathlib.Path(f"{target}.parts")
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
    unfinished = b""  # A line whose end has not arrived.
    while data := stream.read1(_READ_BYTES):
        *lines, unfinished = (unfinished + data).split(b"\n")
        if lines:
            yield [line.decode("utf-8", errors="replace") for line in lines]
    if unfinished:
        yield [unfinished.decode("utf-8", errors="replace")]


def _bundle() -> Any:
    return cli.load("lingvo_gshard.translation.bundle")


def _of_bundle(spec: DecoderSpec) -> tuple[Decoder, Tokenizer, Tokenizer]:
    if _BEAM_SIZE.value is not None or _NBEST.value > spec.num_best:
        raise ValueError(
            f"{_BUNDLE.value}: its beam is fixed and gives {spec.num_best} translations of a "
            "line; export it again with another --beam_size or --nbest."
        )
    _check_language(spec.languages)
    _start_devices(spec.model, spec.num_partitions)
    return _bundle().load(_BUNDLE.value)


def _of_run() -> tuple[Decoder, Tokenizer, Tokenizer]:
    """The decoder of --logdir, from the bundle that an earlier start has kept, or this one keeps.

    Several processes keep none.
    """
    with _launched() as launched:
        if cli.processes():
            return _open_run(*launched).decoder()
        kept = cli.load("lingvo_gshard.runs.kept")
        folder = kept.folder(*launched)
        if found := kept.load(folder):
            return found
        print(f"Exporting to {storage.origin(folder)}, for the next starts.", file=sys.stderr)
        run = _open_run(*launched)
        try:
            run.export_bundle(folder)
            kept.delete_older(folder)
        except OSError as error:
            print(f"Nothing is kept for the next start: {error}", file=sys.stderr)
            return run.decoder()
        return _bundle().load(folder)


@contextlib.contextmanager
def _launched() -> Iterator[tuple[Launch, str, int]]:
    """Yields what --logdir is a run of, its local folder, and the number of partitions."""
    decode = {"num_best": _NBEST.value, "tell_attention": _ATTENTION.value}
    for flag in (_BEAM_SIZE, _BATCH_SIZE, _AVERAGE):
        decode |= {flag.name: flag.value} if flag.value is not None else {}
    launches = cli.load("lingvo_gshard.runs.launch")
    with storage.working(str(_LOGDIR.value)) as logdir:
        launch = launches.recorded(str(logdir))
        _check_language(launch.trained_on)
        launch = launch.changed(f"decode.{name}={value}" for name, value in decode.items())
        yield launch, str(logdir), _start_devices(launch.model)


def _open_run(launch: Launch, logdir: str, num_partitions: int) -> Run:
    return cli.load("lingvo_gshard.runs.run").open_run(launch, logdir, num_partitions)


def _start_devices(model: str, partitions: int | None = None) -> int:
    """Starts the devices and prints what they are; returns the number of partitions."""
    partitions, devices = cli.start_devices(model, partitions)
    print(devices, file=sys.stderr)
    return partitions


def _server() -> Any:
    try:
        return cli.load("lingvo_gshard.serving.app")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--serve needs {error.name}: pip install 'lingvo_gshard[serve]', or -r "
            "requirements-serve.txt."
        ) from error


def _check_language(trained_on: Sequence[str]) -> None:
    code, languages = _SOURCE_LANG.value, example_codec.source_languages(trained_on)
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


def _check_flags() -> None:
    """Refuses flags that do not go together, and files that are not there."""
    if (_LOGDIR.value is None) == (_BUNDLE.value is None):
        raise ValueError("give either --logdir or --bundle; see --help.")
    for flag in (_EXPORT, _BATCH_SIZE, _AVERAGE):
        if _BUNDLE.value and flag.value is not None:
            raise ValueError(f"--{flag.name} needs --logdir.")
    if _BUNDLE.value and _ATTENTION.value:
        raise ValueError("--attention needs --logdir; a bundle has it if it was exported with it.")
    if _SERVE.value is not None and _TARGET_LANG.value:
        raise ValueError("--serve: requests choose the target, by /translate?target_lang=CODE.")
    for flag in (_SERVE, _TARGET_LANG, _SCORES):
        if _EXPORT.value and flag.present:
            raise ValueError(f"--{flag.name} does not go with --export.")
    source, target = _INPUT.value, _OUTPUT.value
    if source is None or target is None:
        if source or target or cli.processes():
            raise ValueError("give both --input and --output; several processes need them.")
        if sys.stdin is None and not _EXPORT.value and _SERVE.value is None:
            raise ValueError("standard input is closed; give --input and --output.")
    elif _EXPORT.value or _SERVE.value is not None:
        raise ValueError("--input goes with neither --serve nor --export.")
    elif not pathlib.Path(source).is_file():
        raise ValueError(f"--input={source}: there is no such file.")
    elif (file := pathlib.Path(target)).exists() != file.is_file() or not file.parent.is_dir():
        raise ValueError(f"--output={target}: expected a file in a folder that exists.")


def run() -> None:
    """The console entry."""
    cli.run("translate", main)


if __name__ == "__main__":
    run()
