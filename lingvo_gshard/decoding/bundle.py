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
import importlib.metadata
import pathlib
import shutil
import threading
from collections.abc import Callable

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import bundle_spec
from lingvo_gshard.decoding.bundle_spec import BELOW, PINS, WEIGHTS, Contents, DecoderSpec
from lingvo_gshard.files import finite, safetensors_file
from lingvo_gshard.input.bpe_tokenizer import loaded
from lingvo_gshard.input.tokenizer import Tokenizer, vocabulary_files
from lingvo_gshard.spmd import program, specs
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.specs import WHOLE, Share
from xla_spmd.files import atomic_file, digests, storage

_PACKAGE = pathlib.Path(__file__).parents[1]
_REQUIREMENTS = ("absl-py", "jax", "jaxlib", "numpy", "sentencepiece", "flatbuffers", "tqdm")

# The part of the library that a bundle contains: its programs, and all modules that they import.
_PROGRAMS = ("translate.py", "generate.py", "serve.py")
_MODULES = ("__init__.py", "cli.py", "decoder_flags.py", "line_program.py")
_ROOMS = ("core", "decoding", "files", "input", "serving", "sharding", "spmd")


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
        """Decodes a batch of features: spec.reading.features, int32 [B, L], and perhaps others.

        All processes must call it, each with its own rows, and each gets its own rows' results.
        Returns ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
        float32 [B, n, T] and, if the model records it, attention [B, n, T, L]: see Hypotheses.
        """
        # Each length has a program: a batch is padded to the shortest length that holds it.
        ids, _, _ = self.spec.reading.features
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
    bundle_spec.check_folder(folder)
    with atomic_file.replacing_folder(folder) as partial:
        names = []  # The files whose digests bundle.json records.

        (partial / "programs").mkdir()
        for length in decoder.spec.input_lengths:
            name = _program_file(decoder.spec, length)
            decoder.program_for(length).save(partial / name)
            names.append(name)

        safetensors_file.write(partial / WEIGHTS, dict(decoder.theta.FlattenItems()), {})
        names.append(WEIGHTS)

        (partial / "vocab").mkdir()
        copies = vocabulary_files("", decoder.spec.kind)
        for copy, path in dict(zip(copies, vocabularies, strict=True)).items():
            shutil.copyfile(path, partial / copy)
            names.append(str(copy))

        _write_library(partial)

        # Digests of the written files, and of the spec itself.
        files = tuple(digests.describe(partial, name) for name in names)
        contents = Contents(decoder.spec, files, decoder.origin)
        bundle_spec.write(partial, contents)


def _write_library(folder: pathlib.Path) -> None:
    """Writes the library's part, and the versions of the packages at the time of the export."""
    # `python -m` in the folder finds this copy first.
    copy = folder / _PACKAGE.name
    copy.mkdir()
    for name in (*_PROGRAMS, *_MODULES):
        shutil.copyfile(_PACKAGE / name, copy / name)
    for room in (*(f"{_PACKAGE.name}/{room}" for room in _ROOMS), BELOW):
        shutil.copytree(
            _PACKAGE.parent / room,
            folder / room,
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copyfile,  # Without modes, which may be read-only.
        )

    # JAX promises to read its exported programs for six months only.
    pins = [f"{name}=={importlib.metadata.version(name)}\n" for name in _REQUIREMENTS]
    (folder / PINS).write_text("".join(pins), encoding="utf-8")


def load(folder: str | pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Returns the decoder and the source and target tokenizers of a bundle.

    Raises ValueError if a file is missing, damaged or of another version, or if weights are not
    finite.
    """
    with storage.working(folder) as local_folder:
        contents = bundle_spec.read(local_folder)
        digests.verify(local_folder, contents.files)

        # Programs and weights are small enough to be read now; compiling waits for the first use.
        programs = {}
        for length in contents.spec.input_lengths:
            programs[length] = program.load(local_folder / _program_file(contents.spec, length))
        weights = safetensors_file.read(local_folder / WEIGHTS).arrays
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


def _program_file(spec: DecoderSpec, length: int) -> str:
    return f"programs/{spec.reading.input_name}_{length}.program"
