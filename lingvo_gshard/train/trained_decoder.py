"""A decoder made from a run's latest checkpoint, for this process or as a bundle for others."""

import pathlib

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode import bundle
from lingvo_gshard.decode.decoder import Decoder, DecoderSpec
from lingvo_gshard.input import sentences
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train import steps
from lingvo_gshard.train.run import Run, vocabulary_files


def make(run: Run) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Returns a decoder of the latest checkpoint, and the source and target tokenizers.

    Raises:
      ValueError: the run has no checkpoint.
    """
    theta = run.estimator.restore().theta
    source, target = (Tokenizer(path) for path in vocabulary_files(run.logdir))
    return Decoder(_spec(run), theta, _Exporter(run)), source, target


def export(run: Run, folder: str | pathlib.Path) -> None:
    """Writes a bundle of the latest checkpoint; ValueError as `make`."""
    theta = run.estimator.restore().theta
    bundle.save(folder, _spec(run), _Exporter(run), theta, vocabulary_files(run.logdir))


def _spec(run: Run) -> DecoderSpec:
    p = run.params.decode
    return DecoderSpec(
        model=run.launch.model,
        languages=run.launch.facts.languages,
        batch_size=p.batch_size,
        source_lengths=sentences.lengths(p.max_source_len),
        num_best=p.num_best,
        num_partitions=run.estimator.partitioning.num_partitions,
    )


class _Exporter:
    """Exports the `predict` program for a source length; its state is the weights alone."""

    def __init__(self, run: Run) -> None:
        self._params = run.params
        self._model = TranslationModel(run.params, run.estimator.partitioning)

    def __call__(self, source_len: int) -> Program:
        rows = TensorSpec((self._params.decode.batch_size, source_len), "int32", "BL")
        names = ("source_ids", "source_segment_ids", "source_positions")
        batch = NestedMap(features=NestedMap({name: rows for name in names}))
        state = NestedMap(theta=self._model.state_spec.theta)
        annotated = steps.predictor(self._model.model_fn, self._params, state, batch)
        return lowering.export(annotated, self._model.partitioning)
