"""Draws a program from a seed; a seed always gives the same program.

TensorFlow executes each operator as soon as it is drawn, which gives the shape of its result. The
operator is dropped if TensorFlow cannot execute it, or if its results are too large to compare.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tools.fuzz_programs import eager, operators
from tools.fuzz_programs.draft import EVERYTHING, MAX_ELEMENTS, Choices, Draft, Tensor
from tools.fuzz_programs.program import FLOATS, Argument, Program, Record, used
from tools.fuzz_programs.registry import FAMILIES, OPERATORS, Call, NoOperands

assert operators  # Its import has filled the registry.

_MESHES = (
    {"d": 8},
    {"d": 8},
    {"x": 2, "y": 4},
    {"x": 2, "y": 4},
    {"x": 4, "y": 2},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2},
    {"x": 2, "y": 2, "z": 2},
    {"x": 2, "y": 3},
    {"d": 3},
)
_LETTERS = "PQR"
_TERMS = "T"  # The dim of a sum's terms over P, which a manual region returns.
_MAX_RANK = 5
_MAX_VALUE = 300.0
_MAX_TRIES = 40


def generate(seed: int, choices: Choices = EVERYTHING) -> Program:
    """Returns the program of a seed, drawn from `choices`."""
    rng = random.Random(seed)
    mesh = rng.choice(_MESHES)
    table = {}
    for letter in _LETTERS:
        table[letter] = rng.sample(list(mesh), rng.randint(1, len(mesh)))
    table[_TERMS] = table["P"]

    draft = Draft(rng, _LETTERS, choices)
    for _ in range(rng.randint(1, 2)):
        draft.add_argument(draft.draw_shape(), draft.draw_dtype())

    num_devices = math.prod(mesh.values())
    values = {}
    for argument in draft.arguments:
        values[argument.name] = tf.constant(eager.array(argument, seed))
    records: list[Record] = []
    num_records = rng.randint(4, 8)
    for _ in range(_MAX_TRIES):
        if len(records) == num_records:
            break
        record = _draw_record(draft, f"t{len(records)}", choices.families, values, seed)
        if record is not None:
            annotation = draw_annotation(draft, draft.tensors[-1], num_devices)
            records.append(dataclasses.replace(record, annotation=annotation))
    return _finished(draft, mesh, table, records)


def _draw_record(
    draft: Draft, name: str, families: Sequence[str], values: dict[str, tf.Tensor], seed: int
) -> Record | None:
    """Draws an operator and adds its result to the draft; returns None if it can't be executed."""
    chosen = list(FAMILIES.values())
    if families:
        chosen = [FAMILIES[family] for family in families]
    (family,) = draft.rng.choices(chosen, [family.weight for family in chosen])

    num_arguments = len(draft.arguments)
    num_tensors = len(draft.tensors)
    record = None
    result = None
    try:
        call = family.draw(draft)
        record = _record(name, draft.rng.choice(family.operators), call)
        for argument in draft.arguments[num_arguments:]:
            values[argument.name] = tf.constant(eager.array(argument, seed))
        result = _execute(record, call.below, values)
    except NoOperands:
        pass

    # If the operator is dropped, the arguments that were drawn for it are dropped, too.
    if result is None:
        del draft.arguments[num_arguments:]
        del draft.tensors[num_tensors:]
        return None
    draft.tensors.append(result)
    return record


def _record(name: str, operator: str, call: Call) -> Record:
    """Returns a call as a record, with the attributes that the operator's expression uses."""
    inputs = tuple(tensor.name for tensor in call.inputs)
    attributes = {}
    for key, value in call.attributes.items():
        if f"{{{key}}}" in OPERATORS[operator]:
            attributes[key] = value
    return Record(name, operator, inputs, attributes)


def _execute(record: Record, below: int, values: dict[str, tf.Tensor]) -> Tensor | None:
    """Executes a record eagerly; returns its result as a tensor of the draft, or None."""
    try:
        result = eager.execute(record, values)
    except eager.ERRORS:
        return None

    shape = tuple(result.shape.as_list())
    dtype = result.dtype.name
    is_small = math.prod(shape) <= MAX_ELEMENTS and len(shape) <= _MAX_RANK
    if not is_small or dtype not in (*FLOATS, "int32", "bool"):
        return None

    numbers = result.numpy().astype(np.float64)
    if not np.all(np.abs(numbers) <= _MAX_VALUE):  # A NaN is refused, too.
        return None
    values[record.name] = result
    return Tensor(record.name, shape, dtype, below if dtype == "int32" else 0)


def draw_annotation(draft: Draft, tensor: Tensor, num_devices: int) -> str:
    """Returns a random annotation of a tensor, as an expression of `{0}`; it is often empty."""
    rng = draft.rng
    kind = rng.choice(("none", "none", "replicate", "split", "split", "shard", "shard", "annotate"))
    if kind == "none" or (tensor.rank == 0 and kind != "replicate"):
        return ""
    if kind == "replicate":
        return "gshard.replicate({0})"
    if kind == "annotate":
        return f"annotator.annotate({{0}}, {draft.draw_dims(tensor.rank)!r})"

    divisors = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    num_parts = rng.choice((*divisors, num_devices))
    if kind == "split":
        return f"gshard.split({{0}}, {draft.axis(tensor)}, {num_parts})"

    grid = [1] * tensor.rank
    for factor in _prime_factors(num_parts):
        grid[rng.randrange(tensor.rank)] *= factor
    devices = list(range(num_parts))
    if rng.random() < 0.3:
        rng.shuffle(devices)
        return f"gshard.shard({{0}}, np.reshape({devices}, {grid}))"
    return f"gshard.shard({{0}}, np.arange({num_parts}).reshape({grid}))"


def _prime_factors(number: int) -> list[int]:
    factors = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            factors.append(prime)
            number //= prime
    return factors


def _finished(
    draft: Draft, mesh: dict[str, int], table: dict[str, list[str]], records: list[Record]
) -> Program:
    """Returns the program, with the last tensors, some others and most gradients as results."""
    taken = {name for record in records for name in record.inputs}
    tensors = {tensor.name: tensor for tensor in draft.tensors}
    results = {}
    for record in records:
        if record.name not in taken or draft.chance(0.25):
            results[record.name] = draft.draw_dims(tensors[record.name].rank)

    gradients: list[str] = []
    cotangents: list[Argument] = []
    if draft.chance(0.85):
        for argument in draft.arguments:
            if argument.dtype in FLOATS:
                gradients.append(argument.name)
        for name in results:
            tensor = tensors[name]
            if tensor.dtype in FLOATS:
                dims = draft.draw_dims(tensor.rank)
                cotangents.append(Argument(f"d_{name}", tensor.shape, tensor.dtype, dims))
    if not cotangents or not gradients:
        cotangents = []
        gradients = []

    arguments = (*draft.arguments, *cotangents)
    program = Program(mesh, table, arguments, tuple(records), results, ())
    # Gradients exist only for the arguments that a result depends on.
    used_names = {argument.name for argument in used(program).arguments}
    kept = tuple(name for name in gradients if name in used_names)
    return used(program.replace(gradients=kept))
