"""Prepares parallel text for training.

    python -m data_prep.build --input=TEXT_DIR --out=DATA_DIR \
        --source_vocab_size=8000 --target_vocab_size=5000

TEXT_DIR holds {train,dev,test}/<lang>-en.tsv[.gz], or <lang>-en.tsv[.gz] alone.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any

from absl import app, flags, logging

from data_prep import pipeline
from lingvo_gshard.input import manifest

_DEFAULTS = pipeline.BuildConfig()
_INPUT = flags.DEFINE_string("input", None, "Folder of parallel text.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to prepare.", required=True)
_SETTINGS = (
    flags.DEFINE_integer("source_vocab_size", _DEFAULTS.source_vocab_size, "Pieces."),
    flags.DEFINE_integer("target_vocab_size", _DEFAULTS.target_vocab_size, "Pieces."),
    flags.DEFINE_enum("model_type", _DEFAULTS.model_type, ["bpe", "unigram"], "Of SentencePiece."),
    flags.DEFINE_float(
        "character_coverage",
        _DEFAULTS.character_coverage,
        "Share of the characters that get pieces; the others are written in bytes.",
    ),
    flags.DEFINE_integer(
        "max_vocab_sentences", _DEFAULTS.max_vocab_sentences, "Sentences vocabularies learn from."
    ),
    flags.DEFINE_float(
        "vocab_temperature", _DEFAULTS.vocab_temperature, "Of drawing these: n**(1/T)."
    ),
    flags.DEFINE_integer(
        "max_pieces", _DEFAULTS.max_pieces, "Longer training pairs are dropped; EOS included."
    ),
    flags.DEFINE_float(
        "max_malformed_share", _DEFAULTS.max_malformed_share, "Of a file's lines, before giving up."
    ),
    flags.DEFINE_float(
        "held_out_share", _DEFAULTS.held_out_share, "Of a flat folder, for each of dev and test."
    ),
    flags.DEFINE_integer("max_chars", _DEFAULTS.max_chars, "Longest side of a training pair."),
    flags.DEFINE_float(
        "max_length_ratio", _DEFAULTS.max_length_ratio, "Between the sides, in characters."
    ),
    flags.DEFINE_integer("seed", _DEFAULTS.seed, "Of drawing the vocabularies' text."),
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.INFO)
    start_secs = time.monotonic()
    settings: dict[str, Any] = {flag.name: flag.value for flag in _SETTINGS}
    config = pipeline.BuildConfig(**settings)
    try:
        made = pipeline.build(pathlib.Path(_INPUT.value), pathlib.Path(_OUT.value), config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    _report(made, time.monotonic() - start_secs)


def _report(made: manifest.Manifest, elapsed_secs: float) -> None:
    for language in made.languages:
        counts = {split: language.num_examples(split) for split in manifest.SPLITS}
        logging.info("%s: %s, dropped %s", language.code, counts, language.dropped or "none")
    totals = {
        field.name: sum(
            getattr(language.records["train"], field.name)
            for language in made.languages
            if "train" in language.records
        )
        for field in dataclasses.fields(manifest.Records)
        if field.name.startswith("num_")
    }
    logging.info(
        "%s: train %s; vocabularies %d and %d; %.1f s",
        _OUT.value,
        totals,
        made.source_vocabulary.size,
        made.target_vocabulary.size,
        elapsed_secs,
    )


if __name__ == "__main__":
    app.run(main)
