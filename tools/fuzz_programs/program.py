"""A random program, made of plain records that can be printed, run, stored and shrunk.

Each record is one line of Python, an expression of `tf` and `gshard`. The same text is executed
eagerly, traced for the partitioned program, and printed for a reader.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tools.fuzz_programs.registry import OPERATORS

FLOATS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor that is an argument of the program."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: str  # A letter of the table for each dim, or `_`.
    below: int = 0  # Integers are from 0 to below - 1.


@dataclasses.dataclass(frozen=True)
class Record:
    """One operator of the program: the name of its result, its inputs' names and its attributes.

    `annotation` is an expression in which `{0}` is the result, or empty.
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    annotation: str = ""

    @property
    def expression(self) -> str:
        """The Python expression of the operator, without its annotation."""
        every = ", ".join(self.inputs)
        return OPERATORS[self.operator].format(*self.inputs, every=every, **self.attributes)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of its arguments, and its partitioning.

    It returns the tensors of `results`, each split by its dims, and the gradients with respect to
    the arguments `gradients`. The incoming gradient of each floating-point result NAME is the
    argument `d_NAME`.
    """

    mesh: Mapping[str, int]
    table: Mapping[str, Sequence[str]]  # The mesh axes of each letter.
    arguments: tuple[Argument, ...]
    records: tuple[Record, ...]
    results: Mapping[str, str]
    gradients: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """The number of the mesh's devices."""
        return math.prod(self.mesh.values())

    @property
    def cotangents(self) -> list[str]:
        """The results whose incoming gradient is an argument, in order."""
        names = {argument.name for argument in self.arguments}
        return [name for name in self.results if f"d_{name}" in names]

    def replace(self, **changes: Any) -> Program:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def to_json(program: Program) -> str:
    """Returns the program as one line of JSON."""
    return json.dumps(dataclasses.asdict(program))


def from_json(text: str) -> Program:
    """Returns the program of `to_json`."""
    fields = json.loads(text)
    arguments = []
    for argument in fields.pop("arguments"):
        arguments.append(Argument(**argument | {"shape": tuple(argument["shape"])}))
    records = []
    for record in fields.pop("records"):
        records.append(Record(**record | {"inputs": tuple(record["inputs"])}))
    gradients = tuple(fields.pop("gradients"))
    return Program(
        **fields, arguments=tuple(arguments), records=tuple(records), gradients=gradients
    )


def describe(program: Program) -> str:
    """Returns the program in a few readable lines."""
    axes = ", ".join(f"{name}:{size}" for name, size in program.mesh.items())
    rows = ", ".join(f"{letter}:{'+'.join(names)}" for letter, names in program.table.items())
    lines = [f"mesh {axes}; table {rows or 'empty'}"]
    for argument in program.arguments:
        bound = f" below {argument.below}" if argument.below else ""
        shape = list(argument.shape)
        lines.append(f"{argument.name} = {argument.dtype}{shape} {argument.dims!r}{bound}")
    lines += body(program)
    results = ", ".join(f"{name} {dims!r}" for name, dims in program.results.items())
    lines.append(f"returns {results or 'no value'}")
    if program.gradients:
        lines.append(f"and the gradients of {', '.join(program.gradients)}")
    return "\n".join(lines)


def body(program: Program) -> list[str]:
    """Returns one line of Python for each record, and one for its annotation."""
    lines = []
    for record in program.records:
        lines.append(f"{record.name} = {record.expression}")
        if record.annotation:
            lines.append(f"{record.name} = {record.annotation.format(record.name)}")
    return lines


def used(program: Program) -> Program:
    """Returns the program without unused records and arguments."""
    needed = {*program.results, *program.gradients}
    needed |= {f"d_{name}" for name in program.results}

    records = []
    for record in reversed(program.records):
        if record.name in needed:
            records.append(record)
            needed |= set(record.inputs)
    arguments = tuple(argument for argument in program.arguments if argument.name in needed)
    return program.replace(arguments=arguments, records=tuple(reversed(records)))
