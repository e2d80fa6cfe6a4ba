"""A run: a registered experiment bound to its data, a folder and a number of devices."""

import dataclasses
import json
import pathlib
from typing import Any

from lingvo_gshard.checkpoints import checkpoints
from lingvo_gshard.checkpoints.warm_start import Rule, WarmStart, rows_by_piece
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import bundle, kinds
from lingvo_gshard.decoding.bundle import Decoder, DecoderSpec
from lingvo_gshard.decoding.reading import READINGS
from lingvo_gshard.decoding.text_decoder import TextDecoder
from lingvo_gshard.files import json_records, storage
from lingvo_gshard.input import sentences
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair, vocabulary_files
from lingvo_gshard.layers.stored_weights import Numbers
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import saved_model
from lingvo_gshard.runs.experiment_programs import ExperimentPrograms
from lingvo_gshard.runs.launch import (
    Launch,
    check_decoded,
    experiment_params,
    trained_on,
    vocabularies,
    with_product_dtype,
)
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.estimator import Estimator

# In a decoder's origin: the launch, from which a bundle can be made again.
_LAUNCH = "launch"


@dataclasses.dataclass(frozen=True)
class Run:
    """A launch and the estimator that carries it out."""

    launch: Launch
    estimator: Estimator

    @property
    def params(self) -> Params:
        """Returns the experiment's settings."""
        return self.estimator.params

    @property
    def logdir(self) -> str:
        """Returns the run's folder."""
        return self.estimator.model_dir

    @property
    def done(self) -> int:
        """Returns the step of the newest whole checkpoint; 0 without one."""
        return max(checkpoints.whole_steps(self.logdir), default=0)

    @property
    def product_dtype(self) -> str:
        """Returns the dtype of the numbers that products are made of."""
        task = self.params.task
        return str(task.cls.ProductDtype(task))

    @property
    def averaged(self) -> dict[str, Any]:
        """Returns which checkpoint is evaluated, decoded and exported, and the mean of how many."""
        p = self.params.decode
        return {"checkpoint_step": p.checkpoint_step, "average": p.average_checkpoints}

    def text_decoder(self) -> TextDecoder:
        """Returns what decodes lines of text with the weights; raises as `decoder`."""
        return kinds.text_decoder(*self.decoder())

    def decoder(self) -> tuple[Decoder, Tokenizer, Tokenizer]:
        """Returns a decoder of the weights, and its tokenizers.

        Raises as launch.check_decoded and Estimator.restore.
        """
        p = self.params
        check_decoded(self.launch.model, p)

        # The weights are read first: without a checkpoint there is nothing to decode with.
        partitioning = self.estimator.partitioning
        restored = self.estimator.restore(**self.averaged, weights_alone=True)
        source, target = map(Tokenizer, vocabularies(self.logdir))

        kind = self.launch.facts.kind
        assert kind is not None, "check_decoded"
        longest = p.task.cls.DecodeLength(p.decode)
        input_name = READINGS[kind].input_name
        spec = DecoderSpec(
            model=self.launch.model,
            languages=trained_on(self.launch, p),
            batch_size=p.decode.batch_size,
            input_lengths=sentences.lengths(longest, f"decode.max_{input_name}_len"),
            num_best=p.decode.num_best,
            num_partitions=partitioning.mesh.num_partitions,
            targets=tuple(target.languages) or source.targets,
            kind=kind,
            is_sampled=p.decode.temperature is not None,
            sources=tuple(source.languages),
            weights=p.decode.weights.value,
        )
        programs = ExperimentPrograms(p, partitioning)
        decoder = Decoder(
            spec,
            kept_weights(programs, restored.state.theta),
            program_for=programs.decoder,
            share=self.estimator.input_share(p.decode.batch_size),
            origin={
                "weights": restored.digest,
                "params": p.ToText(),
                _LAUNCH: json.dumps(dataclasses.asdict(self.launch)),
            },
        )
        return decoder, source, target

    def export_bundle(self, folder: str | pathlib.Path) -> None:
        """Writes a bundle of the decoder. Raises as `decoder`."""
        with storage.working(folder) as local_folder:
            decoder, _, _ = self.decoder()
            bundle.save(local_folder, decoder, vocabularies(self.logdir))

    def export_saved_model(self, folder: str | pathlib.Path) -> None:
        """Writes a TensorFlow SavedModel of the decoder. Raises as `decoder` and saved_model.save.

        It runs on one device, however many this run has.
        """
        saved_model.check_installed()  # Before the weights are read.
        with storage.working(folder) as local_folder:
            decoder, _, _ = self.decoder()
            saved_model.save(local_folder, decoder, self.params, vocabularies(self.logdir))


def kept_weights(programs: ExperimentPrograms, theta: NestedMap) -> NestedMap:
    """Returns float32 weights as decode.weights has a decoder keep them."""
    if programs.params.decode.weights is Numbers.FLOAT32:
        return theta
    made: NestedMap = compile_program(programs.keeper())(NestedMap(theta=theta)).state.theta
    return made


def export_again(older: str | pathlib.Path, newer: str | pathlib.Path) -> None:
    """Writes a bundle with the weights, settings and vocabularies of an older one.

    Its programs are made anew, by the TensorFlow and JAX that are installed. Raises ValueError if
    the older one is damaged, or does not record its experiment.
    """
    with storage.working(older) as source, storage.working(newer) as target:
        decoder, _, _ = bundle.load(source)

        # The partitioning and the beam are those of the older bundle, whatever this machine is.
        params = _recorded_params(older, decoder)
        partitioning = placement.partitioning(params, decoder.spec.num_partitions)
        program_for = ExperimentPrograms(params, partitioning).decoder

        again = dataclasses.replace(decoder, program_for=program_for)
        bundle.save(target, again, vocabulary_files(source, decoder.spec.kind))


def export_saved_model_of(bundle_folder: str | pathlib.Path, folder: str | pathlib.Path) -> None:
    """Writes a TensorFlow SavedModel of a bundle's decoder.

    Raises ValueError as `export_again` and saved_model.save.
    """
    saved_model.check_installed()
    with storage.working(bundle_folder) as source, storage.working(folder) as target:
        decoder, _, _ = bundle.load(source)
        params = _recorded_params(bundle_folder, decoder)
        files = vocabulary_files(source, decoder.spec.kind)
        saved_model.save(target, decoder, params, files)


def _recorded_params(folder: str | pathlib.Path, decoder: Decoder) -> Params:
    """Returns the settings of the experiment that a bundle records; ValueError if it does not."""
    if _LAUNCH not in decoder.origin:
        raise ValueError(f"{folder} does not record its experiment; export it again with --logdir.")
    launch = json_records.read(Launch, json.loads(decoder.origin[_LAUNCH]))
    return experiment_params(launch)


def open_run(
    launch: Launch, logdir: str, num_partitions: int, executables: str | None = None
) -> Run:
    """Returns the run of a launch. Raises as experiment_params and make_estimator."""
    launch, params = with_product_dtype(launch, logdir)
    return Run(launch, make_estimator(params, logdir, num_partitions, executables))


def make_estimator(
    params: Params, logdir: str, num_partitions: int, executables: str | None = None
) -> Estimator:
    """Returns the estimator of a run; ValueError for a size that does not fit the devices."""
    partitioning = placement.partitioning(params, num_partitions)
    placement.check_sizes(params, partitioning)
    model = TaskModel(params, partitioning)

    # A run that has checkpoints continues from those.
    has_checkpoints = bool(checkpoints.whole_steps(logdir))
    return Estimator(
        ExperimentPrograms(params, partitioning),
        logdir,
        params=params,
        partitioning=partitioning,
        state_spec=model.state_spec,
        # In these settings, the model must agree with the folder's checkpoints.
        model_prefixes=("task", "optimizer.cls", "train.frozen"),
        warm_start=None if has_checkpoints else _warm_start(params),
        executables=executables,
    )


def _warm_start(params: Params) -> WarmStart | None:
    """Returns what new weights start from, if anything; ValueError for a wrong rule."""
    if params.train.warm_start_from is None:
        return None
    start = WarmStart(params.train.warm_start_from, params.train.warm_start_rules)

    # Exported weights, or a folder of checkpoints alone, have no vocabularies; nor have some tasks.
    patterns = list(params.task.cls.VOCABULARIES.values())
    if not patterns or not pathlib.Path(start.source, "vocab").is_dir():
        if Rule.BY_PIECE in dict(start.rules).values():
            raise ValueError(
                f"train.warm_start_from={start.source}: BY_PIECE needs a run's folder, which "
                "records the vocabularies of its weights."
            )
        return start

    # For the weights with a row for each piece: the id that each of the new pieces had, or those
    # that it is to be the mean of.
    # A task with one vocabulary has that of what it predicts.
    old_tokenizers = list(map(Tokenizer, vocabularies(start.source)))[-len(patterns) :]
    new_tokenizers = load_pair(params.input.data_dir)[-len(patterns) :]
    old_pieces = []
    means = []
    for pattern, old, new in zip(patterns, old_tokenizers, new_tokenizers, strict=True):
        rows = rows_by_piece(
            old.pieces(range(old.vocab_size)),
            new.pieces(range(new.vocab_size)),
            params.train.warm_start_pieces,
        )
        old_pieces.append((pattern, rows.ids))
        means.append((pattern, rows.means))
    return dataclasses.replace(start, old_pieces=tuple(old_pieces), means=tuple(means))
