"""Makes a run of a model in transformers' format: its settings, its vocabulary, its weights.

The weights are read part by part and written to a checkpoint of step 0, so that only a few parts
are in memory, however large the model is. The result is a run like any other: it can be decoded,
evaluated, exported and planned on any number of devices, and other runs can start from it.
"""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence

from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.hugging_face import decoder_tokenizer, families, generation
from lingvo_gshard.hugging_face.config import Config
from lingvo_gshard.hugging_face.folder import Folder
from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.input.fairseq_vocabulary import Vocabulary
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.model import placement
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import new_run
from lingvo_gshard.runs.launch import Launch


@dataclasses.dataclass(frozen=True)
class Imported:
    """The model that was imported, and counts."""

    model: str
    kind: str  # The Kind of text that it reads.
    num_weights: int
    num_tensor_bytes: int  # The size of all tensors in the folder.
    num_arrays: int
    num_continued: int  # The arrays that an earlier process had written.
    has_vocabulary: bool  # Whether the folder has a tokenizer.
    has_chats: bool  # Whether the tokenizer has a chat template.
    decode_settings: tuple[str, ...]  # `path=value` settings from the folder's for generate.
    not_used: tuple[str, ...]  # The folder's other contents, a line for each file and the tensors.
    secs: float


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder's files except for the weights, in our terms."""

    folder: pathlib.Path
    config: Config
    model: str  # The registered model.
    settings: tuple[str, ...]  # `path=value` settings in which the folder's model differs.
    generated: Fields  # The options of transformers' generate.
    decode_settings: tuple[str, ...]  # `path=value` settings from `generated`.
    vocabulary: Vocabulary | None  # None without a tokenizer.
    has_chats: bool  # Whether the tokenizer has a chat template.

    def launch(self, settings: Sequence[str] = ()) -> Launch:
        """Returns the launch of a run with more `settings`."""
        size = self.config["vocab_size"]
        facts = DataFacts(
            size,
            size,
            kind=self.config.KIND,
            language_tokens=_languages(self.vocabulary),
            imported_ids=self.config.rows,
        )
        launch = Launch(self.model, (), None, facts)
        return launch.changed([*self.settings, *self.decode_settings, *settings])


def read(folder: pathlib.Path) -> Source:
    """Reads a folder's files, except for the weights.

    Raises ValueError for a file that is missing or damaged, and for a model or a vocabulary that we
    do not support.
    """
    config = families.read(folder)
    model, settings = config.launched_model()
    generated = generation.fields(folder, config)

    vocabulary = None
    has_chats = False
    if config.KIND is not Kind.TEXT:
        vocabulary = _fairseq_vocabulary(folder, config)
    elif tokenizer := decoder_tokenizer.read(folder):
        config = config.ending_with(tokenizer.eos_id, generated)
        vocabulary = tokenizer.vocabulary(config)
        has_chats = tokenizer.chat_template is not None

    decode_settings = tuple(generation.settings(generated, config))
    return Source(
        folder, config, model, settings, generated, decode_settings, vocabulary, has_chats
    )


def import_folder(
    folder: str | pathlib.Path, logdir: str | pathlib.Path, settings: Sequence[str] = ()
) -> Imported:
    """Writes a run of the model in a folder of transformers, with `path=value` settings.

    Raises ValueError for a folder whose weights do not fit its config.json, a model that we do not
    support, or a damaged file; and for a logdir with another model, or with checkpoints. Then it
    removes its files from logdir.
    """
    began_secs = time.monotonic()
    source = read(pathlib.Path(folder))
    launch, params = launches.with_product_dtype(source.launch(settings), str(logdir))

    # Mistakes that the files' headers show are found before anything is written.
    contents = new_run.contents(params)
    files = Folder(source.folder, source.config, contents.state_spec.theta)
    vocabularies = [] if source.vocabulary is None else [source.vocabulary.model] * 2
    written = new_run.write(logdir, launch, contents, files.arrays, files.identity(), vocabularies)
    assert launch.facts.kind is not None
    return Imported(
        source.model,
        launch.facts.kind,
        placement.num_weights(params),
        files.num_bytes,
        written.num_arrays,
        written.num_continued,
        source.vocabulary is not None,
        source.has_chats,
        source.decode_settings,
        tuple(not_used(source, files)),
        time.monotonic() - began_secs,
    )


def not_used(source: Source, weights: Folder) -> list[str]:
    """Returns lines that name a folder's unused fields, tensors and files."""
    lines = json_fields.not_used(source.config.values)
    used = {source.config.path, source.generated.path, *weights.paths}
    if source.generated is not source.config.values:
        lines += json_fields.not_used(source.generated)
    if source.vocabulary is not None:
        lines += source.vocabulary.not_used
        is_bpe = source.vocabulary.is_bpe
        files = decoder_tokenizer.FILES if is_bpe else fairseq_vocabulary.FILES
        used |= {source.folder / name for name in files}
    lines += weights.not_used

    others = []
    for path in sorted(source.folder.iterdir()):
        if path not in used:
            others.append(json_fields.shown(path.name) + ("/" if path.is_dir() else ""))
    if others:
        lines.append(f"files: {', '.join(others)}")
    return lines


def _fairseq_vocabulary(folder: pathlib.Path, config: Config) -> Vocabulary | None:
    """Returns the vocabulary of a SentencePiece model; None without one.

    Raises ValueError if its size or its special tokens differ from the config's.
    """
    if not (folder / fairseq_vocabulary.MODEL).is_file():
        return None
    # The first pieces are in fairseq's order.
    rows = tuple(fairseq_vocabulary.rows(len(config.rows)).tolist())
    if config.rows != rows:
        raise ValueError(
            f"{config.path}: pad, bos and eos are {list(config.rows)}, and the tokenizer's "
            f"{list(rows)}."
        )
    return fairseq_vocabulary.read_all(folder)


def _languages(vocabulary: Vocabulary | None) -> tuple[str, ...]:
    """Returns the codes of the languages for which a vocabulary has tokens."""
    if vocabulary is None or vocabulary.is_bpe:
        return ()
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(vocabulary.model)
        file.flush()
        return tuple(Tokenizer(file.name).languages)
