"""A bundle: a folder that translates with jax, numpy and sentencepiece alone.

bundle.json                    the decoder's spec
programs/source_<L>.program    the search over a batch of sources of length L
weights.safetensors            theta by dotted path
vocab/{source,target}.model    SentencePiece models
lingvo_gshard/                 the modules that run it
requirements.txt               the packages that they need

cd BUNDLE && python -m lingvo_gshard.translate --bundle=.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import shutil
from collections.abc import Callable

from lingvo_gshard.core import safetensors_file
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode.decoder import Decoder, DecoderSpec
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.spmd import program
from lingvo_gshard.spmd.program import Program

_VERSION = 1
_SPEC = "bundle.json"
_REQUIREMENTS = ("absl-py", "jax", "jaxlib", "numpy", "sentencepiece", "flatbuffers")
_WEIGHTS = "weights.safetensors"
_PACKAGE = pathlib.Path(__file__).parents[1]
# The modules that `translate --bundle` imports; their packages' __init__.py are copied as well.
_RUNTIME = (
    "cli.py",
    "translate.py",
    "core/atomic_file.py",
    "core/json_records.py",
    "core/nested_map.py",
    "core/safetensors_file.py",
    "hlo/*.py",
    "sharding/mesh.py",
    "sharding/layout.py",
    "spmd/*.py",
    "input/sentences.py",
    "input/example_codec.py",
    "input/manifest.py",
    "input/tokenizer.py",
    "decode/bundle.py",
    "decode/decoder.py",
    "decode/translator.py",
    "serving/*",
)


def save(
    folder: str | pathlib.Path,
    spec: DecoderSpec,
    program_for: Callable[[int], Program],
    theta: NestedMap,
    vocabularies: tuple[pathlib.Path, pathlib.Path],
) -> None:
    """Writes a bundle. bundle.json comes last, so that a folder without it is incomplete.

    Overwriting a bundle first invalidates the old one.

    Args:
      folder: created if missing.
      spec: the decoder's.
      program_for: see Decoder.
      theta: the weights.
      vocabularies: the files of the source and target SentencePiece models.
    """
    folder = pathlib.Path(folder)
    for name in ("programs", "vocab"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / _SPEC).unlink(missing_ok=True)
    for length in spec.source_lengths:
        program_for(length).save(_program_file(folder, length))
    safetensors_file.write(folder / _WEIGHTS, dict(theta.FlattenItems()), {})
    for path, copy in zip(vocabularies, _vocabulary_files(folder), strict=True):
        shutil.copyfile(path, copy)
    _copy_runtime(folder / _PACKAGE.name)
    pins = [f"{name}=={importlib.metadata.version(name)}\n" for name in _REQUIREMENTS]
    (folder / "requirements.txt").write_text("".join(pins))
    fields = {"version": _VERSION, **dataclasses.asdict(spec)}
    (folder / _SPEC).write_text(json.dumps(fields, indent=2) + "\n")


def load_spec(folder: str | pathlib.Path) -> DecoderSpec:
    """Reads the spec of a bundle.

    Raises:
      ValueError: the folder is not a bundle, is damaged or has another version.
    """
    path = pathlib.Path(folder, _SPEC)
    if not path.is_file():
        raise ValueError(f"{folder}: no {_SPEC}; give a folder that `translate --export` wrote.")
    try:
        fields = json.loads(path.read_text())
        version = fields.pop("version")
        if version != _VERSION:
            raise ValueError(f"has version {version}, expected {_VERSION}; export it again")
        lists = {name: tuple(fields[name]) for name in ("languages", "source_lengths")}
        return DecoderSpec(**{**fields, **lists})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}.") from error


def load(folder: str | pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Returns the decoder and the source and target tokenizers of a bundle.

    Raises:
      ValueError: as load_spec; or the weights are damaged or do not match the programs.
    """
    folder, spec = pathlib.Path(folder), load_spec(folder)
    programs = {n: program.load(_program_file(folder, n)) for n in spec.source_lengths}
    theta = _weights(folder / _WEIGHTS, programs[spec.source_lengths[0]].args[0].theta)
    source, target = (Tokenizer(path) for path in _vocabulary_files(folder))
    return Decoder(spec, theta, programs.__getitem__), source, target


def _weights(path: pathlib.Path, wanted: NestedMap) -> NestedMap:
    """Reads the weights that a program takes, given their TensorSpecs; raises as `load`."""
    held, specs = safetensors_file.read(path).arrays, dict(wanted.FlattenItems())
    if set(held) != set(specs):
        missing, extra = sorted(set(specs) - set(held)), sorted(set(held) - set(specs))
        raise ValueError(f"{path}: lacks {missing[:3]}, should not hold {extra[:3]}.")
    for name, spec in specs.items():
        found = (held[name].shape, str(held[name].dtype))
        if found != (spec.shape, spec.dtype):
            raise ValueError(f"{path}: {name} is {found}, expected {(spec.shape, spec.dtype)}.")
    return wanted.Pack(held[name] for name in specs)


def _program_file(folder: pathlib.Path, length: int) -> pathlib.Path:
    return folder / "programs" / f"source_{length}.program"


def _vocabulary_files(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    return folder / "vocab" / "source.model", folder / "vocab" / "target.model"


def _copy_runtime(package: pathlib.Path) -> None:
    for pattern in _RUNTIME:
        for module in sorted(path for path in _PACKAGE.glob(pattern) if path.is_file()):
            for path in (module, module.parent / "__init__.py", _PACKAGE / "__init__.py"):
                copy = package / path.relative_to(_PACKAGE)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
