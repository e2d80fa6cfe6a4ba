"""A decoder is a trained model that decodes batches; a bundle is the folder that stores one.

A bundle decodes with only the packages jax, numpy and sentencepiece:

bundle.json                    the decoder's spec, and digests of the model's files
programs/source_<L>.program    the search over a batch of sources of length L; for a language
                               model, prompt_<L>.program
weights.safetensors            theta by dotted path
vocab/{source,target}.model    SentencePiece models; for a language model, text.model
lingvo_gshard/, xla_spmd/      the part of the library that decodes and serves
requirements.txt               the packages that a bundle needs

B batch, L input length, n hypotheses, T target length.
"""

import dataclasses
import difflib
import functools
import importlib.metadata
import pathlib
import shutil
import threading
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.reading import READINGS
from lingvo_gshard.files import finite, safetensors_file
from lingvo_gshard.input.bpe_tokenizer import loaded
from lingvo_gshard.input.example_codec import listed, source_languages, target_token
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.tokenizer import Tokenizer, vocabulary_files
from lingvo_gshard.spmd import program, specs
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.specs import WHOLE, Share
from xla_spmd.files import atomic_file, digests, json_records, storage
from xla_spmd.files.digests import File

_VERSION = 2
_SPEC = "bundle.json"
_WEIGHTS = "weights.safetensors"
_PINS = "requirements.txt"
_PACKAGE = pathlib.Path(__file__).parents[1]
_BELOW = "xla_spmd"  # The package below this one; a bundle contains all of it.
_ENTRIES = {_SPEC, _WEIGHTS, _PINS, _PACKAGE.name, _BELOW, "programs", "vocab"}
_REQUIREMENTS = ("absl-py", "jax", "jaxlib", "numpy", "sentencepiece", "flatbuffers", "tqdm")

# The part of the library that a bundle contains: its programs, and all modules that they import.
_PROGRAMS = ("translate.py", "generate.py", "serve.py")
_MODULES = ("__init__.py", "cli.py", "decoder_flags.py", "line_program.py")
_ROOMS = ("core", "decoding", "files", "input", "serving", "sharding", "spmd")


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """The properties of a decoder that its callers need."""

    model: str  # A registered name.
    # Codes, such as en-de for German from English; for a language model, names of corpora.
    languages: tuple[str, ...]
    batch_size: int
    input_lengths: tuple[int, ...]  # Each has a separate program; the shortest comes first.
    num_best: int  # The number of results for each line.
    num_partitions: int
    # The languages to translate into, which a source names by its first token. Empty if the model
    # translates only into English.
    targets: tuple[str, ...] = ()
    # The Kind of the data that the model learned from: PARALLEL translates lines, TEXT continues
    # them.
    kind: str = Kind.PARALLEL
    # Whether a row has one sample, which depends only on its input and its own seed.
    is_sampled: bool = False
    # The languages to translate from, if the vocabulary has tokens of languages: then a source
    # begins with its own language's token, and its translation must begin with the target's.
    sources: tuple[str, ...] = ()
    # The format of the large weights: float32, float32_laid_out, bfloat16 or int8.
    weights: str = "float32"

    @property
    def input_name(self) -> str:
        """The name of a row's input: source or prompt."""
        return READINGS[self.kind].input_name

    @property
    def does(self) -> str:
        """The model's task in words: it translates lines, or continues prompts."""
        return READINGS[self.kind].does

    @property
    def noun(self) -> str:
        """The name of a line's result: translation or continuation."""
        return READINGS[self.kind].noun

    @property
    def inputs(self) -> tuple[str, str, str]:
        """The names of the features with the ids, segments and positions of inputs."""
        return READINGS[self.kind].features

    @property
    def command(self) -> str:
        """The program that decodes lines with this model: translate or generate."""
        return READINGS[self.kind].command

    @property
    def source_languages(self) -> tuple[str, ...]:
        """The codes of the languages to translate from; empty for a language model."""
        if self.kind == Kind.TEXT:
            return ()
        return self.sources or source_languages(self.languages)

    def beginning(self, target: str | None, source: str | None = None) -> str:
        """Returns the text that starts a line that is translated from `source` into `target`.

        None means the only target, or an unnamed source. Raises ValueError if the model does not
        translate in this direction, or if a language is None and must be chosen.
        """
        if self.sources:
            _check_named("source_lang", source, self.sources)
            _check_named("target_lang", target, self.targets)
            return f"{source} {target} "

        # The source's beginning names the target, or there is only one target.
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
    """The contents of bundle.json."""

    spec: DecoderSpec
    files: tuple[File, ...]  # The programs, weights and vocabularies.
    origin: dict[str, str]  # The Decoder's `origin`.


@dataclasses.dataclass
class Decoder:
    """Decodes batches; compiles the program of each length when it is first needed."""

    spec: DecoderSpec
    theta: NestedMap
    # Returns the program for a length of inputs; its arguments are state.theta and batch.features.
    program_for: Callable[[int], Program]
    share: Share = WHOLE  # This process's part of a batch's rows.
    # Identifies the weights and settings. Results of another origin are decoded again.
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    _compiled: dict[int, Executable] = dataclasses.field(default_factory=dict, init=False)
    _compiling: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def __call__(self, features: NestedMap) -> dict[str, np.ndarray]:
        """Decodes a batch of the program's features: spec.inputs, int32 [B, L], and others.

        All processes must call it, each with its own rows, and each gets its own rows' results.
        Returns ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
        float32 [B, n, T] and, if the model records it, attention [B, n, T, L]: see Hypotheses.
        """
        # Each length has a program: a batch is padded to the shortest length that holds it.
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
                # Once placed, the weights are not moved again: all programs split them equally.
                self.theta = executable.place("state", NestedMap(theta=self.theta)).theta
                self._compiled[length] = executable
            return self._compiled[length]


def save(
    folder: str | pathlib.Path, decoder: Decoder, vocabularies: tuple[pathlib.Path, pathlib.Path]
) -> None:
    """Writes a decoder and its source and target SentencePiece models.

    The folder appears whole, in place of any earlier bundle. Raises ValueError if it contains files
    that are not part of a bundle.
    """
    atomic_file.check_holds_only(folder, _ENTRIES, "a bundle")
    with atomic_file.replacing_folder(folder) as partial:
        names = []  # The files whose digests bundle.json records.

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

        # Digests of the written files, and of the spec itself.
        files = tuple(digests.describe(partial, name) for name in names)
        contents = _Contents(decoder.spec, files, decoder.origin)
        digests.write_json(partial / _SPEC, _VERSION, dataclasses.asdict(contents))


def _write_library(folder: pathlib.Path) -> None:
    """Writes the library's part, and the versions of the packages at the time of the export."""
    # `python -m` in the folder finds this copy first.
    copy = folder / _PACKAGE.name
    copy.mkdir()
    for name in (*_PROGRAMS, *_MODULES):
        shutil.copyfile(_PACKAGE / name, copy / name)
    for room in (*(f"{_PACKAGE.name}/{room}" for room in _ROOMS), _BELOW):
        shutil.copytree(
            _PACKAGE.parent / room,
            folder / room,
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copyfile,  # Without modes, which may be read-only.
        )

    # JAX promises to read its exported programs for six months only.
    pins = [f"{name}=={importlib.metadata.version(name)}\n" for name in _REQUIREMENTS]
    (folder / _PINS).write_text("".join(pins), encoding="utf-8")


def load_spec(folder: str | pathlib.Path) -> DecoderSpec:
    """Reads a bundle's spec. Raises ValueError if it is missing, damaged or of another version."""
    return _contents(folder).spec


def load(folder: str | pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Returns the decoder and the source and target tokenizers of a bundle.

    Raises ValueError if a file is missing, damaged or of another version, or if weights are not
    finite.
    """
    with storage.working(folder) as local_folder:
        contents = _contents(local_folder)
        digests.verify(local_folder, contents.files)

        # Programs and weights are small enough to be read now; compiling waits for the first use.
        programs = {}
        for length in contents.spec.input_lengths:
            programs[length] = program.load(local_folder / _program_file(contents.spec, length))
        weights = safetensors_file.read(local_folder / _WEIGHTS).arrays
        counts = {name: finite.num_not_finite(array) for name, array in weights.items()}
        finite.check(str(folder), counts)
        source, target = map(loaded, vocabulary_files(local_folder, contents.spec.kind))

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
            read_contents = functools.partial(json_records.read, _Contents)
            return digests.read_json(path, _VERSION, read_contents)
    raise ValueError(f"{folder}: no {_SPEC}; give a folder that gshard export wrote.")


def _program_file(spec: DecoderSpec, length: int) -> str:
    return f"programs/{spec.input_name}_{length}.program"
