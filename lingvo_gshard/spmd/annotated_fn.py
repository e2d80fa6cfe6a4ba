"""AnnotatedFn: a pure TensorFlow function with the dims of its arguments and results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap, nested
from lingvo_gshard.sharding.annotate import program_devices, static_shape
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import specs
from xla_spmd import checks


@dataclasses.dataclass(frozen=True)
class AnnotatedFn:
    """A pure function of trees of tensors, ready to be partitioned."""

    name: str
    # Takes one NestedMap of tf.Tensors per argument and returns one NestedMap or dict. It must not
    # use a tf.Variable: every weight is an argument, and every new weight is a result.
    fn: Callable[..., Mapping[str, Any]]
    # A name and a NestedMap or dict of TensorSpec for each argument.
    arg_names: tuple[str, ...]
    args: tuple[NestedMap, ...]
    # The dims of each result, by dotted path. A donated argument's results have its dims; other
    # results without an entry have `unnamed_dims`.
    result_dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The arguments whose memory the results reuse. A donated argument `state` is returned as
    # result.state, with the same paths, shapes and dtypes.
    donate: tuple[str, ...] = ()
    # The leading dims of unnamed results: `B` splits rows; if empty, all devices have the whole.
    unnamed_dims: str = ""
    # The stack whose rows split a result, by its path, as in TensorSpec. A donated argument's
    # results have its stack; other results without an entry belong to the whole model.
    result_stacks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.arg_names, str) or isinstance(self.args, Mapping | TensorSpec):
            raise ValueError(
                f"{self.name}: arg_names and args: expected tuples of names and of dicts, such as "
                "('batch',) and ({'x': spec},)."
            )
        arg_names = tuple(self.arg_names)
        if len(arg_names) != len(self.args):
            raise ValueError(
                f"{self.name}: {len(arg_names)} argument names {arg_names} but {len(self.args)} "
                "arguments."
            )

        # Lists become tuples, and dicts NestedMaps.
        args = []
        for name, arg in zip(arg_names, self.args, strict=True):
            what = f"{self.name}: argument {name}"
            tree = nested(what, arg)
            check_specs(what, tree)
            args.append(tree)
        object.__setattr__(self, "arg_names", arg_names)
        object.__setattr__(self, "args", tuple(args))
        checks.check_takes(f"{self.name}: fn", self.fn, arg_names)

        for name in self.donate:
            if name not in self.arg_names:
                raise ValueError(
                    f"{self.name}: donates {name!r}, which is not one of {self.arg_names}."
                )


def check_specs(what: str, tree: NestedMap) -> None:
    """Raises ValueError, which begins with `what`, unless all leaves are TensorSpecs."""
    for path, leaf in tree.FlattenItems():
        if not isinstance(leaf, TensorSpec):
            described = f"got {type(leaf).__name__}"
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                rank = len(leaf.shape)
                described += f": TensorSpec(x.shape, x.dtype, dims), with {rank} letters as dims"
            raise ValueError(f"{what}.{path}: expected a TensorSpec, {described}.")


def trace(
    annotated: AnnotatedFn, partitioning: Partitioning
) -> tuple[Callable[..., list[tf.Tensor]], NestedMap]:
    """Traces `annotated` into a graph in which every argument and result is annotated.

    Returns a function from arguments' leaves to results', and the TensorSpecs of the results. All
    shapes are logical: `lowering` pads dims that the mesh does not divide. Raises ValueError if a
    result's shape is not static, if a donated argument is not returned with the same specs, if `fn`
    reads a tf.Variable, or for a dtype that JAX would narrow.
    """
    expected = "an AnnotatedFn, which has the dims of arguments"
    checks.check_type("export", annotated, AnnotatedFn, expected)
    expected = "a Partitioning, such as Partitioning.from_dict(Mesh.flat(4), {'B': 'd'})"
    checks.check_type(annotated.name, partitioning, Partitioning, expected)

    # Check before tracing, which is slow, and again after it, when the results are known.
    leaves = specs.named_leaves(annotated.arg_names, annotated.args)
    specs.check_dtypes(f"{annotated.name}: argument", leaves)
    annotate = Annotator(partitioning).annotate_as
    traced_specs: list[NestedMap] = []  # Filled when `flat` is traced.

    # A tf.function takes and returns flat lists of tensors.
    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        pairs = zip(tensors, leaves, strict=True)
        remaining = iter([annotate(x, spec) for x, (_, spec) in pairs])
        args = []
        for arg in annotated.args:
            args.append(arg.Pack(itertools.islice(remaining, len(arg.Flatten()))))

        # `fn` may annotate tensors without naming the mesh, by split() and shard().
        with program_devices(partitioning.mesh.num_partitions):
            returned = nested(f"{annotated.name}: what fn returns", annotated.fn(*args))
            result = returned.Transform(tf.convert_to_tensor)

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
    specs.check_dtypes(f"{annotated.name}: result", traced_specs[-1].FlattenItems())
    return function, traced_specs[-1]


def _result_specs(annotated: AnnotatedFn, result: NestedMap) -> NestedMap:
    """Returns the TensorSpec of every result.

    Raises ValueError if a result's shape is not static or does not fit its dims, if a donated
    argument is not returned with the same specs, or if a path with dims is not returned.
    """
    donated_prefixes = tuple(f"{name}." for name in annotated.donate)
    arguments = specs.named_leaves(annotated.arg_names, annotated.args)
    donated = {path: spec for path, spec in arguments if path.startswith(donated_prefixes)}

    # A donated argument keeps its dims, unless the function names others.
    dims = {path: spec.dims for path, spec in donated.items()}
    dims.update(annotated.result_dims)
    stacks = {path: spec.stack for path, spec in donated.items()}
    stacks.update(annotated.result_stacks)

    returned = {}
    for path, tensor in result.FlattenItems():
        what = f"{annotated.name}: result {path}"
        spec = _spec(what, tensor, dims.get(path), annotated.unnamed_dims)
        returned[path] = dataclasses.replace(spec, stack=stacks.get(path, ""))

    # XLA writes a result over the argument with the same path, so both must exist.
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
    """Returns the TensorSpec of a result. Without `dims`, its dims begin with `unnamed_dims`."""
    shape = static_shape(what, tensor.shape)
    if dims is None:
        dims = unnamed_dims[: len(shape)].ljust(len(shape), "_")
    if len(dims) != len(shape):
        raise ValueError(f"{what} has shape {shape}, but its dims are {dims!r}.")
    return TensorSpec(shape, tensor.dtype.as_numpy_dtype.__name__, dims)
