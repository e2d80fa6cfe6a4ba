"""A decoder: a trained model that decodes batches. A bundle: the folder that one is saved in.

A bundle translates with jax, numpy and sentencepiece alone:

bundle.json                    the decoder's spec, and digests of the model's files
programs/source_<L>.program    the search over a batch of sources of length L
weights.safetensors            theta by dotted path
vocab/{source,target}.model    SentencePiece models
lingvo_gshard/                 the library without training
requirements.txt               the packages that they need

B batch, L source length, n hypotheses, T target length.
"""

import dataclasses
import functools
import importlib.metadata
import pathlib
import shutil
import threading
from collections.abc import Callable

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import atomic_file, digests, json_records, safetensors_file, storage
from lingvo_gshard.files.digests import File
from lingvo_gshard.input.example_codec import source_languages, target_token
from lingvo_gshard.input.tokenizer import Tokenizer, vocabulary_files
from lingvo_gshard.spmd import program, specs
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.specs import WHOLE, Share

_VERSION = 2
_SPEC = "bundle.json"
_REQUIREMENTS = ("absl-py", "jax", "jaxlib", "numpy", "sentencepiece", "flatbuffers")
_WEIGHTS = "weights.safetensors"
_PINS = "requirements.txt"
_PACKAGE = pathlib.Path(__file__).parents[1]
_ENTRIES = {_SPEC, _WEIGHTS, _PINS, _PACKAGE.name, "programs", "vocab"}
# What `translate --bundle` never imports.
_TRAINING = (
    *("beam_search", "checkpoints", "evaluation", "layers", "model", "optim", "planning", "runs"),
    "train",
)
_BINARIES = ("compare.py", "export_bundle.py", "plan.py", "registry.py", "trainer.py")


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """What the caller of a decoder must know."""

    model: str  # A registered name.
    languages: tuple[str, ...]  # Codes, en-de for German from English.
    batch_size: int
    source_lengths: tuple[int, ...]  # There is a program for each, shortest first.
    num_best: int
    num_partitions: int
    # Languages that sources name by a token; none if all are English.
    targets: tuple[str, ...] = ()

    @property
    def source_languages(self) -> tuple[str, ...]:
        """The codes of the languages to translate from."""
        return source_languages(self.languages)

    def beginning(self, target: str | None) -> str:
        """Returns how a line begins that is to be translated into a language, None if not chosen.

        Raises ValueError if the model does not translate into it, or it has to be chosen.
        """
        if target in self.targets:
            return f"{target_token(target)} "
        if self.targets:
            given = "is missing" if target is None else target
            raise ValueError(f"target_lang {given}: expected one of {', '.join(self.targets)}")
        if target is not None:
            raise ValueError(f"target_lang {target}: the model translates into English alone")
        return ""


@dataclasses.dataclass(frozen=True)
class _Contents:
    """A bundle's spec, and the files that it is computed with."""

    spec: DecoderSpec
    files: tuple[File, ...]
    origin: dict[str, str] | None = None  # That of the Decoder; earlier bundles have none.


@dataclasses.dataclass
class Decoder:
    """Decodes batches; compiles the program of a length when it is first needed."""

    spec: DecoderSpec
    theta: NestedMap
    # From a source length to that of (state.theta, batch.features).
    program_for: Callable[[int], Program]
    share: Share = WHOLE  # This process's part of a batch's rows.
    # Identifies the weights and settings.
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    _compiled: dict[int, Executable] = dataclasses.field(default_factory=dict, init=False)
    _compiling: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def __call__(self, features: NestedMap) -> dict[str, np.ndarray]:
        """Decodes a batch of int32 [B, L] source_ids, source_segment_ids and source_positions.

        All processes must call it, each with its own rows, and get the results of these.
        Returns ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
        float32 [B, n, T] and, if the model records it, attention [B, n, T, L]: see Hypotheses.
        """
        run = self._executable(features.source_ids.shape[1])
        found = run(NestedMap(theta=self.theta), NestedMap(features=features)).predictions
        return dict(self.share.of(found).FlattenItems())

    def compile(self) -> None:
        """Compiles the programs of all lengths."""
        for source_len in self.spec.source_lengths:
            self._executable(source_len)

    def _executable(self, source_len: int) -> Executable:
        with self._compiling:
            if source_len not in self._compiled:
                run = compile_program(self.program_for(source_len))
                # The programs of all lengths need the weights on the same devices.
                self.theta = run.place("state", NestedMap(theta=self.theta)).theta
                self._compiled[source_len] = run
            return self._compiled[source_len]


def save(
    folder: str | pathlib.Path, decoder: Decoder, vocabularies: tuple[pathlib.Path, pathlib.Path]
) -> None:
    """Writes a decoder and its source and target SentencePiece models.

    The folder appears whole, in place of an earlier bundle. Raises ValueError if it holds anything
    that is no part of one.
    """
    folder = pathlib.Path(folder)
    others = {path.name for path in folder.iterdir()} - _ENTRIES if folder.exists() else ()
    if others:
        problem = f"{folder} holds {min(others)}, which is no part of a bundle"
        raise ValueError(f"{problem}; export to a new or empty folder.")
    programs = {_program_file(length): length for length in decoder.spec.source_lengths}
    with atomic_file.replacing_folder(folder) as partial:
        for name in ("programs", "vocab"):
            (partial / name).mkdir()
        for name, length in programs.items():
            decoder.program_for(length).save(partial / name)
        safetensors_file.write(partial / _WEIGHTS, dict(decoder.theta.FlattenItems()), {})
        for path, copy in zip(vocabularies, vocabulary_files(partial), strict=True):
            shutil.copyfile(path, copy)
        _write_library(partial)
        names = [*programs, _WEIGHTS, *map(str, vocabulary_files(""))]
        files = tuple(digests.describe(partial, name) for name in names)
        contents = _Contents(decoder.spec, files, decoder.origin)
        digests.write_json(partial / _SPEC, _VERSION, dataclasses.asdict(contents))


def _write_library(folder: pathlib.Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", *_TRAINING, *_BINARIES)
    copied = shutil.copyfile  # Without modes, which may be read-only.
    shutil.copytree(_PACKAGE, folder / _PACKAGE.name, ignore=left_out, copy_function=copied)
    pins = [f"{name}=={importlib.metadata.version(name)}\n" for name in _REQUIREMENTS]
    (folder / _PINS).write_text("".join(pins))


def load_spec(folder: str | pathlib.Path) -> DecoderSpec:
    """Reads a bundle's spec; ValueError if it is missing, damaged or of another version."""
    return _contents(folder).spec


def _contents(folder: str | pathlib.Path) -> _Contents:
    path = storage.path(folder) / _SPEC
    with storage.errors(path, "read"):
        if path.exists():
            return digests.read_json(
                path, _VERSION, functools.partial(json_records.read, _Contents)
            )
    raise ValueError(f"{folder}: no {_SPEC}; give a folder that lingvo_gshard.export_bundle wrote.")


def load(folder: str | pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Returns the decoder and the source and target tokenizers of a bundle.

    Raises ValueError as load_spec, or for a damaged file.
    """
    with storage.working(folder) as here:
        contents = _contents(here)
        digests.verify(here, contents.files)
        spec = contents.spec
        programs = {n: program.load(here / _program_file(n)) for n in spec.source_lengths}
        weights = safetensors_file.read(here / _WEIGHTS).arrays
        source, target = map(Tokenizer, vocabulary_files(here))
    first = programs[spec.source_lengths[0]]
    theta = first.args[0].theta
    theta = theta.Pack(weights[name] for name, _ in theta.FlattenItems())
    share = specs.own_share(first.partitioning)
    origin = contents.origin or {file.path: file.sha256 for file in contents.files}
    return Decoder(spec, theta, programs.__getitem__, share, origin), source, target


def _program_file(length: int) -> str:
    return f"programs/source_{length}.program"
