"""Foreign programs with other annotations: another mesh, and other splits of their arguments.

All annotations of a program are replaced: the shardings of its arguments and results, and its own
constraints. XLA's propagation still decides the shardings of all other tensors.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from xla_plan.program import stablehlo_program
from xla_plan.program.stablehlo_program import StablehloProgram
from xla_spmd import stablehlo
from xla_spmd.mesh import Mesh
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir

Split = tuple[tuple[str, ...], ...]  # The axes of the mesh that split each dim, the slowest first.

_SHARDINGS = ("sdy.sharding", "mhlo.sharding")
_MESH = "mesh"  # The name of the new mesh in the module.


def reannotated(
    program: StablehloProgram,
    mesh: Mesh,
    arguments: Sequence[Split],
    results: Sequence[Split],
    constraints: Sequence[Split],
) -> StablehloProgram:
    """Returns a copy of a program with a different partitioning.

    Args:
      program: the program, which is not changed.
      mesh: the mesh that replaces its own.
      arguments: the split of each argument.
      results: the split of each result, or None if the compiler chooses it. A result in the memory
        of a donated argument is split like the argument.
      constraints: the split of each constrained tensor, in the order of stablehlo.walk.
    """
    module = jax_private.stablehlo_module(jax_private.bytecode(program.module))
    with module.context, ir.Location.unknown():
        operations = list(stablehlo.walk(module.body))
        constraint_splits = iter(constraints)
        for operation in operations:
            if stablehlo.is_constraint(operation):
                _constrain(operation, next(constraint_splits))
            elif operation.operation.name == "sdy.mesh":
                operation.operation.erase()
            else:
                _strip(operation.operation)

        _add_mesh(module, mesh)
        (main,) = [function for function in module.body.operations if _is_main(function)]
        result_splits: list[Split | None] = []
        for split, is_free in zip(results, program.free_results, strict=True):
            result_splits.append(None if is_free else split)
        for index, result in _replaced(program, main):
            result_splits[result] = arguments[index]
        _annotate(main, "arg_attrs", arguments)
        _annotate(main, "res_attrs", result_splits)
    return stablehlo_program.of_module(program.name, module)


def in_shardings(
    jitted: Any, args: Sequence[Any], mesh: Any, specs: Mapping[str, Split]
) -> tuple[Any, ...]:
    """Returns the shardings of `args` on a jax.sharding.Mesh, for jax.device_put or in_shardings.

    Args:
      jitted: the function, whose parameters' names begin the arguments' names.
      args: the function's arguments, trees of anything.
      mesh: a mesh with the axes of the splits.
      specs: the split of each argument, by JAX's name of it, such as `state['params']['w']`. An
        argument without an entry, as the function does not use it, is replicated.
    """
    bound = inspect.signature(jitted).bind(*args)
    shardings = []
    for parameter, value in bound.arguments.items():

        def sharding(path: Any, leaf: Any, parameter: str = parameter) -> NamedSharding:
            name = f"{parameter}{jax.tree_util.keystr(path)}"
            return NamedSharding(mesh, partition_spec(specs.get(name, ())))

        shardings.append(jax.tree_util.tree_map_with_path(sharding, value))
    return tuple(shardings)


def partition_spec(split: Split) -> PartitionSpec:
    """Returns JAX's form of a split: None, an axis, or several axes for each dim."""
    entries: list[str | tuple[str, ...] | None] = []
    for axes in split:
        if not axes:
            entries.append(None)
        else:
            entries.append(axes[0] if len(axes) == 1 else axes)

    # The dims after the last split one are left out.
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _sharding(split: Split) -> Any:
    """Returns Shardy's attribute, whose dims the compiler splits no further."""
    dims = []
    for axes in split:
        names = ", ".join(f'"{axis}"' for axis in axes)
        dims.append(f"{{{names}}}")
    return ir.Attribute.parse(f"#sdy.sharding<@{_MESH}, [{', '.join(dims)}]>")


def _constrain(operation: Any, split: Split) -> None:
    """Gives a constraint another sharding; one of GSPMD's becomes one of Shardy's."""
    sharding = _sharding(split)
    inner = operation.operation
    if inner.name != "stablehlo.custom_call":
        inner.attributes["sharding"] = sharding
        return

    replaced = ir.Operation.create(
        "sdy.sharding_constraint",
        results=[operation.results[0].type],
        operands=list(operation.operands),
        attributes={"sharding": sharding},
        loc=inner.location,
        ip=ir.InsertionPoint(operation),
    )
    operation.results[0].replace_all_uses_with(replaced.results[0])
    inner.erase()


def _strip(operation: Any) -> None:
    """Removes the shardings of an operation, and of a function's arguments and results."""
    for name in _SHARDINGS:
        if name in operation.attributes:
            del operation.attributes[name]
    for name in ("arg_attrs", "res_attrs"):
        if name in operation.attributes:
            kept = [_without_sharding(entry) for entry in operation.attributes[name]]
            operation.attributes[name] = ir.ArrayAttr.get(list(map(ir.DictAttr.get, kept)))


def _without_sharding(attributes: Any) -> dict[str, Any]:
    kept = {entry.name: entry.attr for entry in attributes}
    return {name: value for name, value in kept.items() if name not in _SHARDINGS}


def _add_mesh(module: Any, mesh: Mesh) -> None:
    """Names the axes of the mesh at the top of a module, and how many partitions it has."""
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.shape.items())
    parsed = ir.Module.parse(f"module {{ sdy.mesh @{_MESH} = <[{axes}]> }}")
    parsed.body.operations[0].operation.clone(ir.InsertionPoint.at_block_begin(module.body))

    number = ir.IntegerType.get_signless(32)
    partitions = math.prod(mesh.axis_sizes)
    attributes = module.operation.attributes
    attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(number, partitions)
    attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(number, 1)


def _is_main(function: Any) -> bool:
    attributes = function.operation.attributes
    return "sym_name" in attributes and attributes["sym_name"].value == "main"


def _replaced(program: StablehloProgram, main: Any) -> Iterator[tuple[int, int]]:
    """Yields the number of each donated argument and of the result in its memory.

    If the program does not name the result, it is the first one of the argument's type.
    """
    types = [str(type_) for type_ in main.type.results]
    unclaimed = list(range(len(types)))
    entries = zip(main.arguments, _entries(main, "arg_attrs"), program.arguments, strict=True)
    for index, (value, attributes, argument) in enumerate(entries):
        if "tf.aliasing_output" in attributes:
            claimed = [attributes["tf.aliasing_output"].value]
        elif argument.is_donated:
            claimed = [result for result in unclaimed if types[result] == str(value.type)][:1]
        else:
            claimed = []
        for result in claimed:
            unclaimed.remove(result)
            yield index, result


def _entries(function: Any, name: str) -> list[Any]:
    count = len(function.arguments if name == "arg_attrs" else function.type.results)
    if name not in function.operation.attributes:
        return [ir.DictAttr.get({}) for _ in range(count)]
    return list(function.operation.attributes[name])


def _annotate(function: Any, name: str, splits: Sequence[Split | None]) -> None:
    """Gives the arguments or results of a function their shardings; None leaves one open."""
    annotated = []
    for entry, split in zip(_entries(function, name), splits, strict=True):
        attributes = _without_sharding(entry)
        if split is not None:
            attributes[_SHARDINGS[0]] = _sharding(split)
        annotated.append(ir.DictAttr.get(attributes))
    function.operation.attributes[name] = ir.ArrayAttr.get(annotated)
