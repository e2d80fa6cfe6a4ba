"""What a bundle decodes, from its bundle.json alone: it can be read before JAX is imported."""

import dataclasses
import functools
import pathlib

from lingvo_gshard.decoding.languages import Languages
from lingvo_gshard.decoding.reading import READINGS, Reading
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import atomic_file, digests, json_records, storage
from xla_spmd.files.digests import File

FILE_NAME = "bundle.json"
WEIGHTS = "weights.safetensors"
PINS = "requirements.txt"
BELOW = "xla_spmd"  # The package below this one; a bundle contains all of it.
_VERSION = 2
# The files and folders of a bundle; see bundle.py.
_ENTRIES = {
    FILE_NAME,
    WEIGHTS,
    PINS,
    "lingvo_gshard",
    BELOW,
    "programs",
    "vocab",
}


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
    def reading(self) -> Reading:
        """The inputs and results of such a model, and its program."""
        return READINGS[self.kind]

    @property
    def spoken(self) -> Languages:
        """The languages to translate between."""
        return Languages(self.kind, self.languages, self.sources, self.targets)

    @property
    def source_languages(self) -> tuple[str, ...]:
        """The codes of the languages to translate from; empty for a language model."""
        return self.spoken.source_languages

    def beginning(self, target: str | None, source: str | None = None) -> str:
        """Returns the text that starts a translated line; see Languages.beginning."""
        return self.spoken.beginning(target, source)


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of bundle.json."""

    spec: DecoderSpec
    files: tuple[File, ...]  # The programs, weights and vocabularies.
    origin: dict[str, str]  # The Decoder's `origin`.


def check_folder(folder: str | pathlib.Path) -> None:
    """Raises ValueError if a folder contains files that are not part of a bundle."""
    atomic_file.check_holds_only(folder, _ENTRIES, "a bundle")


def load_spec(folder: str | pathlib.Path) -> DecoderSpec:
    """Reads a bundle's spec. Raises ValueError if it is missing, damaged or of another version."""
    return read(folder).spec


def write(folder: pathlib.Path, contents: Contents) -> None:
    """Writes the contents of a bundle to its bundle.json."""
    digests.write_json(folder / FILE_NAME, _VERSION, dataclasses.asdict(contents))


def read(folder: str | pathlib.Path) -> Contents:
    """Reads the contents of a bundle; raises the errors of `load_spec`."""
    path = storage.path(folder) / FILE_NAME
    with storage.errors(path, "read"):
        if path.exists():
            read_contents = functools.partial(json_records.read, Contents)
            return digests.read_json(path, _VERSION, read_contents)
    raise ValueError(f"{folder}: no {FILE_NAME}; give a folder that gshard export wrote.")
