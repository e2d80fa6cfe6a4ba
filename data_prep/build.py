"""Prepares parallel text for training.

    python -m data_prep.build --input=TEXT_DIR --out=DATA_DIR \\
        --source_vocab_size=8000 --target_vocab_size=5000
    python -m data_prep.build --config=FILE --out=DATA_DIR

TEXT_DIR holds {train,dev,test}/<lang>-en.tsv[.gz], or <lang>-en.tsv[.gz] alone; FILE names any
sources, see config.py. A run that was stopped goes on where it was; --through ends it after a step.
A mistake is told in one line; --verbosity=1 shows its traceback.
"""

import os
import pathlib
import sys
import time
from typing import Any

from absl import app, flags, logging

from data_prep import config, corpus, pipeline
from data_prep.sources.source import Source
from lingvo_gshard.input import manifest

_INPUT = flags.DEFINE_string("input", None, "Folder of parallel text.")
_CONFIG = flags.DEFINE_string("config", None, "TOML file that names the sources.")
_OUT = flags.DEFINE_string("out", None, "Folder to prepare.", required=True)
_THROUGH = flags.DEFINE_enum_class(
    "through", pipeline.Step.REPORT, pipeline.Step, "The last step to run."
)
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count() or 1, "Processes to work with.")
# These go before what a file says.
_SETTINGS = (
    flags.DEFINE_integer("source_vocab_size", None, "Pieces."),
    flags.DEFINE_integer("target_vocab_size", None, "Pieces."),
    flags.DEFINE_enum("model_type", None, config.MODEL_TYPES, "Of SentencePiece."),
    flags.DEFINE_float("character_coverage", None, "Share of the characters that get pieces."),
    flags.DEFINE_integer("max_vocab_sentences", None, "That the vocabularies learn from."),
    flags.DEFINE_integer("max_pieces", None, "Longer training pairs are dropped; EOS included."),
    flags.DEFINE_integer("seed", None, "Of drawing the vocabularies' text."),
)

_MANY_BYTES = 0.1  # Of a language's tokens.


def main(argv: list[str]) -> None:
    if not logging.level_debug():
        logging.set_verbosity(logging.INFO)
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected arguments {argv[1:]}; see --help")
        _build(pathlib.Path(_OUT.value))
    except (ValueError, OSError) as error:
        if logging.level_debug():
            raise
        # A full disk's error names no file.
        is_nameless = isinstance(error, OSError) and error.filename is None
        sys.exit(f"error: {_OUT.value}: {error}" if is_nameless else f"error: {error}")


def _build(out_dir: pathlib.Path) -> None:
    began = time.monotonic()
    sources, settings = _sources_and_config()
    if _THROUGH.value is not pipeline.Step.REPORT:
        pipeline.run_through(_THROUGH.value, sources, out_dir, settings, _WORKERS.value)
        return
    made = pipeline.prepare(sources, out_dir, settings, _WORKERS.value)
    _report(made, time.monotonic() - began)


def _sources_and_config() -> tuple[tuple[Source, ...], config.BuildConfig]:
    if (_INPUT.value is None) == (_CONFIG.value is None):
        raise ValueError("give --input=TEXT_DIR or --config=FILE, one of them")
    settings: dict[str, Any] = {f.name: f.value for f in _SETTINGS if f.value is not None}
    if _CONFIG.value is not None:
        return config.load(pathlib.Path(_CONFIG.value), settings)
    assert _INPUT.value is not None
    return corpus.find(pathlib.Path(_INPUT.value)), config.BuildConfig(**settings)


def _report(made: manifest.Manifest, elapsed_secs: float) -> None:
    for language in made.languages:
        counts = {split: language.num_examples(split) for split in manifest.SPLITS}
        logging.info("%s: %s, dropped %s", language.code, counts, language.dropped or "none")
        _warn_of_bytes(language)
    train = [one.records["train"] for one in made.languages if "train" in one.records]
    logging.info(
        "%s: %d training pairs of %d languages, %d source and %d target tokens; "
        "vocabularies %d and %d; %.1f s; tables in %s/report",
        _OUT.value,
        sum(records.num_examples for records in train),
        len(train),
        sum(records.num_source_tokens for records in train),
        sum(records.num_target_tokens for records in train),
        made.source_vocabulary.size,
        made.target_vocabulary.size,
        elapsed_secs,
        _OUT.value,
    )


def _warn_of_bytes(language: manifest.Language) -> None:
    if "train" not in language.records:
        return
    records = language.records["train"]
    share = records.num_source_byte_tokens / max(records.num_source_tokens, 1)
    if share > _MANY_BYTES:
        logging.warning(
            "%s: %.1f %% of the source's tokens are bytes of characters without a piece: a larger "
            "source vocabulary or character_coverage makes it shorter",
            language.code,
            100 * share,
        )


if __name__ == "__main__":
    app.run(main)
