"""AnnotatedFn: a pure TensorFlow function with the dims of its arguments and results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotate import program_devices, static_shape
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import refused, specs


@dataclasses.dataclass(frozen=True)
class AnnotatedFn:
    """A pure function of trees of tensors, ready to be partitioned."""

    name: str
    # Takes one NestedMap of tf.Tensors per argument and returns one NestedMap. It uses no
    # tf.Variable: every weight is an argument, and every new weight a result.
    fn: Callable[..., NestedMap]
    # One name and one NestedMap of TensorSpec for each argument.
    arg_names: tuple[str, ...]
    args: tuple[NestedMap, ...]
    # By the result's dotted path. The results of a donated argument have its dims; other results
    # without an entry have `unnamed_dims`.
    result_dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The arguments whose memory the results take over. A donated argument `state` is returned as
    # result.state, with the same paths, shapes and dtypes.
    donate: tuple[str, ...] = ()
    # Leading dims: `B` splits rows; without any, all devices have the whole.
    unnamed_dims: str = ""
    # By the result's path, the stack whose rows split it, as in TensorSpec. Donated arguments have
    # their own; other results without an entry have none.
    result_stacks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.arg_names) != len(self.args):
            raise ValueError(
                f"{self.name}: {len(self.arg_names)} argument names {self.arg_names} but "
                f"{len(self.args)} arguments."
            )

        for name in self.donate:
            if name not in self.arg_names:
                raise ValueError(
                    f"{self.name}: donates {name!r}, which is none of {self.arg_names}."
                )


def trace(
    annotated: AnnotatedFn, partitioning: Partitioning
) -> tuple[Callable[..., list[tf.Tensor]], NestedMap]:
    """Traces `annotated` into a graph in which every argument and result is annotated.

    Returns a function from arguments' leaves to results', and the TensorSpecs of the results.
    All shapes are logical: `lowering` pads what the mesh does not divide. Raises ValueError if a
    result's shape is not static, a donated argument does not come back as it was, `fn` reads a
    tf.Variable, or XLA would partition an operator wrongly (refused.py).
    """
    leaves = specs.named_leaves(annotated.arg_names, annotated.args)
    annotate = Annotator(partitioning).annotate_as
    traced_specs: list[NestedMap] = []  # Known once `flat` was traced.

    # A tf.function takes and returns flat lists of tensors.
    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        pairs = zip(tensors, leaves, strict=True)
        remaining = iter([annotate(x, spec) for x, (_, spec) in pairs])
        args = []
        for arg in annotated.args:
            args.append(arg.Pack(itertools.islice(remaining, len(arg.Flatten()))))

        # `fn` may annotate tensors without naming the mesh, by split() and shard().
        with program_devices(partitioning.mesh.num_partitions):
            result = annotated.fn(*args).Transform(tf.convert_to_tensor)

        result_specs = _result_specs(annotated, result)
        traced_specs.append(result_specs)
        return result.Transform(annotate, result_specs).Flatten()

    signature = [tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)) for _, spec in leaves]
    function = tf.function(flat, input_signature=signature, autograph=False, jit_compile=True)
    concrete = function.get_concrete_function()

    # A program keeps no state between its calls.
    if concrete.graph.variables:
        names = ", ".join(variable.name for variable in concrete.graph.variables)
        raise ValueError(
            f"{annotated.name}: reads the variables {names}; a weight must be an argument."
        )

    # On one partition, all operators are right.
    if partitioning.mesh.num_partitions > 1:
        refused.check(annotated.name, concrete.graph)
    return function, traced_specs[-1]


def _result_specs(annotated: AnnotatedFn, result: NestedMap) -> NestedMap:
    """Returns the TensorSpec of every result; raises ValueError as `trace`."""
    donated_prefixes = tuple(f"{name}." for name in annotated.donate)
    donated = {}
    for path, spec in specs.named_leaves(annotated.arg_names, annotated.args):
        if path.startswith(donated_prefixes):
            donated[path] = spec

    # A donated argument comes back with its own dims, unless the function names others.
    dims = {path: spec.dims for path, spec in donated.items()}
    dims.update(annotated.result_dims)
    stacks = {path: spec.stack for path, spec in donated.items()}
    stacks.update(annotated.result_stacks)

    returned = {}
    for path, tensor in result.FlattenItems():
        what = f"{annotated.name}: result {path}"
        spec = _spec(what, tensor, dims.get(path), annotated.unnamed_dims)
        returned[path] = dataclasses.replace(spec, stack=stacks.get(path, ""))

    # XLA writes a result over the argument of its path, so neither may be without the other.
    returned_donations = {path for path in returned if path.startswith(donated_prefixes)}
    for path in sorted(donated.keys() | returned_donations):
        if donated.get(path) != returned.get(path):
            raise ValueError(
                f"{annotated.name}: donated argument {path} is {donated.get(path)} but comes back "
                f"as {returned.get(path)}."
            )

    unused = (dims.keys() | stacks.keys()) - returned.keys()
    if unused:
        raise ValueError(f"{annotated.name}: no result {', '.join(sorted(unused))} is returned.")
    return result.Pack(returned.values())


def _spec(what: str, tensor: tf.Tensor, dims: str | None, unnamed_dims: str) -> TensorSpec:
    """Returns the TensorSpec of a result; one without `dims` begins with `unnamed_dims`."""
    shape = static_shape(what, tensor.shape)
    if dims is None:
        dims = unnamed_dims[: len(shape)].ljust(len(shape), "_")
    if len(dims) != len(shape):
        raise ValueError(f"{what} has shape {shape}, but its dims are {dims!r}.")
    return TensorSpec(shape, tensor.dtype.as_numpy_dtype.__name__, dims)
