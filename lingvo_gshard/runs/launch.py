"""What a user asked to train, and the record of it in the run's folder.

logdir/experiment.json   the model's name, the settings changed, and what it was trained on
logdir/vocab/*.model     the vocabularies it was trained with, if its input has any

Neither TensorFlow nor JAX is imported here, so a mistake is reported within a second.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Self

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params, apply_setting, parse_setting
from lingvo_gshard.files import atomic_file, digests, json_records, storage
from lingvo_gshard.files.digests import File
from lingvo_gshard.input import tokenizer
from lingvo_gshard.input.base_input import DATA_DIR, DataFacts
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.spmd import environment

_EXPERIMENT = "experiment.json"
_VERSION = 1
_PRODUCT_DTYPE = "task.product_dtype"
_WARM_START = "train.warm_start_from"


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the user asked for: a registered model, `path=value` settings of it, and data for it."""

    model: str
    overrides: tuple[str, ...]
    data_dir: str | None  # None if its input reads no folder.
    facts: DataFacts

    def changed(self, overrides: Iterable[str]) -> Self:
        """Returns the launch with more settings; only the last one of each path stays."""
        last = {}
        for setting in (*self.overrides, *overrides):
            path, _ = parse_setting(setting)
            last[path] = setting
        return dataclasses.replace(self, overrides=tuple(last.values()))


@dataclasses.dataclass(frozen=True)
class Pruned:
    """How a run was made of one with more experts: see pruning.py."""

    source: str  # The folder of that run.
    weights: str  # A digest of its weights' fingerprints.
    languages: tuple[str, ...]  # Whose loads decided which experts stay.
    is_merged: bool  # Whether the others are in them, and not dropped.
    experts: dict[str, tuple[int, ...]]  # By layer: those that stay, as that run counts them.


@dataclasses.dataclass(frozen=True)
class _Record:
    """The record in a run's folder: its launch, and the files of its vocabularies."""

    launch: Launch
    files: tuple[File, ...]
    pruned: Pruned | None


def launch_of(
    model: str | None, overrides: tuple[str, ...], data_dir: str | None, logdir: str
) -> Launch:
    """Returns what the user asked for, completed by what is recorded with the run in `logdir`.

    The recorded settings hold unless the model is named again. Paths become absolute, so that what
    is recorded holds in every folder that a later command is given in. Raises ValueError if model
    or data_dir is missing and logdir holds no run; if the model's input reads no data_dir; and as
    BaseInput.Facts and `experiment_params`.
    """
    overrides = tuple(map(_with_absolute_path, overrides))
    if data_dir is not None:
        data_dir = storage.absolute(data_dir)

    # What is not given is as it was in this folder.
    if model is None:
        before = _before(logdir)
        model = before.model
        overrides = before.changed(overrides).overrides

    batches = registry.get_params(model).input
    if DATA_DIR not in batches:
        if data_dir is not None:
            raise ValueError(f"--data_dir={data_dir}: {model} reads no data; leave the flag out.")
        facts = DataFacts(kind=None)
    elif data_dir is not None:
        facts = batches.cls.Facts(data_dir)
    else:
        before = _before(logdir)
        data_dir = before.data_dir
        facts = before.facts
        if data_dir is None:
            raise ValueError(f"{logdir} holds a run without data: give --data_dir for {model}.")
        if storage.absolute(data_dir) != data_dir:
            raise ValueError(
                f"{logdir} records its data as {data_dir}, relative to a folder that it does not "
                "name: give --data_dir."
            )

    # A wrong setting is reported now, before JAX starts.
    launch = Launch(model, overrides, data_dir, facts)
    experiment_params(launch)
    return launch


def _with_absolute_path(setting: str) -> str:
    """Returns a `path=value` setting, with an absolute path if its value is a file or folder."""
    path, value = parse_setting(setting)
    if path != _WARM_START or not isinstance(value, str):
        return setting
    return f"{path}={storage.absolute(value)}"


def _before(logdir: str) -> Launch:
    """Returns the launch of the run in a folder; ValueError if there is none."""
    if not pathlib.Path(logdir, _EXPERIMENT).is_file():
        raise ValueError(
            f"{logdir} holds no run yet (no {_EXPERIMENT}): give both --model and --data_dir."
        )
    return recorded(logdir)


def with_product_dtype(launch: Launch, logdir: str) -> tuple[Launch, Params]:
    """Returns the launch and its Params, with a dtype in place of `task.product_dtype=auto`.

    A run that the folder holds keeps its dtype, and so its program, on every machine. A new one
    gets what suits this machine. Raises ValueError as `experiment_params`.
    """
    params = experiment_params(launch)
    if "product_dtype" not in params.task or params.task.product_dtype != "auto":
        return launch, params

    # Rounding factors to bfloat16 pays only where the CPU has instructions for such products.
    dtype: Any = "bfloat16" if environment.has_fast_bfloat16() else "float32"
    if pathlib.Path(logdir, _EXPERIMENT).is_file():
        # One that recorded none had an experiment's own dtype, and not `auto`.
        settings = dict(map(parse_setting, recorded(logdir).overrides))
        dtype = settings.get(_PRODUCT_DTYPE, "float32")

    params.task.product_dtype = dtype
    return launch.changed([f"{_PRODUCT_DTYPE}={dtype}"]), params


def experiment_params(launch: Launch) -> Params:
    """Returns a launch's Params with vocabulary sizes.

    Raises ValueError for a wrong setting, for data of another task, or of another vocabulary.
    """
    params = registry.get_params(launch.model, launch.overrides)
    kind = params.input.cls.KIND
    if kind != launch.facts.kind:
        raise ValueError(
            f"{launch.model} learns from data of kind {kind}, but {launch.data_dir} holds kind "
            f"{launch.facts.kind}: give other data or another --model."
        )

    # What an experiment cannot know by itself: where its data is, and how many pieces it has.
    for batches in (params.input, params.eval_input):
        _bind(batches, launch)

    # A task with one vocabulary has that of what it predicts.
    names = list(params.task.cls.VOCABULARIES)
    sizes = [launch.facts.source_vocab_size, launch.facts.target_vocab_size]
    for name, size in zip(reversed(names), reversed(sizes), strict=False):
        # The paper's models say what their vocabularies are; others take any.
        wanted = params.task.Get(name)
        if wanted not in (None, size):
            raise ValueError(
                f"task.{name} is {wanted}, but the data's vocabulary has {size} pieces: prepare "
                f"the data with --{name}={wanted}."
            )
        params.task.Set(**{name: size})

    # A translation into one of many languages begins with the token of its own.
    if launch.facts.language_tokens and "decode" in params:
        params.decode.forces_first = True
    return params


def _bind(batches: Params, launch: Launch) -> Params:
    """Returns the settings of an input, with the folder of the data if it reads one."""
    if DATA_DIR in batches:
        batches.Set(**{DATA_DIR: launch.data_dir})
    return batches


def check_decoded(model: str, params: Params) -> None:
    """Raises ValueError for an experiment whose task predicts no text."""
    if Mode.PREDICT not in params.task.cls.MODES or params.input.cls.KIND is None:
        raise ValueError(f"{model}: {params.task.cls.__name__} is trained and evaluated alone.")


def evaluated_input(launch: Launch, params: Params, split: str) -> Params:
    """Returns the settings of the input that has a split, dev or test, given a launch's Params.

    For dev these are `params.eval_input`, and for test the experiment's Test(), to which the user's
    settings of eval_input apply as well. Raises ValueError for another split, or an experiment
    without Test().
    """
    if split == "dev":
        return params.eval_input
    if split != "test":
        raise ValueError(f"--split={split}: --mode=eval evaluates dev or test.")

    experiment = registry.get_class(launch.model)
    if not hasattr(experiment, "Test"):
        raise ValueError(f"--split=test: {launch.model} has no Test().")
    inputs = Params()
    inputs.Define("eval_input", experiment().Test(), "The batches of test.")
    for setting in launch.overrides:
        if setting.startswith("eval_input."):
            apply_setting(inputs, setting)
    return _bind(inputs.eval_input, launch)


def trained_on(launch: Launch, params: Params) -> tuple[str, ...]:
    """Returns the languages of the training text, given the launch's Params."""
    return params.input.languages or launch.facts.languages


def check_data(launch: Launch, logdir: str) -> dict[pathlib.Path, bytes]:
    """Returns the data's vocabularies by their paths in a run.

    Raises ValueError if the run in `logdir` has other vocabularies, or was trained on other data:
    its position in the data would mean another one, and its results would be written over.
    """
    data_dir = launch.data_dir
    if data_dir is None:
        return {}
    files = registry.get_params(launch.model).input.cls.VocabularyFiles(data_dir)
    digests.verify(data_dir, files)

    # A model's rows of embeddings belong to the pieces of one vocabulary, if its data has any.
    contents = {}
    copies = tokenizer.vocabulary_files(logdir, launch.facts.kind)
    for file, copy in zip(files, copies, strict=False):
        source = digests.local(data_dir, file)
        contents[copy] = source.read_bytes()
        if copy.exists() and copy.read_bytes() != contents[copy]:
            raise ValueError(
                f"{copy}: this folder's model has another vocabulary than {source}; choose another "
                "--logdir, or the data it was trained on."
            )

    # Two folders may share their vocabularies, and a folder may be made again.
    if pathlib.Path(logdir, _EXPERIMENT).is_file():
        before = recorded(logdir)
        fingerprint = registry.get_params(launch.model).input.cls.Facts(data_dir).fingerprint
        if before.facts.fingerprint not in ("", fingerprint):
            raise ValueError(
                f"{data_dir} holds other data than {logdir} was trained on (from "
                f"{before.data_dir}); give that data by --data_dir, or choose another --logdir."
            )
    return contents


def record(
    launch: Launch,
    logdir: str,
    vocabularies: Sequence[bytes] = (),
    pruned: Pruned | None = None,
) -> None:
    """Writes what decoding needs to logdir; raises as `check_data`.

    `vocabularies` of sources and of targets, if any are given, take the place of the data's, which
    need not be there. A run that was pruned stays recorded as such.
    """
    folder = pathlib.Path(logdir)
    if vocabularies:
        copies = tokenizer.vocabulary_files(logdir, launch.facts.kind)
        contents = dict(zip(copies, vocabularies, strict=False))
    else:
        contents = check_data(launch, logdir)
    if pruned is None and (folder / _EXPERIMENT).is_file():
        pruned = recorded_pruning(logdir)

    # Copies, as the data may be moved or deleted once the model is trained.
    folder.mkdir(parents=True, exist_ok=True)
    for copy, content in contents.items():
        copy.parent.mkdir(exist_ok=True)
        atomic_file.write(copy, content)

    # Last: a folder with a record has its vocabularies.
    settings = dataclasses.asdict(launch)
    facts = settings.pop("facts")
    files = [digests.describe(folder, f"vocab/{copy.name}") for copy in contents]
    fields = {
        "launch": settings,
        "data": facts,
        "files": [dataclasses.asdict(file) for file in files],
    }
    if pruned is not None:
        fields["pruned"] = dataclasses.asdict(pruned)
    digests.write_json(folder / _EXPERIMENT, _VERSION, fields)


def recorded(logdir: str) -> Launch:
    """Returns what `record` wrote; ValueError if there is none, or it is damaged."""
    return _read(logdir).launch


def recorded_pruning(logdir: str) -> Pruned | None:
    """Returns how a run was pruned, None if it was not; raises as `recorded`."""
    return _read(logdir).pruned


def vocabularies(logdir: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of a run's vocabularies; ValueError as `recorded`, or for a damaged one."""
    run = _read(logdir)
    digests.verify(logdir, run.files)
    return tokenizer.vocabulary_files(logdir, run.launch.facts.kind)


def _read(logdir: str) -> _Record:
    path = pathlib.Path(logdir, _EXPERIMENT)
    if not path.is_file():
        raise ValueError(f"{logdir}: no {_EXPERIMENT}; give the --logdir of a trained model.")
    return digests.read_json(path, _VERSION, _parsed)


def _parsed(fields: dict[str, Any]) -> _Record:
    launch = json_records.read(Launch, fields["launch"] | {"facts": fields["data"]})
    files = json_records.read(tuple[File, ...], fields["files"])
    return _Record(launch, files, json_records.read(Pruned | None, fields.get("pruned")))
