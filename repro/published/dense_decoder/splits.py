"""The mesh of a step, and the splits of weights and activations along its axes."""

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from repro.published.dense_decoder.sizes import Run

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # The axes that split the rows of a batch.

_AXIS_OF_LETTER = {"M": "fsdp", "N": "tensor", "K": "tensor", "H": "tensor", "V": "tensor"}
_GPU_KINDS = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3"}


def abstract_mesh(run: Run, gpu: str | None = None) -> AbstractMesh:
    """Returns a run's mesh on devices that need not exist; a GPU's kernels need its name."""
    device = None
    if gpu is not None:
        device = AbstractDevice(_GPU_KINDS[gpu], num_cores=None, platform="cuda")
    sizes = (run.data, run.fsdp, run.tensor)
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=device)


def tracing(mesh: AbstractMesh) -> AbstractContextManager[Any]:
    """Returns the context for tracing a step, in which GPU kernels can query the devices."""
    return jax.sharding.use_abstract_mesh(mesh)


def spec(run: Run, letters: str) -> PartitionSpec:
    """Returns the split of a weight whose dims have these letters."""
    if run.experts == "exchanged" and set("EH") < set(letters):
        return PartitionSpec(*("fsdp" if letter == "E" else None for letter in letters))
    return PartitionSpec(*(_AXIS_OF_LETTER.get(letter) for letter in letters))


def between(mesh: Mesh | AbstractMesh, x: jax.Array) -> jax.Array:
    """Returns activations [B, T, M] with the split that they have between products."""
    sharding = NamedSharding(mesh, PartitionSpec(ROWS, None, "tensor"))
    return jax.lax.with_sharding_constraint(x, sharding)


def gathered(run: Run, mesh: Mesh | AbstractMesh, letters: str, weight: jax.Array) -> jax.Array:
    """Returns a weight in the activations' dtype, whole along `fsdp`.

    Its gradient is split again: the sums over the rows' devices become ReduceScatters.
    """
    split = spec(run, letters)
    whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in split))

    def make_whole(weight: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, whole))

    gather = jax.custom_vjp(make_whole)

    def forward(weight: jax.Array) -> tuple[jax.Array, None]:
        return make_whole(weight), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, split)),)

    gather.defvjp(forward, backward)
    narrow = weight.astype(run.dtype)
    return gather(jax.lax.with_sharding_constraint(narrow, NamedSharding(mesh, split)))
