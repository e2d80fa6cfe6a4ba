"""The weights in a folder of transformers, under our names; they are read when they are used."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorstore
from tensorstore import TensorStore

from lingvo_gshard.checkpoints import stack_forms
from lingvo_gshard.checkpoints.checked_array import CheckedArray, Index, computed_view, part_shape
from lingvo_gshard.checkpoints.stack_forms import Form
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import finite
from lingvo_gshard.files.json_fields import some
from lingvo_gshard.hugging_face import names, weight_files
from lingvo_gshard.hugging_face.config import Config
from lingvo_gshard.hugging_face.names import Piece
from lingvo_gshard.sharding.layout import TensorSpec
from xla_spmd.files import digests

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_PREFIX = "model."


class Folder:
    """The tensors of a folder, whose headers have been read.

    `arrays` has our weights by path, such as `theta.encoder.norm.scale`, in float32.
    """

    def __init__(self, folder: pathlib.Path, config: Config, theta: NestedMap) -> None:
        """Compares all names, shapes and dtypes with `theta`, the TensorSpecs of a task's weights.

        Raises ValueError for a tensor that is missing, left over, or has another shape or dtype,
        for tied tables that differ, and for a file that is missing or damaged.
        """
        self._config = config
        files = weight_files.find(folder)
        self.paths = files.paths
        self._spans = files.spans
        self._checked: set[str] = set()

        self._pieces: dict[str, list[Piece]] = {}
        self.specs = {f"theta.{path}": spec for path, spec in theta.FlattenItems()}
        forms = stack_forms.forms_of(self.specs)
        for path, spec in self.specs.items():
            self._pieces[path] = self._own_pieces(path, spec, forms)

        self._compare(folder)
        self.not_used = (*files.not_used, *self._not_used(folder))

    @property
    def arrays(self) -> dict[str, CheckedArray]:
        """Returns the weights by path; each part is read when it is used."""
        arrays = {}
        for path, spec in self.specs.items():
            arrays[path] = CheckedArray(path, spec, functools.partial(self._view, path))
        return arrays

    @property
    def num_bytes(self) -> int:
        """Returns the size of all tensors in the files."""
        return sum(span.num_bytes for span in self._spans.values())

    def identity(self) -> str:
        """Returns a digest of the config, and of the tensors' names, shapes, offsets and files."""
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
        return digests.of_json(self._config.values.values, described)

    def _own_pieces(self, path: str, spec: TensorSpec, forms: Mapping[str, Form]) -> list[Piece]:
        """Returns the tensors of a weight, under their names in the folder."""
        candidates = self._config.table_candidates(path)
        if candidates:
            shape = spec.shape if spec.dims == "VM" else spec.shape[::-1]
            return [Piece((), self._first(candidates), shape)]

        pieces = names.pieces(path, spec, forms, self._config.name)
        return [dataclasses.replace(piece, name=self._first([piece.name])) for piece in pieces]

    def _first(self, candidates: Sequence[str]) -> str:
        """Returns the first of the names that is in the folder, or else the first one."""
        for name in candidates:
            # A file of a model without lm_head does not use the prefix.
            for full_name in (f"{_PREFIX}{name}", name):
                if full_name in self._spans:
                    return full_name
        return f"{_PREFIX}{candidates[0]}"

    def _compare(self, folder: pathlib.Path) -> None:
        """Raises ValueError unless the tensors have the model's names, shapes and dtypes."""
        wanted: dict[str, tuple[int, ...]] = {}
        for pieces in self._pieces.values():
            wanted |= {piece.name: piece.shape for piece in pieces}

        missing = sorted(wanted.keys() - self._spans.keys())
        if missing:
            raise ValueError(f"{folder} lacks {some(missing)}.")
        config = self._config
        extra = [
            name
            for name in self._spans.keys() - wanted.keys()
            if not config.TABLES.fullmatch(name) and not config.is_left_out(name)
        ]
        if extra:
            raise ValueError(f"{folder} has {some(extra)}, which the model does not have.")

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

    def _not_used(self, folder: pathlib.Path) -> list[str]:
        """Returns a line that names the unused tensors, except for copies of a table.

        Raises ValueError if tied tables differ.
        """
        used: set[str] = set()
        for pieces in self._pieces.values():
            used.update(piece.name for piece in pieces)
        tables = [name for name in self._spans if self._config.TABLES.fullmatch(name)]
        used_tables = sorted(used.intersection(tables))

        unused = [name for name in self._spans if self._config.is_left_out(name)]
        for name in sorted(set(tables) - used):
            span = self._spans[name]
            if any(span.is_equal(self._spans[table]) for table in used_tables):
                continue
            if self._config["tie_word_embeddings"]:
                raise ValueError(
                    f"{folder}: {name} and {used_tables[0]} are one table by tie_word_embeddings, "
                    "and differ: set it to false in config.json to keep both."
                )
            unused.append(name)
        return [f"tensors: {', '.join(sorted(unused))}"] if unused else []

    def _view(self, path: str) -> TensorStore:
        """Returns a view of the weight at `path`, as float32, made of one tensor or several."""
        spec = self.specs[path]
        pieces = self._pieces[path]
        if spec.dims in ("VM", "MV"):
            table = self._table(pieces[0])
            return table.T if spec.dims == "MV" else table

        num_counted = len(pieces[0].index)
        of_tensor = TensorSpec(spec.shape[num_counted:], spec.dtype, spec.dims[num_counted:])
        is_expert_output = "E" in spec.dims and spec.dims.endswith("M")
        factor = self._config.expert_scale if is_expert_output else 1.0
        views = [self._product(piece.name, of_tensor, factor) for piece in pieces]

        # Experts are stacked first, and then blocks.
        for size in reversed(spec.shape[:num_counted]):
            groups = [views[i : i + size] for i in range(0, len(views), size)]
            views = [tensorstore.stack(group) for group in groups]
        (view,) = views
        return view

    def _product(self, name: str, spec: TensorSpec, factor: float) -> TensorStore:
        """Returns a view of a product's weight with `spec`, multiplied by `factor`."""

        def read(index: Index, values: np.ndarray) -> None:
            tensor = self._finite(name)
            if names.is_transposed(spec.dims):
                tensor = tensor.T
            np.multiply(tensor.reshape(spec.shape)[index], np.float32(factor), out=values)

        return computed_view(read, spec.shape, spec.dtype)

    def _table(self, piece: Piece) -> TensorStore:
        """Returns a view of a table [V, M], in the order of our ids, as float32."""

        def read(index: Index, values: np.ndarray) -> None:
            values[...] = self._finite(piece.name, index[0].start, index[0].stop)

        spec = TensorSpec(piece.shape, "float32", "VM")
        table = computed_view(read, spec.shape, spec.dtype, part_shape(spec))
        # Padding, BOS and EOS may have other ids there; the other rows are read in whole parts.
        order = self._config.order()
        moved = np.flatnonzero(order != np.arange(len(order)))
        parts = []
        start = 0
        for ours in moved.tolist():
            if start < ours:
                parts.append(table[start:ours])
            parts.append(table[int(order[ours]) : int(order[ours]) + 1])
            start = ours + 1
        if start < len(order):
            parts.append(table[start:])

        # Each part's rows are counted from 0, wherever they are in the table.
        return tensorstore.concat([part[tensorstore.d[0].translate_to[0]] for part in parts], 0)

    def _finite(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns rows [start:stop] of a tensor as float32.

        Raises ValueError unless they are finite, and the tensor matches its digest in the file.
        """
        span = self._spans[name]
        if name not in self._checked:
            span.check()
            self._checked.add(name)
        with np.errstate(over="ignore"):  # A float64 beyond float32 becomes infinite.
            values = span.read(start, stop).astype(np.float32, copy=False)
            if finite.num_not_finite(values) > 0:
                # The error has the number in the whole tensor.
                whole = span.read().astype(np.float32)
                finite.check(str(span.path), {name: finite.num_not_finite(whole)})
        return values
