"""The outcome of a program: it is partitioned over devices and compared with the oracle."""

from __future__ import annotations

import dataclasses
import pathlib
import time
import traceback
from typing import Any

import jax
import numpy as np
import tensorflow as tf

import lingvo_gshard as gshard
import xla_spmd
from tools.fuzz_programs import eager
from tools.fuzz_programs.program import Program

SAME = "same"
REFUSED = "refused"  # The library raised a ValueError.
ERROR = "error"  # The compiler or the library raised another exception.
DIED = "died"  # The process was aborted or did not end.
WRONG = "wrong"
# One device fails, too, or its results differ from TensorFlow's: not a fault of partitioning.
UNLIKE = "unlike"
FINDINGS = (ERROR, DIED, WRONG)

_LIBRARY = tuple(str(pathlib.Path(package.__file__).parent) for package in (gshard, xla_spmd))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a program."""

    kind: str
    detail: str = ""
    names: tuple[str, ...] = ()  # The results that are wrong.
    secs: float = 0.0


def outcome(program: Program, seed: int) -> Outcome:
    """Runs a program on the devices of its mesh, and compares it with TensorFlow's results."""
    # With complete tracebacks, _is_refusal can find the package that raised the error.
    jax.config.update("jax_traceback_filtering", "off")
    tf.debugging.disable_traceback_filtering()

    began = time.process_time()
    try:
        oracle = eager.expected(program, seed)
    except eager.ERRORS as error:
        return Outcome(UNLIKE, f"TensorFlow: {_line(error)}")

    # A fault is due to partitioning only if a single device gives the right results.
    found = _judge(program, seed, oracle)
    if found.kind in FINDINGS:
        alone = _judge(_on_one_device(program), seed, oracle)
        if alone.kind != SAME:
            found = Outcome(UNLIKE, f"one device: {alone.kind}: {alone.detail}", alone.names)
    return dataclasses.replace(found, secs=round(time.process_time() - began, 3))


def _judge(program: Program, seed: int, oracle: dict[str, eager.Expected]) -> Outcome:
    """Compiles and runs a program once, and returns its outcome."""
    try:
        results = run(program, seed)
    except Exception as error:
        kind = REFUSED if _is_refusal(error) else ERROR
        return Outcome(kind, f"{type(error).__name__}: {_line(error)}")

    names = []
    details = []
    for name, expected in oracle.items():
        differs = expected.differs(results[name])
        if np.any(differs):
            names.append(name)
            details.append(_difference(name, expected, results[name], differs))
    if names:
        return Outcome(WRONG, "; ".join(details), tuple(names))
    return Outcome(SAME)


def run(program: Program, seed: int) -> dict[str, np.ndarray]:
    """Compiles a program for its mesh, runs it and returns its results and gradients."""
    mesh = gshard.Mesh(tuple(program.mesh), tuple(program.mesh.values()))
    table = {letter: tuple(axes) for letter, axes in program.table.items()}
    partitioning = gshard.Partitioning.from_dict(mesh, table)
    executable = gshard.compile_program(
        gshard.export(annotated(program, partitioning), partitioning)
    )

    batch = gshard.NestedMap(eager.arrays(program, seed))
    results = executable(batch)
    return {name: np.asarray(values) for name, values in results.FlattenItems()}


def annotated(program: Program, partitioning: gshard.Partitioning) -> gshard.AnnotatedFn:
    """Returns the program as the function that the library compiles."""
    namespace: dict[str, Any] = {
        "tf": tf,
        "np": np,
        "gshard": gshard,
        "annotator": gshard.Annotator(partitioning),
        "partitioning": partitioning,
    }
    if partitioning.mesh.num_partitions == 1:
        namespace = eager.whole_namespace()

    def with_annotation(record: Any, tensor: tf.Tensor) -> tf.Tensor:
        if not record.annotation:
            return tensor
        return eval(record.annotation.format("tensor"), {**namespace, "tensor": tensor})

    def fn(batch: gshard.NestedMap) -> gshard.NestedMap:
        return gshard.NestedMap(eager.compute(program, batch, namespace, with_annotation))

    specs = {}
    for argument in program.arguments:
        specs[argument.name] = gshard.TensorSpec(argument.shape, argument.dtype, argument.dims)

    # A gradient is split like its argument.
    result_dims = dict(program.results)
    for name in program.gradients:
        result_dims[f"g_{name}"] = specs[name].dims
    return gshard.AnnotatedFn(
        "program", fn, ("batch",), (gshard.NestedMap(specs),), result_dims=result_dims
    )


def _on_one_device(program: Program) -> Program:
    records = [dataclasses.replace(record, annotation="") for record in program.records]
    return program.replace(mesh={"d": 1}, table={}, records=tuple(records))


def _is_refusal(error: Exception) -> bool:
    """Returns whether this library itself raised a ValueError, rather than TensorFlow or JAX.

    If XLA cannot compile the program, the outcome is an error, although the library raises it.
    """
    if "XLA cannot compile it" in str(error):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError) and last.filename.startswith(_LIBRARY)


def _difference(
    name: str, expected: eager.Expected, values: np.ndarray, differs: np.ndarray
) -> str:
    """Returns a message with the number of wrong elements of a result, and one of them."""
    place = tuple(int(i) for i in np.argwhere(differs)[0])
    return (
        f"{name}: {np.sum(differs)} of {differs.size} differ, {list(place)} is "
        f"{float(values[place]):.6g}, expected {expected.values[place]:.6g} within "
        f"{expected.tolerance[place]:.1g}"
    )


def _line(error: Exception) -> str:
    """Returns an error's message as one line; the middle of a long one is cut out."""
    # jax2tf lists its limitations before TensorFlow's own message.
    message = str(error).split("Caught TensorFlow exception:")[-1]
    line = " ".join(message.split())
    return line if len(line) <= 600 else f"{line[:300]} ... {line[-300:]}"
