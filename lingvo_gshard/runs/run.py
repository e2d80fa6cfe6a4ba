"""A run: a registered experiment bound to its data, a folder and a number of devices."""

import dataclasses
import json
import pathlib
from typing import Any

from lingvo_gshard.checkpoints import checkpoints
from lingvo_gshard.checkpoints.warm_start import Rule, WarmStart, old_ids
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import json_records, storage
from lingvo_gshard.input import sentences
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair, vocabulary_files
from lingvo_gshard.model import placement
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.runs.experiment_programs import ExperimentPrograms
from lingvo_gshard.runs.launch import Launch, experiment_params, vocabularies, with_product_dtype
from lingvo_gshard.train.estimator import Estimator
from lingvo_gshard.translation import bundle
from lingvo_gshard.translation.bundle import Decoder, DecoderSpec

_LAUNCH = "launch"  # Of a decoder's origin: what a newer bundle is made from.


@dataclasses.dataclass(frozen=True)
class Run:
    """A launch and the estimator that carries it out."""

    launch: Launch
    estimator: Estimator

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
        """Returns a decoder of the weights, and its tokenizers; raises as Estimator.restore."""
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
        program_for = ExperimentPrograms(p, partitioning).decoder
        origin = {
            "weights": found.digest,
            "params": p.ToText(),
            _LAUNCH: json.dumps(dataclasses.asdict(self.launch)),
        }
        share = self.estimator.input_share
        return Decoder(spec, found.state.theta, program_for, share, origin), source, target

    def export_bundle(self, folder: str | pathlib.Path) -> None:
        """Writes a bundle of the decoder. Raises as `decoder`."""
        with storage.working(folder) as here:
            bundle.save(here, self.decoder()[0], vocabularies(self.logdir))


def export_again(older: str | pathlib.Path, newer: str | pathlib.Path) -> None:
    """Writes a bundle with the weights, settings and vocabularies of an older one.

    Its programs are made anew, by the TensorFlow and JAX that are installed. Raises ValueError if
    the older one is damaged, or does not record its experiment.
    """
    with storage.working(older) as source, storage.working(newer) as target:
        decoder, _, _ = bundle.load(source)
        if _LAUNCH not in decoder.origin:
            raise ValueError(
                f"{older} does not record its experiment; export it again with --logdir."
            )
        launch = json_records.read(Launch, json.loads(decoder.origin[_LAUNCH]))
        params = experiment_params(launch)
        partitioning = placement.partitioning(params, decoder.spec.num_partitions)
        program_for = ExperimentPrograms(params, partitioning).decoder

        again = dataclasses.replace(decoder, program_for=program_for)
        bundle.save(target, again, vocabulary_files(source))


def open_run(
    launch: Launch, logdir: str, num_partitions: int, executables: str | None = None
) -> Run:
    """Returns the run of a launch. Raises as experiment_params and make_estimator."""
    launch = with_product_dtype(launch, logdir)
    estimator = make_estimator(experiment_params(launch), logdir, num_partitions, executables)
    return Run(launch, estimator)


def make_estimator(
    params: Params, logdir: str, num_partitions: int, executables: str | None = None
) -> Estimator:
    """Returns the estimator of a run; ValueError for a size that does not fit the devices."""
    partitioning = placement.partitioning(params, num_partitions)
    placement.check_divisible(params, partitioning)
    model = TranslationModel(params, partitioning)
    weights, slots = model.state_spec.theta, model.state_spec.slots
    for path, spec in [*weights.FlattenItems(), *slots.FlattenItems()]:
        partitioning.check(path, spec)
    return Estimator(
        ExperimentPrograms(params, partitioning),
        logdir,
        params=params,
        partitioning=partitioning,
        state_spec=model.state_spec,
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
