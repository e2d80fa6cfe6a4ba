r"""Runs that start from another run's weights by explicit rules.

rules = (
    (r"theta\.(.*_embedding\..*|softmax)", "BY_PIECE"),
    (r"theta\..*\.feed_forward\..*", "COPY_EXPERTS"),
    (r"theta\..*", "SAME"),
)

The first rule whose pattern matches an array's path applies to it; others are initialized.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lingvo_gshard.checkpoints import exported
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.checkpoints.stored import Index
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes, specs


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
    """Where to start from; raises ValueError for bad rules."""

    source: str  # A run's folder, or a .safetensors file or its index that a run exported.
    rules: tuple[tuple[str, str], ...]  # Pairs of a pattern of paths and a Rule or its name.
    # For BY_PIECE: pairs of such a pattern and each new piece's old id, or -1: int [V].
    old_pieces: tuple[tuple[str, np.ndarray], ...] = ()

    def __post_init__(self) -> None:
        for given in self.rules:
            try:
                pattern, rule = given
                re.compile(pattern), Rule(rule)
            except (TypeError, ValueError, re.error) as error:
                problem = f"Warm start: expected (pattern, rule), got {given!r}"
                raise ValueError(f"{problem}; rules are {', '.join(Rule)} ({error}).") from error

    def apply(self, state: NestedMap, state_spec: NestedMap) -> NestedMap:
        """Returns the initialized state with arrays from the source; prints a line for each array.

        All processes must call it. Each reads only what its devices need, one array at a time, and
        deletes the arrays of `state` that it replaces. Raises as `arrays` and `first_value`.
        """
        old, leaves = self.arrays(), []
        for (path, leaf), spec in zip(state.FlattenItems(), state_spec.Flatten(), strict=True):
            value, line = self.first_value(path, spec.dims, old, leaf)
            leaves.append(value)
            if value is not leaf:
                leaf.delete()
            if processes.is_first():
                print(line)
        return state.Pack(leaves)

    def arrays(self) -> Mapping[str, Any]:
        """Returns the source's arrays by path, parts of which are read when they are used.

        Raises as `exported.read`, and ValueError if there is no checkpoint or it is damaged.
        """
        if self.source.endswith((".safetensors", exported.INDEX_SUFFIX)):
            return exported.read(self.source)
        with Checkpoints(self.source) as saved:
            step = saved.latest()
            if step is not None:
                return saved.arrays(step)
        raise ValueError(f"{self.source}: there is no checkpoint to start from.")

    def first_value(
        self, path: str, dims: str, old: Mapping[str, Any], new: jax.Array
    ) -> tuple[jax.Array, str]:
        """Returns the first value of the array at `path`, and a line that describes it.

        `old` are the old run's arrays; `new` is the value without a warm start, itself returned by
        rule NEW. Raises ValueError if the old array is missing, does not fit, or is damaged.
        """
        rule = Rule(_first_match(self.rules, path) or Rule.NEW)
        if rule is Rule.NEW:
            return new, f"{path}: new, {specs.describe(new)}"
        if path not in old:
            raise ValueError(f"{self.source} has no {path}, which rule {rule} needs.")
        ids, line = self._ids(rule, path, dims, old[path], new)
        return _taken(old[path], ids, new), f"{path}: {line}"

    def _ids(
        self, rule: Rule, path: str, dims: str, before: Any, new: jax.Array
    ) -> tuple[list[np.ndarray], str]:
        """Returns, along each dim, each new index's old one, or -1; and how the rule is applied."""
        ids, shape = [np.arange(size) for size in new.shape], specs.describe(new)
        mismatch = f"{self.source}: {path} is {specs.describe(before)}, this model's {shape}"
        if before.dtype != new.dtype or len(before.shape) != new.ndim:
            raise ValueError(f"{mismatch}.")
        old_ids = _first_match(self.old_pieces, path)
        if rule is Rule.BY_PIECE:
            if old_ids is None or "V" not in dims:
                raise ValueError(f"{path}: rule BY_PIECE, but no vocabulary is known for it.")
            axis, known = dims.index("V"), np.count_nonzero(old_ids >= 0)
            if np.delete(before.shape, axis).tolist() != np.delete(new.shape, axis).tolist():
                raise ValueError(f"{mismatch}.")
            ids[axis] = old_ids
            return ids, f"restored {known} of {len(old_ids)} pieces, the others new, {shape}"
        if rule is Rule.SAME and before.shape != new.shape:
            raise ValueError(
                f"{mismatch}; rule SAME needs the same shape: COPY_EXPERTS, BY_PIECE or NEW may do."
            )
        if old_ids is not None and not np.array_equal(old_ids, np.arange(len(old_ids))):
            raise ValueError(f"{path}: the source has another vocabulary: BY_PIECE or NEW may do.")
        if np.mod(new.shape, before.shape).any():
            raise ValueError(f"{mismatch}; rule COPY_EXPERTS needs a multiple of each dim.")
        how = "restored," if rule is Rule.SAME else f"{specs.describe(before)} copied to"
        return [each % size for each, size in zip(ids, before.shape, strict=True)], f"{how} {shape}"


def old_ids(old_pieces: Sequence[str], new_pieces: Sequence[str]) -> np.ndarray:
    """Returns each new piece's id among the old ones, -1 where it has none: int64 [V]."""
    ids = {piece: i for i, piece in enumerate(old_pieces)}
    return np.array([ids.get(piece, -1) for piece in new_pieces], np.int64)


def _taken(before: Any, ids: Sequence[np.ndarray], new: jax.Array) -> jax.Array:
    """Returns an array like `new` whose [i, j, ...] is before[ids[0][i], ids[1][j], ...].

    Where an id is -1, it keeps what `new` has. Only what this process's devices need is read, once.
    """
    shards = {str(shard.index): shard.data for shard in new.addressable_shards}
    read: dict[str, np.ndarray] = {}

    def part(index: Index | None) -> np.ndarray:
        assert index is not None
        kept, own = shards[str(index)], [x[i] for x, i in zip(ids, index, strict=True)]
        known = [x[x >= 0] for x in own]
        if not all(map(len, known)):
            return np.asarray(kept)
        wanted = tuple(slice(x.min(), x.max() + 1) for x in known)
        if str(wanted) not in read:
            read[str(wanted)] = before[wanted]
        found = read[str(wanted)]
        for axis, x in enumerate(own):
            if len(x) != found.shape[axis] or (np.diff(x) != 1).any():
                found = np.take(found, x - known[axis].min(), axis, mode="clip")
            if len(known[axis]) < len(x):
                is_new = np.expand_dims(x < 0, [i for i in range(new.ndim) if i != axis])
                found = np.where(is_new, kept, found)
        return found

    return jax.make_array_from_callback(new.shape, new.sharding, part)


def _first_match(patterns: Sequence[tuple[str, Any]], path: str) -> Any:
    return next((found for pattern, found in patterns if re.fullmatch(pattern, path)), None)
