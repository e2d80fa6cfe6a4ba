"""A decoder: a trained model that decodes batches. A bundle: the folder that one is saved in.

A bundle decodes with jax, numpy and sentencepiece alone:

bundle.json                    the decoder's spec, and digests of the model's files
programs/source_<L>.program    the search over a batch of sources of length L; prompt_<L>.program of
                               a language model
weights.safetensors            theta by dotted path
vocab/{source,target}.model    SentencePiece models; text.model of a language model
lingvo_gshard/                 the part of the library that decodes and serves
requirements.txt               the packages that they need

B batch, L input length, n hypotheses, T target length.
"""

import dataclasses
import difflib
import importlib.metadata
import pathlib
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.reading import READINGS
from lingvo_gshard.files import atomic_file, digests, json_records, safetensors_file, storage
from lingvo_gshard.files.digests import File
from lingvo_gshard.input.example_codec import listed, source_languages, target_token
from lingvo_gshard.input.manifest import Kind
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

# The part of the library that a bundle holds: its programs, and all that they import.
_PROGRAMS = ("translate.py", "generate.py", "serve.py")
_MODULES = ("__init__.py", "cli.py", "decoder_flags.py", "line_program.py")
_ROOMS = ("core", "decoding", "files", "hlo", "input", "serving", "sharding", "spmd")


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """What the caller of a decoder must know."""

    model: str  # A registered name.
    languages: tuple[str, ...]  # Codes, en-de for German from English; names of corpora of text.
    batch_size: int
    input_lengths: tuple[int, ...]  # There is a program for each, shortest first.
    num_best: int  # Of a line.
    num_partitions: int
    # The languages to translate into, which a source names by its first token; none if the model
    # translates into English alone.
    targets: tuple[str, ...] = ()
    # The Kind of the data that the model learned from: PARALLEL translates lines, TEXT continues
    # them.
    kind: str = Kind.PARALLEL
    # Whether a row has one sample, which is a function of its input and of its own seed.
    is_sampled: bool = False
    # The languages to translate from, if the vocabulary has tokens of languages: a source begins
    # with its own, and a translation is made to begin with that of its target.
    sources: tuple[str, ...] = ()
    # What the large weights are kept in: float32, float32_laid_out, bfloat16 or int8.
    weights: str = "float32"

    @property
    def input_name(self) -> str:
        """Returns what a row reads: a source or a prompt."""
        return READINGS[self.kind].input_name

    @property
    def does(self) -> str:
        """Returns what the model does: translates lines, or continues prompts."""
        return READINGS[self.kind].does

    @property
    def noun(self) -> str:
        """Returns what a line gets: a translation or a continuation."""
        return READINGS[self.kind].noun

    @property
    def inputs(self) -> tuple[str, str, str]:
        """Returns the names of the features that are ids, segments and positions of inputs."""
        return READINGS[self.kind].features

    @property
    def command(self) -> str:
        """Returns the program that decodes lines with it: translate or generate."""
        return READINGS[self.kind].command

    @property
    def source_languages(self) -> tuple[str, ...]:
        """Returns the codes of the languages to translate from; none of a language model."""
        if self.kind == Kind.TEXT:
            return ()
        return self.sources or source_languages(self.languages)

    def beginning(self, target: str | None, source: str | None = None) -> str:
        """Returns what a line must begin with to be translated from `source` into `target`.

        None stands for the only target, and for a source that is not named. Raises ValueError if
        the model does not translate so, or if one of them has to be chosen.
        """
        if self.sources:
            _check_named("source_lang", source, self.sources)
            _check_named("target_lang", target, self.targets)
            return f"{source} {target} "

        # The source names the target, or there is only one.
        if self.targets:
            _check_named("target_lang", target, self.targets)
            assert target is not None
            return f"{target_token(target)} "
        if target is not None:
            targets = "no language" if self.kind == Kind.TEXT else "English alone"
            raise ValueError(f"target_lang {target}: the model translates into {targets}")
        return ""


def _check_named(option: str, code: str | None, codes: Sequence[str]) -> None:
    """Raises ValueError unless the option names one of the languages."""
    if code in codes:
        return

    given = "is missing" if code is None else code
    near = difflib.get_close_matches(code or "", codes, n=1, cutoff=0.5)
    hint = f". Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{option} {given}: expected one of {listed(codes)}{hint}")


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
    # Takes a length of inputs, and returns a program whose arguments are state.theta and
    # batch.features.
    program_for: Callable[[int], Program]
    share: Share = WHOLE  # This process's part of a batch's rows.
    # Identifies the weights and settings: what was decoded with others is decoded anew.
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    _compiled: dict[int, Executable] = dataclasses.field(default_factory=dict, init=False)
    _compiling: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def __call__(self, features: NestedMap) -> dict[str, np.ndarray]:
        """Decodes a batch of the program's features: spec.inputs, int32 [B, L], and others.

        All processes must call it, each with its own rows, and get the results of these.
        Returns ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
        float32 [B, n, T] and, if the model records it, attention [B, n, T, L]: see Hypotheses.
        """
        # One program for each length: a batch is padded to the shortest that holds it.
        ids, _, _ = self.spec.inputs
        run = self._executable(features[ids].shape[1])
        result = run(NestedMap(theta=self.theta), NestedMap(features=features))
        return dict(self.share.of(result.predictions).FlattenItems())

    def compile(self) -> None:
        """Compiles the programs of all lengths."""
        for length in self.spec.input_lengths:
            self._executable(length)

    def _executable(self, length: int) -> Executable:
        with self._compiling:
            if length not in self._compiled:
                executable = compile_program(self.program_for(length))
                # Once placed, the weights are not moved again: all programs split them alike.
                self.theta = executable.place("state", NestedMap(theta=self.theta)).theta
                self._compiled[length] = executable
            return self._compiled[length]


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
        for length in decoder.spec.input_lengths:
            name = _program_file(decoder.spec, length)
            decoder.program_for(length).save(partial / name)
            names.append(name)

        safetensors_file.write(partial / _WEIGHTS, dict(decoder.theta.FlattenItems()), {})
        names.append(_WEIGHTS)

        (partial / "vocab").mkdir()
        copies = vocabulary_files("", decoder.spec.kind)
        for copy, path in dict(zip(copies, vocabularies, strict=True)).items():
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
    (folder / _PINS).write_text("".join(pins), encoding="utf-8")


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
        for length in contents.spec.input_lengths:
            programs[length] = program.load(local_folder / _program_file(contents.spec, length))
        weights = safetensors_file.read(local_folder / _WEIGHTS).arrays
        source, target = map(Tokenizer, vocabulary_files(local_folder, contents.spec.kind))

    # The programs of all lengths have the same weights and partitioning.
    shortest = programs[contents.spec.input_lengths[0]]
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
            return digests.read_json(path, _VERSION, _parsed)
    raise ValueError(f"{folder}: no {_SPEC}; give a folder that lingvo_gshard.export_bundle wrote.")


def _parsed(fields: dict[str, Any]) -> _Contents:
    # Older bundles have the lengths under the name that all inputs had: sources.
    spec = dict(fields["spec"])
    if "source_lengths" in spec:
        spec["input_lengths"] = spec.pop("source_lengths")
    contents: _Contents = json_records.read(_Contents, fields | {"spec": spec})
    return contents


def _program_file(spec: DecoderSpec, length: int) -> str:
    return f"programs/{spec.input_name}_{length}.program"
