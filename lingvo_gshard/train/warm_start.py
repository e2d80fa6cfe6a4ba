r"""Weights that a run exports, and runs that start from another run's weights by explicit rules.

rules = (
    (r"theta\..*_embedding\..*", "BY_PIECE"),
    (r"theta\..*\.feed_forward\..*", "COPY_EXPERTS"),
    (r"theta\..*", "SAME"),
)

The first rule whose pattern matches an array's whole path applies to it. Arrays without a rule are
initialized as in any new run: usually the optimizer's slots and the step. An exported file is a
safetensors file whose names are the paths, such as theta.encoder.layers[1].feed_forward.wi.
"""

import dataclasses
import enum
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core import safetensors_file, table
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.train.checkpoints import Checkpoints

_FORMAT = "lingvo_gshard weights 1"


class Rule(enum.StrEnum):
    """How an array is made from the old run's.

    SAME: unchanged. COPY_EXPERTS: dims that differ grow by whole copies, so new expert i is old
    expert i mod E. BY_PIECE: along V, pieces that the old vocabulary has are taken from it; other
    pieces are new. NEW: initialized.
    """

    SAME = "SAME"
    COPY_EXPERTS = "COPY_EXPERTS"
    BY_PIECE = "BY_PIECE"
    NEW = "NEW"


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Where to start from: a run's folder or a .safetensors file; raises ValueError for bad rules.

    `rules` are pairs of a pattern of paths and a Rule or its name. For BY_PIECE, `old_pieces` are
    pairs of such a pattern and each new piece's id in the old vocabulary, or -1: int [V].
    """

    source: str
    rules: tuple[tuple[str, str], ...]
    old_pieces: tuple[tuple[str, np.ndarray], ...] = ()

    def __post_init__(self) -> None:
        for given in self.rules:
            try:
                pattern, rule = given
                re.compile(pattern), Rule(rule)
            except (TypeError, ValueError, re.error) as error:
                raise ValueError(
                    f"Warm start: expected (pattern, rule), got {given!r}; rules are "
                    f"{', '.join(Rule)} ({error})."
                ) from error

    def apply(self, state: NestedMap, state_spec: NestedMap) -> NestedMap:
        """Returns the initialized state with arrays from the source; prints a line for each array.

        Holds one array at a time in host memory, and deletes each of `state`, JAX arrays, that it
        replaces. All processes must call it. Raises as `arrays` and `first_value`.
        """
        old, leaves = self.arrays(), []
        for (path, leaf), spec in zip(state.FlattenItems(), state_spec.Flatten(), strict=True):
            value, line = self.first_value(path, spec.dims, old, leaf)
            leaves.append(leaf if value is leaf else _replaced(leaf, np.asarray(value)))
            if processes.is_first():
                print(line)
        return state.Pack(leaves)

    def arrays(self) -> Mapping[str, Any]:
        """Returns the source's arrays by path; np.asarray reads one from disk.

        Raises as `read_file`, and ValueError if there is no checkpoint or it is damaged.
        """
        if self.source.endswith(".safetensors"):
            return read_file(self.source)
        with Checkpoints(self.source) as saved:
            step = saved.latest()
            if step is not None:
                return saved.arrays(step)
        raise ValueError(f"{self.source}: there is no checkpoint to start from.")

    def rule_of(self, path: str) -> Rule:
        """Returns the rule for the array at `path`."""
        return Rule(_first_match(self.rules, path) or Rule.NEW)

    def first_value(
        self, path: str, dims: str, old: Mapping[str, Any], new: jax.Array
    ) -> tuple[Any, str]:
        """Returns the first value of the array at `path`, and a line that describes it.

        `old` are the old run's arrays, and `new` is the value without a warm start, which itself is
        returned under rule NEW. Raises ValueError if the old array is missing or does not suit.
        """
        rule = self.rule_of(path)
        if rule is Rule.NEW:
            return new, f"{path}: new, {_shape(new)}"
        if path not in old:
            raise ValueError(f"{self.source}: has no {path}, which rule {rule} needs.")
        before = old[path]
        mismatch = f"{self.source}: {path} is {_shape(before)}, this model's {_shape(new)}"
        if before.dtype != new.dtype or len(before.shape) != new.ndim:
            raise ValueError(f"{mismatch}.")
        if rule is Rule.BY_PIECE:
            return self._by_piece(path, dims, before, new, mismatch)
        if rule is Rule.COPY_EXPERTS:
            copies, rest = np.divmod(new.shape, before.shape)
            if rest.any():
                raise ValueError(f"{mismatch}; rule COPY_EXPERTS needs a multiple of each dim.")
            line = f"{path}: {_shape(before)} copied to {_shape(new)}"
            return np.tile(np.asarray(before), copies), line
        if before.shape != new.shape:
            raise ValueError(
                f"{mismatch}; rule SAME needs the same shape: COPY_EXPERTS, BY_PIECE or NEW may do."
            )
        return before, f"{path}: restored, {_shape(new)}"

    def _by_piece(
        self, path: str, dims: str, before: Any, new: jax.Array, mismatch: str
    ) -> tuple[np.ndarray, str]:
        old_ids = _first_match(self.old_pieces, path)
        if old_ids is None or "V" not in dims:
            raise ValueError(f"{path}: rule BY_PIECE, but no vocabulary is known for it.")
        axis, known = dims.index("V"), np.flatnonzero(old_ids >= 0)
        value = np.array(processes.to_host(NestedMap(x=new)).x)
        by_piece, before_by_piece = (np.moveaxis(x, axis, 0) for x in (value, np.asarray(before)))
        if by_piece.shape[1:] != before_by_piece.shape[1:]:
            raise ValueError(f"{mismatch}.")
        by_piece[known] = before_by_piece[old_ids[known]]
        line = f"{path}: restored {len(known)} of {len(old_ids)} pieces, the others new"
        return value, f"{line}, {_shape(new)}"


def old_ids(old_pieces: Sequence[str], new_pieces: Sequence[str]) -> np.ndarray:
    """Returns each new piece's id among the old ones, -1 where it has none: int64 [V]."""
    ids = {piece: i for i, piece in enumerate(old_pieces)}
    return np.array([ids.get(piece, -1) for piece in new_pieces], np.int64)


def write_file(path: str | pathlib.Path, weights: Mapping[str, Any], step: int) -> None:
    """Writes the weights after `step` steps, one at a time; see safetensors_file.write."""
    safetensors_file.write(path, weights, {"format": _FORMAT, "step": str(step)})


def read_file(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write_file` wrote, mapped from the file.

    Raises FileNotFoundError if there is no such file, and ValueError if it is not a safetensors
    file, is cut short, was written by another program, or an array is not what was written.
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    found = safetensors_file.read(path)
    weights, file_format = found.arrays, found.metadata.get("format")
    if file_format != _FORMAT:
        raise ValueError(
            f"{path}: another program's file: its format is {file_format!r}, not {_FORMAT!r}; it "
            f"holds {', '.join(sorted(weights)[:3]) or 'nothing'}, ..."
        )
    digests = json.loads(found.metadata.get("sha256", "{}"))
    for name in sorted(digests.keys() | weights.keys()):
        if name not in weights or digests.get(name) != safetensors_file.sha256(weights[name]):
            raise ValueError(f"{path}: damaged: {name} is not what was written.")
    return weights


def summary(weights: Mapping[str, Any]) -> str:
    """Returns a line for each array, sorted by name, and one with the totals."""
    rows = [(name, _shape(array)) for name, array in sorted(weights.items())]
    total = sum(math.prod(array.shape) for array in weights.values())
    return "\n".join([table.text(rows), f"{len(weights)} tensors, {total:,} weights"])


def _replaced(leaf: jax.Array, value: np.ndarray) -> jax.Array:
    placed = jax.make_array_from_callback(value.shape, leaf.sharding, lambda index: value[index])
    leaf.delete()
    return placed


def _first_match(patterns: Sequence[tuple[str, Any]], path: str) -> Any:
    return next((found for pattern, found in patterns if re.fullmatch(pattern, path)), None)


def _shape(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
