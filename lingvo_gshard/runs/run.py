"""A run: a registered experiment bound to its data, a folder and a number of devices."""

import dataclasses
import functools
import pathlib
from typing import Any

from lingvo_gshard.checkpoints import checkpoints
from lingvo_gshard.checkpoints.warm_start import Rule, WarmStart, old_ids
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import storage
from lingvo_gshard.input import packing, sentences
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.runs.launch import Launch, experiment_params, vocabularies, with_product_dtype
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train import steps
from lingvo_gshard.train.estimator import TPUEstimator
from lingvo_gshard.translation import bundle
from lingvo_gshard.translation.bundle import Decoder, DecoderSpec


@dataclasses.dataclass(frozen=True)
class Run:
    """A launch and the estimator that carries it out."""

    launch: Launch
    estimator: TPUEstimator

    @property
    def params(self) -> Params:
        return self.estimator.params

    @property
    def logdir(self) -> str:
        return self.estimator.model_dir

    @property
    def product_dtype(self) -> str:
        """The dtype of the numbers that products are made of."""
        dtypes = self.params.task.product_dtype, self.params.task.activation_dtype
        return "bfloat16" if "bfloat16" in dtypes else "float32"

    @property
    def averaged(self) -> dict[str, Any]:
        """The checkpoint that is evaluated, decoded and exported, and over how many it averages."""
        p = self.params.decode
        return {"checkpoint_step": p.checkpoint_step, "average": p.average_checkpoints}

    def decoder(self) -> tuple[Decoder, Tokenizer, Tokenizer]:
        """Returns a decoder of the weights, and its tokenizers; raises as TPUEstimator.restore."""
        partitioning, p = self.estimator.partitioning, self.params
        found = self.estimator.restore(**self.averaged)
        source, target = map(Tokenizer, vocabularies(self.logdir))
        spec = DecoderSpec(
            model=self.launch.model,
            languages=self.launch.trained_on,
            batch_size=p.decode.batch_size,
            source_lengths=sentences.lengths(p.decode.max_source_len),
            num_best=p.decode.num_best,
            num_partitions=partitioning.mesh.num_partitions,
            targets=source.targets,
        )
        program_for = functools.partial(predict_program, p, partitioning)
        origin = {"weights": found.digest, "params": p.ToText()}
        share = self.estimator.input_share
        return Decoder(spec, found.state.theta, program_for, share, origin), source, target

    def export_bundle(self, folder: str | pathlib.Path) -> None:
        """Writes a bundle of the decoder. Raises as `decoder`."""
        with storage.working(folder) as here:
            bundle.save(here, self.decoder()[0], vocabularies(self.logdir))


def predict_program(params: Params, partitioning: Partitioning, source_len: int) -> Program:
    """Exports the program that decodes sources of one length; its state is theta alone."""
    model = TranslationModel(params, partitioning)
    rows = TensorSpec((params.decode.batch_size, source_len), "int32", "BL")
    batch = NestedMap(features=NestedMap({name: rows for name in packing.SOURCE}))
    state = NestedMap(theta=model.state_spec.theta)
    programs = steps.Programs(model.model_fn, params, partitioning, state)
    return programs.export(Mode.PREDICT, batch)


def open_run(
    launch: Launch, logdir: str, num_partitions: int, executables: str | None = None
) -> Run:
    """Returns the run of a launch. Raises as experiment_params and make_estimator."""
    launch = with_product_dtype(launch, logdir)
    estimator = make_estimator(experiment_params(launch), logdir, num_partitions, executables)
    return Run(launch, estimator)


def make_estimator(
    params: Params, logdir: str, num_partitions: int, executables: str | None = None
) -> TPUEstimator:
    """Returns the estimator of a run; ValueError for a size that does not fit the devices."""
    partitioning = placement.partitioning(params, num_partitions)
    placement.check_divisible(params, partitioning)
    model = TranslationModel(params, partitioning)
    weights, slots = model.state_spec.theta, model.state_spec.slots
    for path, spec in [*weights.FlattenItems(), *slots.FlattenItems()]:
        partitioning.check(path, spec)
    return TPUEstimator(
        model.model_fn,
        logdir,
        params=params,
        partitioning=partitioning,
        state_spec=model.state_spec,
        init_fn=model.init_state,
        # In these settings, the model must agree with the folder's checkpoints.
        model_prefixes=("task", "optimizer.cls"),
        # A run that has checkpoints continues from those.
        warm_start=None if checkpoints.whole_steps(logdir) else _warm_start(params),
        executables=executables,
    )


def _warm_start(params: Params) -> WarmStart | None:
    if params.train.warm_start_from is None:
        return None
    start = WarmStart(params.train.warm_start_from, params.train.warm_start_rules)
    if not pathlib.Path(start.source, "vocab").is_dir():
        if Rule.BY_PIECE not in dict(start.rules).values():
            return start
        raise ValueError(
            f"train.warm_start_from={start.source}: BY_PIECE needs a run's folder, which records "
            "the vocabularies of its weights."
        )
    patterns = (r"theta\.source_embedding\..*", r"theta\.(target_embedding\..*|softmax)")
    old = map(Tokenizer, vocabularies(start.source))
    new = load_pair(params.input.data_dir)
    ids = (
        old_ids(before.pieces(range(before.vocab_size)), after.pieces(range(after.vocab_size)))
        for before, after in zip(old, new, strict=True)
    )
    return dataclasses.replace(start, old_pieces=tuple(zip(patterns, ids, strict=True)))
