"""What the trainer's modes do, and what they print."""

from __future__ import annotations

import pathlib
import sys

from lingvo_gshard.decode.translator import Translator
from lingvo_gshard.evaluation import expert_load, quality, run_report
from lingvo_gshard.evaluation.scores import corpus_bleu, corpus_chrf
from lingvo_gshard.input import decoding, manifest
from lingvo_gshard.model import flops
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.spmd import processes
from lingvo_gshard.train import decoders, model_dir, run, train_and_evaluate
from lingvo_gshard.train.estimator import InputFn, TPUEstimator
from lingvo_gshard.train.retention import BestBy
from lingvo_gshard.train.stopping import EXIT_STATUS, StopOnSignal
from lingvo_gshard.train.train_and_evaluate import EvalSpec, TrainSpec


def train(estimator: TPUEstimator, launch: run.Launch, facts: run.DataFacts) -> None:
    """Trains to the experiment's max_steps; SystemExit if it was asked to end before."""
    _announce(estimator, launch, facts)
    with StopOnSignal() as stop:
        estimator.train(
            _input_fn(estimator, "input"),
            max_steps=estimator.params.train.max_steps,
            hooks=[stop],
        )
    _end(estimator, stop)


def train_and_eval(estimator: TPUEstimator, launch: run.Launch, facts: run.DataFacts) -> None:
    """As train, with an evaluation on (a part of) dev at every checkpoint."""
    _announce(estimator, launch, facts)
    with StopOnSignal() as stop:
        metrics = train_and_evaluate.train_and_evaluate(
            estimator,
            TrainSpec(
                _input_fn(estimator, "input"), estimator.params.train.max_steps, hooks=[stop]
            ),
            _dev(estimator),
        )
    if metrics is not None:
        _print_metrics(metrics)
    _end(estimator, stop)


def evaluate(estimator: TPUEstimator, facts: run.DataFacts) -> None:
    """Evaluates the latest checkpoint on dev, then language by language; prints the metrics."""
    _print_metrics(estimator.evaluate(_input_fn(estimator, "eval_input"), name="dev"))
    data = manifest.load(estimator.params.eval_input.data_dir)
    for code in facts.languages:
        if data.language(code).num_examples("dev"):
            of_language = _input_fn(estimator, "eval_input", languages=(code,))
            metrics = estimator.evaluate(of_language, name=f"dev_{code}")
            _print(f"nll of {code}: {metrics['nll']:.6g}")


def evaluate_continuously(estimator: TPUEstimator) -> None:
    """Evaluates each new checkpoint of the run that another process trains, to its last step."""
    metrics = train_and_evaluate.evaluate_continuously(
        estimator, _dev(estimator), until_step=estimator.params.train.max_steps
    )
    if metrics is None:
        _print(f"Every checkpoint to step {estimator.params.train.max_steps} was evaluated before.")
    else:
        _print_metrics(metrics)


def decode(estimator: TPUEstimator, data_dir: str, split: str) -> None:
    """Translates a split of every language; prints and draws BLEU by language.

    Writes logdir/decode_SPLIT/<lang>.txt (a translation a line), scores.json and bleu.png.
    """
    run.recorded(estimator.config.model_dir)  # Refuses a folder that was never trained in.
    data, limit = manifest.load(data_dir), estimator.params.decode.max_sentences
    if limit is not None and limit < 1:
        raise ValueError(f"decode.max_sentences must be 1 or more, or None, got {limit}.")
    texts = {
        language.code: decoding.eval_text(data_dir, split, language.code)[:limit]
        for language in data.languages
        if split in language.text
    }
    if not texts:
        raise ValueError(f"{data_dir}: no language has a {split} split to decode.")
    # All languages together: full batches, and one program for each length.
    lines = [pair[0] for pairs in texts.values() for pair in pairs]
    translations = iter(list(Translator(*decoders.make(estimator)).translate(lines)))
    if not processes.is_first():
        return

    folder = pathlib.Path(estimator.config.model_dir, f"decode_{split}")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for code, pairs in texts.items():
        hypotheses = [next(translations)[0].text for _ in pairs]
        (folder / f"{code}.txt").write_text("".join(line + "\n" for line in hypotheses))
        references = [reference for _, reference in pairs]
        bleu, chrf = corpus_bleu(hypotheses, references), corpus_chrf(hypotheses, references)
        size = data.language(code).num_examples("train")
        rows.append(quality.LanguageQuality(code, size, len(pairs), bleu, chrf))
    report = quality.Quality(tuple(rows))
    report.save(folder / "scores.json")
    quality.draw(report, folder / "bleu.png")
    print(report.table())
    print(f"Wrote {folder}/scores.json, bleu.png and a file of translations a language.")


def export(estimator: TPUEstimator) -> None:
    """Writes logdir/weights.safetensors of the latest checkpoint; prints names and shapes."""
    path = pathlib.Path(estimator.config.model_dir, "weights.safetensors")
    _print(estimator.export_weights(path))
    _print(f"Wrote {path}.")


def report(estimator: TPUEstimator, launch: run.Launch) -> None:
    """Writes logdir/report.html of what the run has left so far.

    Raises:
      ValueError: it has not trained a step yet, or it is another model's.
    """
    params = estimator.params
    model_dir.check(estimator.config.model_dir, params.ToText(), run.MODEL_PREFIXES)
    task = TranslationModel(params, estimator.partitioning).task
    languages = manifest.load(launch.data_dir).languages
    facts = run_report.RunFacts(
        model=launch.model,
        num_weights=task.num_weights,
        max_steps=params.train.max_steps,
        step_flops=flops.train_step_flops(
            task, params.input.batch_size, params.input.source_len, params.input.target_len
        ),
        train_pairs={language.code: language.num_examples("train") for language in languages},
    )
    _print(f"Wrote {run_report.write(estimator.config.model_dir, facts)}.")


def _dev(estimator: TPUEstimator) -> EvalSpec:
    by = estimator.params.train.keep_best_by
    return EvalSpec(
        _input_fn(estimator, "eval_input"),
        steps=estimator.params.train.eval_batches,
        name="dev",
        best_by=None if by is None else BestBy(by),
    )


def _input_fn(estimator: TPUEstimator, name: str, **settings: object) -> InputFn:
    """This process's part of an experiment's input, with some of its settings changed."""
    share = estimator.input_share
    settings |= {"process_index": share.index, "num_processes": share.count}
    return lambda p: p.Get(name).Copy().Set(**settings).Instantiate()


def _end(estimator: TPUEstimator, stop: StopOnSignal) -> None:
    if processes.is_first():
        expert_load.draw(estimator.config.model_dir)
    if stop.stopped_at is not None:
        saved = ", which is saved" if stop.stopped_at else ": nothing was done yet"
        _print(f"Stopped by a signal after step {stop.stopped_at}{saved}.")
        sys.exit(EXIT_STATUS)


def _announce(estimator: TPUEstimator, launch: run.Launch, facts: run.DataFacts) -> None:
    if not processes.is_first():
        return
    logdir = estimator.config.model_dir
    # Before anything in a folder of another model, or of another process, is written over.
    with model_dir.claimed(logdir, estimator.params.ToText(), run.MODEL_PREFIXES):
        run.record(launch, facts, logdir)
    done, wanted = max(estimator.checkpoint_steps(), default=0), estimator.params.train.max_steps
    print(
        f"{launch.model}: {run.num_weights(estimator.params) / 1e6:.2f} M weights over "
        f"{estimator.partitioning.num_partitions} partitions, "
        + (f"step {done} to {wanted}" if done < wanted else f"step {wanted} is done already")
        + f" in {logdir}",
        flush=True,
    )


def _print_metrics(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics))
    for name, value in sorted(metrics.items()):
        _print(f"{name:<{width}}  {value:.6g}")


def _print(line: str) -> None:
    if processes.is_first():
        print(line, flush=True)
