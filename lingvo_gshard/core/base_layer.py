"""BaseLayer: a tree of layers that declare their weights and compute purely.

A layer holds the specs of its weights, not their values. `InitTheta` makes the values, theta, and
FProp(theta, ...) is a pure function of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

from lingvo_gshard.core.configured import Configured
from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap

# The leading dim of an array that stacks the weights of several layers.
STACKED = "R"
# The outermost scope of layers that the gradient computes again; see layers/repeat.py.
RECOMPUTED = "recomputed"


class Use(enum.Enum):
    """What a layer uses a weight for; names of weights are free.

    Decoding may keep a FACTOR or a TABLE in fewer bits; the others stay float32. Pruning drops
    columns of a ROUTER.

    EXACT: vectors, and matrices that must stay float32.
    ROUTER: a matrix with a column for each expert, by which tokens choose their experts.
    FACTOR: large products contract its rows.
    TABLE: its rows are read by their index, and a product, if any, contracts its columns.
    """

    EXACT = "exact"
    ROUTER = "router"
    FACTOR = "factor"
    TABLE = "table"

    @property
    def is_large(self) -> bool:
        """Whether decoding may keep such a weight in fewer bits."""
        return self in (Use.FACTOR, Use.TABLE)


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A weight's logical shape, its dims, and its initial values."""

    shape: tuple[int, ...]
    dims: str  # A letter for each dim; sharding/layout.py lists them.
    scale: float  # If Gaussian, the standard deviation around 0; else the value of all elements.
    is_gaussian: bool
    # A matrix: its last `columns` dims are the columns, the `rows` dims before them the rows, and
    # any dims before those, such as E, count matrices. With rows=0, the weight is a vector, or one
    # vector for each expert: a bias or a scale, over any number of dims.
    rows: int = 1
    columns: int = 1
    stack: str = ""  # As in TensorSpec.
    share_used: float = 1.0  # The share of the weight that multiplies one token: 1/E for experts.
    # If set, the optimizer does not update this weight: each step moves its elements by this number
    # against the sign of their gradient. The optimizer allocates no slots for it, and norms leave
    # its gradient out.
    sign_step: float | None = None
    # Whether steps leave it unchanged. If so, the same holds for its slots and its gradient.
    is_frozen: bool = False
    use: Use = Use.EXACT

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise ValueError(f"WeightSpec: shape {self.shape} does not fit dims {self.dims!r}.")
        if self.is_matrix and self.rows + self.columns > len(self.dims):
            raise ValueError(
                f"WeightSpec: a matrix of rows={self.rows} and columns={self.columns} needs as "
                f"many dims, got {self.dims!r}; a bias or a scale has rows=0."
            )

    @property
    def is_matrix(self) -> bool:
        """Whether optimizers treat it as a matrix, which may decay and have factored slots."""
        return self.rows > 0

    @property
    def is_optimized(self) -> bool:
        """Whether the optimizer updates this weight, and may keep slots for it."""
        return self.sign_step is None and not self.is_frozen

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of a single weight: all axes except the stack's."""
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
    """Returns the spec of a weight with standard deviation fan_in^-1/2, by default a matrix.

    Such a weight keeps the scale of activations. Raises ValueError if a size is below 1, or if
    there are fewer dims than rows and columns.
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
    shape: tuple[int, ...],
    dims: str,
    value: float,
    *,
    rows: int = 0,
    columns: int = 1,
    share_used: float = 1.0,
) -> WeightSpec:
    """Returns the spec of a weight that starts as `value` everywhere, by default a vector.

    For a matrix, such as one that starts as 0, set rows=1. Raises ValueError if there are fewer
    dims than rows and columns.
    """
    return WeightSpec(
        shape,
        dims,
        value,
        is_gaussian=False,
        rows=rows,
        columns=columns,
        share_used=share_used,
    )


class BaseLayer(Configured):
    """A node in the tree of layers.

    A subclass declares children and weights in its `__init__`, after calling this class's, and
    defines FProp. FProp's operations are named by the layer's path, which a compiled program keeps
    as metadata.
    """

    class Params(Configured.Params):
        """The settings of a layer; a subclass declares its own."""

    p: Params

    def __init__(self, params: Params, annotator: Any, path: str = "") -> None:
        """`annotator` is a sharding.annotator.Annotator; `path` is dotted, empty for the root."""
        super().__init__(params)
        self.path = path
        # The WeightSpecs of this layer and of all layers below it, in theta's structure.
        self.weight_specs = NestedMap()
        self._annotator = annotator
        if path:
            self.FProp = _named_by(path)(self.FProp)  # type: ignore[method-assign]

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
        self, name: str, params: Sequence[InstantiableParams], stacked: int | None = None
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
        """Returns theta, float32, from `seed`, int32 [2]; equal for every partitioning."""
        # Each path has its own seed, so that a weight does not depend on the model's other weights.
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


def scope_of(path: str) -> str:
    """Returns the scope of a layer's operations: `encoder/layers_1` of `encoder.layers[1]`."""
    return path.replace(".", "/").replace("[", "_").replace("]", "")


@contextlib.contextmanager
def _named_by(path: str) -> Iterator[None]:
    """Names operations by a layer's path; it decorates a function, too."""
    scope = scope_of(path)
    # Within a gradient that computes layers again, the path is below that gradient's own scope.
    if tf.get_current_name_scope().split("/")[0] == RECOMPUTED:
        scope = f"{RECOMPUTED}/{scope}"
    with tf.name_scope(f"{scope}/"):  # The slash keeps it unchanged.
        yield


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
