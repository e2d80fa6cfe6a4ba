"""Translates lines of standard input into English, one line for each, in order.

    python -m lingvo_gshard.translate --logdir=RUN --source_lang=de < in.txt > out.txt
    python -m lingvo_gshard.translate --logdir=RUN --export=DIR
    python -m lingvo_gshard.translate --bundle=DIR < in.txt > out.txt
    python -m lingvo_gshard.translate --bundle=DIR --serve=8080    # and a page to type in

A bundle runs without TensorFlow: see decode/bundle.py. With --serve any number of people translate.
"""

from __future__ import annotations

import argparse
import difflib
import io
import itertools
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

from lingvo_gshard.spmd import environment

if TYPE_CHECKING:
    from lingvo_gshard.decode.decoder import DecoderSpec
    from lingvo_gshard.decode.translator import Translation, Translator
    from lingvo_gshard.train.estimator import TPUEstimator

# At most; a pipe gives what there is.
_READ_BYTES = 1 << 20


def main(args: argparse.Namespace) -> None:
    """Translates, serves, or exports a bundle.

    Raises:
      ValueError: no trained run or bundle, an unknown language, or sizes that do not fit.
    """
    if args.export:
        from lingvo_gshard.train import decoders

        decoders.export(_of_run(args), args.export)
        print(
            f"Wrote {args.export}: cd {args.export} && python -m lingvo_gshard.translate "
            "--bundle=. < in.txt > out.txt"
        )
        return
    translator, spec = _translator(args)
    if args.serve is not None:
        _server().serve(translator, spec, args.host, args.serve)
        return
    for lines in read_lines(cast(io.BufferedReader, sys.stdin.buffer)):
        for translations in translator.translate(lines):
            line = _line(translations[: args.nbest], args.scores)
            sys.stdout.buffer.write(f"{line}\n".encode())  # In UTF-8, whatever the locale says.
            sys.stdout.buffer.flush()


def _server() -> ModuleType:
    try:
        from lingvo_gshard.serving import app
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--serve needs {error.name}: pip install 'lingvo_gshard[serve]', or -r "
            "requirements-serve.txt."
        ) from error
    return app


def read_lines(stream: io.BufferedIOBase) -> Iterator[list[str]]:
    """The lines of a stream of bytes, without their ends; together those that came together.

    Lines end at newlines alone, not at marks such as U+2028. One that is no UTF-8 is read all the
    same, with marks where it can't be.
    """
    begun: list[bytes] = []  # Of a line whose end has not come.
    while data := stream.read1(_READ_BYTES):
        first, *others = data.split(b"\n")
        begun.append(first)
        if others:
            lines = [b"".join(begun), *others]
            begun = [lines.pop()]
            yield [line.decode("utf-8", errors="replace") for line in lines]
    if any(begun):
        yield [b"".join(begun).decode("utf-8", errors="replace")]


def _translator(args: argparse.Namespace) -> tuple[Translator, DecoderSpec]:
    from lingvo_gshard.decode.translator import Translator

    if args.bundle:
        from lingvo_gshard.decode import bundle

        decoder, source, target = bundle.load(args.bundle)
        _check_bundle(args, decoder.spec.num_best)
    else:
        from lingvo_gshard.train import decoders

        decoder, source, target = decoders.make(_of_run(args))
    _check_language(args.source_lang, decoder.spec.languages)
    return Translator(decoder, source, target), decoder.spec


def _of_run(args: argparse.Namespace) -> TPUEstimator:
    from lingvo_gshard.train import decoders

    decode = {"num_best": args.nbest, "tell_attention": args.attention}
    if args.beam_size is not None:
        decode["beam_size"] = args.beam_size
    return decoders.of_run(args.logdir, args.num_partitions, **decode)


def _check_bundle(args: argparse.Namespace, num_best: int) -> None:
    if args.beam_size is not None or args.nbest > num_best:
        raise ValueError(
            f"{args.bundle}: its beam is fixed and gives {num_best} translations of a line; "
            "export it again with another --beam_size or --nbest."
        )


def _check_language(code: str | None, languages: Sequence[str]) -> None:
    if code is not None and code not in languages:
        near = difflib.get_close_matches(code, languages, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--source_lang={code}: the model was trained on {', '.join(languages)}.{hint}"
        )


def _line(translations: Iterable[Translation], scores: bool) -> str:
    """A line's translations, with tabs between them; each after its score if `scores`."""
    fields = [[f"{t.score:.4f}", t.text] if scores else [t.text] for t in translations]
    return "\t".join(itertools.chain(*fields))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "translate", description="Lines of standard input in, as many of English out."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--logdir", help="The folder of a trained run.")
    model.add_argument("--bundle", help="A folder that --export wrote.")
    parser.add_argument("--export", metavar="DIR", help="Write a bundle of --logdir, and end.")
    parser.add_argument("--source_lang", help="The lines' language, to be refused if unknown.")
    parser.add_argument("--nbest", type=int, default=1, help="Translations of each line.")
    parser.add_argument("--beam_size", type=int, help="Active hypotheses of each line.")
    parser.add_argument("--scores", action="store_true", help="Print each one's score before it.")
    parser.add_argument("--serve", type=int, metavar="PORT", help="Serve over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="Where --serve listens.")
    parser.add_argument(
        "--attention", action="store_true", help="Have --serve tell, or --export keep, attention."
    )
    parser.add_argument("--num_partitions", type=int, default=1, help="Devices, for --logdir.")
    args = parser.parse_args(argv)
    if args.export and not args.logdir:
        parser.error("--export needs --logdir")
    if args.nbest < 1:
        parser.error(f"--nbest must be 1 or more, got {args.nbest}")
    return args


def run(argv: Sequence[str] | None = None) -> None:
    """The console entry: a mistake is told in one line, with exit status 1.

    Who reads no further, as `head` does, and who interrupts get a shell's status of such a signal.
    """
    args = _parse(argv)
    try:
        environment.prepare(max(1, _num_devices(args)))
        main(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what is unwritten.
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        sys.exit(f"translate: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _num_devices(args: argparse.Namespace) -> int:
    if not args.bundle:
        return args.num_partitions
    from lingvo_gshard.decode import bundle

    return bundle.load_spec(args.bundle).num_partitions


if __name__ == "__main__":
    run()
