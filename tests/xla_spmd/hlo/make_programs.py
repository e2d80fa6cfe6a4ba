"""Compiles the programs for programs.kept: for TPUs and GPUs, on a machine without either.

    python -m tests.xla_spmd.hlo.make_programs tpu
    python -m tests.xla_spmd.hlo.make_programs gpu

The first needs libtpu (`make setup-tpu`), the second JAX's CUDA plugin (`make setup-plan-gpu`).
Parts that no test reads are removed: source files, literals of arrays, the backend configs of
everything except loops and custom calls, and all of a layout except its memory space.
"""

from __future__ import annotations

import lzma
import os
import sys
from typing import Any

from lingvo_gshard.plans import topology_executable
from xla_spmd.runtime import environment

os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
environment.prepare(1)

# The following imports load TensorFlow and JAX, which then read the environment.
# ruff: noqa: E402
import jax
import numpy as np
import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, program, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.train.programs import Programs
from tests.xla_spmd.hlo import programs
from xla_plan.machines import topology
from xla_spmd.hlo import hlo_proto
from xla_spmd.mesh import Mesh

_KEPT = (
    *("name", "opcode", "shape", "metadata", "literal", "id", "operand_ids", "parameter_number"),
    *("called_computation_ids", "tuple_index", "comparison_direction", "custom_call_target"),
    *("window", "convolution_dimension_numbers", "batch_group_count", "dot_dimension_numbers"),
    *("replica_groups", "source_target_pairs", "collective_device_list"),
    *("iota_collective_device_list", "mesh_axes_replica_group_list", "frontend_attributes"),
    *("output_operand_aliasing", "is_host_transfer"),
)


def main(platform: str) -> None:
    """Writes the programs of `tpu` or `gpu`."""
    if platform == "tpu":
        _write("tpu_step", training_step(8), topology.devices("v3:2x2"))
        _write("tpu_split", split_weights(64), topology.devices("v3:4x8"))
        _keep("tpu_beside", _split_products(topology.devices("v5e:4x4")))
        _keep("tpu_slices", _between_slices(topology.devices("v5e:2x2x4slices")))
    else:
        _write("gpu_step", training_step(8), topology.devices("h100:1x8"))
        _keep("gpu_products", _products(topology.devices("h100:1x1")))


def training_step(num_partitions: int) -> program.Program:
    """Returns a training step of a small mixture of experts whose layers are loops."""
    params = registry.get_params(programs.MODEL, programs.SETTINGS)
    parts = placement.partitioning(params, num_partitions)
    p = params.input
    batch = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    return Programs(TaskModel(params, parts), in_process=True).exported(Mode.TRAIN, batch)


def split_weights(num_partitions: int) -> program.Program:
    """Returns an SGD step of a perceptron whose weights are split and gathered for each product."""

    def fn(weights: NestedMap, batch: NestedMap) -> NestedMap:
        with tf.GradientTape() as tape:
            tape.watch(weights.Flatten())
            hidden_BH = tf.nn.relu(batch.x_BM @ weights.wi_MH)
            loss = tf.reduce_sum(tf.square(hidden_BH @ weights.wo_HM - batch.x_BM))
        grads = tape.gradient(loss, weights.Flatten())
        new = [w - 0.1 * grad for w, grad in zip(weights.Flatten(), grads, strict=True)]
        return NestedMap(weights=weights.Pack(new))

    m, h = programs.SPLIT_DIMS
    weights = NestedMap(
        wi_MH=TensorSpec((m, h), "float32", "_H"), wo_HM=TensorSpec((h, m), "float32", "H_")
    )
    batch = NestedMap(x_BM=TensorSpec((16 * num_partitions, m), "float32", "B_"))
    results = {"weights.wi_MH": "_H", "weights.wo_HM": "H_"}
    annotated = AnnotatedFn("split", fn, ("weights", "batch"), (weights, batch), results)
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), {"B": "d", "H": "d"})
    return lowering.export(annotated, parts)


def stripped(serialized: bytes) -> bytes:
    """Returns a serialized HloModuleProto with only the parts that the readers need."""
    proto_class = hlo_proto.messages()["xla.HloModuleProto"]
    module = proto_class.FromString(serialized)
    kept = proto_class(
        name=module.name,
        entry_computation_id=module.entry_computation_id,
        schedule=module.schedule,
        device_assignment=module.device_assignment,
    )
    for each in module.computations:
        for instruction in each.instructions:
            _strip(instruction)
        kept.computations.add(
            name=each.name, id=each.id, root_id=each.root_id, instructions=each.instructions
        )
    return kept.SerializeToString(deterministic=True)


def _strip(instruction: Any) -> None:
    unwanted = {field.name for field, _ in instruction.ListFields()}.difference(_KEPT)
    if instruction.opcode in ("while", "custom-call"):
        unwanted.discard("backend_config")
    if instruction.shape.dimensions:
        unwanted.add("literal")
    for name in unwanted:
        instruction.ClearField(name)
    op_name = instruction.metadata.op_name
    instruction.metadata.Clear()
    instruction.metadata.op_name = op_name
    _clear_layouts(instruction.shape)


def _clear_layouts(shape: Any) -> None:
    # A layout on a TPU's chip has tiles, and a memory space other than 0.
    layout = shape.layout
    space = layout.memory_space
    tiles = list(layout.tiles)[:1]
    shape.ClearField("layout")
    if space:
        shape.layout.memory_space = space
        shape.layout.tiles.extend(tiles)
    for each in shape.tuple_shapes:
        _clear_layouts(each)


def _write(name: str, exported: program.Program, devices: list[Any]) -> None:
    mesh = specs.device_mesh(exported.partitioning, devices)
    _keep(name, topology_executable.TopologyExecutable(exported, mesh).compiled)


def _products(devices: list[Any]) -> Any:
    """Returns two products by cuBLAS; for some sizes, an attached GPU would choose XLA's own."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in programs.PRODUCTS]
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def fn(x: jax.Array, w: jax.Array, batches: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ w, batches @ batches

    lowered = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*arrays)
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def _split_products(devices: list[Any]) -> Any:
    """Returns two products with split factors: gathered in fusions beside them, and in rings."""
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 4), ("x", "y"))

    def split(*axes: str) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def fn(x: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(x @ wi, split("x", "y"))
        return jax.lax.with_sharding_constraint(hidden @ wo, split("x", "y"))

    b, m, h = programs.BESIDE_DIMS
    args = (
        jax.ShapeDtypeStruct((b, m), "bfloat16", sharding=split("x", "y")),
        jax.ShapeDtypeStruct((m, h), "bfloat16", sharding=split("x", "y")),
        jax.ShapeDtypeStruct((h, m), "bfloat16", sharding=split("y", "x")),
    )
    return jax.jit(fn).lower(*args).compile()


def _between_slices(devices: list[Any]) -> Any:
    """Returns a shift to the next of four slices, and an exchange between all of them."""
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 4), ("slice", "x"))
    rows = jax.sharding.PartitionSpec(("slice", "x"))
    to_next = [(i, (i + 1) % 4) for i in range(4)]

    def fn(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        shifted = jax.lax.ppermute(a, "slice", to_next)
        return shifted, jax.lax.all_to_all(a, "slice", 0, 0, tiled=True)

    whole = jax.sharding.NamedSharding(mesh, rows)
    argument = jax.ShapeDtypeStruct((4096, 4096), "float32", sharding=whole)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=rows, out_specs=rows)
    return jax.jit(mapped).lower(argument).compile()


def _keep(name: str, compiled: Any) -> None:
    (module,) = compiled.runtime_executable().hlo_modules()
    programs.FOLDER.mkdir(exist_ok=True)
    path = programs.FOLDER / f"{name}.xz"
    path.write_bytes(lzma.compress(stripped(module.as_serialized_hlo_module_proto()), preset=9))
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
