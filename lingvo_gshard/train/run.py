"""A run: a registered experiment bound to its data, a folder and a number of devices.

logdir/experiment.json   the model's name, the settings changed, and what it was trained on
logdir/vocab/*.model     the vocabularies it was trained with
"""

import dataclasses
import functools
import pathlib
from typing import Any

from lingvo_gshard import registry
from lingvo_gshard.core import atomic_file, digests, json_records, storage
from lingvo_gshard.core.digests import File
from lingvo_gshard.core.hyperparams import Params, parse_setting
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode import bundle
from lingvo_gshard.decode.bundle import Decoder, DecoderSpec
from lingvo_gshard.input import manifest, sentences
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import ModeKeys
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import environment
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train import checkpoints, steps
from lingvo_gshard.train.estimator import TPUEstimator
from lingvo_gshard.train.warm_start import Rule, WarmStart, old_ids

_EXPERIMENT = "experiment.json"
_VERSION, _WITHOUT_VERSION = 1, None
_PRODUCTS = "task.product_dtype"
# The settings in which a folder's checkpoints and the model that reads them must agree.
_MODEL_PREFIXES = ("task", "optimizer.cls")


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What a model must know about its data: vocabulary sizes in pieces, and language codes."""

    source_vocab_size: int
    target_vocab_size: int
    languages: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the user asked for: a registered model, `path=value` settings of it, and data for it."""

    model: str
    overrides: tuple[str, ...]
    data_dir: str
    facts: DataFacts


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
        """The checkpoint whose weights are decoded and exported, and over how many they average."""
        p = self.params.decode
        return {"checkpoint_step": p.checkpoint_step, "average": p.average_checkpoints}

    def decoder(self) -> tuple[Decoder, Tokenizer, Tokenizer]:
        """Returns a decoder of the weights, and its tokenizers; raises as TPUEstimator.restore."""
        partitioning, p = self.estimator.partitioning, self.params
        found = self.estimator.restore(**self.averaged)
        source, target = map(Tokenizer, vocabularies(self.logdir))
        spec = DecoderSpec(
            model=self.launch.model,
            languages=self.launch.facts.languages,
            batch_size=p.decode.batch_size,
            source_lengths=sentences.lengths(p.decode.max_source_len),
            num_best=p.decode.num_best,
            num_partitions=partitioning.num_partitions,
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
    names = ("source_ids", "source_segment_ids", "source_positions")
    batch = NestedMap(features=NestedMap({name: rows for name in names}))
    state = NestedMap(theta=model.state_spec.theta)
    programs = steps.Programs(model.model_fn, params, partitioning, state)
    return programs.export(ModeKeys.PREDICT, batch)


def open_run(
    launch: Launch,
    logdir: str,
    num_partitions: int,
    executables: str | None = None,
    **decode: object,
) -> Run:
    """Returns a run with other `decode` settings. Raises as experiment_params, make_estimator."""
    params = experiment_params(launch)
    params.decode.Set(**decode)
    return Run(launch, make_estimator(params, logdir, num_partitions, executables))


def data_facts(data_dir: str) -> DataFacts:
    """Reads the facts of a prepared folder. Raises as manifest.load."""
    data = manifest.load(data_dir)
    codes = tuple(language.code for language in data.languages if language.records)
    return DataFacts(data.source_vocabulary.size, data.target_vocabulary.size, codes)


def launch_of(
    model: str | None, overrides: tuple[str, ...], data_dir: str | None, logdir: str
) -> Launch:
    """Returns what the user asked for, completed by what is recorded with the run in `logdir`.

    The recorded settings hold unless the model is named again. Raises ValueError if model or
    data_dir is missing and logdir holds no run; and as `data_facts` and `get_params`.
    """
    given = None if data_dir is None else (data_dir, data_facts(data_dir))
    if model is not None and given is not None:
        return _with_product_dtype(Launch(model, overrides, *given), logdir)
    if not pathlib.Path(logdir, _EXPERIMENT).is_file():
        raise ValueError(f"{logdir} holds no run yet (no {_EXPERIMENT}): give --model, --data_dir.")
    launch = recorded(logdir)
    if model is None:
        # Only the last setting of each path.
        last = {parse_setting(each)[0]: each for each in (*launch.overrides, *overrides)}
        model, overrides = launch.model, tuple(last.values())
    data = given or (launch.data_dir, launch.facts)
    return _with_product_dtype(Launch(model, overrides, *data), logdir)


def _with_product_dtype(launch: Launch, logdir: str) -> Launch:
    """The launch with a dtype in place of `auto`: the one of the folder's run, or the machine's.

    So a run keeps its program on every machine. One without a dtype is older, and was float32.
    """
    if registry.get_params(launch.model, launch.overrides).task.product_dtype != "auto":
        return launch
    dtype: object = "bfloat16" if environment.has_bfloat16_units() else "float32"
    if pathlib.Path(logdir, _EXPERIMENT).is_file():
        dtype = dict(map(parse_setting, recorded(logdir).overrides)).get(_PRODUCTS, "float32")
    return dataclasses.replace(launch, overrides=(*launch.overrides, f"{_PRODUCTS}={dtype}"))


def experiment_params(launch: Launch) -> Params:
    """Returns a launch's Params with vocabulary sizes; ValueError for a wrong setting or size."""
    params = registry.get_params(launch.model, launch.overrides)
    for name in ("input", "eval_input"):
        params.Get(name).data_dir = launch.data_dir
    for name in ("source_vocab_size", "target_vocab_size"):
        wanted, size = params.task.Get(name), getattr(launch.facts, name)
        if wanted not in (None, size):
            raise ValueError(
                f"task.{name} is {wanted}, but the data's vocabulary has {size} pieces: prepare "
                f"the data with --{name}={wanted}."
            )
        params.task.Set(**{name: size})
    return params


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
        model_prefixes=_MODEL_PREFIXES,
        # A run that has checkpoints continues from those.
        warm_start=None if checkpoints.folder(logdir).is_dir() else _warm_start(params),
        executables=executables,
    )


def record(launch: Launch, logdir: str) -> None:
    """Writes what `translate` needs to logdir; ValueError if it has other vocabularies."""
    data, folder = manifest.load(launch.data_dir), pathlib.Path(logdir)
    digests.verify(launch.data_dir, data.vocabulary_files)
    contents = {}
    for file, copy in zip(data.vocabulary_files, bundle.vocabulary_files(folder), strict=True):
        source = digests.local(launch.data_dir, file)
        contents[copy] = source.read_bytes()
        if copy.exists() and copy.read_bytes() != contents[copy]:
            raise ValueError(
                f"{copy}: this folder's model was trained with another vocabulary than {source}; "
                "choose another --logdir, or the data that the model was trained on."
            )
    (folder / "vocab").mkdir(parents=True, exist_ok=True)
    for copy, content in contents.items():
        atomic_file.write(copy, content)
    asked = dataclasses.asdict(launch)
    facts = asked.pop("facts")
    files = [digests.describe(folder, f"vocab/{copy.name}") for copy in contents]
    fields = {"launch": asked, "data": facts, "files": list(map(dataclasses.asdict, files))}
    digests.write_json(folder / _EXPERIMENT, _VERSION, fields)


def recorded(logdir: str) -> Launch:
    """Returns what `record` wrote; ValueError if there is none, or it is damaged."""
    return _read(logdir)[0]


def vocabularies(logdir: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of a run's SentencePiece models, as `record` wrote them.

    Raises as `recorded`, and ValueError for one that is damaged.
    """
    digests.verify(logdir, _read(logdir)[1])
    return bundle.vocabulary_files(logdir)


def _read(logdir: str) -> tuple[Launch, tuple[File, ...]]:
    path = pathlib.Path(logdir, _EXPERIMENT)
    if not path.is_file():
        raise ValueError(f"{logdir}: no {_EXPERIMENT}; give the --logdir of a trained model.")
    return digests.read_json(path, _VERSION, _parsed, older=(_WITHOUT_VERSION,))


def _parsed(fields: dict[str, Any]) -> tuple[Launch, tuple[File, ...]]:
    launch = json_records.read(Launch, fields["launch"] | {"facts": fields["data"]})
    return launch, json_records.read(tuple[File, ...], fields.get("files", ()))


def _warm_start(params: Params) -> WarmStart | None:
    if params.train.warm_start_from is None:
        return None
    start = WarmStart(params.train.warm_start_from, params.train.warm_start_rules)
    if Rule.BY_PIECE not in dict(start.rules).values():
        return start
    patterns = (r"theta\.source_embedding\..*", r"theta\.(target_embedding\..*|softmax)")
    old = map(Tokenizer, vocabularies(start.source))
    new = load_pair(params.input.data_dir)
    ids = (
        old_ids(before.pieces(range(before.vocab_size)), after.pieces(range(after.vocab_size)))
        for before, after in zip(old, new, strict=True)
    )
    return dataclasses.replace(start, old_pieces=tuple(zip(patterns, ids, strict=True)))
