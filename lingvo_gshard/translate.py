"""Translates lines of standard input into English, one line for each, in order.

    python -m lingvo_gshard.translate --logdir=RUN --source_lang=de < in.txt > out.txt
    python -m lingvo_gshard.translate --logdir=RUN --export=DIR
    python -m lingvo_gshard.translate --bundle=DIR < in.txt > out.txt
    python -m lingvo_gshard.translate --bundle=DIR --serve=8080

--export writes a bundle, which runs without TensorFlow. --serve answers over HTTP and serves a page
to type in, for any number of people.
"""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from absl import flags

from lingvo_gshard import cli

if TYPE_CHECKING:
    from lingvo_gshard.decode.bundle import DecoderSpec
    from lingvo_gshard.decode.translator import Translation, Translator

_LOGDIR = flags.DEFINE_string("logdir", None, "The folder of a trained run.")
_BUNDLE = flags.DEFINE_string("bundle", None, "A folder that --export wrote.")
_EXPORT = flags.DEFINE_string("export", None, "Write a bundle of --logdir to this folder, and end.")
_SOURCE_LANG = flags.DEFINE_string("source_lang", None, "The lines' language; checked, not used.")
_NBEST = flags.DEFINE_integer("nbest", 1, "Translations of each line.", lower_bound=1)
_BEAM_SIZE = flags.DEFINE_integer("beam_size", None, "Active hypotheses of each line.", 1)
_SCORES = flags.DEFINE_bool("scores", False, "Print each translation's score before it.")
_SERVE = flags.DEFINE_integer("serve", None, "Serve over HTTP on this port.", 0, 65535)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "The address that --serve listens on.")
_ATTENTION = flags.DEFINE_bool("attention", False, "Return attention weights, too (--serve).")
_DEVICES = cli.device_flags()

# At most; a pipe returns what it holds.
_READ_BYTES = 1 << 20


def main(argv: list[str]) -> None:
    """Translates, serves, or exports a bundle; raises ValueError for a user's mistake."""
    del argv
    if _EXPORT.value:
        run, _ = _trained_run()
        run.export_bundle(_EXPORT.value)
        command = "python -m lingvo_gshard.translate --bundle=. < in.txt > out.txt"
        print(f"Wrote {_EXPORT.value}: cd {_EXPORT.value} && {command}")
        return
    translator, spec = _translator()
    if _SERVE.value is not None:
        _server().serve(translator, spec, _HOST.value, _SERVE.value)
        return
    for lines in read_lines(cast(io.BufferedReader, sys.stdin.buffer)):
        for translations in translator.translate(lines):
            line = _line(translations[: _NBEST.value], _SCORES.value)
            sys.stdout.buffer.write(f"{line}\n".encode())  # UTF-8, whatever the locale is.
            sys.stdout.buffer.flush()


def read_lines(stream: io.BufferedIOBase) -> Iterator[list[str]]:
    """Yields the lines of a stream of bytes, without their ends, as soon as they arrive.

    Only a newline ends a line, not a mark such as U+2028. Bytes that are not UTF-8 become
    replacement characters.
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


def _translator() -> tuple[Translator, DecoderSpec]:
    if _BUNDLE.value:
        decoder, source, target = cli.load("lingvo_gshard.decode.bundle").load(_BUNDLE.value)
        _, devices = _DEVICES.start(decoder.spec.model)
        num_best = decoder.spec.num_best
        if _BEAM_SIZE.value is not None or _NBEST.value > num_best:
            raise ValueError(
                f"{_BUNDLE.value}: its beam is fixed and gives {num_best} translations of a line; "
                "export it again with another --beam_size or --nbest."
            )
    else:
        run, devices = _trained_run()
        decoder, source, target = run.decoder()
    _check_language(_SOURCE_LANG.value, decoder.spec.languages)
    translator = cli.load("lingvo_gshard.decode.translator")
    print(devices, file=sys.stderr)
    return translator.Translator(decoder, source, target), decoder.spec


def _trained_run() -> tuple[Any, str]:
    """The run of --logdir, and a description of its devices."""
    decode = {"num_best": _NBEST.value, "tell_attention": _ATTENTION.value}
    if _BEAM_SIZE.value is not None:
        decode["beam_size"] = _BEAM_SIZE.value
    runs = cli.load("lingvo_gshard.train.run")
    launch = runs.recorded(_LOGDIR.value)
    num_partitions, devices = _DEVICES.start(launch.model)
    return runs.open_run(launch, _LOGDIR.value, num_partitions, **decode), devices


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


def _line(translations: Iterable[Translation], scores: bool) -> str:
    """Joins a line's translations by tabs; `scores` puts each one's score before it."""
    return "\t".join(f"{t.score:.4f}\t{t.text}" if scores else t.text for t in translations)


def _num_devices() -> int:
    """Returns how many devices the translator needs, after checking the flags."""
    if (_LOGDIR.value is None) == (_BUNDLE.value is None):
        raise ValueError("give either --logdir or --bundle; see --help.")
    if _BUNDLE.value is None:
        return _DEVICES.num_partitions.value or 1
    if _EXPORT.value:
        raise ValueError("--export needs --logdir.")
    return cli.load("lingvo_gshard.decode.bundle").load_spec(_BUNDLE.value).num_partitions


def run() -> None:
    """The console entry."""
    cli.run("translate", main, _num_devices)


if __name__ == "__main__":
    run()
