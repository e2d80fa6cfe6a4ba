r"""Runs that start from another run's weights by explicit rules.

rules = (
    (r"theta\.(.*_embedding\..*|softmax)", "BY_PIECE"),
    (r"theta\..*\.feed_forward\..*", "COPY_EXPERTS"),
    (r"theta\..*", "SAME"),
)

The first rule whose pattern matches an array's path applies to it; others are initialized.

A run without experts starts a model that has them (upcycling: Komatsuzaki et al., 2023): by rule
COPY_EXPERTS each expert is a copy of the layer's feed-forward, and the gate is NEW.

rules = (
    (r"theta\..*\.feed_forward\.wg", "NEW"),
    (r"theta\..*\.feed_forward\..*", "COPY_EXPERTS"),
    (r"theta\..*", "SAME"),
)

The old run's stacks may have another form, UNROLLED or LOOP: see stack_forms.py.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lingvo_gshard.checkpoints import exported, stack_forms
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.checkpoints.stored import Index
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import padded, processes, specs
from lingvo_gshard.spmd.padded import PaddedArray


class Rule(enum.StrEnum):
    """How an array is made from the old run's.

    SAME: unchanged. COPY_EXPERTS: dims that differ grow by whole copies, so new expert i is old
    expert i mod E, and an old array without experts is one expert, of which all are copies.
    BY_PIECE: along V, pieces that the old vocabulary has are taken from it; other pieces are means
    of old ones, if they are listed, or new.
    NEW: initialized.
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
    # And pairs of such a pattern and groups of old ids: what follows the old ids are their means.
    means: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()

    def __post_init__(self) -> None:
        for pair in self.rules:
            try:
                pattern, rule = pair
                re.compile(pattern)
                Rule(rule)
            except (TypeError, ValueError, re.error) as error:
                problem = f"Warm start: expected (pattern, rule), got {pair!r}"
                raise ValueError(f"{problem}; rules are {', '.join(Rule)} ({error}).") from error

    def apply(self, state: NestedMap, state_spec: NestedMap) -> NestedMap:
        """Returns the initialized state with arrays from the source; prints where each is from.

        New slots of an optimizer and the like share a line. So do the source's weights, `theta`,
        that no array was made from.

        All processes must call it. Each reads only what its devices need, one array at a time, and
        deletes the arrays of `state` that it replaces. Raises as `arrays` and `first_value`.
        """
        old = stack_forms.Renamed(self.arrays(), dict(state.FlattenItems()))
        leaves = []
        num_new = 0
        for (path, leaf), spec in zip(state.FlattenItems(), state_spec.Flatten(), strict=True):
            value, line = self.first_value(path, spec.dims, old, leaf)
            leaves.append(value)
            if value is not leaf:
                leaf.delete()  # Otherwise the devices would hold two states in the end.
            if value is leaf and not path.startswith("theta."):
                num_new += 1
            elif processes.is_first():
                print(line)

        if num_new and processes.is_first():
            print(f"{num_new} arrays that are no weights, such as slots: new")
        left = [path for path in old.left() if path.startswith("theta.")]
        if left and processes.is_first():
            print(f"{self.source}: left out are {', '.join(left)}")
        return state.Pack(leaves)

    def arrays(self) -> Mapping[str, Any]:
        """Returns the source's arrays by path; parts of them are read when they are used.

        Raises as `exported.read`, and ValueError if there is no checkpoint or it is damaged.
        """
        if self.source.endswith((".safetensors", exported.INDEX_SUFFIX)):
            return exported.read(self.source)

        # The arrays can be read after `saved` is closed.
        with Checkpoints(self.source) as saved:
            step = saved.latest()
            if step is not None:
                return saved.arrays(step)
        raise ValueError(f"{self.source}: there is no checkpoint to start from.")

    def first_value(
        self, path: str, dims: str, old: Mapping[str, Any], new: jax.Array | PaddedArray
    ) -> tuple[jax.Array | PaddedArray, str]:
        """Returns the first value of the array at `path`, and a line that describes it.

        `old` has the old run's arrays by path. `new` is the initialized array, with a letter of
        `dims` for each dim; with rule NEW, the result is `new` itself. Raises ValueError if the old
        array is missing, does not fit, or is damaged.
        """
        rule = Rule(_first_match(self.rules, path) or Rule.NEW)
        if rule is Rule.NEW:
            return new, f"{path}: new, {specs.describe(new)}"
        try:
            before = old[path]
        except KeyError as missing:
            (old_path,) = missing.args
            raise ValueError(f"{self.source} has no {old_path}, which rule {rule} needs.") from None
        if rule is Rule.COPY_EXPERTS:
            before = self._with_experts(path, dims, before, new)

        # Rules change sizes, but neither dtypes nor the number of dims.
        if before.dtype != new.dtype or len(before.shape) != new.ndim:
            raise ValueError(f"{self._mismatch(path, before, new)}.")
        if rule is Rule.BY_PIECE:
            means = _first_match(self.means, path)
            if means and "V" in dims:
                before = _WithMeans(before, dims.index("V"), means)
            ids, description = self._ids_by_piece(path, dims, before, new)
        else:
            ids, description = self._ids_of_copies(rule, path, before, new)
        return _gathered(before, ids, new), f"{path}: {description}"

    def _with_experts(self, path: str, dims: str, before: Any, new: jax.Array | PaddedArray) -> Any:
        """Returns the old array as that of one expert, if it has none and the new one has."""
        # A lowercase letter is the same dim, in the optimizer.
        axis = dims.upper().find("E")
        if axis < 0 or len(before.shape) != new.ndim - 1:
            return before

        # Copies of a part of a layer would not compute what the layer did.
        if tuple(before.shape) != (*new.shape[:axis], *new.shape[axis + 1 :]):
            raise ValueError(
                f"{self._mismatch(path, before, new)}; the experts of a layer that had none need "
                f"its shape."
            )
        return stack_forms.OneExpert(before, axis)

    def _ids_by_piece(
        self, path: str, dims: str, before: Any, new: jax.Array | PaddedArray
    ) -> tuple[list[np.ndarray], str]:
        """Returns each new index's old one along each dim, -1 for new pieces; and a description."""
        old_ids = _first_match(self.old_pieces, path)
        if old_ids is None or "V" not in dims:
            raise ValueError(f"{path}: rule BY_PIECE, but no vocabulary is known for it.")

        # Only the vocabulary's size may differ.
        vocabulary_axis = dims.index("V")
        other_sizes_before = np.delete(before.shape, vocabulary_axis)
        other_sizes = np.delete(new.shape, vocabulary_axis)
        if not np.array_equal(other_sizes_before, other_sizes):
            raise ValueError(f"{self._mismatch(path, before, new)}.")

        ids = [np.arange(size) for size in new.shape]
        ids[vocabulary_axis] = old_ids
        num_known = np.count_nonzero(old_ids >= 0)
        return ids, (
            f"restored {num_known} of {len(old_ids)} pieces, the others new, {specs.describe(new)}"
        )

    def _ids_of_copies(
        self, rule: Rule, path: str, before: Any, new: jax.Array | PaddedArray
    ) -> tuple[list[np.ndarray], str]:
        """Returns each new index's old one along each dim, and a description, for the other rules.

        Rule SAME is the case in which each dim has one copy.
        """
        if rule is Rule.SAME and before.shape != new.shape:
            raise ValueError(
                f"{self._mismatch(path, before, new)}; rule SAME needs the same shape: "
                f"COPY_EXPERTS, BY_PIECE or NEW may do."
            )
        # A vocabulary of the same size, but with other pieces, would fit without being right.
        old_ids = _first_match(self.old_pieces, path)
        if old_ids is not None and not np.array_equal(old_ids, np.arange(len(old_ids))):
            raise ValueError(f"{path}: the source has another vocabulary: BY_PIECE or NEW may do.")
        if np.mod(new.shape, before.shape).any():
            raise ValueError(
                f"{self._mismatch(path, before, new)}; rule COPY_EXPERTS needs a multiple of each "
                f"dim."
            )

        # New expert i is old expert i mod E, and so along every dim.
        sizes = zip(new.shape, before.shape, strict=True)
        ids = [np.arange(size) % size_before for size, size_before in sizes]
        if rule is Rule.SAME:
            return ids, f"restored, {specs.describe(new)}"
        return ids, f"{specs.describe(before)} copied to {specs.describe(new)}"

    def _mismatch(self, path: str, before: Any, new: jax.Array | PaddedArray) -> str:
        """Returns the beginning of an error, with both arrays' dtypes and shapes."""
        shapes = f"{specs.describe(before)}, this model's {specs.describe(new)}"
        return f"{self.source}: {path} is {shapes}"


@dataclasses.dataclass(frozen=True)
class PieceRows:
    """Which of the old rows, and of means that follow them, each of the new pieces has."""

    ids: np.ndarray  # int64 [V], -1 for a piece that is new.
    means: tuple[tuple[int, ...], ...] = ()  # The old ids of each.


def rows_by_piece(
    old_pieces: Sequence[str],
    new_pieces: Sequence[str],
    like: Sequence[tuple[str, str]] = (),
) -> PieceRows:
    """Returns the rows that the new vocabulary's pieces have in the old one.

    Pairs of `like` are a new piece and old ones, with spaces between them, whose mean it starts at.
    Raises ValueError for pairs of anything else.
    """
    old_ids = {piece: i for i, piece in enumerate(old_pieces)}
    ids = np.array([old_ids.get(piece, -1) for piece in new_pieces], np.int64)

    means: list[tuple[int, ...]] = []
    for pair in like:
        new, old = _checked_pair(pair)
        if new in old_ids or new not in new_pieces:
            where = "in the old vocabulary already" if new in old_ids else "not in the new one"
            raise ValueError(f"train.warm_start_pieces: {new} is {where}.")
        unknown = [piece for piece in old if piece not in old_ids]
        if unknown:
            raise ValueError(
                f"train.warm_start_pieces: {', '.join(unknown)}, for {new}, is not in the old "
                "vocabulary."
            )
        ids[list(new_pieces).index(new)] = len(old_pieces) + len(means)
        means.append(tuple(old_ids[piece] for piece in old))
    return PieceRows(ids, tuple(means))


def _checked_pair(pair: object) -> tuple[str, list[str]]:
    """Returns a new piece and the old ones; ValueError for what is no pair of texts."""
    match pair:
        case (str() as new, str() as old) if old.split():
            return new, old.split()
    raise ValueError(
        f"train.warm_start_pieces: expected pairs such as ('nds_Latn', 'deu_Latn'), got {pair!r}."
    )


@dataclasses.dataclass(frozen=True)
class _WithMeans:
    """An array, and behind its last index along an axis the means of some of its indices."""

    array: Any
    axis: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        size = self.array.shape[self.axis] + len(self.groups)
        return (*self.array.shape[: self.axis], size, *self.array.shape[self.axis + 1 :])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    def __getitem__(self, index: Index) -> np.ndarray:
        num_old = self.array.shape[self.axis]
        start, stop, _ = index[self.axis].indices(num_old + len(self.groups))
        parts: list[np.ndarray] = []
        if start < num_old:
            parts.append(self._read(index, start, min(stop, num_old)))

        # A mean reads single rows, wherever they are.
        for group in self.groups[max(0, start - num_old) : max(0, stop - num_old)]:
            rows = [self._read(index, row, row + 1) for row in group]
            parts.append(np.mean(rows, axis=0, dtype=np.float32).astype(self.dtype))
        return np.concatenate(parts, self.axis)

    def _read(self, index: Index, start: int, stop: int) -> np.ndarray:
        along = (*index[: self.axis], slice(start, stop), *index[self.axis + 1 :])
        return np.asarray(self.array[along])


def _gathered(
    before: Any, ids: Sequence[np.ndarray], new: jax.Array | PaddedArray
) -> jax.Array | PaddedArray:
    """Returns an array like `new` whose [i, j, ...] is before[ids[0][i], ids[1][j], ...].

    Where an id is -1, it keeps what `new` has. Only what this process's devices need is read, once.
    """
    # Padding has no old id, and keeps what it has.
    on_devices = padded.on_devices(new)
    padding = padded.end_padding(new.shape, on_devices.shape)
    ids = [np.pad(x, ends, constant_values=-1) for x, ends in zip(ids, padding, strict=True)]

    new_shards = {str(shard.index): shard.data for shard in on_devices.addressable_shards}
    read: dict[str, np.ndarray] = {}

    def shard(index: Index | None) -> np.ndarray:
        assert index is not None
        initialized = new_shards[str(index)]
        ids_here = [dim_ids[part] for dim_ids, part in zip(ids, index, strict=True)]
        old_range = _covering(ids_here)
        if old_range is None:
            return np.asarray(initialized)  # A part of the vocabulary without an old piece.

        # Devices that hold copies of the same experts share what was read.
        if str(old_range) not in read:
            read[str(old_range)] = before[old_range]
        return _selected(read[str(old_range)], old_range, ids_here, initialized)

    gathered = jax.make_array_from_callback(on_devices.shape, on_devices.sharding, shard)
    return padded.of_shape(gathered, new.shape)


def _covering(ids: Sequence[np.ndarray]) -> Index | None:
    """Returns the smallest range with all ids but -1; None if a dim has no others.

    Ids [3, -1, 1] and [0, 1] are covered by [1:4, 0:2].
    """
    slices = []
    for dim_ids in ids:
        known = dim_ids[dim_ids >= 0]
        if not known.size:
            return None
        slices.append(slice(known.min(), known.max() + 1))
    return tuple(slices)


def _selected(
    values: np.ndarray, old_range: Index, ids: Sequence[np.ndarray], initialized: jax.Array
) -> np.ndarray:
    """Returns the ids of each dim from `values`, which are [old_range] of the old array.

    Where an id is -1, the result has what `initialized` has.
    """
    for axis, dim_ids in enumerate(ids):
        # Most dims are taken as they are; a copy of them would double the memory.
        within = dim_ids - old_range[axis].start
        if not np.array_equal(within, np.arange(values.shape[axis])):
            values = np.take(values, within, axis, mode="clip")

        # For id -1, a new piece, np.take has clipped the id and taken a wrong row.
        is_new = dim_ids < 0
        if is_new.any():
            other_axes = [other for other in range(len(ids)) if other != axis]
            values = np.where(np.expand_dims(is_new, other_axes), initialized, values)
    return values


def _first_match(patterns: Sequence[tuple[str, Any]], path: str) -> Any:
    """Returns the value of the first pattern that matches the whole path; None if none does."""
    for pattern, value in patterns:
        if re.fullmatch(pattern, path):
            return value
    return None
