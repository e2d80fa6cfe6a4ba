"""A run: a registered experiment bound to its data, a folder and a number of devices."""

import dataclasses
import json
import logging
import math
import pathlib
from typing import Any

import jax

from lingvo_gshard.checkpoints import saved_steps
from lingvo_gshard.checkpoints.warm_start import Rule, WarmStart, rows_by_piece
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import bundle, kinds
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.reading import READINGS
from lingvo_gshard.decoding.text_decoder import TextDecoder
from lingvo_gshard.input import sentences
from lingvo_gshard.input.base_input import DATA_DIR
from lingvo_gshard.input.bpe_tokenizer import load_pair, loaded
from lingvo_gshard.input.tokenizer import Tokenizer, vocabulary_files
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.stored_weights import Numbers
from lingvo_gshard.model import placement, remats
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import loss_products, saved_model
from lingvo_gshard.runs.launch import (
    MODEL_PREFIXES,
    Launch,
    check_decoded,
    experiment_params,
    model_languages,
    vocabularies,
    with_product_dtype,
    with_recorded_remats,
    with_remat,
)
from lingvo_gshard.spmd import devices, processes
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.estimator import Estimator
from lingvo_gshard.train.programs import Programs
from xla_spmd.files import digests, json_records, storage
from xla_spmd.runtime import versions

# In a decoder's origin: the launch, from which a bundle can be made again.
_LAUNCH = "launch"
# The beginning of the compiler's refusal of a program that is too large for a device.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Run:
    """A launch and its estimator."""

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
        """Returns the step of the newest complete checkpoint, or 0."""
        return max(saved_steps.whole_steps(self.logdir), default=0)

    @property
    def computing(self) -> str:
        """Returns the dtype of products, and what gradients recompute in a task with stacks.

        For example `float32 products, remat BLOCK`.
        """
        task = self.params.task
        products = f"{task.cls.ProductDtype(task)} products"
        remat = placement.remat(self.params)
        return products if remat is None else f"{products}, remat {remat}"

    @property
    def averaged(self) -> dict[str, Any]:
        """Returns the checkpoint to evaluate, decode and export, and how many to average."""
        p = self.params.decode
        return {"checkpoint_step": p.checkpoint_step, "average": p.average_checkpoints}

    def text_decoder(self) -> TextDecoder:
        """Returns the decoder of lines of text; raises the errors of `decoder`."""
        return kinds.text_decoder(*self.decoder())

    def decoder(self) -> tuple[Decoder, Tokenizer, Tokenizer]:
        """Returns a decoder with the run's weights, and its tokenizers.

        Raises ValueError if the task does not predict text, or if the checkpoint is missing,
        damaged, or another model's.
        """
        p = self.params
        check_decoded(self.launch.model, p)

        # The weights are read first, since the checkpoint may be missing.
        partitioning = self.estimator.partitioning
        restored = self.estimator.restore(**self.averaged, weights_alone=True)
        source, target = map(loaded, vocabularies(self.logdir))

        spoken = model_languages(self.launch, p, source, target)
        longest = p.task.cls.DecodeLength(p.decode)
        input_name = READINGS[spoken.kind].input_name
        spec = DecoderSpec(
            model=self.launch.model,
            languages=spoken.trained_on,
            batch_size=p.decode.batch_size,
            input_lengths=sentences.lengths(longest, f"decode.max_{input_name}_len"),
            num_best=p.decode.num_best,
            num_partitions=partitioning.mesh.num_partitions,
            targets=spoken.targets,
            kind=spoken.kind,
            is_sampled=p.decode.temperature is not None,
            sources=spoken.sources,
            weights=p.decode.weights.value,
        )
        model = TaskModel(p, partitioning)
        programs = Programs(model)
        decoder = Decoder(
            spec,
            converted_weights(model, restored.state.theta),
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
        """Writes a bundle of the decoder; raises the errors of `decoder`."""
        with storage.working(folder) as local_folder:
            decoder, _, _ = self.decoder()
            bundle.save(local_folder, decoder, vocabularies(self.logdir))

    def export_saved_model(self, folder: str | pathlib.Path) -> None:
        """Writes a TensorFlow SavedModel of the decoder, which runs on one device.

        Raises the errors of `decoder`, and ValueError for a folder with other files.
        """
        with storage.working(folder) as local_folder:
            decoder, _, _ = self.decoder()
            saved_model.save(local_folder, decoder, self.params, vocabularies(self.logdir))


@dataclasses.dataclass(frozen=True)
class _Need:
    """The memory that training needs on each device: infinite if the compiler refuses it."""

    num_bytes: float
    text: str


def converted_weights(model: TaskModel, theta: NestedMap) -> NestedMap:
    """Returns float32 weights, converted to the numbers of decode.weights."""
    if model.params.decode.weights is Numbers.FLOAT32:
        return theta
    convert = compile_program(Programs(model).weight_converter())
    converted: NestedMap = convert(NestedMap(theta=theta)).state.theta
    return converted


def export_again(older: str | pathlib.Path, newer: str | pathlib.Path) -> None:
    """Writes a bundle with the weights, settings and vocabularies of an older one.

    Its programs are made again, by the installed TensorFlow and JAX. Raises ValueError if the
    older bundle is damaged, or does not record its experiment.
    """
    with storage.working(older) as source, storage.working(newer) as target:
        decoder, _, _ = bundle.load(source)

        # On any machine, the partitioning and the beam are the older bundle's.
        params = _recorded_params(older, decoder)
        partitioning = placement.partitioning(params, decoder.spec.num_partitions)
        program_for = Programs(TaskModel(params, partitioning)).decoder

        again = dataclasses.replace(decoder, program_for=program_for)
        bundle.save(target, again, vocabulary_files(source, decoder.spec.kind))


def export_saved_model_of(bundle_folder: str | pathlib.Path, folder: str | pathlib.Path) -> None:
    """Writes a TensorFlow SavedModel of a bundle's decoder.

    Raises ValueError if the bundle is damaged or does not record its experiment, and for a folder
    with other files.
    """
    with storage.working(bundle_folder) as source, storage.working(folder) as target:
        decoder, _, _ = bundle.load(source)
        params = _recorded_params(bundle_folder, decoder)
        files = vocabulary_files(source, decoder.spec.kind)
        saved_model.save(target, decoder, params, files)


def _recorded_params(folder: str | pathlib.Path, decoder: Decoder) -> Params:
    """Returns the settings of a bundle's experiment; ValueError if they are not recorded."""
    if _LAUNCH not in decoder.origin:
        raise ValueError(f"{folder} does not record its experiment; export it again with --logdir.")
    launch = json_records.read(Launch, json.loads(decoder.origin[_LAUNCH]))
    return experiment_params(launch)


def check_processes(launch: Launch) -> None:
    """Checks that all processes have the same versions, code, settings and data.

    All must call it before they compute together. Raises ValueError, which names the difference, in
    a process that differs from process 0.
    """
    installed = versions.installed((*versions.COMPILING, "tensorflow"))
    lines = experiment_params(launch).ToText().splitlines()
    processes.check_alike(
        {
            "versions": "\n".join(f"{name} {version}" for name, version in installed.items()),
            "code": digests.of_library(),
            # The machines may have their copies of the data in different folders.
            "settings": "\n".join(line for line in lines if f".{DATA_DIR} : " not in line),
            "data": launch.facts.fingerprint,
        }
    )


def open_run(
    launch: Launch,
    logdir: str,
    num_partitions: int,
    executables: str | None = None,
    trains: bool = False,
) -> Run:
    """Returns the run of a launch.

    If it `trains`, remat=AUTO is replaced by what fits the devices; otherwise by BLOCK, as only
    gradients recompute. Raises ValueError if a setting or the data does not fit the model, or a
    size the devices.
    """
    launch, _ = with_product_dtype(launch, logdir)
    launch, params = with_recorded_remats(launch, logdir)
    if remats.automatic(params):
        if trains:
            return _with_least_remat(launch, params, logdir, num_partitions, executables)
        launch = with_remat(launch, Remat.BLOCK)
        params = experiment_params(launch)
    return Run(launch, make_estimator(params, logdir, num_partitions, executables))


def _with_least_remat(
    launch: Launch, params: Params, logdir: str, num_partitions: int, executables: str | None
) -> Run:
    """Returns a run with the least recomputation whose training step fits, in place of AUTO.

    Process 0 decides what fits for all. Raises ValueError if nothing fits.
    """
    partitioning = placement.partitioning(params, num_partitions)
    placement.check_sizes(params, partitioning)
    capacity_bytes = devices.memory_bytes()
    batch: NestedMap = params.input.cls.batch_specs(params.input)
    needs: dict[Remat, _Need] = {}
    fitting: dict[Remat, Estimator] = {}  # The program of the one that fits is trained with.

    def fits(remat: Remat) -> bool:
        made = make_estimator(remats.replaced(params, remat), logdir, num_partitions, executables)
        need = needs[remat] = _training_need(made, batch)
        logging.info("remat=%s: a training step needs %s", remat.name, need.text)
        if processes.of_first(need.num_bytes <= capacity_bytes):
            fitting[remat] = made
        return remat in fitting

    chosen = remats.least(params, loss_products.of_experiment, partitioning, capacity_bytes, fits)
    if chosen is None:
        least_need = needs[Remat.BLOCK].text
        raise ValueError(
            f"remat=AUTO: nothing fits. With BLOCK, a training step needs {least_need}, and a "
            f"device has {capacity_bytes / _GIB:.3f} GiB: use more devices, fewer rows "
            "(input.batch_size), or parts (train.gradient_accumulation_steps)."
        )
    return Run(with_remat(launch, chosen), fitting[chosen])


def _training_need(estimator: Estimator, batch: NestedMap) -> _Need:
    """Returns what training needs, if the compiler does not refuse it for its memory."""
    try:
        num_bytes = estimator.training_bytes(batch)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if not reason.startswith(_OUT_OF_MEMORY):
            raise
        return _Need(math.inf, f"more than the compiler accepts ({reason})")
    return _Need(num_bytes, f"{num_bytes / _GIB:.3f} GiB")


def make_estimator(
    params: Params, logdir: str, num_partitions: int, executables: str | None = None
) -> Estimator:
    """Returns the estimator of a run; raises ValueError if a size does not fit the devices."""
    partitioning = placement.partitioning(params, num_partitions)
    placement.check_sizes(params, partitioning)

    # A run with checkpoints continues from its own.
    has_checkpoints = bool(saved_steps.whole_steps(logdir))
    return Estimator(
        TaskModel(params, partitioning),
        logdir,
        params=params,
        model_prefixes=MODEL_PREFIXES,
        warm_start=None if has_checkpoints else _warm_start(params),
        executables=executables,
    )


def _warm_start(params: Params) -> WarmStart | None:
    """Returns the weights to start from, or None; raises ValueError for a wrong rule."""
    if params.train.warm_start_from is None:
        return None
    start = WarmStart(params.train.warm_start_from, params.train.warm_start_rules)

    # Some tasks lack vocabularies, and so do exported weights and a folder with only checkpoints.
    patterns = list(params.task.cls.VOCABULARIES.values())
    if not patterns or not pathlib.Path(start.source, "vocab").is_dir():
        if Rule.BY_PIECE in dict(start.rules).values():
            raise ValueError(
                f"train.warm_start_from={start.source}: BY_PIECE needs a run's folder, which "
                "records the vocabularies of its weights."
            )
        return start

    # Maps each new piece to an old one, or to the old pieces whose mean it starts from. A task with
    # one vocabulary uses the targets'.
    old_tokenizers = list(map(loaded, vocabularies(start.source)))[-len(patterns) :]
    new_tokenizers = load_pair(params.input.data_dir)[-len(patterns) :]
    pieces = []
    for pattern, old, new in zip(patterns, old_tokenizers, new_tokenizers, strict=True):
        rows = rows_by_piece(
            old.pieces(range(old.vocab_size)),
            new.pieces(range(new.vocab_size)),
            params.train.warm_start_pieces,
        )
        pieces.append((pattern, rows))
    return dataclasses.replace(start, pieces=tuple(pieces))
