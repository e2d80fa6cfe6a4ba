"""A run's latest checkpoint as a decoder, in this process or as a bundle for another."""

from __future__ import annotations

import pathlib

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode import bundle
from lingvo_gshard.decode.decoder import Decoder, DecoderSpec
from lingvo_gshard.input import sentences
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train import run, steps
from lingvo_gshard.train.estimator import TPUEstimator


def of_run(logdir: str, num_partitions: int, **decode: object) -> TPUEstimator:
    """The estimator of a trained run, with settings of its `decode` changed.

    Raises:
      ValueError: no run's folder; or the partitions don't divide what they must.
    """
    launch, facts = run.recorded(logdir)
    params = run.experiment_params(launch, facts)
    params.decode.Set(**decode)
    return run.make_estimator(params, logdir, num_partitions)


def make(estimator: TPUEstimator) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """The decoder of a run's latest checkpoint, and the source and target tokenizers.

    Raises:
      ValueError: no run's folder, or no checkpoint in it.
    """
    logdir = estimator.config.model_dir
    spec, theta = _spec(estimator), estimator.restore().theta
    source, target = (Tokenizer(path) for path in run.vocabulary_files(logdir))
    return Decoder(spec, theta, _Exporter(estimator)), source, target


def export(estimator: TPUEstimator, folder: str | pathlib.Path) -> None:
    """Writes a bundle of a run's latest checkpoint; ValueError as `make`."""
    vocabularies = run.vocabulary_files(estimator.config.model_dir)
    theta = estimator.restore().theta
    bundle.save(folder, _spec(estimator), _Exporter(estimator), theta, vocabularies)


def _spec(estimator: TPUEstimator) -> DecoderSpec:
    launch, facts = run.recorded(estimator.config.model_dir)
    p = estimator.params.decode
    return DecoderSpec(
        model=launch.model,
        languages=facts.languages,
        batch_size=p.batch_size,
        source_lengths=sentences.lengths(p.max_source_len),
        num_best=p.num_best,
        num_partitions=estimator.partitioning.num_partitions,
    )


class _Exporter:
    """Makes the `predict` program of a source length, of the weights alone."""

    def __init__(self, estimator: TPUEstimator) -> None:
        self._params = estimator.params
        self._model = TranslationModel(estimator.params, estimator.partitioning)

    def __call__(self, source_len: int) -> Program:
        rows = TensorSpec((self._params.decode.batch_size, source_len), "int32", "BL")
        names = ("source_ids", "source_segment_ids", "source_positions")
        batch = NestedMap(features=NestedMap({name: rows for name in names}))
        state = NestedMap(theta=self._model.state_spec.theta)
        annotated = steps.predictor(self._model.model_fn, self._params, state, batch)
        return program.export(annotated, self._model.partitioning)
