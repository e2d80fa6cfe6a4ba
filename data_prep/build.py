"""Prepares text for training: pairs of sentences or, with --kind=text, documents.

    gshard prepare --input=TEXT_DIR --out=DATA_DIR \\
        --source_vocab_size=8000 --target_vocab_size=5000
    gshard prepare --input=TEXT_DIR --kind=text --out=DATA_DIR --text_vocab_size=8000
    gshard prepare --config=FILE --out=DATA_DIR

TEXT_DIR contains {train,dev,test}/<lang>-en.tsv[.gz], or only <lang>-en.tsv[.gz]. For documents,
the files are <name>.txt[.gz], with one document per line. FILE names sources of any format and sets
everything else (docs/data.md); data_prep/recipes has some for public corpora. The same command
continues a build that was stopped. --verbosity=1 shows tracebacks.

--engine=dask runs the tasks on the Dask cluster of --scheduler=HOST:PORT, whose workers need the
same packages and see the same folders under the same absolute paths; one thread each is best. On
Slurm or PBS, dask-jobqueue starts such a cluster; its `scheduler_address` is HOST:PORT.
Without --scheduler, Dask starts --workers processes on this machine.
"""

import contextlib
import os
import pathlib
import shlex
import time
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

from data_prep import config, engines, pipeline, report
from data_prep.sources import Source
from lingvo_gshard import cli
from lingvo_gshard.input import manifest
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import atomic_file, storage
from xla_spmd.runtime import environment

_INPUT = flags.DEFINE_string("input", None, "A folder of text.")
_CONFIG = flags.DEFINE_string("config", None, "A TOML file that names the sources.")
_OUT = flags.DEFINE_string("out", None, "The folder to prepare.", required=True)
_THROUGH = flags.DEFINE_enum_class("through", pipeline.Step.REPORT, pipeline.Step, "The last step.")
_ENGINE = flags.DEFINE_enum("engine", "local", ["local", "dask"], "What runs the tasks.")
_SCHEDULER = flags.DEFINE_string("scheduler", None, "HOST:PORT of a Dask cluster's scheduler.")
_WORKERS = flags.DEFINE_integer("workers", environment.num_cores(), "Local processes.", 1)
# Settings of BuildConfig. These flags override the file.
_SETTINGS = (
    flags.DEFINE_enum("kind", None, list(Kind), "The kind of text: pairs or documents."),
    flags.DEFINE_integer("source_vocab_size", None, "Pieces of the source vocabulary."),
    flags.DEFINE_integer("target_vocab_size", None, "Pieces of the target vocabulary."),
    flags.DEFINE_integer("text_vocab_size", None, "Pieces of the vocabulary of documents."),
    flags.DEFINE_string(
        "vocabulary", None, "A run or its .model, or a tokenizer's folder, instead of learning."
    ),
    flags.DEFINE_enum("model_type", None, config.MODEL_TYPES, "SentencePiece's algorithm."),
    flags.DEFINE_float("character_coverage", None, "Share of the characters that get pieces."),
    flags.DEFINE_integer("max_vocab_sentences", None, "Sentences for learning vocabularies."),
    flags.DEFINE_integer("max_pieces", None, "Drops longer training pairs; EOS counts."),
    flags.DEFINE_integer("seed", None, "Decides which sentences the vocabularies learn from."),
)
# A model to begin with, by the data's kind.
_FIRST_MODEL: dict[str, str] = {Kind.PARALLEL: "small.MoE8E6L", Kind.TEXT: "toy.LmMoE8E4L"}
_MANY_BYTES = 0.1  # As a share of a language's tokens.


def main() -> None:
    """Builds, and logs the results. Raises ValueError for a user's mistake."""
    # Our info lines are shown, but not the libraries'; --verbosity=1 shows more and is kept.
    if not logging.level_debug():
        logging.get_absl_logger().setLevel("INFO")
    began = time.monotonic()
    sources, settings = _sources_and_config()

    # A folder in a bucket has a local copy, which is kept if the build is stopped.
    with storage.working(_OUT.value, keep=True) as out_dir, atomic_file.naming(out_dir):
        with _engine() as engine:
            pipeline.run_through(_THROUGH.value, sources, out_dir, settings, engine)
        if _THROUGH.value is pipeline.Step.REPORT:
            data = manifest.load(out_dir)
            _log_languages(data)
            for warning in report.warnings(data):
                logging.warning(warning)
            _warn_of_bytes(data)
            _log_totals(data, time.monotonic() - began)
            _log_next(data.kind, settings.vocabulary)


def _log_next(kind: str, vocabulary: str) -> None:
    """Logs the next command, which trains a model; with a given vocabulary, an imported one."""
    data_flag = f"--data_dir={shlex.quote(_OUT.value)}"
    if vocabulary:
        logging.info(
            f"Next: gshard train {data_flag} --logdir=RUN, if RUN was imported with this "
            f"vocabulary and not trained yet, or gshard train --model=MODEL {data_flag} "
            "--logdir=TUNED --set=train.warm_start_from=RUN, which begins with its weights"
        )
        return

    logging.info(
        f"Next: gshard train --model={_FIRST_MODEL[kind]} {data_flag} --logdir=RUN "
        "(for a first look, add --set=train.max_steps=200; the same command without it continues)"
    )


def _sources_and_config() -> tuple[Sequence[Source], config.BuildConfig]:
    """Returns the sources and settings from --input, --config and the flags that override it.

    All paths are absolute, so that a restarted build continues with the same text, whatever the
    working directory is.
    """
    folder = None if _INPUT.value is None else pathlib.Path(_INPUT.value).absolute()
    settings: dict[str, Any] = {
        flag.name: flag.value for flag in _SETTINGS if flag.value is not None
    }

    if folder is not None and folder.resolve() == pathlib.Path(_OUT.value).resolve():
        raise ValueError(f"--out={_OUT.value} is the folder of --input; choose another.")
    storage.check_writable(_OUT.value)
    if "vocabulary" in settings:
        if storage.is_bucket(settings["vocabulary"]):
            raise ValueError(f"--vocabulary={settings['vocabulary']} must be on this machine.")
        settings["vocabulary"] = storage.absolute(settings["vocabulary"])

    if _CONFIG.value is not None:
        return config.load(pathlib.Path(_CONFIG.value).absolute(), settings, folder)
    if folder is None:
        raise ValueError("give --input=TEXT_DIR, --config=FILE, or both")
    made = config.BuildConfig(**settings)
    return config.sources_of_folder(folder, Kind(made.kind)), made


def _engine() -> contextlib.AbstractContextManager[engines.Engine]:
    """Returns a context with the engine that the flags choose. Raises ValueError if they clash."""
    # Workers on other machines have other working directories.
    if _SCHEDULER.value is not None:
        if _ENGINE.value != "dask":
            raise ValueError(f"--scheduler needs --engine=dask, got --engine={_ENGINE.value}")
        for flag in (_INPUT, _CONFIG, _OUT):
            if flag.value and not os.path.isabs(flag.value):
                raise ValueError(
                    f"--{flag.name}={flag.value} with --scheduler: expected an absolute path, "
                    "which is the same for all workers"
                )

    if _ENGINE.value == "dask":
        return engines.dask(_SCHEDULER.value, _WORKERS.value)
    return contextlib.nullcontext(engines.pool(_WORKERS.value))


def _log_languages(data: manifest.Manifest) -> None:
    for language in data.languages:
        counts = {split: language.num_examples(split) for split in manifest.SPLITS}
        logging.info(
            "%s: %s, dropped %s of the %d that were read",
            language.code,
            counts,
            language.dropped or "none",
            language.read,
        )


def _warn_of_bytes(data: manifest.Manifest) -> None:
    """Warns about languages with many characters that are not in the learned vocabulary."""
    if data.config.get("vocabulary"):
        return
    for code, records in _training_records(data).items():
        side = "source"
        share = records.num_source_byte_tokens / max(records.num_source_tokens, 1)
        if data.kind == Kind.TEXT:
            side = "text"
            share = records.num_target_byte_tokens / max(records.num_target_tokens, 1)

        if share > _MANY_BYTES:
            logging.warning(
                f"{code}: {100 * share:.1f} % of the {side}'s tokens are bytes of characters "
                f"without a piece: a larger {side} vocabulary or character_coverage makes it "
                "shorter"
            )


def _log_totals(data: manifest.Manifest, elapsed_secs: float) -> None:
    # Only of training text: dev and test are small.
    train = _training_records(data)
    num_examples = sum(records.num_examples for records in train.values())
    num_source = sum(records.num_source_tokens for records in train.values())
    num_target = sum(records.num_target_tokens for records in train.values())

    if data.kind == Kind.TEXT:
        num_bytes = sum(records.num_target_bytes for records in train.values())
        totals = (
            f"{num_examples} training documents in {len(train)} corpora, {num_target} tokens of "
            f"{num_bytes} bytes; vocabulary {data.target_vocabulary.size}"
        )
    else:
        totals = (
            f"{num_examples} training examples in {len(train)} directions, {num_source} source "
            f"and {num_target} target tokens; vocabularies {data.source_vocabulary.size} and "
            f"{data.target_vocabulary.size}"
        )
    logging.info(f"{_OUT.value}: {totals}; {elapsed_secs:.1f} s; tables in {_OUT.value}/report")


def _training_records(data: manifest.Manifest) -> dict[str, manifest.Records]:
    """Returns the training records of each direction that has any, by its code."""
    return {
        language.code: language.records["train"]
        for language in data.languages
        if "train" in language.records
    }


if __name__ == "__main__":
    cli.run("data_prep.build", main)
