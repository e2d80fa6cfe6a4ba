"""What a user asked to train, and the record of it in the run's folder.

logdir/experiment.json   the model's name, the settings changed, and what it was trained on
logdir/vocab/*.model     the vocabularies it was trained with

Neither TensorFlow nor JAX is imported here, so a mistake is reported within a second.
"""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any, Self

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params, parse_setting
from lingvo_gshard.files import atomic_file, digests, json_records
from lingvo_gshard.files.digests import File
from lingvo_gshard.input import manifest, tokenizer
from lingvo_gshard.spmd import environment

_EXPERIMENT = "experiment.json"
_VERSION, _WITHOUT_VERSION = 1, None
_PRODUCTS = "task.product_dtype"


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

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The languages of the training text."""
        return experiment_params(self).input.languages or self.facts.languages

    def changed(self, overrides: Iterable[str]) -> Self:
        """The launch with more settings; only the last one of each path stays."""
        last = {parse_setting(each)[0]: each for each in (*self.overrides, *overrides)}
        return dataclasses.replace(self, overrides=tuple(last.values()))


def data_facts(data_dir: str) -> DataFacts:
    """Reads the facts of a prepared folder. Raises as manifest.load."""
    data = manifest.load(data_dir)
    codes = tuple(language.code for language in data.languages if language.num_examples("train"))
    return DataFacts(data.source_vocabulary.size, data.target_vocabulary.size, codes)


def launch_of(
    model: str | None, overrides: tuple[str, ...], data_dir: str | None, logdir: str
) -> Launch:
    """Returns what the user asked for, completed by what is recorded with the run in `logdir`.

    The recorded settings hold unless the model is named again. Raises ValueError if model or
    data_dir is missing and logdir holds no run; and as `data_facts` and `experiment_params`.
    """
    given = None if data_dir is None else (data_dir, data_facts(data_dir))
    if model is None or given is None:
        if not pathlib.Path(logdir, _EXPERIMENT).is_file():
            problem = f"{logdir} holds no run yet (no {_EXPERIMENT})"
            raise ValueError(f"{problem}: give both --model and --data_dir.")
        before = recorded(logdir)
        given = given or (before.data_dir, before.facts)
        if model is None:
            model, overrides = before.model, before.changed(overrides).overrides
    launch = Launch(model, overrides, *given)
    experiment_params(launch)
    return launch


def with_product_dtype(launch: Launch, logdir: str) -> Launch:
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
            problem = f"task.{name} is {wanted}, but the data's vocabulary has {size} pieces"
            raise ValueError(f"{problem}: prepare the data with --{name}={wanted}.")
        params.task.Set(**{name: size})
    return params


def check_vocabularies(data_dir: str, logdir: str) -> dict[pathlib.Path, bytes]:
    """Returns the data's vocabularies by their paths in a run; ValueError if the run's differ."""
    files, contents = manifest.load(data_dir).vocabulary_files, {}
    digests.verify(data_dir, files)
    for file, copy in zip(files, tokenizer.vocabulary_files(logdir), strict=True):
        source = digests.local(data_dir, file)
        contents[copy] = source.read_bytes()
        if copy.exists() and copy.read_bytes() != contents[copy]:
            problem = f"{copy}: this folder's model has another vocabulary than {source}"
            raise ValueError(f"{problem}; choose another --logdir, or the data it was trained on.")
    return contents


def record(launch: Launch, logdir: str) -> None:
    """Writes what `translate` needs to logdir; raises as `check_vocabularies`."""
    folder, contents = pathlib.Path(logdir), check_vocabularies(launch.data_dir, logdir)
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
    """Returns the paths of a run's vocabularies; ValueError as `recorded`, or for a damaged one."""
    digests.verify(logdir, _read(logdir)[1])
    return tokenizer.vocabulary_files(logdir)


def _read(logdir: str) -> tuple[Launch, tuple[File, ...]]:
    path = pathlib.Path(logdir, _EXPERIMENT)
    if not path.is_file():
        raise ValueError(f"{logdir}: no {_EXPERIMENT}; give the --logdir of a trained model.")
    return digests.read_json(path, _VERSION, _parsed, older=(_WITHOUT_VERSION,))


def _parsed(fields: dict[str, Any]) -> tuple[Launch, tuple[File, ...]]:
    launch = json_records.read(Launch, fields["launch"] | {"facts": fields["data"]})
    return launch, json_records.read(tuple[File, ...], fields.get("files", ()))
