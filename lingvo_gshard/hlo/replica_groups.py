"""Who exchanges with whom in a collective, from the forms that XLA's text writes it in."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

# The partitions of each group; of a collective-permute, (source, target) pairs.
Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}")
_IOTA = re.compile(r"\breplica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"\breplica_groups=mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:, device_ids=\((?:\[(?P<sizes>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,]+))\))?"
    r" ?\{(?P<axes>[^}]*)\}"
)
_SIZED_AXIS = re.compile(r"'?([\w.-]+)'?=(\d+)")
# A part of an axis: as many as `size`, each of what is left when `pre` parts have been made.
_AXIS = re.compile(r"'?(?P<name>[A-Za-z_][\w.-]*)'?(?::\((?P<pre>\d+)\)(?P<size>\d+))?")


def parse(attributes: str, num_partitions: int) -> Groups:
    """The groups in a collective's attributes; where none are given, all partitions are one.

    Raises:
      ValueError: they are written in a form that is not known.
    """
    if iota := _IOTA.search(attributes):
        ids = _iota(iota[3], iota[4])
        return _rows(ids.reshape(int(iota[1]), int(iota[2])))
    if mesh := _MESH.search(attributes):
        return _rows(_along_axes(mesh))
    if listed := _LISTED.search(attributes):
        if listed[1] is None:
            return (tuple(range(num_partitions)),)
        return tuple(_numbers(row) for row in listed[1].strip("{}").split("},{"))
    if "replica_groups=" in attributes:
        written = attributes[attributes.index("replica_groups=") :][:80]
        raise ValueError(f"parse: a collective's groups are in no known form: {written}")
    return (tuple(range(num_partitions)),)


def _along_axes(mesh: re.Match[str]) -> np.ndarray:
    """[group, place in it] of `mesh['a'=2,'b'=4] {'b'}`: one group along the axes in braces."""
    sizes = {name: int(size) for name, size in _SIZED_AXIS.findall(mesh["mesh"])}
    wanted = [
        (axis["name"], int(axis["pre"] or 1), int(axis["size"] or sizes[axis["name"]]))
        for axis in _AXIS.finditer(mesh["axes"])
    ]
    # Each axis is divided where one of its wanted parts begins or ends.
    factors: list[tuple[str, int, int]] = []
    for name, whole in sizes.items():
        cuts = {1, whole}
        cuts |= {cut for axis, pre, size in wanted if axis == name for cut in (pre, pre * size)}
        factors += [(name, start, end // start) for start, end in itertools.pairwise(sorted(cuts))]
    ids = np.arange(math.prod(sizes.values()))
    if mesh["sizes"]:
        ids = _iota(mesh["sizes"], mesh["order"])
    elif mesh["ids"]:
        ids = np.array(_numbers(mesh["ids"]))
    inside = [factors.index(axis) for axis in wanted if axis[2] > 1]
    outside = [place for place in range(len(factors)) if place not in inside]
    grid = ids.reshape([size for _, _, size in factors]).transpose(outside + inside)
    return grid.reshape(-1, math.prod(factors[place][2] for place in inside))


def _iota(sizes_text: str, order_text: str | None) -> np.ndarray:
    """0, 1, 2, ... in a grid of `sizes`, read in another order of its dimensions."""
    sizes = _numbers(sizes_text)
    order = _numbers(order_text) if order_text else tuple(range(len(sizes)))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _rows(groups: np.ndarray) -> Groups:
    return tuple(map(tuple, groups.tolist()))
