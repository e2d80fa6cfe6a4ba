"""A decoder: a trained model that decodes batches. A bundle: the folder that one is saved in.

A bundle translates with jax, numpy and sentencepiece alone:

bundle.json                    the decoder's spec
programs/source_<L>.program    the search over a batch of sources of length L
weights.safetensors            theta by dotted path
vocab/{source,target}.model    SentencePiece models
lingvo_gshard/                 the library without training
requirements.txt               the packages that they need

cd BUNDLE && python -m lingvo_gshard.translate --bundle=.

B batch, L source length, n hypotheses, T target length.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np

from lingvo_gshard.core import json_records, safetensors_file, storage
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input.example_codec import target_token
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.spmd import program, specs
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.specs import WHOLE, Share

_VERSION = 1
_SPEC = "bundle.json"
_REQUIREMENTS = ("absl-py", "jax", "jaxlib", "numpy", "sentencepiece", "flatbuffers")
_WEIGHTS = "weights.safetensors"
_PACKAGE = pathlib.Path(__file__).parents[1]
# What `translate --bundle` never imports.
_TRAINING = ("evaluation", "layers", "model", "optim", "planning", "train")
_BINARIES = ("compare.py", "plan.py", "registry.py", "trainer.py")


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """What the caller of a decoder must know.

    `model` is a registered name; `languages` are codes, en-de for German from English. `targets`
    are the languages that sources name by a token; if there are none, all are translated into
    English. There is a program for each of the `source_lengths`, shortest first.
    """

    model: str
    languages: tuple[str, ...]
    batch_size: int
    source_lengths: tuple[int, ...]
    num_best: int
    num_partitions: int
    targets: tuple[str, ...] = ()

    @property
    def source_languages(self) -> tuple[str, ...]:
        """The codes of the languages to translate from."""
        codes = ("en" if code.startswith("en-") else code for code in self.languages)
        return tuple(dict.fromkeys(codes))

    def beginning(self, target: str | None) -> str:
        """Returns how a line begins that is to be translated into a language, None if not chosen.

        Raises ValueError if the model does not translate into it, or it has to be chosen.
        """
        if target in self.targets:
            return f"{target_token(target)} "
        if self.targets:
            raise ValueError(f"target_lang {target}: expected one of {', '.join(self.targets)}")
        if target is not None:
            raise ValueError(f"target_lang {target}: the model translates into English alone")
        return ""


@dataclasses.dataclass
class Decoder:
    """Decodes batches; compiles the program of a length when it is first needed.

    Attributes:
      program_for: from a source length to the program of (state.theta, batch.features).
      share: this process's part of a batch's rows.
      origin: differs between decoders of other weights or settings.
    """

    spec: DecoderSpec
    theta: NestedMap
    program_for: Callable[[int], Program]
    share: Share = WHOLE
    origin: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._compiled: dict[int, Executable] = {}

    def __call__(self, features: NestedMap) -> dict[str, np.ndarray]:
        """Decodes a batch of int32 [B, L] source_ids, source_segment_ids and source_positions.

        All processes must call it, each with its own rows, and get the results of these.
        Returns ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
        float32 [B, n, T] and, if the model records it, attention [B, n, T, L]: see Hypotheses.
        """
        run = self._executable(features.source_ids.shape[1])
        found = run(NestedMap(theta=self.theta), NestedMap(features=features)).predictions
        return dict(self.share.of(found).FlattenItems())

    def _executable(self, source_len: int) -> Executable:
        if source_len not in self._compiled:
            run = compile_program(self.program_for(source_len))
            # The programs of all lengths need the weights on the same devices.
            self.theta = run.place("state", NestedMap(theta=self.theta)).theta
            self._compiled[source_len] = run
        return self._compiled[source_len]


def save(
    folder: str | pathlib.Path, decoder: Decoder, vocabularies: tuple[pathlib.Path, pathlib.Path]
) -> None:
    """Writes a decoder and its source and target SentencePiece models, creating the folder.

    bundle.json comes last, so that a folder without it is incomplete. Overwriting a bundle first
    invalidates the old one.
    """
    folder, spec = pathlib.Path(folder), decoder.spec
    for name in ("programs", "vocab"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for old in (folder / _SPEC, storage.origin(folder / _SPEC)):
        old.unlink(missing_ok=True)
    for length in spec.source_lengths:
        decoder.program_for(length).save(_program_file(folder, length))
    safetensors_file.write(folder / _WEIGHTS, dict(decoder.theta.FlattenItems()), {})
    for path, copy in zip(vocabularies, vocabulary_files(folder), strict=True):
        shutil.copyfile(path, copy)
    left_out = shutil.ignore_patterns("__pycache__", *_TRAINING, *_BINARIES)
    shutil.copytree(
        _PACKAGE,
        folder / _PACKAGE.name,
        ignore=left_out,
        copy_function=shutil.copyfile,  # Without modes, which may be read-only.
        dirs_exist_ok=True,
    )
    pins = [f"{name}=={importlib.metadata.version(name)}\n" for name in _REQUIREMENTS]
    (folder / "requirements.txt").write_text("".join(pins))
    fields = {"version": _VERSION, **dataclasses.asdict(spec)}
    (folder / _SPEC).write_text(json.dumps(fields, indent=2) + "\n")


def vocabulary_files(folder: str | pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of the source and target SentencePiece models of a bundle or a run."""
    vocab = pathlib.Path(folder, "vocab")
    return vocab / "source.model", vocab / "target.model"


def load_spec(folder: str | pathlib.Path) -> DecoderSpec:
    """Reads a bundle's spec; ValueError if it is missing, damaged or of another version."""
    path = storage.path(folder) / _SPEC
    if not path.exists():
        raise ValueError(f"{folder}: no {_SPEC}; give a folder that `translate --export` wrote.")
    try:
        fields = json.loads(path.read_text())
        version = fields.pop("version")
        if version != _VERSION:
            raise ValueError(f"has version {version}, expected {_VERSION}; export it again")
        return json_records.read(DecoderSpec, fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}.") from error


def load(folder: str | pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Returns the decoder and the source and target tokenizers of a bundle.

    Raises ValueError as load_spec, or if the weights are damaged or do not match the programs.
    """
    with storage.working(folder) as here:
        return _load(here)


def _load(folder: pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    spec = load_spec(folder)
    programs = {n: program.load(_program_file(folder, n)) for n in spec.source_lengths}
    first, path = programs[spec.source_lengths[0]], folder / _WEIGHTS
    theta = _weights(path, first.args[0].theta)
    listed = safetensors_file.read(path).metadata.get("sha256")  # Older files list none.
    digest = listed or hashlib.sha256(path.read_bytes()).hexdigest()
    search = hashlib.sha256(b"".join(programs[n].exported for n in spec.source_lengths))
    origin = {"weights": digest, "search": search.hexdigest()}
    source, target = map(Tokenizer, vocabulary_files(folder))
    share = specs.own_share(first.partitioning)
    return Decoder(spec, theta, programs.__getitem__, share, origin), source, target


def _weights(path: pathlib.Path, wanted: NestedMap) -> NestedMap:
    """Reads the weights that a program takes, given their TensorSpecs; raises as `load`."""
    held = safetensors_file.read(path).arrays
    specs.check_same(str(path), held, wanted)
    return wanted.Pack(held[name] for name, _ in wanted.FlattenItems())


def _program_file(folder: pathlib.Path, length: int) -> pathlib.Path:
    return folder / "programs" / f"source_{length}.program"
