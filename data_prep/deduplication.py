"""The rules that need the whole corpus: no pair of dev or test in training, and no pair twice.

A document counts as a pair whose source and English are the same text.

Texts are compared by 64-bit digests. As in an external sort, a language's chunks are divided into
groups, and the range of digests into as many parts. Three steps of tasks follow:

    sort      sorts the digests of one group, without the digests of held-out pairs
    repeated  finds the pairs with digests in one range that occur earlier
    select    writes which pairs of one group's chunks are kept

So only the pairs of one group or range are in memory, and only the number of pieces exchanged grows
quadratically, as (pairs / _PAIRS_PER_GROUP)**2. The steps exchange these files:

    <language>-<group>.sorted.npy    uint64 [2, n]: digests in order, and positions in the group
    <language>-<range>.repeated.npy  uint64 [2, n]: groups in order, and positions in each
"""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from data_prep import languages, shards, text_chunks, tsv
from data_prep.rules import Dropped, Rule
from data_prep.text_chunks import Chunk

_PAIRS_PER_GROUP = 1 << 24
_NUM_DIGESTS = 1 << 64  # Digests are spread evenly over these numbers.
Runner = Callable[[str, Mapping[Any, Callable[[], Any]]], dict[Any, Any]]  # See runs.run_tasks.


@dataclasses.dataclass(frozen=True)
class Selected:
    """The numbers of kept pairs by block (shards.py), and of dropped pairs by language and rule."""

    block_sizes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    dropped: Dropped = dataclasses.field(default_factory=collections.Counter)


def groups(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Divides a language's chunks, in order, into groups of about _PAIRS_PER_GROUP pairs."""
    sizes = [chunk.num_examples for chunk in chunks]
    return tsv.grouped(chunks, sizes, _PAIRS_PER_GROUP)


def select(
    train: Mapping[str, Sequence[Chunk]],
    held_out: Sequence[Chunk],
    folder: pathlib.Path,
    pairs_per_block: int,
    run: Runner,
) -> dict[str, Selected]:
    """Decides which pairs of each language's training chunks are kept; writes it beside them.

    A pair is dropped if one of its texts occurs, in the same language, in the `held_out` chunks of
    dev and test. Of equal pairs, the first is kept.
    """
    folder.mkdir(exist_ok=True)
    held_out_paths: dict[str, pathlib.Path] = {}
    for language in sorted(set(itertools.chain.from_iterable(map(languages.sides, train)))):
        held_out_paths[language] = folder / f"{language}.held_out.npy"
        _save_held_out(held_out, language, held_out_paths[language])

    sort_calls: dict[tuple[str, int], Callable[[], None]] = {}
    repeated_calls: dict[tuple[str, int], Callable[[], None]] = {}
    keep_calls: dict[tuple[str, int], Callable[[], Selected]] = {}
    for code, chunks in train.items():
        source, target = languages.sides(code)
        chunk_groups = groups(chunks)
        names = [f"{code}-{i:05d}" for i in range(len(chunk_groups))]
        sorted_paths = [folder / f"{name}.sorted.npy" for name in names]
        repeated_paths = [folder / f"{name}.repeated.npy" for name in names]
        for i, group in enumerate(chunk_groups):
            lowest, highest = _digest_range(i, len(chunk_groups))
            sort_calls[code, i] = partial(
                _sort, group, held_out_paths[target], held_out_paths[source], sorted_paths[i]
            )
            repeated_calls[code, i] = partial(
                _find_repeated, sorted_paths, lowest, highest, repeated_paths[i]
            )
            keep_calls[code, i] = partial(
                _keep, group, i, sorted_paths[i], repeated_paths, pairs_per_block
            )

    # Each step reads the files of all tasks of the step before.
    run("sort", sort_calls)
    run("repeated", repeated_calls)
    selected = {code: Selected() for code in train}
    for (code, _), of_group in run("select", keep_calls).items():
        selected[code].block_sizes.update(of_group.block_sizes)
        selected[code].dropped.update(of_group.dropped)
    return selected


def _save_held_out(held_out: Sequence[Chunk], language: str, path: pathlib.Path) -> None:
    """Writes the digests of a language's texts in the chunks of dev and test, sorted."""
    digests = [np.empty(0, np.uint64)]  # concatenate() needs at least one array.
    for chunk in held_out:
        source, target = languages.sides(chunk.language)
        if source == language:
            digests.append(chunk.digests()[:, text_chunks.SOURCE])
        if target == language:
            digests.append(chunk.digests()[:, text_chunks.TARGET])
    text_chunks.save_array(path, np.unique(np.concatenate(digests)))


def _digest_range(index: int, num_ranges: int) -> tuple[np.uint64, np.uint64]:
    """Returns the lowest and the highest digest of one of several equal ranges."""
    lowest = index * _NUM_DIGESTS // num_ranges
    highest = (index + 1) * _NUM_DIGESTS // num_ranges - 1
    return np.uint64(lowest), np.uint64(highest)


def _sort(
    group: Sequence[Chunk],
    targets_path: pathlib.Path,
    sources_path: pathlib.Path,
    path: pathlib.Path,
) -> None:
    """Writes the sorted digests of a group's pairs, without pairs held out on either side."""
    held_out_targets = np.load(targets_path)
    held_out_sources = np.load(sources_path)

    pair_digests: list[np.ndarray] = []
    is_held_out: list[np.ndarray] = []
    for chunk in group:
        digests = chunk.digests()
        has_target = np.isin(digests[:, text_chunks.TARGET], held_out_targets)
        has_source = np.isin(digests[:, text_chunks.SOURCE], held_out_sources)
        pair_digests.append(digests[:, text_chunks.PAIR])
        is_held_out.append(has_target | has_source)

    positions = np.flatnonzero(~np.concatenate(is_held_out))
    values = np.concatenate(pair_digests)[positions]
    # Stable: equal digests stay in the order of their positions.
    order = np.argsort(values, kind="stable")
    text_chunks.save_array(path, np.stack([values[order], positions[order].astype(np.uint64)]))


def _find_repeated(
    sorted_paths: Sequence[pathlib.Path],
    lowest: np.uint64,
    highest: np.uint64,
    path: pathlib.Path,
) -> None:
    """Writes the places of pairs that occur earlier, for digests from `lowest` to `highest`.

    A place is the index of a group and a position in the group.
    """
    values: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for group_index, sorted_path in enumerate(sorted_paths):
        digests, positions = np.load(sorted_path, mmap_mode="r")
        start = np.searchsorted(digests, lowest, side="left")
        end = np.searchsorted(digests, highest, side="right")
        in_range = positions[start:end]
        values.append(digests[start:end])
        places.append(np.stack([np.full_like(in_range, group_index), in_range]))

    # unique() returns the first index, which is the first position in the first group.
    _, first_indices = np.unique(np.concatenate(values), return_index=True)
    all_places = np.concatenate(places, axis=1)
    text_chunks.save_array(path, np.delete(all_places, first_indices, axis=1))


def _keep(
    group: Sequence[Chunk],
    group_index: int,
    sorted_path: pathlib.Path,
    repeated_paths: Sequence[pathlib.Path],
    pairs_per_block: int,
) -> Selected:
    """Writes which pairs of a group's chunks are kept: the sorted pairs that are not repeated."""
    sizes = [chunk.num_examples for chunk in group]
    is_kept = np.zeros(sum(sizes), bool)

    # Held-out pairs were not sorted.
    _, sorted_positions = np.load(sorted_path)
    is_kept[sorted_positions] = True
    num_held_out = len(is_kept) - np.count_nonzero(is_kept)

    # The file of a range lists the repeated pairs of all groups, in the order of the groups.
    for repeated_path in repeated_paths:
        group_indices, positions = np.load(repeated_path, mmap_mode="r")
        first = np.searchsorted(group_indices, np.uint64(group_index))
        end = np.searchsorted(group_indices, np.uint64(group_index + 1))
        is_kept[positions[first:end]] = False
    num_repeated = len(is_kept) - np.count_nonzero(is_kept) - num_held_out

    chunk_ends = np.cumsum(sizes)
    for chunk, of_chunk in zip(group, np.split(is_kept, chunk_ends[:-1]), strict=True):
        text_chunks.save_array(chunk.array_path("kept"), of_chunk)

    language = group[0].language
    dropped: Dropped = collections.Counter()
    dropped[language, Rule.HELD_OUT] = int(num_held_out)
    dropped[language, Rule.DUPLICATE] = int(num_repeated)
    return Selected(shards.block_sizes(group, pairs_per_block), dropped)
