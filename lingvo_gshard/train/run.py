"""A run: a registered experiment bound to data, a folder and a number of devices.

logdir/experiment.json   the model's name, the settings changed, and what it was trained on
logdir/vocab/*.model     the vocabularies it was trained with
logdir/params.txt, checkpoints, summaries: the estimator's
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import pathlib

from lingvo_gshard import registry
from lingvo_gshard.core import atomic_file
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.input import manifest
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair
from lingvo_gshard.layers.moe import group_size
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.train import checkpoints
from lingvo_gshard.train.estimator import TPUEstimator
from lingvo_gshard.train.warm_start import Rule, WarmStart, old_ids

_EXPERIMENT = "experiment.json"
# What must agree between a folder's checkpoints and the model that reads them.
MODEL_PREFIXES = ("task", "optimizer.cls")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What makes a run the run it is.

    Attributes:
      model: a registered name.
      overrides: `path=value` settings, applied in order to the experiment's Params.
      data_dir: a folder that data_prep prepared.
    """

    model: str
    overrides: tuple[str, ...]
    data_dir: str


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What a model must know of its data: the vocabularies' pieces, and the languages' codes."""

    source_vocab_size: int
    target_vocab_size: int
    languages: tuple[str, ...]


def data_facts(data_dir: str) -> DataFacts:
    """Reads a prepared folder's facts; ValueError as manifest.load."""
    data = manifest.load(data_dir)
    codes = tuple(language.code for language in data.languages)
    return DataFacts(data.source_vocabulary.size, data.target_vocabulary.size, codes)


def overridden_params(model: str, overrides: tuple[str, ...]) -> Params:
    """A registered experiment's Params with `path=value` settings applied in order.

    Raises:
      ValueError: unknown model, setting or value.
    """
    params = registry.get_params(model)
    for override in overrides:
        _apply(params, override)
    return params


def launch_of(
    model: str | None, overrides: tuple[str, ...], data_dir: str | None, logdir: str
) -> tuple[Launch, DataFacts]:
    """The launch that is asked for; what is not given is as it was when the run was last trained.

    Settings recorded with a run hold unless its model is named anew.

    Raises:
      ValueError: neither model and data_dir are given nor does logdir hold a run; or as
        data_facts.
    """
    if model is not None and data_dir is not None:
        return Launch(model, overrides, data_dir), data_facts(data_dir)
    try:
        before, facts = recorded(logdir)
    except ValueError as error:
        raise ValueError(f"Give --model and --data_dir; {error}") from error
    if data_dir is not None:
        facts = data_facts(data_dir)
    if model is None:
        model, overrides = before.model, _merged(before.overrides, overrides)
    return Launch(model, overrides, data_dir or before.data_dir), facts


def _merged(before: tuple[str, ...], anew: tuple[str, ...]) -> tuple[str, ...]:
    """Settings in order, each path's last one alone: a run that goes on again and again has few."""
    last = {parse_override(override)[0]: override for override in (*before, *anew)}
    return tuple(last.values())


def experiment_params(launch: Launch, facts: DataFacts) -> Params:
    """The experiment's Params with its overrides and the data's vocabularies.

    Raises:
      ValueError: unknown model, setting or value, or data whose vocabulary is not of the size
        that the model wants.
    """
    params = overridden_params(launch.model, launch.overrides)
    for side in ("input", "eval_input"):
        params.Get(side).data_dir = launch.data_dir
    _bind_vocabulary(params, "source_vocab_size", facts.source_vocab_size)
    _bind_vocabulary(params, "target_vocab_size", facts.target_vocab_size)
    return params


def make_estimator(params: Params, logdir: str, num_partitions: int) -> TPUEstimator:
    """Returns the estimator of a run.

    Raises:
      ValueError: the partitions don't divide the batch, the groups or the experts; or a setting
        in params.train is out of range.
    """
    check_divisible(params, num_partitions)
    partitioning = partitioning_over(params, num_partitions)
    model = TranslationModel(params, partitioning)
    return TPUEstimator(
        model.model_fn,
        logdir,
        params=params,
        partitioning=partitioning,
        state_spec=model.state_spec,
        init_fn=model.init_state,
        model_prefixes=MODEL_PREFIXES,
        # A run that has checkpoints continues from those.
        warm_start=None if checkpoints.exist(logdir) else _warm_start(params),
    )


def partitioning_over(params: Params, num_partitions: int) -> Partitioning:
    """The experiment's table over so many devices, which check_divisible let pass.

    Of fewer experts than devices there are copies: along a second axis, `r`, lies all that lies
    along theirs but the experts.
    """
    moe = params.task.encoder.moe
    if moe is None or num_partitions <= moe.num_experts:
        return Partitioning.from_dict(Mesh.flat(num_partitions), params.sharding)
    mesh = Mesh(("r", "d"), (num_partitions // moe.num_experts, moe.num_experts))
    table = {
        letter: axis if letter == "E" else ("r", axis) for letter, axis in params.sharding.items()
    }
    return Partitioning.from_dict(mesh, table)


def num_weights(params: Params) -> int:
    """The number of scalars in the model's weights; its vocabularies' sizes must be set."""
    return params.task.Instantiate(Partitioning(Mesh.flat(1), ())).num_weights


def check_divisible(params: Params, num_partitions: int) -> None:
    """ValueError, saying what to change, unless the partitions divide all that is split."""
    moe, rows = params.task.encoder.moe, params.input.batch_size
    sizes = {"input.batch_size": rows, "decode.batch_size": params.decode.batch_size}
    if moe is not None:
        # Of fewer experts there are copies.
        if num_partitions < 1 or moe.num_experts < 1 or num_partitions % moe.num_experts:
            sizes["task.encoder.moe.num_experts"] = moe.num_experts
        for stack, length in (("encoder", "source_len"), ("decoder", "target_len")):
            tokens = rows * params.input.Get(length)
            group = group_size(params.task.Get(stack).moe, tokens)
            if group < 1 or tokens % group:
                raise ValueError(
                    f"task.{stack}.moe.group_size {group} does not divide the batch's {tokens} "
                    f"tokens (input.batch_size {rows} x input.{length}); choose a divisor."
                )
            sizes[f"groups of the {stack} (tokens / task.{stack}.moe.group_size)"] = tokens // group
    for what, size in sizes.items():
        if num_partitions < 1 or size < 1 or size % num_partitions:
            raise ValueError(
                f"--num_partitions={num_partitions} does not divide {what} = {size}; choose a "
                "divisor, or change it with --set."
            )


def record(launch: Launch, facts: DataFacts, logdir: str) -> None:
    """Writes what `translate` needs into the run's folder: the launch and the vocabularies.

    Raises:
      ValueError: the folder's model was trained with other vocabularies.
    """
    data, folder = manifest.load(launch.data_dir), pathlib.Path(logdir)
    copies = list(
        zip((data.source_vocabulary, data.target_vocabulary), vocabulary_files(logdir), strict=True)
    )
    for vocabulary, copy in copies:
        _check_same_vocabulary(pathlib.Path(launch.data_dir, vocabulary.file.path), copy)
    (folder / "vocab").mkdir(parents=True, exist_ok=True)
    for vocabulary, copy in copies:
        source = pathlib.Path(launch.data_dir, vocabulary.file.path)
        atomic_file.write(copy, source.read_bytes())
    fields = {"launch": dataclasses.asdict(launch), "data": dataclasses.asdict(facts)}
    atomic_file.write(folder / _EXPERIMENT, json.dumps(fields, indent=2) + "\n")


def recorded(logdir: str) -> tuple[Launch, DataFacts]:
    """What `record` wrote; the data itself need not be there any more.

    Raises:
      ValueError: no run's folder, or a damaged record.
    """
    path = pathlib.Path(logdir, _EXPERIMENT)
    if not path.is_file():
        raise ValueError(f"{logdir}: no {_EXPERIMENT}; give the --logdir of a trained model.")
    try:
        fields = json.loads(path.read_text())
        launch, facts = Launch(**fields["launch"]), DataFacts(**fields["data"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged: {error!r}.") from error
    launch = dataclasses.replace(launch, overrides=tuple(launch.overrides))
    return launch, dataclasses.replace(facts, languages=tuple(facts.languages))


def vocabulary_files(logdir: str) -> tuple[pathlib.Path, pathlib.Path]:
    """The source and target SentencePiece models of a run."""
    folder = pathlib.Path(logdir, "vocab")
    return folder / "source.model", folder / "target.model"


def _warm_start(params: Params) -> WarmStart | None:
    source = params.train.warm_start_from
    if source is None:
        return None
    rules = tuple(_rule(given) for given in params.train.warm_start_rules)
    if all(rule is not Rule.BY_PIECE for _, rule in rules):
        return WarmStart(source, rules)
    old = (Tokenizer(path) for path in vocabulary_files(source))
    new = load_pair(params.input.data_dir)
    source_ids, target_ids = (
        old_ids(before.pieces(range(before.vocab_size)), after.pieces(range(after.vocab_size)))
        for before, after in zip(old, new, strict=True)
    )
    of_source, of_target = r"theta\.source_embedding\..*", r"theta\.(target_embedding\..*|softmax)"
    return WarmStart(source, rules, ((of_source, source_ids), (of_target, target_ids)))


def _rule(given: object) -> tuple[str, Rule]:
    match given:
        case (str(pattern), str(name)) if name in Rule.__members__:
            return pattern, Rule[name]
    raise ValueError(
        f"train.warm_start_rules: {given!r} is no (pattern, rule); rules are "
        f"{', '.join(Rule.__members__)}."
    )


def parse_override(override: str) -> tuple[str, object]:
    """`path=value` as a path and a Python literal; what is no literal is a string.

    Raises:
      ValueError: no `=`, or no path.
    """
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ValueError(f"--set={override}: path=value is expected, such as train.max_steps=500.")
    try:
        return path, ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return path, text


def _apply(params: Params, override: str) -> None:
    path, value = parse_override(override)
    try:
        old = params.Get(path)
    except AttributeError as error:
        raise ValueError(f"--set={override}: {error}") from error
    if isinstance(old, Params):
        inner = ", ".join(name for name, _ in old.Leaves(f"{path}."))
        raise ValueError(f"--set={override}: {path} holds settings; set one of {inner}.")
    if isinstance(old, enum.Enum):
        members = type(old).__members__
        if str(value) not in members:
            raise ValueError(f"--set={override}: {path} is one of {', '.join(members)}.")
        value = members[str(value)]
    optional = params.OptionalType(path)
    kind, or_none = (type(old), "") if optional is None else (optional, " or None")
    untyped = old is None and optional is None
    if not (untyped or _is_a(value, kind) or (optional and value is None)):
        raise ValueError(
            f"--set={override}: {path} is {old!r}; {kind.__name__}{or_none} is expected, "
            f"not {type(value).__name__}."
        )
    params.Set(**{path: value})


def _is_a(value: object, kind: type) -> bool:
    """Whether a literal is of a type: an int is a float, too, and a bool is no number."""
    return type(value) in ((int, float) if kind is float else (kind,))


def _bind_vocabulary(params: Params, name: str, size: int) -> None:
    wanted = params.task.Get(name)
    if wanted is None:
        params.task.Set(**{name: size})
    elif wanted != size:
        raise ValueError(
            f"task.{name} is {wanted}, but the data's vocabulary has {size} pieces: prepare the "
            f"data with --{name}={wanted}."
        )


def _check_same_vocabulary(data: pathlib.Path, copy: pathlib.Path) -> None:
    if copy.exists() and copy.read_bytes() != data.read_bytes():
        raise ValueError(
            f"{copy}: this folder's model was trained with another vocabulary than {data}; choose "
            "another --logdir, or the data that it was trained on."
        )
