"""A compiled program's text, read into records: its collectives, with groups and bytes, and loops.

XLA's text names every computation in a block of its own; a loop names its body's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "collective-permute", "reduce-scatter")

Groups = tuple[tuple[int, ...], ...]

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = ", re.MULTILINE)
# A quote begins the metadata, which quotes the user's names: nothing is read past it.
_COLLECTIVE = re.compile(rf' = (?P<type>[^"]*?) (?P<kind>{"|".join(COLLECTIVES)})(-start)?\(')
_WHILE = re.compile(r' = [^"]* while\(')
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_CALLS = re.compile(
    r"\b(?:body|condition|to_apply|calls|branch_computations|true_computation|"
    r"false_computation)=(?P<names>\{[^}]*\}|%?[\w.-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_ARRAY = re.compile(r"\b(pred|bf16|c64|c128|f8\w*|[suf]\d+)\[([\d,]*)\]")
_LISTED = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}")
_IOTA = re.compile(r"\breplica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one partition's program.

    Attributes:
      kind: one of COLLECTIVES; a start and its done are one.
      result_bytes: of its results on one partition, each time it runs. Several tensors that the
        compiler joined count together.
      groups: the partitions that exchange with each other; of a collective-permute, the
        (source, target) pairs.
      times: how often a call runs it, the trip counts of the loops around it multiplied; None
        where the text does not give one of them.
    """

    kind: str
    result_bytes: int
    groups: Groups
    times: int | None

    @property
    def group_size(self) -> int:
        """Partitions in each group; 2 for a collective-permute."""
        return len(self.groups[0])


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop: its instruction's name, and its trip count where the text gives it."""

    name: str
    trip_count: int | None


@dataclasses.dataclass(frozen=True)
class CompiledText:
    """What stands in the text; loops and collectives in its order."""

    collectives: tuple[Collective, ...]
    loops: tuple[Loop, ...]
    num_instructions: int


@dataclasses.dataclass(frozen=True)
class _Computation:
    """A block of the text."""

    name: str
    lines: tuple[str, ...]
    is_entry: bool


def parse(text: str) -> CompiledText:
    """Reads a compiled program's text.

    Raises:
      ValueError: a collective's groups are written in a form that is not known.
    """
    found = _PARTITIONS.search(text)
    num_partitions = int(found[1]) if found else 1
    blocks = list(_computations(text))
    times = _times(blocks)
    collectives, loops = [], []
    for block in blocks:
        for line in block.lines:
            if match := _COLLECTIVE.search(line):
                is_start, kind = match[3] is not None, match["kind"]
                result_bytes = _type_bytes(_result_type(match["type"], kind, is_start))
                groups = _groups(line, num_partitions)
                collectives.append(Collective(kind, result_bytes, groups, times[block.name]))
            elif _WHILE.search(line) and (name := _INSTRUCTION.match(line)):
                loops.append(Loop(name["name"], _trip_count(line)))
    return CompiledText(tuple(collectives), tuple(loops), len(_INSTRUCTION.findall(text)))


def _computations(text: str) -> Iterator[_Computation]:
    name: str | None = None
    is_entry, lines = False, list[str]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, is_entry, lines = head["name"], head["entry"] is not None, []
        elif name is not None and line.startswith("}"):
            yield _Computation(name, tuple(lines), is_entry)
            name = None
        elif name is not None:
            lines.append(line)


def _times(blocks: list[_Computation]) -> dict[str, int | None]:
    """How often one call runs each computation."""
    callers: dict[str, list[tuple[str, int | None]]] = {block.name: [] for block in blocks}
    for block in blocks:
        for line in block.lines:
            trips = _trip_count(line) if _WHILE.search(line) else 1
            for call in _CALLS.finditer(line):
                for name in re.findall(r"[\w.-]+", call["names"]):
                    if name in callers:
                        callers[name].append((block.name, trips))
    entries = {block.name for block in blocks if block.is_entry}

    @functools.cache
    def times(name: str) -> int | None:
        if name in entries:
            return 1
        total = 0
        for caller, trips in callers[name]:
            outer = times(caller)
            if outer is None or trips is None:
                return None
            total += outer * trips
        return total

    return {block.name: times(block.name) for block in blocks}


def _trip_count(line: str) -> int | None:
    found = _TRIP_COUNT.search(line)
    return int(found[1]) if found else None


def _result_type(type_text: str, kind: str, is_start: bool) -> str:
    """The part of an instruction's type that holds its results: these starts carry operands too."""
    if is_start and kind in ("all-gather", "collective-permute"):
        return _elements(type_text)[1]
    return type_text


def _elements(tuple_type: str) -> list[str]:
    """The types in a tuple's type, whose layouts and inner tuples hold commas and brackets too."""
    elements, depth = [""], 0
    for char in tuple_type.strip()[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += char
    return elements


def _type_bytes(type_text: str) -> int:
    bits = 0
    for dtype, sizes in _ARRAY.findall(type_text):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        bits += count * _dtype_bits(dtype)
    return -(-bits // 8)


def _dtype_bits(dtype: str) -> int:
    if dtype == "pred" or dtype.startswith("f8"):
        return 8
    return int(dtype.lstrip("bcsuf"))


def _groups(line: str, num_partitions: int) -> Groups:
    if iota := _IOTA.search(line):
        sizes = [int(size) for size in iota[3].split(",")]
        order = [int(axis) for axis in iota[4].split(",")] if iota[4] else range(len(sizes))
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return tuple(map(tuple, ids.reshape(int(iota[1]), int(iota[2])).tolist()))
    if listed := _LISTED.search(line):
        if listed[1] is None:  # No groups given: all partitions are one.
            return (tuple(range(num_partitions)),)
        rows = listed[1].strip("{}").split("},{")
        return tuple(tuple(int(place) for place in row.split(",")) for row in rows)
    if "replica_groups=" in line:
        written = line[line.index("replica_groups=") :][:80]
        raise ValueError(f"parse: a collective's groups are in no known form: {written}")
    return (tuple(range(num_partitions)),)
