"""AnnotatedFn: a pure TensorFlow function with the dims of its arguments and results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotate import static_shape
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import specs


@dataclasses.dataclass(frozen=True)
class AnnotatedFn:
    """A pure function of trees of tensors, ready to be partitioned."""

    name: str
    # Takes one NestedMap of tf.Tensors per argument and returns one NestedMap. It uses no
    # tf.Variable: every weight is an argument, and every new weight a result.
    fn: Callable[..., NestedMap]
    arg_names: tuple[str, ...]  # One name and one NestedMap of TensorSpec for each argument.
    args: tuple[NestedMap, ...]
    # By the result's dotted path. The results of a donated argument have its dims; other results
    # without an entry have `unnamed_dims`.
    result_dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The arguments whose memory the results take over. A donated argument `state` is returned as
    # result.state, with the same paths, shapes and dtypes.
    donate: tuple[str, ...] = ()
    # Leading dims: `B` splits rows; without any, all devices have the whole.
    unnamed_dims: str = ""

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
    Raises ValueError if the mesh does not divide an argument or result, a result's shape is not
    static, a donated argument does not come back as it was, or `fn` reads a tf.Variable.
    """
    leaves = specs.named_leaves(annotated.arg_names, annotated.args)
    for path, spec in leaves:
        partitioning.check(f"{annotated.name}: argument {path}", spec)
    traced_results: list[NestedMap] = []
    annotate = Annotator(partitioning).annotate

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        given = iter([annotate(x, spec.dims) for x, (_, spec) in zip(tensors, leaves, strict=True)])
        args = [arg.Pack(itertools.islice(given, len(arg.Flatten()))) for arg in annotated.args]
        result = annotated.fn(*args).Transform(tf.convert_to_tensor)
        returned = _result_specs(annotated, result)
        traced_results.append(returned)
        return result.Transform(lambda x, spec: annotate(x, spec.dims), returned).Flatten()

    signature = [tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)) for _, spec in leaves]
    function = tf.function(flat, input_signature=signature, autograph=False, jit_compile=True)
    concrete = function.get_concrete_function()
    if concrete.graph.variables:
        names = ", ".join(variable.name for variable in concrete.graph.variables)
        raise ValueError(
            f"{annotated.name}: reads the variables {names}; a weight must be an argument."
        )
    results = traced_results[-1]
    for path, spec in results.FlattenItems():
        partitioning.check(f"{annotated.name}: result {path}", spec)
    return function, results


def _result_specs(annotated: AnnotatedFn, result: NestedMap) -> NestedMap:
    """The TensorSpec of every result; ValueError as for `trace`."""
    prefixes = tuple(f"{name}." for name in annotated.donate)
    arguments = specs.named_leaves(annotated.arg_names, annotated.args)
    donated = {path: spec for path, spec in arguments if path.startswith(prefixes)}
    dims = {path: spec.dims for path, spec in donated.items()} | dict(annotated.result_dims)
    returned = {
        path: _spec(f"{annotated.name}: result {path}", tensor, dims.get(path), annotated)
        for path, tensor in result.FlattenItems()
    }
    for path in sorted(donated.keys() | {path for path in returned if path.startswith(prefixes)}):
        if donated.get(path) != returned.get(path):
            raise ValueError(
                f"{annotated.name}: donated argument {path} is {donated.get(path)} but comes back "
                f"as {returned.get(path)}."
            )
    if unused := dims.keys() - returned.keys():
        raise ValueError(f"{annotated.name}: no result {', '.join(sorted(unused))} is returned.")
    return result.Pack(returned.values())


def _spec(what: str, tensor: tf.Tensor, dims: str | None, annotated: AnnotatedFn) -> TensorSpec:
    shape = static_shape(what, tensor.shape)
    if dims is None:
        dims = annotated.unnamed_dims[: len(shape)].ljust(len(shape), "_")
    if len(dims) != len(shape):
        raise ValueError(f"{what} has shape {shape}, but its dims are {dims!r}.")
    return TensorSpec(shape, tensor.dtype.as_numpy_dtype.__name__, dims)
