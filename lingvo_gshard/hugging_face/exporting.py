"""Writes a run's weights as a model that transformers loads.

    config.json, generation_config.json
    model.safetensors, or model-00001-of-00003.safetensors and so on with an index
    tokenizer_config.json, and what its tokenizer reads: see tokenizer_files.py

Dense models become M2M-100, and those with experts NLLB-MoE. What our layers lack is written as it
would be without effect: biases of 0. The weights are read array by array, of experts one expert at
a time, so that no more of them is in memory.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lingvo_gshard.beam_search.beam import Rules, Stopping
from lingvo_gshard.checkpoints.stored import SavedArray
from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import atomic_file, safetensors_file, storage
from lingvo_gshard.hugging_face import names, tokenizer_files, written_config
from lingvo_gshard.hugging_face.config import CONFIG
from lingvo_gshard.hugging_face.folder import block_size
from lingvo_gshard.hugging_face.names import Family, Piece
from lingvo_gshard.input.example_codec import PAD_ID
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import Run

PART_BYTES = 5 * 10**9  # As Hugging Face's parts.
_PREFIX = "model."
_EARLY_STOPPING = {Stopping.DECIDED: "never", Stopping.LIKELY: False, Stopping.FIRST: True}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to write, which is read when it is converted to an array."""

    shape: tuple[int, ...]
    read: Any  # () -> np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Returns float32, which all weights have."""
        return np.dtype(np.float32)

    @property
    def num_bytes(self) -> int:
        """Returns its size."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.ascontiguousarray(self.read(), np.float32)


def export_folder(run: Run, folder: str | pathlib.Path, part_bytes: int = PART_BYTES) -> list[str]:
    """Writes the weights that the run decodes with; returns what a user should know of them.

    Raises ValueError, in one line, if transformers' models cannot express this one, and as
    Estimator.saved_weights.
    """
    task = run.params.task
    vocabularies = _vocabularies(run)
    # Where padding has positions of its own, as in released models, it has their id, too; and so it
    # has in their tokenizers.
    has_their_ids = task.embedding.first_position > 0
    if vocabularies is not None and tokenizer_files.has_languages(vocabularies):
        has_their_ids = True
    rows = (1, 0, 2) if has_their_ids else (0, 1, 2)
    config = written_config.written(task, rows)
    arrays = run.estimator.saved_weights(**run.averaged)
    tensors = _tensors(task, arrays, Family(config["model_type"]), rows)

    with storage.working(folder) as local_folder:
        path = pathlib.Path(local_folder)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ValueError(f"{folder} is not empty: export to a new folder.")
        notes = _write_tokenizer(path, vocabularies, task.target_vocab_size, rows)
        _write(path, tensors, part_bytes)
        generation = _generation(run.params.decode, config) | {"pad_token_id": rows[PAD_ID]}
        _write_json(path / "generation_config.json", generation)
        # Last: a folder without it is no model.
        _write_json(path / CONFIG, config)
    return [*notes, *_notes(run.params, config)]


def _vocabularies(run: Run) -> tuple[pathlib.Path, pathlib.Path] | None:
    """Returns the paths of a run's vocabularies; None of one that was imported without them."""
    paths = launches.vocabularies(run.logdir)
    return paths if all(path.is_file() for path in paths) else None


def _write_tokenizer(
    folder: pathlib.Path,
    vocabularies: tuple[pathlib.Path, pathlib.Path] | None,
    size: int,
    rows: tuple[int, int, int],
) -> list[str]:
    """Writes the tokenizer's files; returns a note if there are none."""
    if vocabularies is None:
        return ["The run has no vocabulary, so there is no tokenizer."]
    try:
        files = tokenizer_files.files(vocabularies, size, rows)
    except ValueError as error:
        return [f"There is no tokenizer: {error}."]
    for name, content in files.items():
        atomic_file.write(folder / name, content)
    return []


def _tensors(
    task: Params, arrays: Mapping[str, SavedArray], family: Family, rows: tuple[int, int, int]
) -> dict[str, _Tensor]:
    """Returns all tensors by their full names, those of one of our weights side by side."""
    tensors: dict[str, _Tensor] = {}
    reader = _Reader()
    for path, array in arrays.items():
        if array.spec.dims in ("VM", "MV"):
            read = functools.partial(_read_table, array, rows)
            vocab_size = task.target_vocab_size
            for name in _table_names(path, task):
                tensors[name] = _Tensor((vocab_size, task.dim), read)
            continue

        for piece in _by_expert(names.pieces(path, array.spec, family, block_size(task, path))):
            read = functools.partial(reader.tensor, array, piece)
            tensors[_PREFIX + piece.name] = _Tensor(piece.shape, read)
    return tensors | _zero_biases(tensors)


def _table_names(path: str, task: Params) -> list[str]:
    """Returns the names of the tensors that a table or the softmax is."""
    if path == names.SOFTMAX:
        return ["lm_head.weight"]
    if task.shared_embeddings:
        return ["model.shared.weight"]
    if path == names.SOURCE_TABLE:
        return ["model.shared.weight", "model.encoder.embed_tokens.weight"]
    return ["model.decoder.embed_tokens.weight"]


def _read_table(array: SavedArray, rows: tuple[int, int, int]) -> np.ndarray:
    """Returns a table [V, M], or the softmax's weights as one, in the order of their ids."""
    ours = array[()]
    if array.spec.dims == "MV":
        ours = ours.T
    theirs = ours.copy()
    theirs[list(rows)] = ours[: len(rows)]
    return theirs


def _by_expert(pieces: list[Piece]) -> list[Piece]:
    """Returns pieces with the blocks of each expert side by side: they are read together."""
    return sorted(pieces, key=lambda piece: piece.index[::-1])


class _Reader:
    """Reads tensors, and keeps what it read last: the next one may be another part of it."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._values = np.zeros(0)

    def tensor(self, array: SavedArray, piece: Piece) -> np.ndarray:
        """Returns the tensor that is a piece of an array, checked."""
        dims = array.spec.dims
        values = self._read(array, piece)
        if dims.startswith(STACKED):
            values = values[piece.index[0]]

        if names.is_transposed(dims[len(piece.index) :]):
            return values.reshape(piece.shape[::-1]).T
        return values.reshape(piece.shape)

    def _read(self, array: SavedArray, piece: Piece) -> np.ndarray:
        """Returns the expert of a piece in all blocks, or the whole array without experts."""
        axis = array.spec.dims.find("E")
        expert = piece.index[axis] if axis >= 0 else -1
        if self._key != (array.name, expert):
            self._values = np.zeros(0)  # Before the next is in memory.
            if axis < 0:
                self._values = array[()]
            else:
                index = (*[slice(None)] * axis, slice(expert, expert + 1))
                self._values = np.squeeze(array[index], axis)
            self._key = (array.name, expert)
        return self._values


def _zero_biases(tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Returns the biases that transformers has, and our layers do not."""
    biases = {}
    for name, tensor in tensors.items():
        has_bias = name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))
        bias = name.removesuffix("weight") + "bias"
        if has_bias and bias not in tensors:
            shape = tensor.shape[:1]
            biases[bias] = _Tensor(shape, functools.partial(np.zeros, shape, np.float32))
    return biases


def _write(folder: pathlib.Path, tensors: Mapping[str, _Tensor], part_bytes: int) -> None:
    """Writes the tensors in parts of at most `part_bytes`, and the index of several parts."""
    parts = list(_packed(tensors, part_bytes))
    metadata = {"format": "pt"}
    if len(parts) == 1:
        safetensors_file.write(folder / "model.safetensors", parts[0], metadata, in_order=True)
        return

    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        safetensors_file.write(folder / file, part, metadata, in_order=True)
        weight_map |= dict.fromkeys(part, file)
    total_size = sum(tensor.num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _packed(tensors: Mapping[str, _Tensor], part_bytes: int) -> Iterator[dict[str, _Tensor]]:
    part: dict[str, _Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if part and num_bytes + tensor.num_bytes > part_bytes:
            yield part
            part = {}
            num_bytes = 0
        part[name] = tensor
        num_bytes += tensor.num_bytes
    yield part


def _generation(decode: Params, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns generation_config.json: what generate does without arguments."""
    generation: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "decoder_start_token_id")
    }
    generation["num_beams"] = decode.beam_size
    generation["early_stopping"] = _EARLY_STOPPING[decode.stopping]
    generation["max_length"] = decode.max_target_len + 1  # Theirs counts the first token.
    if decode.rules is Rules.HUGGING_FACE:
        generation["length_penalty"] = decode.length_norm_alpha
    return generation


def _notes(params: Params, config: Mapping[str, Any]) -> list[str]:
    """Returns what is not as in this project, a line each."""
    notes = []
    for epsilon in sorted(written_config.epsilons(params.task)):
        notes.append(f"Norms have the epsilon {epsilon:g} here and 1e-05 there.")
    if params.decode.rules is not Rules.HUGGING_FACE:
        notes.append("Beam search ranks by other scores there: see decode.rules.")
    if config["model_type"] == Family.NLLB_MOE:
        notes.append(
            "Load it with transformers 4: versions 5.0 to 5.24 send all tokens to experts 0 and 1."
        )
    return notes


def _write_json(path: pathlib.Path, value: Any) -> None:
    atomic_file.write(path, json.dumps(value, indent=2) + "\n")
