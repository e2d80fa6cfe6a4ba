"""Writes a run's weights as a model that transformers loads.

    config.json, generation_config.json
    model.safetensors, or model-00001-of-00003.safetensors and so on with an index
    tokenizer_config.json, and what its tokenizer reads: see tokenizer_files.py

A dense model that translates becomes M2M-100, one with experts NLLB-MoE, and a decoder the family
that can express it. Biases that our layers lack are written as 0. Only one array, or one expert, is
in memory at a time.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_gshard.beam_search.beam import Rules
from lingvo_gshard.checkpoints import stack_forms
from lingvo_gshard.checkpoints.checked_array import CheckedArray
from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import safetensors_file, safetensors_parts
from lingvo_gshard.files.safetensors_parts import PART_BYTES
from lingvo_gshard.hugging_face import families, generation, names, tokenizer_files
from lingvo_gshard.hugging_face.config import CONFIG, Config
from lingvo_gshard.hugging_face.encoder_decoder import SIDES, EncoderDecoder
from lingvo_gshard.hugging_face.names import Family, Piece
from lingvo_gshard.input import bpe_tokenizer
from lingvo_gshard.input.example_codec import PAD_ID
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import Run
from xla_spmd.files import atomic_file, storage

_PREFIX = "model."
_EPSILON = 1e-5  # The epsilon of all norms of their encoder-decoders.


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to write, which is read when NumPy converts it to an array."""

    shape: tuple[int, ...]
    read: Any  # () -> np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Returns float32, the dtype of all weights."""
        return np.dtype(np.float32)

    @property
    def num_bytes(self) -> int:
        """Returns its size."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.ascontiguousarray(self.read(), np.float32)


def export_folder(run: Run, folder: str | pathlib.Path, part_bytes: int = PART_BYTES) -> list[str]:
    """Writes the weights that the run decodes with; returns notes for the user, a line each.

    Raises ValueError, in one line, if transformers' models cannot express this one, if the folder
    is not empty, or if the run's checkpoint is missing or damaged.
    """
    vocabularies = _vocabularies(run)
    bpe = _bpe(vocabularies)
    rows = _rows(run, vocabularies, bpe)
    config = families.written(run.params, rows)
    arrays = run.estimator.saved_weights(**run.averaged)
    tensors = _tensors(config, arrays)

    with storage.working(folder) as local_folder:
        path = pathlib.Path(local_folder)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ValueError(f"{folder} is not empty: export to a new folder.")
        notes = _write_tokenizer(path, vocabularies, config["vocab_size"], rows)
        _write(path, tensors, part_bytes)
        # An import gives a decoder without padding the id of an ordinary piece, which transformers
        # would mask.
        has_padding = bpe is None or bpe.is_special[PAD_ID]
        changed = {} if has_padding else {"pad_token_id": None}
        fields = _generation(run.params.decode, config) | {"pad_token_id": rows[PAD_ID]}
        _write_json(path / generation.FILE, fields | changed)
        # It is written last, since a folder without it is not a model.
        _write_json(path / CONFIG, config.values.values | changed)
    return [*notes, *_notes(run.params, config)]


def _rows(
    run: Run,
    vocabularies: tuple[pathlib.Path, pathlib.Path] | None,
    bpe: bpe_tokenizer.BpeTokenizer | None,
) -> tuple[int, int, int]:
    """Returns the exported ids of padding, BOS and EOS: the imported model's, if they are known."""
    imported_ids = run.launch.facts.imported_ids
    # A run that was fine-tuned has facts of its data; its tokenizer knows the ids.
    if bpe is not None:
        imported_ids = bpe.special_ids
    if imported_ids:
        pad, bos, eos = imported_ids
        return pad, bos, eos

    # Padding has their id if it takes positions, like in released models, and in their tokenizers.
    has_their_ids = run.params.task.embedding.first_position > 0
    if vocabularies is not None and tokenizer_files.has_languages(vocabularies):
        has_their_ids = True
    return (1, 0, 2) if has_their_ids else (0, 1, 2)


def _bpe(
    vocabularies: tuple[pathlib.Path, pathlib.Path] | None,
) -> bpe_tokenizer.BpeTokenizer | None:
    """Returns the tokenizer of an imported decoder; None for any other vocabulary."""
    if vocabularies is None or not bpe_tokenizer.is_bpe(vocabularies[0]):
        return None
    return bpe_tokenizer.BpeTokenizer(vocabularies[0].read_bytes())


def _vocabularies(run: Run) -> tuple[pathlib.Path, pathlib.Path] | None:
    """Returns the paths of a run's vocabularies; None if it was imported without them."""
    paths = launches.vocabularies(run.logdir)
    return paths if all(path.is_file() for path in paths) else None


def _write_tokenizer(
    folder: pathlib.Path,
    vocabularies: tuple[pathlib.Path, pathlib.Path] | None,
    size: int,
    rows: tuple[int, int, int],
) -> list[str]:
    """Writes the tokenizer's files; returns a note if they cannot be written."""
    if vocabularies is None:
        return ["The run has no vocabulary, so there is no tokenizer."]

    try:
        if bpe_tokenizer.is_bpe(vocabularies[0]):
            files = bpe_tokenizer.files(vocabularies[0])
        else:
            files = tokenizer_files.files(vocabularies, size, rows)
    except ValueError as error:
        return [f"There is no tokenizer: {error}."]

    for name, content in files.items():
        atomic_file.write(folder / name, content)
    return []


def _tensors(config: Config, arrays: Mapping[str, CheckedArray]) -> dict[str, _Tensor]:
    """Returns all tensors by their full names; the tensors of a weight follow one another."""
    tensors: dict[str, _Tensor] = {}
    reader = _Reader()
    forms = stack_forms.forms_of(arrays)
    for path, array in arrays.items():
        if array.spec.dims in ("VM", "MV"):
            read = functools.partial(_read_table, array, config.order())
            shape = array.shape if array.spec.dims == "VM" else array.shape[::-1]
            for name in config.written_tables(path):
                tensors[name] = _Tensor(shape, read)
            continue

        # All blocks of an expert are side by side, as they are read together.
        pieces = names.pieces(path, array.spec, forms, config.name)
        for piece in sorted(pieces, key=lambda piece: piece.index[::-1]):
            read = functools.partial(reader.tensor, array, piece)
            tensors[_PREFIX + piece.name] = _Tensor(piece.shape, read)
    return tensors | (_zero_biases(tensors) if config.HAS_BIASES else {})


def _read_table(array: CheckedArray, order: np.ndarray) -> np.ndarray:
    """Returns a table [V, M], or the softmax's transposed weights, in the order of their ids."""
    ours = array[()]
    if array.spec.dims == "MV":
        ours = ours.T
    theirs = np.empty_like(ours)
    theirs[order] = ours
    return theirs


class _Reader:
    """Reads tensors, and holds the last weight or expert for the next tensor."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._values = np.zeros(0)

    def tensor(self, array: CheckedArray, piece: Piece) -> np.ndarray:
        """Returns a piece of an array, as its tensor, checked."""
        dims = array.spec.dims
        values = self._read(array, piece)
        if dims.startswith(STACKED):
            values = values[piece.index[0]]

        if names.is_transposed(dims[len(piece.index) :]):
            return values.reshape(piece.shape[::-1]).T
        return values.reshape(piece.shape)

    def _read(self, array: CheckedArray, piece: Piece) -> np.ndarray:
        """Returns the piece's expert in all blocks, or the whole array without experts."""
        axis = array.spec.dims.find("E")
        expert = piece.index[axis] if axis >= 0 else -1
        if self._key != (array.name, expert):
            self._values = np.zeros(0)  # Frees the last one before the next one is read.
            if axis < 0:
                self._values = array[()]
            else:
                index = (*[slice(None)] * axis, slice(expert, expert + 1))
                self._values = np.squeeze(array[index], axis)
            self._key = (array.name, expert)
        return self._values


def _zero_biases(tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Returns the biases that transformers' layers have and ours lack."""
    biases = {}
    for name, tensor in tensors.items():
        has_bias = name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))
        bias = name.removesuffix("weight") + "bias"
        if has_bias and bias not in tensors:
            shape = tensor.shape[:1]
            biases[bias] = _Tensor(shape, functools.partial(np.zeros, shape, np.float32))
    return biases


def _write(folder: pathlib.Path, tensors: Mapping[str, _Tensor], part_bytes: int) -> None:
    """Writes the tensors to files of at most `part_bytes`, and an index of several files."""
    path = folder / "model.safetensors"
    parts = list(safetensors_parts.packed(tensors, part_bytes))
    files = dict(zip(safetensors_parts.file_names(path, len(parts)), parts, strict=True))
    for file, part in files.items():
        safetensors_file.write(folder / file, part, {"format": "pt"}, in_order=True)
    if len(parts) > 1:
        index_path = path.with_name(path.name + safetensors_parts.INDEX_SUFFIX)
        atomic_file.write(index_path, safetensors_parts.index(files, {}))


def _generation(decode: Params, config: Config) -> dict[str, Any]:
    """Returns generation_config.json: the defaults of generate."""
    fields: dict[str, Any] = {}
    for name in ("bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if name in config.values:
            fields[name] = config[name]
    fields["num_beams"] = decode.beam_size
    fields["early_stopping"] = generation.EARLY_STOPPING[decode.stopping]
    fields |= generation.written_lengths(decode, config.KIND)
    if decode.num_best > 1:
        fields["num_return_sequences"] = decode.num_best
    if decode.rules is Rules.HUGGING_FACE:
        fields["length_penalty"] = decode.length_norm_alpha

    if decode.temperature is not None:
        fields["do_sample"] = True
        fields["temperature"] = decode.temperature
        fields["top_k"] = decode.top_k or 0
        fields["top_p"] = decode.top_p or 1.0
    return fields


def _notes(params: Params, config: Config) -> list[str]:
    """Returns the differences from this project's model, a line each."""
    notes = []
    if isinstance(config, EncoderDecoder):
        epsilons = {params.task.Get(side).layer.norm.epsilon for side in SIDES}
        for epsilon in sorted(epsilons - {_EPSILON}):
            notes.append(f"Norms have the epsilon {epsilon:g} here and {_EPSILON:g} there.")

    if params.decode.rules is not Rules.HUGGING_FACE:
        notes.append("Beam search ranks by other scores there: see decode.rules.")
    if config["model_type"] == Family.NLLB_MOE:
        notes.append(
            "Load it with transformers 4: versions 5.0 to 5.24 send all tokens to experts 0 and 1."
        )
    return notes


def _write_json(path: pathlib.Path, value: Any) -> None:
    atomic_file.write(path, json.dumps(value, indent=2) + "\n")
