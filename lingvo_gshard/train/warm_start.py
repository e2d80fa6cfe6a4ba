r"""A run that begins from another one's weights, by explicit rules.

rules = (
    (r"theta\..*_embedding\..*", Rule.BY_PIECE),
    (r"theta\..*\.feed_forward\..*", Rule.COPY_EXPERTS),
    (r"theta\..*", Rule.SAME),
)

The first rule whose pattern matches an array's whole path holds for it. What no rule names is
new, as in a run that begins from nothing: usually the optimizer's slots and the step.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.train import checkpoints, weights_file
from lingvo_gshard.train.checkpoints import Checkpoints


class Rule(enum.Enum):
    """How an array comes from the old run.

    SAME: as it was. COPY_EXPERTS: dims that differ grow by whole copies, new expert i from old
    expert i mod E. BY_PIECE: along V, each piece of the vocabulary that the old one has, too; other
    pieces are new. NEW: not at all.
    """

    SAME = "same"
    COPY_EXPERTS = "copy_experts"
    BY_PIECE = "by_piece"
    NEW = "new"


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Where to begin, and by which rules.

    Attributes:
      source: a run's folder, whose newest checkpoint is read, or a .safetensors file.
      rules: (pattern of paths, rule), the first that matches holds.
      old_pieces: (pattern of paths, int array [V]): for each piece of the new vocabulary its id in
        the old one, -1 where it has none; for BY_PIECE.

    Raises:
      ValueError: a pattern that is no regular expression.
    """

    source: str
    rules: tuple[tuple[str, Rule], ...]
    old_pieces: tuple[tuple[str, np.ndarray], ...] = ()

    def __post_init__(self) -> None:
        for pattern, _ in self.rules:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"Warm start: {pattern!r} is no pattern: {error}.") from error

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The source's, by path.

        Raises:
          FileNotFoundError: there is no such .safetensors file.
          ValueError: there is no checkpoint, or it is damaged.
        """
        if self.source.endswith(".safetensors"):
            return weights_file.read(self.source)
        if checkpoints.exist(self.source):
            with Checkpoints(self.source) as saved:
                step = saved.latest()
                if step is not None:
                    return saved.restore_arrays(step)
        raise ValueError(f"{self.source}: there is no checkpoint to begin from.")

    def rule_of(self, path: str) -> Rule:
        """The rule that holds for the array at `path`."""
        return _first_match(self.rules, path) or Rule.NEW

    def begin(
        self, path: str, dims: str, old: Mapping[str, np.ndarray], new: np.ndarray
    ) -> tuple[np.ndarray, str]:
        """One array's first value, and a line that says what it is.

        Args:
          path: its path in the state.
          dims: its dims' letters.
          old: the old run's arrays, by path.
          new: the value that it has without a warm start.

        Raises:
          ValueError: the old run lacks it, or its shape or dtype does not suit the rule.
        """
        rule = self.rule_of(path)
        if rule is Rule.NEW:
            return new, f"{path}: new, {_shape(new)}"
        if path not in old:
            raise ValueError(f"{self.source}: has no {path}, which rule {rule.name} wants.")
        before = old[path]
        if before.dtype != new.dtype or before.ndim != new.ndim:
            raise ValueError(f"{self._of(path, before)}, this model's {_shape(new)}.")
        if rule is Rule.BY_PIECE:
            return self._by_piece(path, dims, before, new)
        if rule is Rule.COPY_EXPERTS:
            return self._copied(path, before, new)
        if before.shape != new.shape:
            raise ValueError(
                f"{self._of(path, before)}, this model's {_shape(new)}; rule SAME needs the same "
                "shape: COPY_EXPERTS, BY_PIECE or NEW may do."
            )
        return before, f"{path}: restored, {_shape(new)}"

    def _copied(self, path: str, before: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, str]:
        if any(n % b for n, b in zip(new.shape, before.shape, strict=True)):
            raise ValueError(
                f"{self._of(path, before)}, this model's {_shape(new)}; rule COPY_EXPERTS needs a "
                "multiple of each dim."
            )
        copies = [n // b for n, b in zip(new.shape, before.shape, strict=True)]
        return np.tile(before, copies), f"{path}: {_shape(before)} copied to {_shape(new)}"

    def _by_piece(
        self, path: str, dims: str, before: np.ndarray, new: np.ndarray
    ) -> tuple[np.ndarray, str]:
        old_ids = _first_match(self.old_pieces, path)
        if old_ids is None or "V" not in dims:
            raise ValueError(f"{path}: rule BY_PIECE, but it is of no vocabulary that is known.")
        axis = dims.index("V")
        known = np.flatnonzero(old_ids >= 0)
        first = np.moveaxis(np.array(new), axis, 0)
        if first[0].shape != np.moveaxis(before, axis, 0)[0].shape:
            raise ValueError(f"{self._of(path, before)}, this model's {_shape(new)}.")
        first[known] = np.moveaxis(before, axis, 0)[old_ids[known]]
        line = f"{path}: restored {len(known)} of {len(old_ids)} pieces, the others new"
        return np.ascontiguousarray(np.moveaxis(first, 0, axis)), f"{line}, {_shape(new)}"

    def _of(self, path: str, before: np.ndarray) -> str:
        return f"{self.source}: {path} is {_shape(before)}"


def old_ids(old_pieces: Sequence[str], new_pieces: Sequence[str]) -> np.ndarray:
    """For each new piece its id among the old ones, -1 where there is none: int64 [V]."""
    ids = {piece: i for i, piece in enumerate(old_pieces)}
    return np.array([ids.get(piece, -1) for piece in new_pieces], np.int64)


def _first_match(patterns: Sequence[tuple[str, object]], path: str):
    return next((found for pattern, found in patterns if re.fullmatch(pattern, path)), None)


def _shape(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
