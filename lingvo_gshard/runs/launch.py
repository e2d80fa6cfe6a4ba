"""The experiment that a user launches, and its record in the run's folder.

logdir/experiment.json   the model's name, the changed settings, and facts of the training data
logdir/vocab/*.model     the vocabularies of the training data, if it has any

This file imports neither TensorFlow nor JAX, so a mistake is reported within a second.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from lingvo_gshard import registry
from lingvo_gshard.checkpoints import saved_steps
from lingvo_gshard.core.hyperparams import Params, apply_setting, parse_setting
from lingvo_gshard.decoding.languages import Languages
from lingvo_gshard.input import example_codec, manifest, tokenizer
from lingvo_gshard.input.base_input import DATA_DIR, DataFacts
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.layers.gating_layers import TaskTop2Gating
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import placement, remats
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.train import config as train_config
from xla_spmd.files import atomic_file, digests, json_records, storage
from xla_spmd.files.digests import File
from xla_spmd.late import LateModule
from xla_spmd.runtime import environment

if TYPE_CHECKING:
    from lingvo_gshard.spmd import processes, product_speed
else:  # They import JAX.
    processes = LateModule("lingvo_gshard.spmd.processes")
    product_speed = LateModule("lingvo_gshard.spmd.product_speed")

_EXPERIMENT = "experiment.json"
_VERSION = 1
_PRODUCT_DTYPE = "task.product_dtype"
_WARM_START = "train.warm_start_from"
# These settings must not change while a folder has checkpoints.
MODEL_PREFIXES = ("task", "optimizer.cls", "train.frozen")


@dataclasses.dataclass(frozen=True)
class Launch:
    """A registered model, `path=value` settings that the user has changed, and data for it."""

    model: str
    overrides: tuple[str, ...]
    data_dir: str | None  # None if the model's input does not read a folder.
    facts: DataFacts

    def changed(self, overrides: Iterable[str]) -> Self:
        """Returns the launch with more settings; the last setting of each path counts."""
        last = {}
        for setting in (*self.overrides, *overrides):
            path, _ = parse_setting(setting)
            last[path] = setting
        return dataclasses.replace(self, overrides=tuple(last.values()))


@dataclasses.dataclass(frozen=True)
class Pruned:
    """How a run was made from a run with more experts: see pruning.py."""

    source: str  # The folder of the run with more experts.
    weights: str  # A digest of its weights' fingerprints.
    languages: tuple[str, ...]  # The languages whose loads chose the remaining experts.
    is_merged: bool  # Whether the other experts were merged into them, not dropped.
    experts: dict[str, tuple[int, ...]]  # The remaining experts' old numbers, by layer.


@dataclasses.dataclass(frozen=True)
class _Record:
    """The record in a run's folder: its launch, and the files of its vocabularies."""

    launch: Launch
    files: tuple[File, ...]
    pruned: Pruned | None


def launch_of(
    model: str | None, overrides: tuple[str, ...], data_dir: str | None, logdir: str
) -> Launch:
    """Returns a user's launch, completed from the record of the run in `logdir`.

    The recorded settings hold unless `model` is given. Paths become absolute, so that a later
    command finds them from any folder. Raises ValueError if `model` or `data_dir` is missing and
    `logdir` holds no run, if the model's input does not read `data_dir`, if the data there is
    missing or damaged, or if a setting or the data does not fit the model.
    """
    overrides = tuple(map(_with_absolute_path, overrides))
    if data_dir is not None:
        data_dir = storage.absolute(data_dir)

    # The record completes a launch without a model.
    if model is None:
        before = _before(logdir)
        model = before.model
        overrides = before.changed(overrides).overrides

    # A later command may not import what this one does.
    model = registry.full_name(model)
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

    # A wrong setting is reported now, before JAX starts.
    launch = Launch(model, overrides, data_dir, facts)
    experiment_params(launch)
    return launch


def _with_absolute_path(setting: str) -> str:
    """Returns a `path=value` setting, with an absolute path if its value is a file or folder."""
    path, value = parse_setting(setting)
    if path != _WARM_START or not isinstance(value, str):
        return setting
    return f"{path}={storage.absolute(storage.expanded(value))}"


def _before(logdir: str) -> Launch:
    """Returns the launch of the run in a folder; ValueError if there is none."""
    if not holds_run(logdir):
        raise ValueError(
            f"{logdir} holds no run yet (no {_EXPERIMENT}): give both --model and --data_dir."
        )
    return recorded(logdir)


def with_product_dtype(launch: Launch, logdir: str) -> tuple[Launch, Params]:
    """Returns the launch and its Params, with a dtype in place of `task.product_dtype=auto`.

    An existing run has the same dtype, and so the same program, on every machine. A new run gets
    the dtype with which this machine multiplies faster, or with several processes the machine of
    process 0. Raises ValueError if a setting or the data does not fit.
    """
    params = experiment_params(launch)
    if "product_dtype" not in params.task or params.task.product_dtype != "auto":
        return launch, params

    if holds_run(logdir):
        # One that recorded none had an experiment's own dtype, and not `auto`.
        dtype = _recorded_settings(logdir).get(_PRODUCT_DTYPE, "float32")
    else:
        # Several processes have one program, which is process 0's choice.
        rounds = environment.multiplies_bfloat16() and (
            product_speed.fastest_dtype(params.task.dim) == "bfloat16"
        )
        dtype = "bfloat16" if processes.of_first(rounds) else "float32"
    return _changed(launch, [f"{_PRODUCT_DTYPE}={dtype}"])


def with_recorded_remats(launch: Launch, logdir: str) -> tuple[Launch, Params]:
    """Returns the launch and its Params, with the remats of an existing run in place of AUTO.

    A stack whose remat the run has not recorded keeps AUTO.
    """
    params = experiment_params(launch)
    stacks = remats.automatic(params)
    if not stacks or not holds_run(logdir):
        return launch, params

    before = _recorded_settings(logdir)
    paths = [path for path in map(remats.path, stacks) if path in before]
    return _changed(launch, [f"{path}={before[path]}" for path in paths])


def with_remat(launch: Launch, remat: Remat) -> Launch:
    """Returns the launch with a Remat in place of AUTO."""
    return launch.changed(remats.settings(experiment_params(launch), remat))


def _changed(launch: Launch, settings: Iterable[str]) -> tuple[Launch, Params]:
    """Returns the launch with more settings, and its Params."""
    changed = launch.changed(settings)
    return changed, experiment_params(changed)


def _recorded_settings(logdir: str) -> dict[str, object]:
    """Returns the values of the settings that a run recorded, by path."""
    return dict(map(parse_setting, recorded(logdir).overrides))


def experiment_params(launch: Launch) -> Params:
    """Returns a launch's Params with vocabulary sizes.

    Raises ValueError for a wrong setting, and for data of another task or with a vocabulary of
    another size.
    """
    params = registry.get_params(launch.model, launch.overrides)
    train_config.check(params.train)
    kind = params.input.cls.KIND
    if kind != launch.facts.kind:
        raise ValueError(
            f"{launch.model} learns from data of kind {kind}, but {launch.data_dir} holds kind "
            f"{launch.facts.kind}: give other data or another --model."
        )

    # An experiment does not know the data's folder or the sizes of its vocabularies.
    for batches in (params.input, params.eval_input):
        _bind(batches, launch)

    names = list(params.task.cls.VOCABULARIES)
    for name, size in launch.facts.vocabulary_sizes(names).items():
        # The paper's models set their vocabularies' sizes; other models accept any size.
        wanted = params.task.Get(name)
        if wanted not in (None, size):
            flag = "text_vocab_size" if name == "vocab_size" else name
            raise ValueError(
                f"task.{name} is {wanted}, but the data's vocabulary has {size} pieces: prepare "
                f"the data with --{flag}={wanted} or, for an imported run, with --vocabulary=RUN."
            )
        params.task.Set(**{name: size})

    _check_tasks(params, launch)

    # A translation into one of many languages begins with that language's token.
    if launch.facts.language_tokens and "decode" in params:
        params.decode.forces_first = True
    return params


def _check_tasks(params: Params, launch: Launch) -> None:
    """Raises ValueError if a gating by task has more or fewer tasks than the data's sources name.

    If there are several target languages, the token of the target begins a source.
    """
    facts = launch.facts
    targets = {example_codec.sides(code, facts.languages)[1] for code in facts.languages}
    are_named = len(targets) > 1 and not facts.language_tokens

    for stack in params.task.cls.STACKS:
        moe = params.task.Get(stack).moe
        if moe is None or not issubclass(moe.gating.cls, TaskTop2Gating):
            continue
        setting = f"task.{stack}.moe.gating"
        if not are_named:
            raise ValueError(
                f"{setting}: TaskTop2Gating needs data of several target languages, whose tokens "
                f"begin the sources; {launch.data_dir} has no such tokens."
            )
        if moe.gating.num_tasks != len(targets):
            raise ValueError(
                f"{setting}.num_tasks is {moe.gating.num_tasks}, but {launch.data_dir} has "
                f"{len(targets)} target languages."
            )


def _bind(batches: Params, launch: Launch) -> Params:
    """Returns the settings of an input, with the data's folder if it reads one."""
    if DATA_DIR in batches and launch.data_dir is not None:
        batches.Set(**{DATA_DIR: launch.data_dir})
    return batches


def is_decoded(params: Params) -> bool:
    """Returns whether an experiment's task predicts text."""
    return Mode.PREDICT in params.task.cls.MODES and params.input.cls.KIND is not None


def check_decoded(model: str, params: Params) -> None:
    """Raises ValueError if an experiment's task does not predict text."""
    if not is_decoded(params):
        raise ValueError(f"{model}: {params.task.cls.__name__} is trained and evaluated alone.")


def evaluated_input(launch: Launch, params: Params, split: str) -> Params:
    """Returns the settings of the input for a split, dev or test, given a launch's Params.

    The settings for dev are `params.eval_input`. The settings for test are the experiment's Test(),
    with the user's settings of eval_input. Raises ValueError for another split, or for an
    experiment without Test().
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


def check_files(launch: Launch, inputs: Sequence[str]) -> None:
    """Raises ValueError if a file that `inputs` read is missing or has another size.

    `inputs` are names of an experiment's settings, such as input and eval_input.
    """
    params = experiment_params(launch)
    for name in inputs:
        p = params.Get(name)
        p.cls.CheckFiles(p)


def check_sizes(launch: Launch, inputs: Sequence[str], num_partitions: int | None) -> None:
    """Raises ValueError for sizes of layers, or batches of `inputs`, that no devices can have.

    Raises it also for a mesh or a table that does not fit; None is an unknown number of devices.
    """
    # Only the devices decide what remat=AUTO stands for, but sizes do not depend on it.
    params = remats.replaced(experiment_params(launch), Remat.BLOCK)
    placement.check(params, inputs, num_partitions)


def check_folder(launch: Launch, logdir: str) -> None:
    """Raises ValueError, which lists the differences, if `logdir` holds another model."""
    p = experiment_params(launch)
    train_config.check_folder(logdir, p.ToText(), MODEL_PREFIXES, p.DefaultsText())


def check_weights(launch: Launch, logdir: str) -> None:
    """Raises ValueError unless `logdir` has the launch's model and the checkpoints to decode.

    These are decode.checkpoint_step, and as many as decode.average_checkpoints up to it.
    """
    check_folder(launch, logdir)
    p = experiment_params(launch).decode
    saved_steps.check(logdir, p.checkpoint_step, p.average_checkpoints)


def check_to_train(launch: Launch, logdir: str, evaluates: bool) -> None:
    """Raises ValueError if the model cannot be trained in `logdir`.

    It can't if the folder holds another model, or one of other data; if the learning rate falls to
    zero too early; if a run without checkpoints is to start from a run or a file that is missing;
    or if train.early_stop_patience is set, but nothing `evaluates`.
    """
    check_folder(launch, logdir)
    check_data(launch, logdir)
    params = experiment_params(launch)
    patience = params.train.early_stop_patience
    if patience is not None and not evaluates:
        raise ValueError(f"train.early_stop_patience={patience} needs --mode=train_and_eval.")

    # A run with checkpoints continues from its own.
    source = params.train.warm_start_from
    is_read = source is not None and not saved_steps.whole_steps(logdir)
    if is_read and not storage.path(source).exists():
        raise ValueError(f"{_WARM_START}={source}: there is no such run or file.")

    # A learning rate of zero would leave the last steps without effect.
    zero_from = params.optimizer.schedule.Instantiate().zero_from
    max_steps = params.train.max_steps
    if zero_from is not None and zero_from < max_steps:
        raise ValueError(
            f"train.max_steps is {max_steps}, but the learning rate falls to zero at step "
            f"{zero_from}: set optimizer.schedule.total_steps={max_steps}, too."
        )


def check_to_evaluate(launch: Launch, logdir: str, split: str) -> None:
    """Raises ValueError if the run in `logdir` cannot be evaluated on a split; see evaluated_input.

    It can't if nothing was trained in the folder, if it holds another model or one of other data,
    or if a file of the split is missing or has another size, either.
    """
    recorded(logdir)
    p = evaluated_input(launch, experiment_params(launch), split)
    check_data(launch, logdir)
    p.cls.CheckFiles(p)
    check_weights(launch, logdir)


def check_to_decode(launch: Launch, logdir: str, split: str) -> None:
    """Raises ValueError if the run in `logdir` cannot decode a split; see decoded_languages.

    It can't if its task does not predict text, if nothing was trained in the folder, or if it holds
    another model or one of other data, either.
    """
    params = experiment_params(launch)
    check_decoded(launch.model, params)
    recorded(logdir)
    decoded_languages(launch, params, split)
    check_data(launch, logdir)
    check_weights(launch, logdir)


def decoded_languages(launch: Launch, params: Params, split: str) -> list[manifest.Language]:
    """Returns the languages whose text has a split, given a launch's Params.

    Raises ValueError if there are none, or if decode.max_sentences is below 1.
    """
    max_sentences = params.decode.max_sentences
    if max_sentences is not None and max_sentences < 1:
        raise ValueError(f"decode.max_sentences must be 1 or more, or None, got {max_sentences}.")

    assert launch.data_dir is not None, "A task that decodes text has a prepared folder."
    data = manifest.load(launch.data_dir)
    languages = [language for language in data.languages if split in language.text]
    if not languages:
        splits: set[str] = set()
        for language in data.languages:
            splits.update(language.text)
        known = ", ".join(sorted(splits)) or "none"
        raise ValueError(
            f"--split={split}: no {data.group} of {launch.data_dir} has text of it to decode; the "
            f"splits are {known}."
        )
    return languages


def trained_on(launch: Launch, params: Params) -> tuple[str, ...]:
    """Returns the languages of the training text, given the launch's Params."""
    return params.input.languages or launch.facts.languages


def model_languages(
    launch: Launch, params: Params, source: Tokenizer, target: Tokenizer
) -> Languages:
    """Returns the languages that the model of a run translates between, given its tokenizers."""
    kind = launch.facts.kind
    assert kind is not None, "check_decoded"
    return Languages(
        kind=kind,
        trained_on=trained_on(launch, params),
        sources=tuple(source.languages),
        targets=tuple(target.languages) or source.targets,
    )


def check_data(launch: Launch, logdir: str) -> dict[pathlib.Path, bytes]:
    """Returns the data's vocabularies by their paths in a run.

    Raises ValueError if the run in `logdir` has other vocabularies or was trained on other data,
    where its position in the data would be wrong, or if a vocabulary's file is missing or damaged.
    """
    data_dir = launch.data_dir
    if data_dir is None:
        return {}
    files = registry.get_params(launch.model).input.cls.VocabularyFiles(data_dir)
    digests.verify(data_dir, files)

    # The rows of a model's embeddings belong to the pieces of one vocabulary.
    before = recorded(logdir) if holds_run(logdir) else None
    contents = {}
    copies = tokenizer.vocabulary_files(logdir, launch.facts.kind)
    for file, copy in zip(files, copies, strict=False):
        source = digests.local(data_dir, file)
        contents[copy] = source.read_bytes()
        if before is not None and before.facts.imported_ids and not copy.exists():
            raise ValueError(
                f"{logdir} was imported without a tokenizer, so nobody knows whether {source} is "
                "its vocabulary: import it from a folder that has the tokenizer's files."
            )
        if copy.exists() and copy.read_bytes() != contents[copy]:
            raise ValueError(
                f"{copy}: this folder's model has another vocabulary than {source}; choose another "
                "--logdir, or the data it was trained on."
            )

    # Two folders may share their vocabularies, and a folder may be made again.
    if before is not None:
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
    """Writes the record of a launch, and its vocabularies, to logdir; decoding needs both.

    If `vocabularies` of sources and targets are given, they are used in place of the data's, which
    may then be absent. A record of pruning is preserved. Raises ValueError if the run in `logdir`
    has other vocabularies or other data.
    """
    folder = pathlib.Path(logdir)
    if vocabularies:
        copies = tokenizer.vocabulary_files(logdir, launch.facts.kind)
        contents = dict(zip(copies, vocabularies, strict=False))
    else:
        contents = check_data(launch, logdir)
    if pruned is None and holds_run(logdir):
        pruned = recorded_pruning(logdir)

    # The vocabularies are copied, as the data may be moved or deleted after training.
    folder.mkdir(parents=True, exist_ok=True)
    for copy, content in contents.items():
        copy.parent.mkdir(exist_ok=True)
        atomic_file.write(copy, content)

    # The record is written last, so that a folder with a record has its vocabularies.
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


def holds_run(logdir: str) -> bool:
    """Returns whether a folder has the record of a run."""
    return pathlib.Path(logdir, _EXPERIMENT).is_file()


def recorded(logdir: str) -> Launch:
    """Returns a run's recorded launch; raises ValueError if it is missing or damaged."""
    return _read(logdir).launch


def recorded_pruning(logdir: str) -> Pruned | None:
    """Returns how a run was pruned, or None; raises ValueError if its record is damaged."""
    return _read(logdir).pruned


def vocabularies(logdir: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of a run's vocabularies; raises ValueError if a file is damaged."""
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
