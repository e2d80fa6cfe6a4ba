"""The rules that need the whole corpus: no pair of dev or test in training, and no pair twice.

Texts are compared by 64-bit digests. <name>.sorted.npy, uint64 [2, n], holds the digests of a
chunk's pairs, sorted, and their positions. Duplicates are found over all chunks of a language, one
range of digests after another, so that memory holds one range however large the corpus is.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from data_prep import chunks
from data_prep.chunks import Chunk
from data_prep.cleaning import Rule

_PAIRS_PER_RANGE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Selected:
    """The number of pairs kept of each chunk, and the number dropped by language and rule."""

    num_kept: list[int]
    dropped: chunks.Dropped


def select(members: Sequence[Chunk], held_out: Sequence[Chunk]) -> Selected:
    """Decides which pairs of a language's training chunks are kept, and writes that beside them.

    Drops pairs whose English is held out in any language, pairs whose source is held out in their
    own, and all but the first of equal pairs. `held_out` are all chunks of dev and test.
    """
    language = members[0].language
    held_out_english = _column(chunks.ENGLISH, held_out)
    own = [chunk for chunk in held_out if chunk.language == language]
    held_out_sources = _column(chunks.SOURCE, own)
    for chunk in members:
        digests = chunk.digests()
        is_held_out = np.isin(digests[:, chunks.ENGLISH], held_out_english)
        is_held_out |= np.isin(digests[:, chunks.SOURCE], held_out_sources)
        np.save(chunk.array_path("kept"), ~is_held_out)
        order = np.argsort(digests[:, chunks.PAIR], kind="stable").astype(np.uint64)
        np.save(chunk.array_path("sorted"), np.stack([digests[order, chunks.PAIR], order]))
    num_pairs = sum(chunk.num_pairs for chunk in members)
    num_not_held_out = sum(_num_kept(members))
    for low, high in _ranges(num_pairs):
        _drop_duplicates(members, low, high)
    num_kept = _num_kept(members)
    numbers = {
        Rule.HELD_OUT: num_pairs - num_not_held_out,
        Rule.DUPLICATE: num_not_held_out - sum(num_kept),
    }
    dropped = {(language, rule): number for rule, number in numbers.items()}
    return Selected(num_kept, collections.Counter(dropped))


def _column(column: int, members: Sequence[Chunk]) -> np.ndarray:
    """Returns the different digests in one column of the chunks."""
    digests = [chunk.digests()[:, column] for chunk in members]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *digests]))


def _ranges(num_pairs: int) -> Iterator[tuple[np.uint64, np.uint64]]:
    """Splits all digests into inclusive ranges of about _PAIRS_PER_RANGE pairs."""
    num_ranges = -(-num_pairs // _PAIRS_PER_RANGE) or 1
    bounds = [i * 2**64 // num_ranges for i in range(num_ranges + 1)]
    for low, high in itertools.pairwise(bounds):
        yield np.uint64(low), np.uint64(high - 1)


def _drop_duplicates(members: Sequence[Chunk], low: np.uint64, high: np.uint64) -> None:
    """Drops the pairs with digests from `low` to `high` that occur earlier."""
    values, places = [], []
    for index, chunk in enumerate(members):
        digests, order = np.load(chunk.array_path("sorted"), mmap_mode="r")
        found = slice(np.searchsorted(digests, low), np.searchsorted(digests, high, "right"))
        values.append(digests[found])
        places.append(np.stack([np.full_like(order[found], index), order[found]], axis=1))
    # unique() returns the first index, which is the first position in the first chunk.
    _, first = np.unique(np.concatenate(values), return_index=True)
    repeated = np.delete(np.concatenate(places), first, axis=0)
    for index in np.unique(repeated[:, 0]):
        kept = np.load(members[index].array_path("kept"), mmap_mode="r+")
        kept[repeated[repeated[:, 0] == index, 1]] = False
        kept.flush()


def _num_kept(members: Sequence[Chunk]) -> list[int]:
    return [int(np.load(chunk.array_path("kept")).sum()) for chunk in members]
