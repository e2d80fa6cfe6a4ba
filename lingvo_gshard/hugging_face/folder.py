"""The weights in a folder of transformers, under our names, read when they are used.

A folder holds model.safetensors, or parts of it with an index; or pytorch_model.bin alike:

    config.json
    model.safetensors.index.json         which part holds which tensor
    model-00001-of-00064.safetensors     and so on
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.checkpoints.stored import Index, SavedArray
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import digests, json_records, safetensors_file
from lingvo_gshard.files.tensor_span import TensorSpan
from lingvo_gshard.hugging_face import names, torch_file
from lingvo_gshard.hugging_face.config import Config
from lingvo_gshard.hugging_face.names import Piece
from lingvo_gshard.sharding.layout import TensorSpec

_MAX_INDEX_BYTES = 256 * 2**20
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_PREFIX = "model."
# The names that a table may have, best first: one for both sides and the logits, or each side's.
_SHARED = "shared.weight"
_SOURCE = "encoder.embed_tokens.weight"
_TARGET = "decoder.embed_tokens.weight"
_TIED = (_SHARED, _TARGET, _SOURCE, "lm_head.weight")
_TABLES = {names.TABLE: (_TARGET, _SHARED), names.SOURCE_TABLE: (_SOURCE, _SHARED)}


def block_size(task: Params, path: str) -> int:
    """Returns the layers of a block in the stack of a weight; 1 outside the stacks."""
    for side in ("encoder", "decoder"):
        if path.startswith(f"theta.{side}."):
            stack = task.Get(side)
            return 1 if stack.moe is None else int(stack.moe_every)
    return 1


class Folder:
    """The tensors of a folder, whose headers have been read.

    `theta` has our weights by path, such as `theta.encoder.norm.scale`, as float32 arrays.
    """

    def __init__(
        self, folder: pathlib.Path, config: Config, task: Params, theta: NestedMap
    ) -> None:
        """Compares all names, shapes and dtypes with those of `theta`, TensorSpecs, of a task.

        Raises ValueError for a tensor that is missing, left over, or of another shape or dtype, and
        for a file that is missing or damaged.
        """
        self._config = config
        self._spans = _spans(folder)
        self._checked: set[str] = set()
        self._pieces: dict[str, list[Piece]] = {}
        self.specs = {f"theta.{path}": spec for path, spec in theta.FlattenItems()}
        for path, spec in self.specs.items():
            self._pieces[path] = self._own_pieces(path, spec, block_size(task, path))
        self._compare(folder)

    @property
    def arrays(self) -> dict[str, SavedArray]:
        """Returns the weights by path; a part of one is read when it is indexed."""
        arrays = {}
        for path, spec in self.specs.items():
            read = functools.partial(self._read, path)
            arrays[path] = SavedArray(path, spec, None, read, ValueError)
        return arrays

    @property
    def num_bytes(self) -> int:
        """Returns the size of all tensors in the files."""
        return sum(span.num_bytes for span in self._spans.values())

    def identity(self) -> str:
        """Returns a digest of the config, and of the tensors' names, shapes, places and files."""
        described = {}
        for name, span in sorted(self._spans.items()):
            file = span.path.stat()
            described[name] = [
                span.path.name,
                span.offset,
                str(span.dtype),
                list(span.shape),
                file.st_size,
                file.st_mtime_ns,
            ]
        return digests.of_json(self._config.values, described)

    def _own_pieces(self, path: str, spec: TensorSpec, size: int) -> list[Piece]:
        """Returns the tensors of a weight, under the names that the folder has for them."""
        if path in _TABLES:
            is_tied = path == names.TABLE and self._config["tie_word_embeddings"]
            candidates = _TIED if is_tied else _TABLES[path]
            return [Piece((), self._first(candidates), spec.shape)]

        pieces = names.pieces(path, spec, self._config.family, size)
        return [dataclasses.replace(piece, name=self._first([piece.name])) for piece in pieces]

    def _first(self, candidates: Sequence[str]) -> str:
        """Returns the first name that the folder has, or else the first one."""
        for name in candidates:
            # Files of the whole model have the prefix, and those of one without lm_head have none.
            for full_name in (f"{_PREFIX}{name}", name):
                if full_name in self._spans:
                    return full_name
        return f"{_PREFIX}{candidates[0]}"

    def _compare(self, folder: pathlib.Path) -> None:
        """Raises ValueError unless the tensors are those of the model, by name, shape and dtype."""
        wanted: dict[str, tuple[int, ...]] = {}
        for pieces in self._pieces.values():
            wanted |= {piece.name: piece.shape for piece in pieces}

        missing = sorted(wanted.keys() - self._spans.keys())
        if missing:
            raise ValueError(f"{folder} lacks {_some(missing)}.")
        extra = [name for name in self._spans if name not in wanted]
        extra = sorted(name for name in extra if not names.IGNORED.fullmatch(name))
        if extra:
            raise ValueError(f"{folder} has {_some(extra)}, which the model has no place for.")

        for name, shape in wanted.items():
            span = self._spans[name]
            if span.shape != shape:
                raise ValueError(
                    f"{span.path}: {name} has the shape {list(span.shape)}; expected {list(shape)}."
                )
            if str(span.dtype) not in _FLOATS:
                raise ValueError(
                    f"{span.path}: {name} is {span.dtype}; expected one of {', '.join(_FLOATS)}."
                )

    def _read(self, path: str, index: Index) -> np.ndarray:
        """Reads [index] of the weight at `path`, a slice for each dim, as float32."""
        dims = self.specs[path].dims
        name = self._pieces[path][0].name
        if dims == "VM":
            return self._rows(name, index[0])[:, index[1]]
        if dims == "MV":
            return self._rows(name, index[1]).T[index[0]]
        return self._products(path, index)

    def _products(self, path: str, index: Index) -> np.ndarray:
        """Reads [index] of a weight that is made of one tensor for each block and expert."""
        spec = self.specs[path]
        by_index = {piece.index: piece for piece in self._pieces[path]}
        num_counted = len(self._pieces[path][0].index)
        dims = spec.dims[num_counted:]
        shape = spec.shape[num_counted:]
        within = index[num_counted:]

        # Only the blocks and experts that are asked for are read.
        counted = []
        for size, part in zip(spec.shape, index[:num_counted], strict=False):
            counted.append(range(size)[part])
        tensors = []
        for piece_index in itertools.product(*counted):
            tensor = self._tensor(by_index[piece_index].name).read()
            if names.is_transposed(dims):
                tensor = tensor.T
            tensors.append(tensor.reshape(shape)[within].astype(np.float32))

        sizes = [len(indices) for indices in counted]
        values = np.stack(tensors).reshape(*sizes, *tensors[0].shape)
        if "E" in spec.dims and path.endswith((".wo", ".wo_bias")):
            values *= np.float32(self._config.expert_scale)
        return values

    def _rows(self, name: str, part: slice) -> np.ndarray:
        """Reads [part] of a table [V, M], in the order of our ids, as float32."""
        span = self._tensor(name)
        start, stop, _ = part.indices(span.shape[0])
        rows = span.read(start, stop).astype(np.float32)

        # Padding, BOS and EOS may have other ids there.
        for ours, theirs in enumerate(self._config.rows):
            if start <= ours < stop:
                rows[ours - start] = span.read(theirs, theirs + 1)[0]
        return rows

    def _tensor(self, name: str) -> TensorSpan:
        """Returns where a tensor is; ValueError if its file has a digest that it has not."""
        span = self._spans[name]
        if name not in self._checked:
            span.check()
            self._checked.add(name)
        return span


def _spans(folder: pathlib.Path) -> dict[str, TensorSpan]:
    """Returns where all tensors of a folder are, from the headers of its files."""
    formats = (
        ("model.safetensors", safetensors_file.spans),
        ("pytorch_model.bin", torch_file.spans),
    )
    for stem, spans_of in formats:
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return _indexed(index, spans_of)
        if (folder / stem).is_file():
            return dict(spans_of(folder / stem))
    raise ValueError(
        f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index "
        "of their parts."
    )


def _indexed(
    index: pathlib.Path, spans_of: Callable[[Any], dict[str, TensorSpan]]
) -> dict[str, TensorSpan]:
    """Returns where the tensors of an index are, each in the part that it names."""
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"{index.stat().st_size} bytes")
        weight_map = dict(json_records.parse(index.read_bytes())["weight_map"])
        files = {str(file) for file in weight_map.values()}
        if any(pathlib.PurePath(file).name != file for file in files):
            raise ValueError("it names files of other folders")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{index} is damaged: it does not describe weights ({error!r})."
        ) from error

    spans = {}
    for file in sorted(files):
        in_file = spans_of(index.parent / file)
        for name, span in in_file.items():
            if weight_map.get(name) != file:
                raise ValueError(f"{index} does not say that {file} has {name}.")
            spans[name] = span
    missing = sorted(weight_map.keys() - spans.keys())
    if missing:
        raise ValueError(f"{index.parent / weight_map[missing[0]]} lacks {_some(missing)}.")
    return spans


def _some(found: Sequence[str]) -> str:
    """Returns the first few of some names, and how many more there are."""
    shown = ", ".join(found[:3])
    return shown if len(found) <= 3 else f"{shown} and {len(found) - 3} more"
