"""Reduces a failing program to a few lines that fail in the same way."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tools.fuzz_programs import eager, generate, worker
from tools.fuzz_programs.draft import EVERYTHING, Choices
from tools.fuzz_programs.program import FLOATS, Argument, Program, Record, to_json, used
from tools.fuzz_programs.source import source

_MAX_SECS = 600.0
# Smaller meshes are tried first; the wrong result may need more devices.
_MESHES = ({"d": 2}, {"d": 4}, {"x": 2, "y": 2}, {"d": 8}, {"x": 2, "y": 4})


def shrunk_source(seed: int, choices: Choices = EVERYTHING) -> str:
    """Shrinks the program of a seed as long as its outcome is the same; returns it as Python.

    Raises ValueError if the outcome is `same` or `unlike`.
    """
    program = generate.generate(seed, choices)
    process = worker.Worker()
    try:
        first = worker.outcome_of_program(process, to_json(program), seed)
        if first["kind"] in ("same", "unlike"):
            raise ValueError(f"seed {seed}: the outcome is {first['kind']}, not a fault.")

        def fails(candidate: Program) -> bool:
            outcome = worker.outcome_of_program(process, to_json(candidate), seed)
            return signature(outcome) == signature(first)

        small = shrunk(program, seed, fails)
        last = worker.outcome_of_program(process, to_json(small), seed)
    finally:
        process.close()
    return source(small, seed, f"{last['kind']}: {last['detail']}")


def signature(outcome: dict[str, Any]) -> tuple[str, str]:
    """Returns the part of an outcome that is the same for every program with the same fault."""
    if outcome["kind"] not in ("error", "died"):
        return outcome["kind"], ""
    # Times, sizes and names of instructions differ from program to program.
    detail = outcome["detail"].split("] ")[-1]
    return outcome["kind"], re.sub(r"[\d.\[\]{},%]+", "", detail)[:50]


def shrunk(program: Program, seed: int, fails: Callable[[Program], bool]) -> Program:
    """Returns a program that is as small as possible and for which `fails` is true."""
    deadline = time.monotonic() + _MAX_SECS
    tried = {to_json(program)}
    smaller: Program | None = program
    while smaller is not None:
        program = smaller
        smaller = _smaller(program, seed, fails, tried, deadline)
    return program


def _smaller(
    program: Program,
    seed: int,
    fails: Callable[[Program], bool],
    tried: set[str],
    deadline: float,
) -> Program | None:
    """Returns a failing program that is one step smaller, or None; adds the programs to `tried`."""
    for reduce in (_results, _records, _placements, _meshes, _sizes):
        for candidate in reduce(program, seed):
            if time.monotonic() > deadline:
                return None

            fitted = _fitted(candidate, seed)
            if fitted is None or to_json(fitted) in tried:
                continue
            tried.add(to_json(fitted))
            if fails(fitted):
                return fitted
    return None


def _fitted(program: Program, seed: int) -> Program | None:
    """Returns a program whose cotangents have the shapes of its results.

    Returns None if the program can't be executed.
    """
    program = used(program)
    try:
        values = _values(program, seed)
    except eager.ERRORS:
        return None

    arguments = []
    cotangent_dims = {}
    for argument in program.arguments:
        if argument.name.startswith("d_"):
            cotangent_dims[argument.name] = argument.dims
        else:
            arguments.append(argument)

    results = {}
    has_cotangent = False
    for name, result_dims in program.results.items():
        shape = tuple(values[name].shape.as_list())
        results[name] = _of_rank(result_dims, len(shape))
        dtype = values[name].dtype.name
        if program.gradients and dtype in FLOATS:
            dims = _of_rank(cotangent_dims.get(f"d_{name}", ""), len(shape))
            arguments.append(Argument(f"d_{name}", shape, dtype, dims))
            has_cotangent = True
    if not results or (program.gradients and not has_cotangent):
        return None
    return program.replace(arguments=tuple(arguments), results=results)


def _of_rank(dims: str, rank: int) -> str:
    return dims[:rank].ljust(rank, "_")


def _values(program: Program, seed: int) -> dict[str, tf.Tensor]:
    """Returns the tensors of all records, computed eagerly."""
    values: dict[str, tf.Tensor] = {}
    for argument in program.arguments:
        values[argument.name] = tf.constant(eager.array(argument, seed))
    for record in program.records:
        values[record.name] = eager.execute(record, values)
    return values


def _results(program: Program, seed: int) -> Iterator[Program]:
    """Yields programs with fewer results and gradients."""
    del seed
    for name, dims in program.results.items():
        if len(program.results) > 1:
            yield program.replace(results={name: dims}, gradients=())
            yield program.replace(results={name: dims})
    if program.gradients:
        yield program.replace(gradients=())
    for name in program.gradients:
        yield program.replace(gradients=tuple(n for n in program.gradients if n != name))
    for name in program.results:
        yield program.replace(results={n: d for n, d in program.results.items() if n != name})

    # An earlier result is tried instead of the last one.
    if len(program.results) == 1:
        for record in program.records:
            if record.name in program.results:
                return
            yield program.replace(results={record.name: ""}, gradients=())
            yield program.replace(results={record.name: ""})


def _records(program: Program, seed: int) -> Iterator[Program]:
    """Yields programs in which a record is replaced by an argument, or by one of its inputs."""
    values = _values(program, seed)
    for record in reversed(program.records):
        tensor = values[record.name]
        if record.name not in program.results:
            yield _with_argument(program, record, tensor)
        for name in record.inputs:
            source_tensor = values[name]
            is_alike = source_tensor.shape == tensor.shape and source_tensor.dtype == tensor.dtype
            if is_alike and record.name not in program.results:
                yield _without(program, record, name)


def _with_argument(program: Program, record: Record, tensor: tf.Tensor) -> Program:
    """Returns the program with an argument in place of a record."""
    shape = tuple(tensor.shape.as_list())
    below = 0
    if tensor.dtype == tf.int32:
        below = int(np.max(tensor, initial=0)) + 1
    argument = Argument(f"a_{record.name}", shape, tensor.dtype.name, "_" * len(shape), below)

    replaced = _without(program, record, argument.name)
    gradients = program.gradients
    if argument.dtype in FLOATS and gradients:
        gradients = (*gradients, argument.name)
    return replaced.replace(arguments=(*program.arguments, argument), gradients=gradients)


def _without(program: Program, record: Record, name: str) -> Program:
    """Returns the program without a record; its users read the tensor `name` instead."""
    records = []
    for other in program.records:
        if other.name != record.name:
            inputs = tuple(name if n == record.name else n for n in other.inputs)
            records.append(dataclasses.replace(other, inputs=inputs))
    return program.replace(records=tuple(records))


def _placements(program: Program, seed: int) -> Iterator[Program]:
    """Yields programs with fewer annotations, or fewer split dims."""
    del seed
    for i, record in enumerate(program.records):
        if record.annotation:
            yield _with_record(program, i, dataclasses.replace(record, annotation=""))
        if "np.reshape" in record.annotation:
            ordered = re.sub(r"\[([\d, ]+)\],", _arange, record.annotation)
            yield _with_record(program, i, dataclasses.replace(record, annotation=ordered))

    for i, argument in enumerate(program.arguments):
        for dims in _simpler_dims(argument.dims):
            yield _with_sized(program, i, dataclasses.replace(argument, dims=dims))
    for name, dims in program.results.items():
        for simpler in _simpler_dims(dims):
            yield program.replace(results={**program.results, name: simpler})


def _arange(match: re.Match[str]) -> str:
    return f"{list(range(match[1].count(',') + 1))},"


def _simpler_dims(dims: str) -> Iterator[str]:
    for i, letter in enumerate(dims):
        if letter != "_":
            yield f"{dims[:i]}_{dims[i + 1 :]}"


def _meshes(program: Program, seed: int) -> Iterator[Program]:
    """Yields programs for simpler meshes, or with simpler tables."""
    del seed
    for mesh in _MESHES:
        is_smaller = math.prod(mesh.values()) < program.num_devices
        if is_smaller or (math.prod(mesh.values()), len(mesh)) < (
            program.num_devices,
            len(program.mesh),
        ):
            for axes in (list(mesh), list(mesh)[:1], list(mesh)[-1:]):
                table = dict.fromkeys(program.table, axes)
                yield program.replace(mesh=mesh, table=table)

    letters = "".join(
        [argument.dims for argument in program.arguments]
        + list(program.results.values())
        + [f"{record.annotation} {record.attributes}" for record in program.records]
    )
    for letter, axes in program.table.items():
        rest = {key: value for key, value in program.table.items() if key != letter}
        if letter not in letters:
            yield program.replace(table=rest)
        elif len(axes) > 1:
            for axis in axes:
                yield program.replace(table={**program.table, letter: [axis]})


def _sizes(program: Program, seed: int) -> Iterator[Program]:
    """Yields programs with smaller sizes, in all arguments together or in one of them."""
    del seed
    sizes = {size for argument in program.arguments for size in argument.shape}
    for size in sorted(sizes, reverse=True):
        for smaller in sorted({1, 2, 3, size // 2, size - 1} - {0}):
            if smaller < size:
                yield _resized(program, size, smaller)

    for i, argument in enumerate(program.arguments):
        for dim, size in enumerate(argument.shape):
            if size > 1 and not argument.name.startswith("d_"):
                shape = (*argument.shape[:dim], size - 1, *argument.shape[dim + 1 :])
                yield _with_sized(program, i, dataclasses.replace(argument, shape=shape))
        if argument.below > 1:
            yield _with_sized(program, i, dataclasses.replace(argument, below=argument.below - 1))


def _resized(program: Program, size: int, smaller: int) -> Program:
    """Returns the program with a size replaced everywhere, including the attributes."""

    def resized(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(resized(item) for item in value)
        return smaller if value == size and isinstance(value, int) else value

    arguments = []
    for argument in program.arguments:
        shape = resized(argument.shape)
        below = argument.below if argument.below <= size else smaller
        arguments.append(
            dataclasses.replace(argument, shape=shape, below=min(below, argument.below))
        )
    records = []
    for record in program.records:
        attributes = {key: resized(value) for key, value in record.attributes.items()}
        records.append(dataclasses.replace(record, attributes=attributes))
    return program.replace(arguments=tuple(arguments), records=tuple(records))


def _with_record(program: Program, index: int, record: Record) -> Program:
    records = list(program.records)
    records[index] = record
    return program.replace(records=tuple(records))


def _with_sized(program: Program, index: int, argument: Argument) -> Program:
    arguments = list(program.arguments)
    arguments[index] = argument
    return program.replace(arguments=tuple(arguments))
