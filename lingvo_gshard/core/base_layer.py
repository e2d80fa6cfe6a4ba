"""BaseLayer: a tree of layers that declare their weights and compute purely.

A layer holds the specs of its weights, not their values. `InitTheta` makes the values, theta, and
FProp(theta, ...) is a pure function of them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, Self

from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap

# The leading dim of an array that stacks the weights of several layers.
STACKED = "R"
# The outermost scope of layers that the gradient computes again; see layers/repeat.py.
RECOMPUTED = "recomputed"


class Use(enum.Enum):
    """What a weight is used for, which decides whether decoding may keep it in fewer bits.

    EXACT: vectors, and matrices that must stay float32, such as a router's.
    FACTOR: large products contract its rows.
    TABLE: its rows are read by their index, and a product, if any, contracts its columns.
    """

    EXACT = "exact"
    FACTOR = "factor"
    TABLE = "table"


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A weight's logical shape, its dims, and its initial values."""

    shape: tuple[int, ...]
    dims: str  # A letter for each dim; sharding/layout.py lists them.
    scale: float  # The standard deviation around 0 if Gaussian, else the value of all elements.
    is_gaussian: bool
    # The weight as a matrix: its last `columns` dims are the columns, the `rows` dims before them
    # the rows.
    rows: int = 1
    columns: int = 1
    stack: str = ""  # As in TensorSpec.
    share_used: float = 1.0  # The share that one token is multiplied by: of experts, its own.
    # If set, the weight is no matter of the optimizer: each step moves its elements by this number
    # against the sign of their gradient. It has no slots, and its gradient is in no norm.
    sign_step: float | None = None
    is_frozen: bool = False  # Steps leave it as it is. It has no slots, and no gradient in a norm.
    use: Use = Use.EXACT

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"WeightSpec: shape {self.shape} does not fit dims {self.dims!r}.")

    @property
    def is_optimized(self) -> bool:
        """Whether the optimizer takes its steps, for which it may have slots."""
        return self.sign_step is None and not self.is_frozen

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of a single weight: all but that of a stack."""
        return tuple(i for i, letter in enumerate(self.dims) if letter != STACKED)

    def stacked(self, count: int) -> Self:
        """Returns the spec of `count` such weights, stacked along a leading dim."""
        return dataclasses.replace(self, shape=(count, *self.shape), dims=STACKED + self.dims)


def gaussian(
    shape: tuple[int, ...],
    dims: str,
    *,
    fan_in: int,
    rows: int = 1,
    columns: int = 1,
    share_used: float = 1.0,
    use: Use = Use.EXACT,
) -> WeightSpec:
    """Returns the spec of a weight with standard deviation fan_in^-1/2.

    It keeps the scale of activations. Raises ValueError for a size below 1.
    """
    if min(*shape, fan_in) < 1:
        raise ValueError(
            f"A weight's sizes must be 1 or more, got {dims} = {list(shape)}, fan_in {fan_in}."
        )
    return WeightSpec(
        shape,
        dims,
        fan_in**-0.5,
        is_gaussian=True,
        rows=rows,
        columns=columns,
        share_used=share_used,
        use=use,
    )


def constant(
    shape: tuple[int, ...], dims: str, value: float, *, share_used: float = 1.0
) -> WeightSpec:
    """Returns the spec of a weight that starts as `value` everywhere."""
    return WeightSpec(shape, dims, value, is_gaussian=False, share_used=share_used)


class BaseLayer:
    """A node in the tree of layers.

    A subclass declares children and weights in its `__init__`, after calling this class's, and
    defines FProp. FProp's operations are named by the layer's path, which a compiled program keeps
    as metadata.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "FProp" in vars(cls):
            cls.FProp = _named_by_path(cls.FProp)  # type: ignore[method-assign]

    @classmethod
    def Params(cls) -> InstantiableParams:
        """Returns the hyperparameters; a subclass adds its own to those of super().Params()."""
        return InstantiableParams(cls)

    def __init__(self, params: InstantiableParams, annotator: Any, path: str = "") -> None:
        """`annotator` is a sharding.annotator.Annotator; `path` is dotted, empty for the root."""
        self.p = params.Copy().Freeze()  # Later changes of `params` are for other layers.
        self.path = path
        # The WeightSpecs of this layer and of all layers below it, in theta's structure.
        self.weight_specs = NestedMap()
        self._annotator = annotator

    def CreateVariable(self, name: str, spec: WeightSpec) -> None:
        """Declares weight `name`; it is theta.<name> in FProp."""
        self._check_new(name)
        self.weight_specs[name] = dataclasses.replace(spec, stack=self._annotator.stack)

    def CreateChild(self, name: str, params: InstantiableParams) -> None:
        """Makes child `name`, an attribute of this layer; its weights are theta.<name>."""
        self._check_new(name)
        child = self._make(name, params)
        setattr(self, name, child)
        self.weight_specs[name] = child.weight_specs

    def CreateChildren(
        self, name: str, params: list[InstantiableParams], stacked: int | None = None
    ) -> None:
        """Makes a list of children; their weights are theta.<name>[i].

        With `stacked`, each child stands for that many layers: theta stacks their weights along a
        leading dim, and the child's FProp takes one slice of them.
        """
        self._check_new(name)
        children = [self._make(f"{name}[{i}]", p) for i, p in enumerate(params)]
        setattr(self, name, children)

        specs = [child.weight_specs for child in children]
        if stacked is not None:
            specs = [
                child_specs.Transform(lambda spec: spec.stacked(stacked)) for child_specs in specs
            ]
        self.weight_specs[name] = specs

    def annotate(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """Annotates the tensor with the sharding that the experiment gives its dims."""
        return self._annotator.annotate(tensor, dims)

    @property
    def num_weights(self) -> int:
        """The number of scalars in all weights together."""
        return sum(math.prod(spec.shape) for spec in self.weight_specs.Flatten())

    def InitTheta(self, seed: tf.Tensor) -> NestedMap:
        """Returns theta, float32, from `seed`, int32 [2]; the same for every partitioning."""
        # A seed for each path, so that a weight does not depend on the others of the model.
        return self.weight_specs.Pack(
            self._annotator.annotate_as(_initial(spec, fold_seed(seed, path)), spec)
            for path, spec in self.weight_specs.FlattenItems()
        )

    def FProp(self, theta: NestedMap, *args: Any) -> Any:
        """Computes the layer's results from its weights, theta, and its inputs."""
        raise NotImplementedError(f"{type(self).__name__} defines no FProp.")

    def _make(self, name: str, params: InstantiableParams) -> BaseLayer:
        return params.Instantiate(self._annotator, f"{self.path}.{name}" if self.path else name)

    def _check_new(self, name: str) -> None:
        if name in self.weight_specs or hasattr(self, name):
            raise ValueError(f"{type(self).__name__} {self.path!r} has a {name!r} already.")


def _named_by_path(fprop: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an FProp whose operations are named by the layer's path."""

    @functools.wraps(fprop)
    def named(self: BaseLayer, *args: Any, **kwargs: Any) -> Any:
        if not self.path:
            return fprop(self, *args, **kwargs)

        # `encoder.layers[1].norm` becomes `encoder/layers_1/norm/`; the slash keeps it unchanged.
        path = self.path.replace(".", "/").replace("[", "_").replace("]", "")
        # Within a gradient that computes layers again, the same below its own scope.
        if tf.get_current_name_scope().split("/")[0] == RECOMPUTED:
            path = f"{RECOMPUTED}/{path}"
        with tf.name_scope(f"{path}/"):
            return fprop(self, *args, **kwargs)

    return named


def fold_seed(seed: tf.Tensor, name: str) -> tf.Tensor:
    """Returns a seed, int32 [2], that differs from name to name."""
    # Unlike hash(), CRC-32 is the same in every process; 31 bits of it are an int32.
    salt = zlib.crc32(name.encode()) & 0x7FFFFFFF
    return tf.bitwise.bitwise_xor(seed, [0, salt])


def _initial(spec: WeightSpec, seed: tf.Tensor) -> tf.Tensor:
    """Returns the initial values of a weight, float32."""
    if not spec.is_gaussian:
        return tf.fill(spec.shape, tf.constant(spec.scale, tf.float32))

    # Among TensorFlow's generators, only threefry stays local to a shard.
    return spec.scale * tf.random.stateless_normal(spec.shape, seed, alg="threefry")
