"""What the trainer's modes do, and what they print."""

from __future__ import annotations

import json
import pathlib

from lingvo_gshard import runs
from lingvo_gshard.analysis import expert_load, quality
from lingvo_gshard.decode.translator import Translator
from lingvo_gshard.input import decoding, manifest
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.metrics.bleu import corpus_bleu
from lingvo_gshard.train import model_dir
from lingvo_gshard.train.estimator import TPUEstimator
from lingvo_gshard.train.train_and_evaluate import EvalSpec, TrainSpec, train_and_evaluate


def train(estimator: TPUEstimator, launch: runs.Launch, facts: runs.DataFacts) -> None:
    """Trains to the experiment's max_steps."""
    _announce(estimator, launch, facts)
    params = estimator.params
    estimator.train(lambda p: p.input.Instantiate(), max_steps=params.train.max_steps)
    expert_load.draw(estimator.config.model_dir)


def train_and_eval(estimator: TPUEstimator, launch: runs.Launch, facts: runs.DataFacts) -> None:
    """Trains, with an evaluation on (a part of) dev at every checkpoint."""
    _announce(estimator, launch, facts)
    metrics = train_and_evaluate(
        estimator,
        TrainSpec(lambda p: p.input.Instantiate(), estimator.params.train.max_steps),
        EvalSpec(
            lambda p: p.eval_input.Instantiate(),
            steps=estimator.params.train.eval_batches,
            name="dev",
        ),
    )
    _print_metrics(metrics)
    expert_load.draw(estimator.config.model_dir)


def evaluate(estimator: TPUEstimator) -> None:
    """Evaluates the latest checkpoint on dev and prints its metrics."""
    _print_metrics(estimator.evaluate(lambda p: p.eval_input.Instantiate(), name="dev"))


def decode(estimator: TPUEstimator, data_dir: str, split: str) -> None:
    """Translates a split of every language; prints and draws BLEU by language.

    Writes logdir/decode_SPLIT/<lang>.txt (a translation a line), bleu.json and bleu.png.
    """
    runs.recorded(estimator.config.model_dir)  # Refuses a folder that was never trained in.
    data, limit = manifest.load(data_dir), estimator.params.decode.max_sentences
    texts = {
        language.code: decoding.eval_text(data_dir, split, language.code)[:limit]
        for language in data.languages
        if split in language.text
    }
    if not texts:
        raise ValueError(f"{data_dir}: no language has a {split} split to decode.")
    source, target = (Tokenizer(path) for path in runs.vocabulary_files(estimator.config.model_dir))
    translator = Translator(estimator, source, target, estimator.params.decode)
    # All languages together: full batches, and one program for each length.
    lines = [pair[0] for pairs in texts.values() for pair in pairs]
    translations = iter(translator.translate(lines))

    folder = pathlib.Path(estimator.config.model_dir, f"decode_{split}")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for code, pairs in texts.items():
        hypotheses = [next(translations).text for _ in pairs]
        (folder / f"{code}.txt").write_text("".join(line + "\n" for line in hypotheses))
        bleu = corpus_bleu(hypotheses, [reference for _, reference in pairs])
        size = data.language(code).num_examples("train")
        rows.append(quality.LanguageQuality(code, size, len(pairs), bleu.score, bleu.signature))
    report = quality.Quality(tuple(rows))
    (folder / "bleu.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")
    quality.draw(report, folder / "bleu.png")
    print(report.table())
    print(f"Wrote {folder}/bleu.json, bleu.png and a file of translations a language.")


def _announce(estimator: TPUEstimator, launch: runs.Launch, facts: runs.DataFacts) -> None:
    logdir = estimator.config.model_dir
    # Before anything in a folder of another model is written over.
    model_dir.check(logdir, estimator.params.ToText(), runs.MODEL_PREFIXES)
    runs.record(launch, facts, logdir)
    print(
        f"{launch.model}: {runs.num_weights(estimator.params) / 1e6:.2f} M weights over "
        f"{estimator.partitioning.num_partitions} partitions, to step "
        f"{estimator.params.train.max_steps} in {logdir}",
        flush=True,
    )


def _print_metrics(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics))
    for name, value in sorted(metrics.items()):
        print(f"{name:<{width}}  {value:.6g}")
