"""A layer of experts in plain JAX, forward and backward, and its published times.

D devices, T tokens of a device, E experts, K of them for a token, C rows of an expert from one
device, M model, H hidden. Every device holds E/D experts, and the rows of its tokens travel to the
experts and back by all-to-all. The program is right only for balanced routing, C = T * K / E, which
the sources force, too: a buffer has exactly C rows.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from repro.published.dense_decoder import experts
from xla_plan.plans import fingerprints, own_process, plan_folder, program_text, programs
from xla_plan.plans.program_plan import ProgramPlan

TOPOLOGY = "h100:1x8"

_NUM_DEVICES = 8
_AXIS = "experts"
_CODE = (
    "repro/published/dense_decoder/experts.py",
    "repro/published/mixture_layer.py",
    "xla_plan",
    "xla_spmd",
)

Tree = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer. Raises ValueError if they do not divide."""

    tokens: int  # T
    M: int
    H: int
    E: int
    K: int
    shared_H: int = 0  # H of the expert that all tokens take; 0 without one.

    def __post_init__(self) -> None:
        if self.tokens * self.K % self.E:
            raise ValueError(
                f"E={self.E}: expected a divisor of {self.tokens * self.K}, tokens * K."
            )

    @property
    def label(self) -> str:
        """The layer in words."""
        return f"a layer of {self.E} experts, {self.K} for each token"


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """A published time of a layer forward and backward, on eight H100."""

    id: str  # The publisher, the layer, and the case.
    layer: Layer
    measured_secs: float
    source: str
    differs: tuple[str, ...] = ()  # The differences between the rebuild and the source.


_MEGATRON = (
    "NVIDIA/Megatron-LM tests/functional_tests/test_cases/common/moe_perf/baseline.json@32f2c9cf"
)
_MARIN = "marin-community/marin issues/3445"
_MIXTRAL = Layer(tokens=4096, M=4096, H=14_336, E=8, K=2)
_DEEPSEEK = Layer(tokens=4096, M=7168, H=2048, E=32, K=8, shared_H=2048)
_QWEN3_TOP2 = Layer(tokens=16_384, M=2048, H=768, E=128, K=2, shared_H=2048)
_QWEN3_TOP8 = dataclasses.replace(_QWEN3_TOP2, K=8)
_GROUPS = "all experts are eligible, where the source chooses among those of 4 groups of 8"
_KERNELS = "rows travel by all-to-all, where the source has kernels of DeepEP or HybridEP"
_SUMS = "gradients of weights that all devices hold are summed over them"

PUBLISHED = (
    LayerRecord("megatron.mixtral.a2a", _MIXTRAL, 12.0868e-3, _MEGATRON, (_SUMS,)),
    LayerRecord("megatron.mixtral.deepep", _MIXTRAL, 12.6396e-3, _MEGATRON, (_KERNELS, _SUMS)),
    LayerRecord("megatron.mixtral.hybridep", _MIXTRAL, 12.2536e-3, _MEGATRON, (_KERNELS, _SUMS)),
    LayerRecord("megatron.deepseek.a2a", _DEEPSEEK, 17.3952e-3, _MEGATRON, (_GROUPS, _SUMS)),
    LayerRecord(
        "megatron.deepseek.deepep", _DEEPSEEK, 14.4842e-3, _MEGATRON, (_GROUPS, _KERNELS, _SUMS)
    ),
    LayerRecord(
        "megatron.deepseek.hybridep", _DEEPSEEK, 14.0914e-3, _MEGATRON, (_GROUPS, _KERNELS, _SUMS)
    ),
    LayerRecord("marin.qwen3.top2", _QWEN3_TOP2, 8.929e-3, _MARIN, (_KERNELS, _SUMS)),
    LayerRecord("marin.qwen3.top8", _QWEN3_TOP8, 21.49e-3, _MARIN, (_KERNELS, _SUMS)),
)


def load_or_make(record: LayerRecord, folder: pathlib.Path) -> ProgramPlan:
    """Returns the stored plan of a record, or makes and stores it in a separate process.

    Records of one layer share a plan. Raises ValueError if the process died.
    """
    return plan_folder.load_or_make(
        ProgramPlan,
        _folder(record, folder),
        fingerprints.of(repr(record.layer), code=_CODE),
        functools.partial(own_process.call, make, record.layer),
        program_text.markdown,
    )


def load(record: LayerRecord, folder: pathlib.Path) -> ProgramPlan | None:
    """Returns the stored plan of a record, even from older code; None if `folder` lacks it."""
    return plan_folder.find(ProgramPlan, _folder(record, folder))


def _folder(record: LayerRecord, folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a layer's plan, such as FOLDER/4096x4096x14336x8x2x0."""
    layer = record.layer
    return folder / f"{layer.tokens}x{layer.M}x{layer.H}x{layer.E}x{layer.K}x{layer.shared_H}"


def make(layer: Layer) -> ProgramPlan:
    """Returns the plan of a layer on TOPOLOGY."""
    mesh = AbstractMesh((_NUM_DEVICES,), (_AXIS,), axis_types=(AxisType.Auto,))
    jitted = jax.jit(functools.partial(forward_and_backward, layer, mesh))
    roles = ["weights=weights", "activations=x|d_y"]
    return programs.of(jitted, arguments(layer, mesh), TOPOLOGY, roles=roles)


def weight_shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight by name; `up` has the gate's and the linear product."""
    shapes: dict[str, tuple[int, ...]] = {
        "router": (layer.M, layer.E),
        "up": (layer.E, layer.M, 2 * layer.H),
        "down": (layer.E, layer.H, layer.M),
    }
    if layer.shared_H:
        shapes["shared_up"] = (layer.M, 2 * layer.shared_H)
        shapes["shared_down"] = (layer.shared_H, layer.M)
    return shapes


def arguments(layer: Layer, mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """Returns the types and shardings of weights, x and d_y [D * T, M]; all are bfloat16."""

    def struct(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = {name: struct(shape, _spec(name)) for name, shape in weight_shapes(layer).items()}
    x = struct((mesh.size * layer.tokens, layer.M), PartitionSpec(_AXIS))
    return weights, x, x


def forward_and_backward(
    layer: Layer, mesh: Mesh | AbstractMesh, weights: Tree, x: jax.Array, d_y: jax.Array
) -> tuple[jax.Array, tuple[Tree, jax.Array]]:
    """Returns y [D * T, M], and the gradients of the weights and x for the gradient d_y of y."""
    specs = {name: _spec(name) for name in weights}
    tokens = PartitionSpec(_AXIS)
    own = jax.shard_map(
        functools.partial(_forward, layer),
        mesh=mesh,
        in_specs=(specs, tokens),
        out_specs=tokens,
    )
    y, pull_back = jax.vjp(own, weights, x)
    return y, pull_back(d_y)


def _spec(name: str) -> PartitionSpec:
    """Returns the split of a weight: experts are split, and all else is whole."""
    return PartitionSpec(_AXIS) if name in ("up", "down") else PartitionSpec()


def _forward(layer: Layer, weights: Tree, x: jax.Array) -> jax.Array:
    """Returns a device's part of y [T, M]."""

    def compute(buffers: jax.Array) -> jax.Array:
        hidden = _gated(jnp.einsum("ECM,EMH->ECH", buffers, weights["up"]))
        return jnp.einsum("ECH,EHM->ECM", hidden, weights["down"])

    y = experts.routed(x, weights["router"], layer.K, compute, _AXIS)
    if layer.shared_H:
        y = y + _gated(x @ weights["shared_up"]) @ weights["shared_down"]
    return y


def _gated(hidden: jax.Array) -> jax.Array:
    """Returns SwiGLU of both halves of the last dim (Shazeer, 2020)."""
    gate, linear = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * linear
