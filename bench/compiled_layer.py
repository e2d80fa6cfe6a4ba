"""An MoELayer with balanced routing, compiled for one device, and its products alone.

T tokens, E experts, C rows of an expert, M model, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import balanced_layer, published_shapes
from bench.balanced_layer import BalancedLayer
from bench.published_shapes import PRODUCTS
from bench.published_times import Pass
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.program import Program
from xla_spmd.mesh import Mesh

_ONE_DEVICE = Partitioning(Mesh.flat(1), ())

# Contracts the first dim of both factors, within the rows of each expert.
_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)

_Multiply = Callable[[], np.ndarray | jax.Array]


class CompiledLayer:
    """Our layer, compiled, with its arrays on the device."""

    def __init__(
        self,
        layer: BalancedLayer,
        dispatch: Dispatch,
        dtype: str,
        weights: Mapping[str, jax.Array],
        batch: NestedMap,
    ) -> None:
        params = published_shapes.settings(layer, dispatch)
        self._runs = {}
        for part in (Pass.FORWARD, Pass.BOTH):
            program = tracer.traced(program_of, params, layer.tokens, dtype, part)
            self._runs[part] = compile_program(program)

        theta = NestedMap(weights)
        seed = NestedMap(seed=np.array([1, 0], np.int32))
        named = (("theta", theta), ("batch", batch), ("seed", seed))
        self._args = [self._runs[Pass.BOTH].place(name, tree) for name, tree in named]

    def call(self, part: Pass) -> NestedMap:
        """Computes the layer, or it and its gradients; returns when the device has finished."""
        result = self._runs[part](*self._args)
        jax.block_until_ready(result.Flatten())
        return result

    def norms(self) -> dict[str, float]:
        """Returns the norms of the output y, and of the gradients by x and by the weights."""
        result = self.call(Pass.BOTH)
        arrays = {"y": result.y, "x": result.x} | dict(result.theta.FlattenItems())
        return {name: _norm(array) for name, array in arrays.items()}


def layer_of(params: MoELayer.Params) -> MoELayer:
    """Returns the layer, on one device."""
    return params.Instantiate(Annotator(_ONE_DEVICE), "layer")


def program_of(params: MoELayer.Params, tokens: int, dtype: str, part: Pass) -> Program:
    """Traces the layer; the gradients are results, so XLA must compute all of them."""
    layer = layer_of(params)
    theta_spec = layer.weight_specs.Transform(lambda w: TensorSpec(w.shape, dtype, w.dims))
    theta_spec.wg = dataclasses.replace(theta_spec.wg, dtype="float32")
    x_spec = TensorSpec((1, tokens, params.dim), dtype, "BLM")
    valid_spec = TensorSpec((1, tokens), "float32", "BL")
    annotated = AnnotatedFn(
        f"layer_{part.value}",
        _function(layer, has_gradients=part is Pass.BOTH),
        ("theta", "batch", "seed"),
        (
            theta_spec,
            NestedMap(x=x_spec, d_y=x_spec, valid=valid_spec),
            NestedMap(seed=TensorSpec((2,), "int32", "_")),
        ),
    )
    return lowering.export(annotated, _ONE_DEVICE)


def _function(layer: MoELayer, *, has_gradients: bool) -> Callable[..., NestedMap]:
    """Returns a function (theta, batch, seed) -> y and, if asked for, the gradients."""

    def output(theta: NestedMap, batch: NestedMap, seed: NestedMap) -> tf.Tensor:
        y, _ = layer.FProp(theta, batch.x, batch.valid, Context(Mode.TRAIN, seed.seed))
        return y

    def forward(theta: NestedMap, batch: NestedMap, seed: NestedMap) -> NestedMap:
        return NestedMap(y=output(theta, batch, seed))

    def both(theta: NestedMap, batch: NestedMap, seed: NestedMap) -> NestedMap:
        leaves = [batch.x, *theta.Flatten()]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y = output(theta, batch, seed)
        d_x, *d_theta = tape.gradient(y, leaves, batch.d_y)
        return NestedMap(y=y, x=d_x, theta=theta.Pack(d_theta))

    return both if has_gradients else forward


def weights_of(layer: BalancedLayer, dtype: str) -> dict[str, jax.Array]:
    """Returns the weights on the device by name; the router's are float32."""
    weights = {"wg": jnp.asarray(balanced_layer.router(layer))}
    for name in balanced_layer.EXPERT_WEIGHTS:
        # One expert at a time, since a stack may take gigabytes.
        stack = np.empty((layer.E, *balanced_layer.shape(layer, name)), jnp.dtype(dtype))
        for expert in range(layer.E):
            stack[expert] = balanced_layer.expert_weight(layer, name, expert)
        weights[name] = jnp.asarray(stack)
    return weights


def batch_of(layer: BalancedLayer, dtype: str) -> NestedMap:
    """Returns the tokens x and the gradient d_y of the output, [1, T, M], and the tokens' mask."""
    x, d_y = (array.astype(jnp.dtype(dtype))[None] for array in balanced_layer.inputs(layer))
    return NestedMap(x=x, d_y=d_y, valid=np.ones((1, layer.tokens), np.float32))


def _norm(array: jax.Array) -> float:
    return float(np.sqrt(sum(_squares(np.asarray(array)))))


def _squares(array: np.ndarray) -> Iterator[float]:
    """Yields sums of squares, of one expert's array at a time."""
    for part in array if array.ndim == 3 else [array]:
        flat = part.astype(np.float32).reshape(-1)
        yield float(flat @ flat)


def products_of(
    layer: BalancedLayer, dtype: str, weights: Mapping[str, jax.Array], libraries: Iterable[str]
) -> dict[str, dict[str, _Multiply]]:
    """Returns functions that compute one of PRODUCTS for all experts, by library and equation.

    `libraries` are some of NumPy, XLA and ragged_dot.
    """
    rng = np.random.default_rng(1)
    factors = {"EMH": weights["wi"], "EHM": weights["wo"]}
    for letters, columns in (("ECM", layer.M), ("ECH", layer.H)):
        rows = rng.standard_normal((layer.E, layer.rows, columns), np.float32)
        factors[letters] = jnp.asarray(rows, dtype)

    makers = {"NumPy": _numpy_product, "XLA": _xla_product, "ragged_dot": _ragged_product}
    return {
        library: {p.equation: makers[library](p.equation, factors) for p in PRODUCTS}
        for library in libraries
    }


def _numpy_product(equation: str, factors: Mapping[str, jax.Array]) -> _Multiply:
    """Returns a function that multiplies each expert's matrices, and returns the last product."""
    left, right, result = _letters(equation)
    (contracted,) = set(left) & set(right) - set(result)
    transposes_left = left.index(contracted) == 1
    transposes_right = right.index(contracted) == 2

    # On the host, without a copy.
    a_stack = np.asarray(factors[left])
    b_stack = np.asarray(factors[right])
    sizes = dict(zip(left + right, a_stack.shape + b_stack.shape, strict=True))
    out = np.empty([sizes[letter] for letter in result[1:]], np.float32)

    def multiply() -> np.ndarray:
        for a, b in zip(a_stack, b_stack, strict=True):
            np.matmul(a.T if transposes_left else a, b.T if transposes_right else b, out=out)
        return out

    return multiply


def _xla_product(equation: str, factors: Mapping[str, jax.Array]) -> _Multiply:
    """Returns a function that multiplies all experts' matrices, and waits for the products."""
    left, right, _ = _letters(equation)
    product = jax.jit(functools.partial(jnp.einsum, equation))

    def multiply() -> jax.Array:
        return jax.block_until_ready(product(factors[left], factors[right]))

    return multiply


def _ragged_product(equation: str, factors: Mapping[str, jax.Array]) -> _Multiply:
    """Returns a function like XLA's, by the operator for experts of different numbers of rows."""
    left, right, result = _letters(equation)
    num_experts, rows, _ = factors[left].shape
    counts = jnp.full(num_experts, rows, jnp.int32)

    def ragged(a: jax.Array, b: jax.Array) -> jax.Array:
        a_rows = a.reshape(-1, a.shape[-1])
        if "C" in right:  # A weight's gradient is a sum over the rows of each expert.
            return lax.ragged_dot_general(a_rows, b.reshape(-1, b.shape[-1]), counts, _OVER_ROWS)
        if right[1] != left[2]:
            b = b.swapaxes(1, 2)
        return lax.ragged_dot(a_rows, b, counts).reshape(num_experts, rows, -1)

    assert result[0] == "E" and left[1] == "C", equation
    product = jax.jit(ragged)

    def multiply() -> jax.Array:
        return jax.block_until_ready(product(factors[left], factors[right]))

    return multiply


def _letters(equation: str) -> tuple[str, str, str]:
    factors, result = equation.split("->")
    left, right = factors.split(",")
    return left, right, result
