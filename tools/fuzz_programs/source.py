"""Prints a program as Python that a reader can run."""

from __future__ import annotations

import textwrap

from tools.fuzz_programs.program import Argument, Program

_NUM_DEVICES = 8

_TEMPLATE = '''\
"""{heading}"""

import lingvo_gshard as gshard

gshard.prepare(num_devices={devices})

import numpy as np
import tensorflow as tf

{arguments}

def annotated(partitioning):
    annotator = gshard.Annotator(partitioning)
    is_partitioned = partitioning.mesh.num_partitions > 1

    def fn(batch):
{body}

    return gshard.AnnotatedFn(
        "program",
        fn,
        ("batch",),
        (gshard.NestedMap({{name: spec for name, (spec, _) in ARGUMENTS.items()}}),),
        result_dims={result_dims},
    )


def run(mesh, table):
    partitioning = gshard.Partitioning.from_dict(mesh, table)
    program = gshard.export(annotated(partitioning), partitioning)
    batch = gshard.NestedMap({{name: values for name, (_, values) in ARGUMENTS.items()}})
    results = gshard.compile_program(program)(batch).FlattenItems()
    return {{name: np.asarray(values).astype(float) for name, values in results}}


one = run(gshard.Mesh.flat(1), {{}})
many = run(gshard.Mesh({names}, {sizes}), {table})
for name in one:
    print(name, "differs by", np.max(np.abs(one[name] - many[name]), initial=0))
    print("one device:", one[name], "several:", many[name], sep="\\n")
'''


def source(program: Program, seed: int, heading: str) -> str:
    """Returns Python that runs a program on several devices and on one.

    The arguments' values are drawn from `seed`.
    """
    arguments = ["ARGUMENTS = {"]
    for argument in program.arguments:
        spec = f"gshard.TensorSpec({argument.shape}, {argument.dtype!r}, {argument.dims!r})"
        arguments.append(f'    "{argument.name}": ({spec}, {_values(argument, seed)}),')
    arguments.append("}")

    result_dims = {name: dims for name, dims in program.results.items() if dims}
    for argument in program.arguments:
        if argument.name in program.gradients and argument.dims:
            result_dims[f"g_{argument.name}"] = argument.dims
    wrapped = textwrap.fill(heading, 90, break_long_words=False, break_on_hyphens=False)
    return _TEMPLATE.format(
        heading=wrapped.replace("\\", "\\\\").replace('"""', "'''"),
        devices=_NUM_DEVICES,
        arguments="\n".join(arguments),
        body=textwrap.indent("\n".join(_body(program)), " " * 8),
        result_dims=result_dims,
        names=tuple(program.mesh),
        sizes=tuple(program.mesh.values()),
        table={letter: tuple(axes) for letter, axes in program.table.items()},
    )


def _values(argument: Argument, seed: int) -> str:
    """Returns an expression for the same values of an argument as eager.array returns."""
    rng = f'np.random.default_rng([{seed}, *b"{argument.name}"])'
    if argument.dtype == "bool":
        return f"{rng}.random({argument.shape}) < 0.5"
    if argument.dtype == "int32":
        return f"{rng}.integers(0, {argument.below}, {argument.shape}, dtype=np.int32)"
    numbers = f"{rng}.normal(0.1, 0.8, {argument.shape}).astype(np.float32)"
    if argument.dtype == "float32":
        return numbers
    return f"{numbers}.astype(tf.{argument.dtype}.as_numpy_dtype)"


def _body(program: Program) -> list[str]:
    """Returns the lines of the function's body: arguments, records, gradients."""
    lines = [f"{argument.name} = batch.{argument.name}" for argument in program.arguments]
    records = []
    for record in program.records:
        records.append(f"{record.name} = {record.expression}")
        if record.annotation:
            records.append("if is_partitioned:")
            records.append(f"    {record.name} = {record.annotation.format(record.name)}")

    results = {name: name for name in program.results}
    if not program.gradients:
        lines += records
    else:
        watched = ", ".join(program.gradients)
        lines += ["with tf.GradientTape() as tape:", f"    tape.watch([{watched}])"]
        lines += [f"    {line}" for line in records]
        targets = ", ".join(program.cotangents)
        cotangents = ", ".join(f"d_{name}" for name in program.cotangents)
        lines += [
            "gradients = tape.gradient(",
            f"    [{targets}], [{watched}], output_gradients=[{cotangents}],",
            '    unconnected_gradients="zero",',
            ")",
        ]
        for i, name in enumerate(program.gradients):
            results[f"g_{name}"] = f"tf.convert_to_tensor(gradients[{i}])"
    pairs = ", ".join(f"{name}={value}" for name, value in results.items())
    return [*lines, f"return gshard.NestedMap({pairs})"]
