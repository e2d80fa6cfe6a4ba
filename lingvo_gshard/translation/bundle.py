"""A decoder: a trained model that decodes batches. A bundle: the folder that one is saved in.

A bundle translates with jax, numpy and sentencepiece alone:

bundle.json                    the decoder's spec, and digests of the model's files
programs/source_<L>.program    the search over a batch of sources of length L
weights.safetensors            theta by dotted path
vocab/{source,target}.model    SentencePiece models
lingvo_gshard/                 the part of the library that translates and serves
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
_WEIGHTS = "weights.safetensors"
_PINS = "requirements.txt"
_PACKAGE = pathlib.Path(__file__).parents[1]
_ENTRIES = {_SPEC, _WEIGHTS, _PINS, _PACKAGE.name, "programs", "vocab"}
_REQUIREMENTS = ("absl-py", "jax", "jaxlib", "numpy", "sentencepiece", "flatbuffers")

# The part of the library that a bundle holds: two programs, and all that they import.
_PROGRAMS = ("translate.py", "serve.py")
_MODULES = ("__init__.py", "cli.py", "decoder_flags.py")
_ROOMS = ("core", "files", "hlo", "input", "serving", "sharding", "spmd", "translation")


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """What the caller of a decoder must know."""

    model: str  # A registered name.
    languages: tuple[str, ...]  # Codes, en-de for German from English.
    batch_size: int
    source_lengths: tuple[int, ...]  # There is a program for each, shortest first.
    num_best: int
    num_partitions: int
    # The languages to translate into, which a source names by its first token; none if the model
    # translates into English alone.
    targets: tuple[str, ...] = ()

    @property
    def source_languages(self) -> tuple[str, ...]:
        """Returns the codes of the languages to translate from."""
        return source_languages(self.languages)

    def beginning(self, target: str | None) -> str:
        """Returns what a line must begin with to be translated into `target`, None by default.

        Raises ValueError if the model does not translate into it, or it has to be chosen.
        """
        if target in self.targets:
            return f"{target_token(target)} "

        # The model needs a token, or knows none.
        if self.targets:
            given = "is missing" if target is None else target
            raise ValueError(f"target_lang {given}: expected one of {', '.join(self.targets)}")
        if target is not None:
            raise ValueError(f"target_lang {target}: the model translates into English alone")
        return ""


@dataclasses.dataclass(frozen=True)
class _Contents:
    """What bundle.json holds."""

    spec: DecoderSpec
    files: tuple[File, ...]  # The programs, weights and vocabularies.
    origin: dict[str, str]  # That of the Decoder.


@dataclasses.dataclass
class Decoder:
    """Decodes batches; compiles the program of a length when it is first needed."""

    spec: DecoderSpec
    theta: NestedMap
    # Takes a source length, and returns a program whose arguments are state.theta and
    # batch.features.
    program_for: Callable[[int], Program]
    share: Share = WHOLE  # This process's part of a batch's rows.
    # Identifies the weights and settings: what was translated with others is translated anew.
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    _compiled: dict[int, Executable] = dataclasses.field(default_factory=dict, init=False)
    _compiling: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def __call__(self, features: NestedMap) -> dict[str, np.ndarray]:
        """Decodes a batch of int32 [B, L] source_ids, source_segment_ids and source_positions.

        All processes must call it, each with its own rows, and get the results of these.
        Returns ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
        float32 [B, n, T] and, if the model records it, attention [B, n, T, L]: see Hypotheses.
        """
        # One program for each length: a batch is padded to the shortest that holds it.
        run = self._executable(features.source_ids.shape[1])
        result = run(NestedMap(theta=self.theta), NestedMap(features=features))
        return dict(self.share.of(result.predictions).FlattenItems())

    def compile(self) -> None:
        """Compiles the programs of all lengths."""
        for source_len in self.spec.source_lengths:
            self._executable(source_len)

    def _executable(self, source_len: int) -> Executable:
        with self._compiling:
            if source_len not in self._compiled:
                executable = compile_program(self.program_for(source_len))
                # Once placed, the weights are not moved again: all programs split them alike.
                self.theta = executable.place("state", NestedMap(theta=self.theta)).theta
                self._compiled[source_len] = executable
            return self._compiled[source_len]


def save(
    folder: str | pathlib.Path, decoder: Decoder, vocabularies: tuple[pathlib.Path, pathlib.Path]
) -> None:
    """Writes a decoder and its source and target SentencePiece models.

    The folder appears whole, in place of an earlier bundle. Raises ValueError if it holds anything
    that is no part of one.
    """
    atomic_file.check_holds_only(folder, _ENTRIES, "a bundle")
    with atomic_file.replacing_folder(folder) as partial:
        names = []  # Of the files that bundle.json has digests of.

        (partial / "programs").mkdir()
        for length in decoder.spec.source_lengths:
            name = _program_file(length)
            decoder.program_for(length).save(partial / name)
            names.append(name)

        safetensors_file.write(partial / _WEIGHTS, dict(decoder.theta.FlattenItems()), {})
        names.append(_WEIGHTS)

        (partial / "vocab").mkdir()
        for path, copy in zip(vocabularies, vocabulary_files(""), strict=True):
            shutil.copyfile(path, partial / copy)
            names.append(str(copy))

        _write_library(partial)

        # Digests of what was written, and of the spec itself.
        files = tuple(digests.describe(partial, name) for name in names)
        contents = _Contents(decoder.spec, files, decoder.origin)
        digests.write_json(partial / _SPEC, _VERSION, dataclasses.asdict(contents))


def _write_library(folder: pathlib.Path) -> None:
    """Writes the library's part, and the versions of the packages that it was exported with."""
    # `python -m` finds the copy first, when it is started in the folder.
    copy = folder / _PACKAGE.name
    copy.mkdir()
    for name in (*_PROGRAMS, *_MODULES):
        shutil.copyfile(_PACKAGE / name, copy / name)
    for room in _ROOMS:
        shutil.copytree(
            _PACKAGE / room,
            copy / room,
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copyfile,  # Without modes, which may be read-only.
        )

    # JAX promises to read its programs for six months, and not for ever.
    pins = [f"{name}=={importlib.metadata.version(name)}\n" for name in _REQUIREMENTS]
    (folder / _PINS).write_text("".join(pins))


def load_spec(folder: str | pathlib.Path) -> DecoderSpec:
    """Reads a bundle's spec; ValueError if it is missing, damaged or of another version."""
    return _contents(folder).spec


def load(folder: str | pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Returns the decoder and the source and target tokenizers of a bundle.

    Raises ValueError as load_spec, or for a damaged file.
    """
    with storage.working(folder) as local_folder:
        contents = _contents(local_folder)
        digests.verify(local_folder, contents.files)

        # Programs and weights are small enough to be read now; compiling waits for the first use.
        programs = {}
        for length in contents.spec.source_lengths:
            programs[length] = program.load(local_folder / _program_file(length))
        weights = safetensors_file.read(local_folder / _WEIGHTS).arrays
        source, target = map(Tokenizer, vocabulary_files(local_folder))

    # The programs of all lengths have the same weights and partitioning.
    shortest = programs[contents.spec.source_lengths[0]]
    theta_spec = shortest.args[0].theta
    decoder = Decoder(
        contents.spec,
        theta=theta_spec.Pack(weights[path] for path, _ in theta_spec.FlattenItems()),
        program_for=programs.__getitem__,
        share=specs.own_share(shortest.partitioning, contents.spec.batch_size),
        # If the decoder was saved without an origin, its files identify it.
        origin=contents.origin or {file.path: file.sha256 for file in contents.files},
    )
    return decoder, source, target


def _contents(folder: str | pathlib.Path) -> _Contents:
    path = storage.path(folder) / _SPEC
    with storage.errors(path, "read"):
        if path.exists():
            read_contents = functools.partial(json_records.read, _Contents)
            return digests.read_json(path, _VERSION, read_contents)
    raise ValueError(f"{folder}: no {_SPEC}; give a folder that lingvo_gshard.export_bundle wrote.")


def _program_file(length: int) -> str:
    return f"programs/source_{length}.program"
