"""The rules that need the whole corpus: no pair of dev or test in training, and no pair twice.

Texts are compared by 64-bit digests. As in an external sort, a language's chunks are divided into
groups, and the digests into as many ranges. Each task of the first step sorts a group's digests,
of the second finds in one range what occurs earlier, and of the third writes which pairs of a
group's chunks are kept. So the pairs in memory are those of one group or range, and only the number
of pieces between groups and ranges is a square, (pairs / _PAIRS_PER_GROUP)**2.

    <language>-<group>.sorted.npy    uint64 [2, n]: digests in order, and positions in the group
    <language>-<range>.repeated.npy  uint64 [2, n]: groups in order, and positions in each
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from data_prep import chunks, shards, tsv
from data_prep.chunks import Chunk
from data_prep.cleaning import Rule

_PAIRS_PER_GROUP = 1 << 24
Runner = Callable[[str, Mapping[Any, Callable[[], Any]]], dict[Any, Any]]  # See runs.run_tasks.


@dataclasses.dataclass(frozen=True)
class Selected:
    """The number of pairs kept of each block (shards.py), and dropped by language and rule."""

    block_sizes: collections.Counter[int]
    dropped: chunks.Dropped


def groups(members: Sequence[Chunk]) -> list[list[Chunk]]:
    """Divides a language's chunks, in order, into groups of about _PAIRS_PER_GROUP pairs."""
    return tsv.grouped(members, (chunk.num_pairs for chunk in members), _PAIRS_PER_GROUP)


def select(
    train: Mapping[str, Sequence[Chunk]],
    held_out: Sequence[Chunk],
    folder: pathlib.Path,
    pairs_per_block: int,
    run: Runner,
) -> dict[str, Selected]:
    """Decides which pairs of each language's training chunks are kept, and writes that beside them.

    Pairs are dropped if their English is among the `held_out` chunks of dev and test, or their
    source among those of their language, and of equal pairs all but the first.
    """
    folder.mkdir(exist_ok=True)
    english = _save_held_out(held_out, chunks.ENGLISH, folder / "english.npy")
    sort, repeat, keep = {}, {}, {}
    for code, members in train.items():
        own = [chunk for chunk in held_out if chunk.language == code]
        sources = _save_held_out(own, chunks.SOURCE, folder / f"{code}.sources.npy")
        grouped = groups(members)
        in_order = [folder / f"{code}-{i:05d}.sorted.npy" for i in range(len(grouped))]
        repeated = [path.with_suffix("").with_suffix(".repeated.npy") for path in in_order]
        bounds = [i * 2**64 // len(grouped) for i in range(len(grouped) + 1)]
        for i, group in enumerate(grouped):
            low, high = np.uint64(bounds[i]), np.uint64(bounds[i + 1] - 1)
            sort[code, i] = partial(_sort, group, english, sources, in_order[i])
            repeat[code, i] = partial(_find_repeated, in_order, low, high, repeated[i])
            keep[code, i] = partial(_keep, group, i, in_order[i], repeated, pairs_per_block)
    run("sort", sort)
    run("repeated", repeat)
    found = {code: Selected(collections.Counter(), collections.Counter()) for code in train}
    for (code, _), kept in run("select", keep).items():
        found[code].block_sizes.update(kept.block_sizes)
        found[code].dropped.update(kept.dropped)
    return found


def _save_held_out(held_out: Sequence[Chunk], column: int, path: pathlib.Path) -> pathlib.Path:
    """Writes one column of the digests of dev's and test's chunks, sorted, and returns `path`."""
    columns = [chunk.digests()[:, column] for chunk in held_out]
    chunks.save_array(path, np.unique(np.concatenate([np.empty(0, np.uint64), *columns])))
    return path


def _sort(
    group: Sequence[Chunk], english: pathlib.Path, sources: pathlib.Path, path: pathlib.Path
) -> None:
    """Writes the digests, in order, of a group's pairs that are not held out on either side."""
    held_out_english, held_out_sources = np.load(english), np.load(sources)
    pairs, is_held_out = [], []
    for chunk in group:
        digests = chunk.digests()
        pairs.append(digests[:, chunks.PAIR])
        is_held_out.append(
            np.isin(digests[:, chunks.ENGLISH], held_out_english)
            | np.isin(digests[:, chunks.SOURCE], held_out_sources)
        )
    positions = np.flatnonzero(~np.concatenate(is_held_out))
    values = np.concatenate(pairs)[positions]
    order = np.argsort(values, kind="stable")
    chunks.save_array(path, np.stack([values[order], positions[order].astype(np.uint64)]))


def _find_repeated(
    in_order: Sequence[pathlib.Path], low: np.uint64, high: np.uint64, path: pathlib.Path
) -> None:
    """Writes the places of the pairs with digests from `low` to `high` that occur earlier."""
    values, places = [], []
    for index, sorted_path in enumerate(in_order):
        digests, positions = np.load(sorted_path, mmap_mode="r")
        found = slice(np.searchsorted(digests, low), np.searchsorted(digests, high, "right"))
        values.append(digests[found])
        places.append(np.stack([np.full_like(positions[found], index), positions[found]]))
    # unique() returns the first index, which is the first position in the first group.
    _, first = np.unique(np.concatenate(values), return_index=True)
    chunks.save_array(path, np.delete(np.concatenate(places, axis=1), first, axis=1))


def _keep(
    group: Sequence[Chunk],
    index: int,
    in_order: pathlib.Path,
    repeated: Sequence[pathlib.Path],
    pairs_per_block: int,
) -> Selected:
    """Writes which pairs of a group's chunks are kept: those in order that are not repeated."""
    is_kept = np.zeros(sum(chunk.num_pairs for chunk in group), bool)
    is_kept[np.load(in_order)[1]] = True
    num_held_out = len(is_kept) - np.count_nonzero(is_kept)
    for path in repeated:
        groups_of, positions = np.load(path, mmap_mode="r")
        here = slice(*(np.searchsorted(groups_of, np.uint64(i)) for i in (index, index + 1)))
        is_kept[positions[here]] = False
    ends = np.cumsum([chunk.num_pairs for chunk in group])
    for chunk, kept in zip(group, np.split(is_kept, ends[:-1]), strict=True):
        chunks.save_array(chunk.array_path("kept"), kept)
    num_dropped = len(is_kept) - np.count_nonzero(is_kept)
    dropped = {Rule.HELD_OUT: num_held_out, Rule.DUPLICATE: num_dropped - num_held_out}
    by_rule = {(group[0].language, rule): int(number) for rule, number in dropped.items()}
    sizes = shards.block_sizes(group, pairs_per_block)
    return Selected(sizes, collections.Counter(by_rule))
