r"""Runs that start from another run's weights by explicit rules.

rules = (
    (r"theta\.(.*_embedding\..*|softmax)", "BY_PIECE"),
    (r"theta\..*\.feed_forward\..*", "COPY_EXPERTS"),
    (r"theta\..*", "SAME"),
)

The first rule whose pattern matches an array's path applies to it. Arrays without a rule are
initialized.

A dense run can start a model with experts (upcycling: Komatsuzaki et al., 2023). By the rule
COPY_EXPERTS, each expert is a copy of the layer's feed-forward; the gate is NEW.

rules = (
    (r"theta\..*\.feed_forward\.wg", "NEW"),
    (r"theta\..*\.feed_forward\..*", "COPY_EXPERTS"),
    (r"theta\..*", "SAME"),
)

The old run's stacks may have another form, UNROLLED or LOOP: see restacked.py.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore
from tensorstore import TensorStore

from lingvo_gshard.checkpoints import exported, restacked
from lingvo_gshard.checkpoints.checked_array import CheckedArray, Index
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import padded, processes, specs
from lingvo_gshard.spmd.padded import PaddedArray


class Rule(enum.StrEnum):
    """How an array is made from the old run's array.

    SAME: it is equal.
    COPY_EXPERTS: dims that differ grow by whole copies. New expert i is old expert i mod E; if the
    old array has no experts, each new expert is a copy of it.
    BY_PIECE: along V, a piece of the old vocabulary keeps its values. Another piece is the mean of
    old ones, if it is listed, or new.
    NEW: it is initialized.
    """

    SAME = "SAME"
    COPY_EXPERTS = "COPY_EXPERTS"
    BY_PIECE = "BY_PIECE"
    NEW = "NEW"


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A run to start from; raises ValueError for bad rules."""

    source: str  # A run's folder, or a .safetensors file or its index that a run exported.
    rules: tuple[tuple[str, str], ...]  # Pairs of a pattern of paths and a Rule or its name.
    # For BY_PIECE: pairs of a pattern and the rows of the new pieces.
    pieces: tuple[tuple[str, "PieceRows"], ...] = ()

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
        """Returns the initialized state with arrays from the source; prints each array's origin.

        One line counts the new arrays that are not weights, such as slots. Another one lists the
        source's weights that are not used.

        All processes must call it. Each reads only the parts that its devices need, one array at a
        time, and deletes the arrays of `state` that it replaces. Raises ValueError if the source
        has no checkpoint or is damaged, or if an array is missing or does not fit;
        FileNotFoundError if an exported file is missing.
        """
        old = restacked.Renamed(self.arrays(), dict(state.FlattenItems()))
        leaves = []
        num_new = 0
        for (path, leaf), spec in zip(state.FlattenItems(), state_spec.Flatten(), strict=True):
            value, line = self.first_value(path, spec.dims, old, leaf)
            leaves.append(value)
            if value is not leaf:
                leaf.delete()  # Otherwise the devices would finally hold two states.
            if value is leaf and not path.startswith("theta."):
                num_new += 1
            elif processes.is_first():
                print(line)

        if num_new and processes.is_first():
            print(f"{num_new} arrays that are not weights, such as slots: new")
        left = [path for path in old.left() if path.startswith("theta.")]
        if left and processes.is_first():
            print(f"{self.source}: weights that are not used: {', '.join(left)}")
        return state.Pack(leaves)

    def arrays(self) -> Mapping[str, CheckedArray]:
        """Returns the source's arrays by path; each part is read when it is used.

        Raises ValueError if there is no checkpoint, or a file is damaged or another program's, and
        FileNotFoundError if an exported file is missing.
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
        self, path: str, dims: str, old: Mapping[str, CheckedArray], new: jax.Array | PaddedArray
    ) -> tuple[jax.Array | PaddedArray, str]:
        """Returns the first value of the array at `path`, and a line that describes its origin.

        `old` has the old run's arrays by path. `new` is the initialized array, and `dims` has a
        letter for each of its dims; with the rule NEW, the result is `new` itself. Raises
        ValueError if the old array is missing, does not fit, or is damaged.
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

        # Rules change sizes, but not dtypes or the number of dims.
        if before.dtype != new.dtype or len(before.shape) != new.ndim:
            raise ValueError(f"{self._mismatch(path, before, new)}.")
        if rule is Rule.BY_PIECE:
            rows = _first_match(self.pieces, path)
            if rows is None or "V" not in dims:
                raise ValueError(f"{path}: rule BY_PIECE, but no vocabulary is known for it.")
            if rows.means:
                before = _with_means(before, dims.index("V"), rows.means)
            ids, description = self._ids_by_piece(path, dims.index("V"), before, new, rows.ids)
        else:
            ids, description = self._ids_of_copies(rule, path, before, new)
        return _gathered(before, ids, new), f"{path}: {description}"

    def _with_experts(
        self, path: str, dims: str, before: CheckedArray, new: jax.Array | PaddedArray
    ) -> CheckedArray:
        """Returns the old array, as a single expert if only the new array has experts."""
        # A lowercase letter is the same dim, in the optimizer.
        axis = dims.upper().find("E")
        if axis < 0 or len(before.shape) != new.ndim - 1:
            return before

        # The layer must be copied whole: copies of a part would compute something else.
        if tuple(before.shape) != (*new.shape[:axis], *new.shape[axis + 1 :]):
            raise ValueError(
                f"{self._mismatch(path, before, new)}; the experts must have the shape of the "
                f"dense layer that they are copies of."
            )
        return before.indexed(tensorstore.d[axis][tensorstore.newaxis], dims)

    def _ids_by_piece(
        self,
        path: str,
        axis: int,
        before: CheckedArray,
        new: jax.Array | PaddedArray,
        old_ids: np.ndarray,
    ) -> tuple[list[np.ndarray], str]:
        """Returns each new index's old index along each dim, or -1, and a description.

        New pieces, along `axis`, have the old index -1.
        """
        # Only the vocabulary's size may differ.
        if not np.array_equal(np.delete(before.shape, axis), np.delete(new.shape, axis)):
            raise ValueError(f"{self._mismatch(path, before, new)}.")

        ids = [np.arange(size) for size in new.shape]
        ids[axis] = old_ids
        num_known = np.count_nonzero(old_ids >= 0)
        return ids, (
            f"restored {num_known} of {len(old_ids)} pieces, the others new, {specs.describe(new)}"
        )

    def _ids_of_copies(
        self, rule: Rule, path: str, before: CheckedArray, new: jax.Array | PaddedArray
    ) -> tuple[list[np.ndarray], str]:
        """Returns each new index's old index along each dim, for the other rules; a description.

        The rule SAME is the case of one copy along each dim.
        """
        if rule is Rule.SAME and before.shape != new.shape:
            raise ValueError(
                f"{self._mismatch(path, before, new)}; rule SAME needs the same shape: "
                f"try COPY_EXPERTS, BY_PIECE or NEW."
            )
        # A vocabulary of the same size may have other pieces.
        rows = _first_match(self.pieces, path)
        if rows is not None and not np.array_equal(rows.ids, np.arange(len(rows.ids))):
            raise ValueError(f"{path}: the source has another vocabulary: try BY_PIECE or NEW.")
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

    def _mismatch(self, path: str, before: CheckedArray, new: jax.Array | PaddedArray) -> str:
        """Returns the beginning of an error, with both arrays' dtypes and shapes."""
        shapes = f"{specs.describe(before)}, this model's {specs.describe(new)}"
        return f"{self.source}: {path} is {shapes}"


@dataclasses.dataclass(frozen=True)
class PieceRows:
    """The rows of a new vocabulary's pieces: old rows, or means, which follow these."""

    ids: np.ndarray  # Each new piece's row, int64 [V]; -1 for a piece that is new.
    means: tuple[tuple[int, ...], ...] = ()  # The old ids of each mean.


def rows_by_piece(
    old_pieces: Sequence[str],
    new_pieces: Sequence[str],
    like: Sequence[tuple[str, str]] = (),
) -> PieceRows:
    """Returns the rows in the old vocabulary of the new vocabulary's pieces.

    A row without a piece, which is empty, keeps its place. `like` has pairs of a new piece and old
    pieces, separated by spaces. The new piece starts as their mean. Raises ValueError for other
    pairs.
    """
    old_ids = {piece: i for i, piece in enumerate(old_pieces)}
    ids = np.array([old_ids.get(piece, -1) for piece in new_pieces], np.int64)
    for i, pieces in enumerate(zip(old_pieces, new_pieces, strict=False)):
        if pieces == ("", ""):
            ids[i] = i

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
    """Returns a new piece and the old ones; raises ValueError unless `pair` has two texts."""
    match pair:
        case (str() as new, str() as old) if old.split():
            return new, old.split()
    raise ValueError(
        f"train.warm_start_pieces: expected pairs such as ('nds_Latn', 'deu_Latn'), got {pair!r}."
    )


def _with_means(
    array: CheckedArray, axis: int, groups: tuple[tuple[int, ...], ...]
) -> CheckedArray:
    """Returns an array that is followed, along `axis`, by the means of `groups` of its indices.

    The means are computed when the array is first read, and stay in memory.
    """
    sizes = [len(group) for group in groups]
    members = [index for group in groups for index in group]

    def open_view() -> TensorStore:
        old = array.checked
        # All members are read together, as reading one may read and check the whole array.
        read = old[tensorstore.d[axis][members]].read().result()
        means = []
        for group in np.split(read, np.cumsum(sizes)[:-1], axis):
            means.append(group.mean(axis, dtype=np.float32, keepdims=True).astype(array.dtype))
        return tensorstore.concat([old, tensorstore.array(np.concatenate(means, axis))], axis)

    shape = list(array.shape)
    shape[axis] += len(groups)
    spec = dataclasses.replace(array.spec, shape=tuple(shape))
    return dataclasses.replace(array, spec=spec, open=open_view, fingerprints=None)


def _gathered(
    before: CheckedArray, ids: Sequence[np.ndarray], new: jax.Array | PaddedArray
) -> jax.Array | PaddedArray:
    """Returns an array like `new` whose [i, j, ...] is before[ids[0][i], ids[1][j], ...].

    Where an id is -1, it has the element of `new`. Each process reads only the parts that its
    devices need, and each part once.
    """
    # The padding stays as it is in `new`.
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
            return np.asarray(initialized)  # All pieces of this part are new.

        # Devices with copies of the same experts share a part.
        if str(old_range) not in read:
            read[str(old_range)] = before[old_range]
        return _selected(read[str(old_range)], old_range, ids_here, initialized)

    gathered = jax.make_array_from_callback(on_devices.shape, on_devices.sharding, shard)
    return padded.of_shape(gathered, new.shape)


def _covering(ids: Sequence[np.ndarray]) -> Index | None:
    """Returns the smallest range that has all ids except -1; None if some dim has only -1.

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
    """Returns the elements with these ids, given `values`, [old_range] of the old array.

    Where an id is -1, it has the element of `initialized`.
    """
    for axis, dim_ids in enumerate(ids):
        # Most dims are unchanged; copying `values` would double the memory.
        within = dim_ids - old_range[axis].start
        if not np.array_equal(within, np.arange(values.shape[axis])):
            values = np.take(values, within, axis, mode="clip")

        # The id of a new piece, -1, was clipped, so its values are wrong.
        is_new = dim_ids < 0
        if is_new.any():
            other_axes = [other for other in range(len(ids)) if other != axis]
            values = np.where(np.expand_dims(is_new, other_axes), initialized, values)
    return values


def _first_match(patterns: Sequence[tuple[str, Any]], path: str) -> Any:
    """Returns the value of the first pattern that matches the whole path, or None."""
    for pattern, value in patterns:
        if re.fullmatch(pattern, path):
            return value
    return None
