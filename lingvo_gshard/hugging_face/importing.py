"""Makes a run of a model in transformers' format: its settings, its vocabulary, its weights.

The weights are read part by part and written to a checkpoint of step 0, so that no more than a few
parts are in memory, however large the model is. A run like any other is the result: it is decoded,
evaluated, exported and planned on any number of devices, and others start from it.
"""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence

from lingvo_gshard.checkpoints import streamed
from lingvo_gshard.checkpoints.checkpoints import Contents
from lingvo_gshard.hugging_face import config as configs
from lingvo_gshard.hugging_face.config import Config
from lingvo_gshard.hugging_face.folder import Folder
from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import new_run
from lingvo_gshard.runs.launch import Launch


@dataclasses.dataclass(frozen=True)
class Imported:
    """What was imported."""

    model: str
    num_weights: int
    num_tensor_bytes: int  # Of all tensors in the folder.
    num_arrays: int
    num_continued: int  # Of the arrays, those that an earlier process had written.
    has_vocabulary: bool  # Whether the folder has a tokenizer.
    secs: float


def import_folder(
    folder: str | pathlib.Path, logdir: str | pathlib.Path, settings: Sequence[str] = ()
) -> Imported:
    """Writes a run of the model in a folder of transformers, with `path=value` settings.

    Raises ValueError for a folder that holds another model than its config.json says, one that we
    compute otherwise, or a damaged file; and for a logdir with another model, or with checkpoints.
    Then nothing is left in logdir.
    """
    began_secs = time.monotonic()
    source = pathlib.Path(folder)
    config = configs.read(source)
    model, overrides = configs.launched_model(config)
    vocabulary = _vocabulary(source, config)
    size = config["vocab_size"]
    facts = DataFacts(size, size, language_tokens=_languages(vocabulary))
    launch = Launch(model, (), None, facts).changed([*overrides, *settings])
    launch, params = launches.with_product_dtype(launch, str(logdir))

    # All mistakes that headers tell are found before anything is written.
    partitioning = placement.partitioning(params, 1)
    state_spec = TaskModel(params, partitioning).state_spec
    files = Folder(source, config, params.task, state_spec.theta)
    vocabularies = [] if vocabulary is None else [vocabulary, vocabulary]
    with new_run.claimed(launch, params, logdir, vocabularies):
        written = streamed.write(
            logdir,
            new_run.STEP,
            Contents(params, partitioning, state_spec),
            streamed.first_state(state_spec, files.arrays),
            files.identity(),
        )
    return Imported(
        model,
        placement.num_weights(params),
        files.num_bytes,
        written.num_arrays,
        written.num_continued,
        vocabulary is not None,
        time.monotonic() - began_secs,
    )


def _vocabulary(folder: pathlib.Path, config: Config) -> bytes | None:
    """Returns the folder's vocabulary as a SentencePiece model of ours; None without a tokenizer.

    Raises ValueError if it is of another size, or orders its first pieces otherwise.
    """
    if not (folder / fairseq_vocabulary.MODEL).is_file():
        return None
    rows = tuple(fairseq_vocabulary.rows(len(config.rows)).tolist())
    if config.rows != rows:
        raise ValueError(
            f"{config.path}: pad, bos and eos are {list(config.rows)}, and the tokenizer's "
            f"{list(rows)}."
        )
    return fairseq_vocabulary.read(folder)


def _languages(vocabulary: bytes | None) -> tuple[str, ...]:
    """Returns the codes of the languages that a vocabulary has tokens of."""
    if vocabulary is None:
        return ()
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(vocabulary)
        file.flush()
        return tuple(Tokenizer(file.name).languages)
